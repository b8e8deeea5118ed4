"""What heads are meant to compute: outputs, gradients and weights, straight from the definition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from attnspec.backends.common.score_formula import scale_of, shares
from attnspec.backends.common.scores import ScoreFunction
from attnspec.backends.factored.definitions import cancelled, defined, has_weights, weights_of
from attnspec.graphs.predicates.inputs import READ
from attnspec.graphs.relation import Relation, evaluate_pairs
from attnspec.ir.scalars import PAIR
from attnspec.layout.tables import Tables
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache
from attnspec.lower.work import Work
from attnspec.runtime.module import CompiledAttention
from attnspec.verification.report import Check

SIZE = 16
"""The size of the heads that are tried."""

Works: TypeAlias = "Sequence[tuple[Work, tuple[int, ...]]]"

Known: TypeAlias = "Cache[tuple[Any, ...], Any]"
"""What the definition says, kept for other modules that are asked the same."""

Learned = Mapping[str, Tensor]
"""Parameters of a module by name, [layers or 1, heads or 1, …]."""


@dataclass(frozen=True)
class Run:
    """Calls of a layer of a module, for a batch of one, with the last `n_q` of `n` positions, for
    layers and heads that a program may have declared or not. Between two sequences the first `keys`
    of the positions are keys."""

    module: CompiledAttention
    data: Mapping[str, Tensor]
    n_q: int
    n: int
    layers: tuple[int, ...]
    heads: int
    declared: bool
    crossed: int | None = None

    @property
    def keys(self) -> int:
        return self.n if self.crossed is None else self.crossed

    @property
    def first(self) -> int:
        """The position of the first query."""
        return self.n - self.n_q

    def drawn(self, length: int) -> Tensor:
        """Random rows of all heads, float64 [1, heads, length, SIZE]."""
        return torch.randn(1, self.heads, length, SIZE, dtype=torch.float64)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k[:, :, : self.keys], v[:, :, : self.keys]
        out: Tensor = self.module(q, k, v, layer=self.layers[0], inputs=self.data)
        return out

    def differentiated(
        self, given: Sequence[Tensor], grad: Tensor, learned: Iterable[Tensor]
    ) -> tuple[Tensor, ...]:
        """The output of q, k and v, and what its gradient leaves of them and of what is learned."""
        leaves = [x.detach().requires_grad_() for x in given]
        out = self(*leaves)
        return out.detach(), *gradients(out, grad, [*leaves, *learned])

    def check(
        self,
        heads: tuple[int, ...] | None,
        backend: str,
        what: str,
        queries: int,
        fault: str | None,
    ) -> Check:
        """What was compared of some heads, None for all together."""
        if fault is not None and self.crossed is not None and self.first:
            fault = f"{fault}; queries are counted from {self.first} on"
        every = heads is None or (len(heads) == self.heads and not self.declared)
        return Check(self.layers, None if every else heads, backend, what, queries, self.n_q, fault)


class Numbers(NamedTuple):
    """What heads compute with: q [H, n_q, d], k and v [H, n, d], what is learned, and the gradient
    of their outputs [H, n_q, d]."""

    q: Tensor
    k: Tensor
    v: Tensor
    learned: Learned
    grad: Tensor

    def to(self, dtype: torch.dtype) -> Numbers:
        """The same in another type."""
        learned = {name: x.to(dtype) for name, x in self.learned.items()}
        q, k, v, grad = (x.to(dtype) for x in (self.q, self.k, self.v, self.grad))
        return Numbers(q, k, v, learned, grad)


@dataclass(frozen=True, eq=False)
class Results:
    """Of all heads H the outputs [H, r, d] at the queries that are examined, and what a gradient
    there leaves: of q [H, n_q, d], k and v [H, n, d], and of what is learned, by name.

    `largest` [H] are the largest numbers that stand in them, or would without the part of the
    gradients that goes through the sums of weights: the two parts may cancel, and leave the
    roundings of numbers of that size."""

    heads: tuple[Tensor, ...]
    learned: Learned
    largest: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Meaning:
    """Heads of one work of a layer, which a backend computes: its relation is the graph with the
    inputs that are tried. Compared are the positions `rows` [r] of a run. `learned` are what the
    formula calls what is learned, and the names of the parameters. `tables`, if there are any, are
    what a kernel holds, these heads the `place`-th in them; `seconds` is the estimate for one head,
    0 for a sequence short enough to try."""

    work: Work
    heads: tuple[int, ...]
    backend: str
    run: Run
    rows: np.ndarray
    learned: tuple[tuple[str, str], ...]
    known: Known
    seconds: float
    tables: Tables[np.ndarray] | None
    place: int

    @cached_property
    def held(self) -> np.ndarray | None:
        """The keys that these positions read, bool [r, n]; None for a mechanism."""
        return None if self.work.mechanism is not None else self.read(self.rows)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """What some queries read by the definition, bool [rows, n]."""
        relation, n = self.work.relation, self.run.n
        key = relation, rows.tobytes(), n
        rows_read: np.ndarray = self.known.get(key, lambda: held_rows(relation, rows, n))
        return rows_read

    @property
    def weighs(self) -> bool:
        """Whether pairs have weights."""
        return self.held is not None or has_weights(self.work)

    def chunks(self) -> Iterator[tuple[list[int], slice]]:
        """Heads and places of rows that are computed in one go."""
        if self.held is None:
            yield from (([head], slice(0, len(self.rows))) for head in self.heads)
            return
        many = max(1, LIMITS.pairs_at_once // max(1, self.held.size))
        step = max(1, LIMITS.pairs_at_once // max(1, self.held.shape[1]))
        for first in range(0, len(self.heads), many):
            for low in range(0, len(self.rows), step):
                yield list(self.heads[first : first + many]), slice(low, low + step)

    def learned_by(self, heads: Sequence[int], learned: Learned) -> dict[str, Tensor]:
        """What some heads have learned, [h or 1, …], by what the formula calls it."""
        parameters = {}
        for called, name in self.learned:
            rows = learned[name][self.run.layers[0] if len(learned[name]) > 1 else 0]
            parameters[called] = rows[list(heads)] if len(rows) > 1 else rows
        return parameters

    def weights(
        self, heads: Sequence[int], at: slice, numbers: Numbers, steady: bool = False
    ) -> Tensor:
        """The weights [h, rows, n]; to gradients `steady` ones are divided by constants."""
        rows = torch.from_numpy(self.rows[at])
        if self.held is None:
            parts = self._alone(heads[0], numbers)
            return weights_of(self.work, *parts, steady=steady)[None, rows - self.run.first]
        some, q = list(heads), numbers.q
        scores = q[some][:, rows - self.run.first] * scale_of(self.work, q.shape[2])
        scores = (scores @ numbers.k[some].mT)[None, :, None, None]
        change = ScoreFunction(self.work.changes, some, self.work.length, torch.device("cpu"))
        symbols, tables = self._symbols(some, rows), self.learned_by(heads, numbers.learned)
        scores = change(scores, symbols, tables)[0, :, 0, 0]
        row_shares = shares(scores, torch.from_numpy(self.held[at]), self.work.normalize)
        if steady and row_shares.total is not None:
            row_shares = replace(row_shares, total=row_shares.total.detach())
        return row_shares.weights

    def _symbols(self, heads: list[int], rows: Tensor) -> dict[str, Tensor]:
        """What expressions of scores read, broadcastable to [1, h, 1, 1, rows, n]."""
        found = {"q": rows[:, None], "k": torch.arange(self.run.n)}
        for entry in self.run.module.program.inputs:
            x = self.run.data[entry.name][0]
            if entry.kind == "length":
                found[f"{entry.name}()"] = x
            elif entry.kind in READ:
                x = pad(x, (0, self.run.n - len(x)))
                found |= {f"{entry.name}(q)": x[rows][:, None], f"{entry.name}(k)": x}
            elif entry.kind == "pairs":
                x = pad(x[:, rows - self.run.first], (0, self.run.n - x.shape[2]))
                found[f"{entry.name}{PAIR}"] = (x[heads] if len(x) > 1 else x)[None, :, None, None]
        return found

    def outputs(self, heads: Sequence[int], at: slice, numbers: Numbers, steady: bool) -> Tensor:
        """The outputs [h, rows, d]."""
        if self.weighs:
            weights = self.weights(heads, at, numbers, steady)
            return weights @ numbers.v[list(heads), : weights.shape[2]]
        head, queries, keys, tables = self._alone(heads[0], numbers)
        out = defined(self.work, head, queries, keys, numbers.v[head, : self.run.keys], tables)
        return out[None, torch.from_numpy(self.rows[at]) - self.run.first]

    def _alone(self, head: int, numbers: Numbers) -> tuple[int, Tensor, Tensor, dict[str, Tensor]]:
        """A head, with its queries, keys, and what it has learned and its scores read."""
        tables = {name: x[0] for name, x in self.learned_by([head], numbers.learned).items()}
        if self.work.changes.inputs:
            tables |= self._symbols([head], torch.arange(self.run.first, self.run.n))
        return head, numbers.q[head], numbers.k[head, : self.run.keys], tables

    def cancelled(self, head: int, numbers: Numbers) -> float:
        """The largest sum of sizes of a row's weights, some of them negative; 1 at least."""
        if self.held is not None or not self.weighs:
            return 1.0
        return max(1.0, cancelled(self.work, *self._alone(head, numbers)))


def results(meanings: Sequence[Meaning], numbers: Numbers, *, sized: bool) -> Results:
    """What heads are meant to compute, with the largest numbers if `sized`."""
    plain = _swept(meanings, numbers, steady=False)
    if not sized:
        return plain
    largest = torch.zeros(len(numbers.q), dtype=numbers.q.dtype)
    for x in (*plain.heads, *_swept(meanings, numbers, steady=True).heads[1:]):
        if x[0].numel():
            largest = torch.maximum(largest, x.abs().flatten(1).amax(1))
    with torch.no_grad():
        for meaning in meanings:
            for head in meaning.heads:
                most = meaning.cancelled(head, numbers)
                largest[head] = most * max(float(largest[head]), most * (meaning.held is None))
    return replace(plain, largest=tuple(largest.tolist()))


def _swept(meanings: Sequence[Meaning], numbers: Numbers, steady: bool) -> Results:
    """The outputs, and the gradients of q, k, v and of what is learned."""
    leaves = q, k, v = [x.detach().requires_grad_() for x in (numbers.q, numbers.k, numbers.v)]
    learned = {name: x.detach().requires_grad_() for name, x in numbers.learned.items()}
    followed = Numbers(q, k, v, learned, numbers.grad)
    out: Tensor | None = None
    for meaning in meanings:
        grad = numbers.grad[:, torch.from_numpy(meaning.rows - meaning.run.first)]
        out = torch.zeros_like(grad) if out is None else out
        for heads, at in meaning.chunks():
            outs = meaning.outputs(heads, at, followed, steady)
            out[heads, at] = outs.detach()
            total = (outs * grad[heads, at]).sum()
            if total.requires_grad:
                total.backward()  # type: ignore[no-untyped-call]
    every = [
        torch.zeros_like(x) if x.grad is None else x.grad for x in (*leaves, *learned.values())
    ]
    tensors = cast(Tensor, out), *every[:3]
    return Results(tensors, dict(zip(learned, every[3:], strict=True)))


def gradients(out: Tensor, upstream: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What the gradient `upstream` of an output leaves; zeros for what it does not depend on.

    Of a sum, because torch loads sympy to compare the shapes of an output and its gradient.
    """
    total = (out * upstream).sum()
    return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)


def held_rows(relation: Relation, rows: np.ndarray, n: int) -> np.ndarray:
    """The definition for all keys of some queries, bool [rows, n]."""
    mask = np.empty((len(rows), n), bool)
    step = max(1, LIMITS.pairs_at_once // max(1, n))
    for low in range(0, len(rows), step):
        part = rows[low : low + step]
        mask[low : low + step] = evaluate_pairs(relation, part[:, None], np.arange(n)[None], n)
    return mask
