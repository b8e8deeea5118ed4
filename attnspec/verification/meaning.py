"""What heads are meant to compute: outputs, gradients and weights, straight from the definition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from attnspec.backends.common.score_formula import scale_of, shares
from attnspec.backends.common.scores import ScoreFunction
from attnspec.backends.factored.definitions import (
    defined,
    divided,
    has_weights,
    magnitudes_of,
    totals_of,
    weights_of,
)
from attnspec.graphs.predicates.inputs import READ
from attnspec.graphs.relation import Relation, evaluate_pairs
from attnspec.ir.scalars import PAIR
from attnspec.layout.tables import Tables
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache
from attnspec.lower.work import Work

if TYPE_CHECKING:
    from attnspec.verification.trial import Trial

SIZE = 16
"""The size of the heads that are tried."""

Known: TypeAlias = "Cache[tuple[Any, ...], Any]"
"""What the definition says, kept for other modules that are asked the same."""


class Numbers(NamedTuple):
    """What heads compute with, the gradient of their outputs [H, r, d], q [H, n_q, d], k and
    v [H, n, d], and what is learned; or what comes of it, outputs and the gradients of the same."""

    heads: tuple[Tensor, ...]
    learned: Mapping[str, Tensor]

    def to(self, dtype: torch.dtype) -> Numbers:
        """The same in another type."""
        learned = {name: x.to(dtype) for name, x in self.learned.items()}
        return Numbers(tuple(x.to(dtype) for x in self.heads), learned)


@dataclass(frozen=True, eq=False)
class Meaning:
    """Heads of one work of a layer, which a backend computes: its relation is the graph with the
    inputs that are tried. `learned` are what the formula calls what is learned, and the names of
    the parameters. `tables`, if there are any, are what a kernel holds, these heads the `place`-th
    in them; `seconds` is the estimate for one head, 0 for a sequence short enough to try."""

    trial: Trial
    work: Work
    heads: tuple[int, ...]
    backend: str
    seconds: float
    learned: tuple[tuple[str, str], ...]
    tables: Tables[np.ndarray] | None
    place: int

    @cached_property
    def held(self) -> np.ndarray | None:
        """The keys that the examined queries read, bool [r, n]; None for a mechanism."""
        return None if self.work.mechanism is not None else self.read(self.trial.rows)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """What some queries read by the definition, bool [rows, n]."""
        relation, n = self.work.relation, self.trial.n
        key = relation, rows.tobytes(), n
        rows_read: np.ndarray = self.trial.known.get(key, lambda: held_rows(relation, rows, n))
        return rows_read

    @property
    def weighs(self) -> bool:
        """Whether pairs have weights."""
        return self.held is not None or has_weights(self.work)

    def chunks(self) -> Iterator[tuple[list[int], slice]]:
        """Heads and places of examined queries that are computed in one go."""
        many, step, count = 1, max(1, len(self.trial.rows)), len(self.trial.rows)
        if self.held is not None:
            many = max(1, LIMITS.pairs_at_once // max(1, self.held.size))
            step = max(1, LIMITS.pairs_at_once // max(1, self.held.shape[1]))
        for first in range(0, len(self.heads), many):
            for low in range(0, count, step):
                yield list(self.heads[first : first + many]), slice(low, low + step)

    def learned_by(self, heads: Sequence[int], learned: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What some heads have learned, [h or 1, …], by what the formula calls it."""
        parameters = {}
        for called, name in self.learned:
            rows = learned[name][self.trial.layers[0] if len(learned[name]) > 1 else 0]
            parameters[called] = rows[list(heads)] if len(rows) > 1 else rows
        return parameters

    def weights(
        self, heads: Sequence[int], at: slice, numbers: Numbers, steady: bool = False
    ) -> Tensor:
        """The weights [h, rows, n]; to gradients `steady` ones are divided by constants."""
        some, places = list(heads), self.trial.at[at]
        if self.held is None:
            return weights_of(self.work, *self._alone(some[0], numbers), steady=steady)[
                None, places
            ]
        _, q, k, _ = numbers.heads
        scores = (q[some][:, places] * scale_of(self.work, q.shape[2])) @ k[some].mT
        change = ScoreFunction(self.work.changes, some, self.work.length, torch.device("cpu"))
        symbols, tables = self._symbols(some, places), self.learned_by(some, numbers.learned)
        scores = change(scores[None, :, None, None], symbols, tables)[0, :, 0, 0]
        row_shares = shares(scores, torch.from_numpy(self.held[at]), self.work.normalize)
        if steady and row_shares.total is not None:
            row_shares = replace(row_shares, total=row_shares.total.detach())
        return row_shares.weights

    def _symbols(self, heads: list[int], places: Tensor) -> dict[str, Tensor]:
        """What expressions of scores read, broadcastable to [1, h, 1, 1, rows, n]."""
        trial, rows = self.trial, places + self.trial.first
        found = {"q": rows[:, None], "k": torch.arange(trial.n)}
        for entry in trial.program.inputs:
            x = trial.data[entry.name][0]
            if entry.kind == "length":
                found[f"{entry.name}()"] = x
            elif entry.kind in READ:
                x = pad(x, (0, trial.n - len(x)))
                found |= {f"{entry.name}(q)": x[rows][:, None], f"{entry.name}(k)": x}
            elif entry.kind == "pairs":
                x = pad(x[:, places], (0, trial.n - x.shape[2]))
                found[f"{entry.name}{PAIR}"] = (x[heads] if len(x) > 1 else x)[None, :, None, None]
        return found

    def outputs(self, heads: Sequence[int], at: slice, numbers: Numbers, steady: bool) -> Tensor:
        """The outputs [h, rows, d]."""
        v = numbers.heads[3]
        if self.weighs:
            weights = self.weights(heads, at, numbers, steady)
            return weights @ v[list(heads), : weights.shape[2]]
        head, q, k, tables = self._alone(heads[0], numbers)
        return defined(self.work, head, q, k, v[head, : len(k)], tables)[None, self.trial.at[at]]

    def _alone(self, head: int, numbers: Numbers) -> tuple[int, Tensor, Tensor, dict[str, Tensor]]:
        """A head, with its queries, keys, and what it has learned and its scores read."""
        _, q, k, _ = numbers.heads
        tables = {name: x[0] for name, x in self.learned_by([head], numbers.learned).items()}
        if self.work.changes.inputs:
            tables |= self._symbols([head], torch.arange(len(q[head])))
        return head, q[head], k[head, : self.trial.keys], tables

    def cancelled(self, head: int, numbers: Numbers) -> float:
        """The largest sum of sizes of a row's weights, some of them negative; 1 at least."""
        if self.held is not None or not self.weighs:
            return 1.0
        parts = self._alone(head, numbers)
        sizes, total = magnitudes_of(self.work, *parts), totals_of(self.work, *parts)
        return max(1.0, divided(self.work, sizes, total).abs().sum(-1).max().item())


def results(
    meanings: Sequence[Meaning], numbers: Numbers, *, sized: bool
) -> tuple[Numbers, tuple[float, ...]]:
    """What heads are meant to compute and, if `sized`, the largest numbers [H] that stand in it, or
    would without the part of the gradients that goes through the sums of weights: the two parts may
    cancel, and leave the roundings of numbers of that size."""

    def chunks(followed: Numbers, steady: bool) -> Iterator[tuple[Any, Tensor]]:
        for meaning in meanings:
            for at in meaning.chunks():
                yield at, meaning.outputs(*at, followed, steady)

    plain = swept(lambda followed: chunks(followed, False), numbers)
    if not sized:
        return plain, ()
    steady = swept(lambda followed: chunks(followed, True), numbers)
    sizes = [x.abs().flatten(1).amax(1) for x in (*plain.heads, *steady.heads[1:]) if x[0].numel()]
    largest = torch.stack(sizes).amax(0).tolist() if sizes else [0.0] * len(plain.heads[0])
    with torch.no_grad():
        for meaning in meanings:
            for head in meaning.heads:
                most = meaning.cancelled(head, numbers)
                largest[head] = most * max(largest[head], most * (meaning.held is None))
    return plain, tuple(largest)


def swept(chunks: Callable[[Numbers], Iterable[tuple[Any, Tensor]]], numbers: Numbers) -> Numbers:
    """Outputs that come in chunks, each with its place in [H, r], and what their gradient leaves of
    q, k, v and what is learned; zeros for what they do not depend on."""
    grad, *given = numbers.heads
    leaves = [
        x if x.requires_grad else x.detach().requires_grad_()
        for x in (*given, *numbers.learned.values())
    ]
    out, grads = torch.zeros_like(grad), [torch.zeros_like(x) for x in leaves]
    followed = Numbers((grad, *leaves[:3]), dict(zip(numbers.learned, leaves[3:], strict=True)))
    for at, part in chunks(followed):
        out[at] = part.detach()
        # of a sum, because torch loads sympy to compare the shapes of an output and its gradient
        total = (part * grad[at]).sum()
        if total.requires_grad:
            found = torch.autograd.grad(total, leaves, allow_unused=True)
            grads = [x if y is None else x + y for x, y in zip(grads, found, strict=True)]
    learned = dict(zip(numbers.learned, grads[3:], strict=True))
    return Numbers((out, *grads[:3]), learned)


def held_rows(relation: Relation, rows: np.ndarray, n: int) -> np.ndarray:
    """The definition for all keys of some queries, bool [rows, n]."""
    mask = np.empty((len(rows), n), bool)
    step = max(1, LIMITS.pairs_at_once // max(1, n))
    for low in range(0, len(rows), step):
        part = rows[low : low + step]
        mask[low : low + step] = evaluate_pairs(relation, part[:, None], np.arange(n)[None], n)
    return mask
