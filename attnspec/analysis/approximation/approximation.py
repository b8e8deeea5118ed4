"""How good an approximation of softmax attention is on queries, keys and values that are given.

    >>> import numpy as np, attnspec
    >>> spec = attnspec.parse("attention a { attend favor(features = 64) }")
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 128, 16))
    >>> found = approximation(spec.program, q, k, v)
    >>> found["output_error"].quality
    'estimate'

What is measured are the definitions that kernels are held against, in float64, with n^2 numbers.
Random parts are drawn `DRAWS` times, so that the errors are those of the method, not of one seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import sqrt
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from attnspec.analysis.quality import Figure
from attnspec.graphs.bind import bind_attended, situation_of
from attnspec.graphs.patterns.full import Full
from attnspec.graphs.patterns.lsh import Lsh
from attnspec.ir.mechanisms.declaration import MechanismDeclaration
from attnspec.ir.mechanisms.favor import Favor
from attnspec.ir.mechanisms.linformer import Linformer
from attnspec.ir.mechanisms.nystrom import Nystrom
from attnspec.ir.mechanisms.rbf import Rbf
from attnspec.ir.scalars import ScalarError, evaluate
from attnspec.lower.mechanism_sizes import bind_mechanism
from attnspec.lower.work import Work
from attnspec.text.diagnostics import AttnSpecError

if TYPE_CHECKING:
    from attnspec.ir.program import Program

LONGEST = 4096
"""The most positions whose n^2 weights are written out."""

DRAWS = 5
"""Draws of random parts over which errors are averaged."""

Figures: TypeAlias = "dict[str, Figure[Any]]"


def approximation(
    program: Program, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, layer: int = 0, head: int = 0
) -> Figures:
    """The measured errors of one head on q, k [n, d] and v [n, d_v].

    `weight_error` and `output_error` are relative, in Frobenius' norm, to softmax attention with
    the same scale and causal mask. Raises AttnSpecError for a head that approximates nothing, or
    one whose approximation has no formula here, ValueError for arrays that do not fit.
    """
    q, k, v = (np.asarray(each, np.float64) for each in (q, k, v))
    _require_fitting(q, k, v)
    attend = program.attend(layer, head)
    at = situation_of(program, len(q), layer, head)
    scale = 1 / sqrt(max(1, q.shape[1]))
    if attend.scale is not None:
        try:
            scale = float(evaluate(attend.scale, {**at.values, "d": q.shape[1]}))
        except ScalarError as error:
            raise AttnSpecError(f"`scale` has no value here: {error}") from None
    task = _Task(q, k, v, scale, program.causal)
    if attend.mechanism is not None and attend.graph is None:
        method: object = bind_mechanism(attend.mechanism, at)
    elif attend.graph is not None and attend.mechanism is None:
        method = _only_lsh(bind_attended(attend.graph, at))
    else:
        method = None
    for kind, figures in _METHODS.items():
        if isinstance(method, kind):
            return dict(figures(method, task))
    name = getattr(method, "name", None)
    what = f"`{name}`" if name else "this head"
    raise AttnSpecError(
        f"{what} cannot be compared with softmax attention: `approximation` is for"
        f" {', '.join(sorted(kind.name for kind in _METHODS))}"
    )


class _Task:
    """Arrays, and the exact weights and outputs that are approximated."""

    def __init__(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, causal: bool
    ) -> None:
        self.q, self.k, self.v, self.scale, self.causal = q, k, v, scale, causal
        self.held = np.tri(len(q), dtype=bool) if causal else np.ones((len(q), len(q)), bool)
        self.weights = softmax_weights(q, k, self.held, scale)
        self.draws = np.random.Generator(np.random.PCG64(0))

    def defined(
        self, method: MechanismDeclaration, learned: Mapping[str, np.ndarray] | None = None
    ) -> np.ndarray:
        """The weights [n, n] by the definition of a method, with what it has learned."""
        # what measures needs torch, what it is compared with does not
        from attnspec.backends.factored.definitions import weights_array

        n = len(self.q)
        work = Work(Full(), n, n, self.scale, mechanism=method, causal=self.causal)
        weights = weights_array(work, self.q, self.k, learned or {})
        if not np.isfinite(weights).all():
            raise ValueError(f"q and k are too large for the features of `{method.name}`")
        return weights

    def errors(self, estimate: Callable[[int], np.ndarray], draws: int = DRAWS) -> Figures:
        """The relative errors of weights [n, n], over several draws of them."""
        exact = self.weights @ self.v
        drawn = []
        for draw in range(draws):
            weights = estimate(draw)
            drawn.append([_error(weights, self.weights), _error(weights @ self.v, exact)])
        figures = {}
        for name, errors in zip(("weight_error", "output_error"), np.transpose(drawn), strict=True):
            note = f"the mean of {draws} draws, spread {errors.std():.2g}"
            mean = float(errors.mean())
            figures[name] = Figure(mean, "estimate", note) if draws > 1 else Figure(mean)
        return figures


def _error(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def _require_fitting(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    if any(each.ndim != 2 for each in (q, k, v)) or q.shape != k.shape or len(v) != len(q):
        raise ValueError(
            f"q and k must be [n, d] and v [n, d_v], got {q.shape}, {k.shape} and {v.shape}"
        )
    if not 1 <= len(q) <= LONGEST:
        raise ValueError(f"n must be between 1 and {LONGEST:,}, got {len(q):,}")
    if not all(np.isfinite(each).all() for each in (q, k, v)):
        raise ValueError("q, k and v must hold finite numbers")


def _only_lsh(relation: object) -> object:
    parts = getattr(relation, "terms", (relation,))
    choices = [part for part in parts if isinstance(part, Lsh)]
    return choices[0] if len(choices) == 1 else None


# --- random features ------------------------------------------------------------------------------


def _favor(method: Favor, task: _Task) -> Iterator[tuple[str, Figure[Any]]]:
    yield from task.errors(lambda draw: task.defined(replace(method, seed=draw))).items()


def _rbf(method: Rbf, task: _Task) -> Iterator[tuple[str, Figure[Any]]]:
    x, y = task.q / method.sigma, task.k / method.sigma
    # -|x - y|^2 / 2 but for what a whole row has in common
    along = np.column_stack([x, np.ones(len(x))]), np.column_stack([y, -(y**2).sum(1) / 2])
    kernel = softmax_weights(*along, task.held, 1.0)
    variances: list[float] = []

    def estimate(draw: int) -> np.ndarray:
        weights = task.defined(replace(method, seed=draw))
        variances.append(_error(weights, kernel))
        return weights

    yield from task.errors(estimate).items()
    note = f"against the Gaussian kernel itself, the mean of {len(variances)} draws"
    yield "kernel_error", Figure(float(np.mean(variances)), "estimate", note)


# --- low rank -------------------------------------------------------------------------------------


def _linformer(method: Linformer, task: _Task) -> Iterator[tuple[str, Figure[Any]]]:
    n, rank = len(task.q), method.rank

    def estimate(_: int) -> np.ndarray:
        drawn = {name: task.draws.standard_normal((rank, n)) for name in ("keys", "values")}
        return task.defined(method, {name: each / sqrt(rank) for name, each in drawn.items()})

    if method.projection == "linear":
        for name, figure in task.errors(estimate).items():
            note = f"projections as they are drawn, before any training; {figure.note}"
            yield name, Figure(figure.value, figure.quality, note)


def _nystrom(method: Nystrom, task: _Task) -> Iterator[tuple[str, Figure[Any]]]:
    if len(task.q) <= method.landmarks:
        yield from task.errors(lambda _: task.weights, draws=1).items()
        return
    # the convolution of values is not a part of the weights
    method = replace(method, conv=0)
    yield from task.errors(lambda _: task.defined(method), draws=1).items()
    exactly = replace(method, iterations=0)
    for name, figure in task.errors(lambda _: task.defined(exactly), draws=1).items():
        yield f"{name}_exact_inverse", Figure(figure.value, "exact", "with the pseudo-inverse")


# --- hashing --------------------------------------------------------------------------------------


def _lsh(method: Lsh, task: _Task) -> Iterator[tuple[str, Figure[Any]]]:
    n, d = task.q.shape
    buckets = method.buckets_at(n)
    lengths = np.linalg.norm(task.q, axis=1, keepdims=True)
    unit = task.q / np.where(lengths == 0, 1.0, lengths)
    scale = task.scale if method.scale == "root" else 1.0
    pairs = task.held & ~np.eye(n, dtype=bool)
    exact = softmax_weights(task.q, unit, pairs, scale)
    total = float(exact.sum())
    shares = []
    for _ in range(DRAWS):
        together = np.zeros((n, n), bool)
        for _ in range(method.rounds):
            along = unit @ task.draws.standard_normal((d, buckets // 2))
            bucket = np.concatenate([along, -along], 1).argmax(1)
            together |= bucket[:, None] == bucket
        shares.append(float((exact * together).sum()) / total if total else 1.0)
    note = f"of the weight of other keys, before chunks, the mean of {DRAWS} draws"
    yield "recall", Figure(float(np.mean(shares)), "estimate", note)


_METHODS: dict[Any, Callable[[Any, _Task], Iterator[tuple[str, Figure[Any]]]]] = {
    Favor: _favor,
    Rbf: _rbf,
    Linformer: _linformer,
    Nystrom: _nystrom,
    Lsh: _lsh,
}


def softmax_weights(q: np.ndarray, k: np.ndarray, held: np.ndarray, scale: float) -> np.ndarray:
    """The weights softmax(scale q k^T) [n, m] of q [n, d] and k [m, d], float64, of the pairs that
    `held` bool [n, m] has; a row without one is 0."""
    scores = np.where(held, q @ k.T * scale, -np.inf)
    top = scores.max(1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    sums = weights.sum(1, keepdims=True)
    normalised: np.ndarray = weights / np.where(sums == 0, 1.0, sums)
    return normalised
