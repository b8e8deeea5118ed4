"""The kernel of graphs that the data decide: lists of tiles, and the rest in tables, merged.

Where the fast way cannot go (transforms, dropout, derivatives of derivatives) the dense definition
computes the same, which takes a number for every pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import cast

import torch

from attnspec.backends.common.exact import SoftmaxKernel
from attnspec.backends.common.merging import Partial, with_zero
from attnspec.backends.common.score_formula import unit
from attnspec.backends.lists import attention
from attnspec.backends.lists.attention import LOG2E
from attnspec.backends.lists.changes import ScoreChanges
from attnspec.backends.lists.cover import Covers
from attnspec.backends.lists.partials import Partials, side_by_side, summed
from attnspec.backends.lists.parts import Part, parts_of
from attnspec.backends.lists.placed import Placed
from attnspec.backends.lists.products import Parts
from attnspec.backends.one_block.dense import DenseKernel
from attnspec.backends.tables.kernel import SteppedKernel
from attnspec.backends.tables.per_sample import ReadingKernel
from attnspec.backends.tables.sides import scratch
from attnspec.graphs.relation import Relation
from attnspec.graphs.token_sets import inputs_in
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Work

WEIGHT = "weight of a choice"
"""What stands for it among the tables of a call."""


class Rest(ReadingKernel):
    """What stands beside decided graphs, in tables: those of each sample where inputs are read."""

    def __init__(
        self, work: Work, heads: tuple[int, ...], device: torch.device, rest: Relation
    ) -> None:
        work = replace(work, relation=rest, reads=inputs_in(rest), normalize="softmax")
        super().__init__(work, heads, device)

    def known(self, work: Work) -> SteppedKernel:
        return SteppedKernel(work, self.heads, self.device)

    def of_sample(self, data: Mapping[str, torch.Tensor], sample: int) -> SteppedKernel:
        """The kernel of one sample's inputs."""
        return cast(SteppedKernel, self.kernel_of(data, sample))


class ListedKernel(SoftmaxKernel):
    """Attention over the lists of a call's choices, and over the rest of the graph."""

    def __init__(
        self, work: Work, heads: tuple[int, ...], device: torch.device, parts: Parts
    ) -> None:
        self.work, self.heads, self.device, self.parts = work, heads, device, parts
        self.changes = ScoreChanges(work, heads) if work.changes else None
        self.rest = None if parts.rest is None else Rest(work, heads, device, parts.rest)
        self._covers = Covers(work.n_k)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        rounds = self._rounds(call)
        if rounds:
            return self._mean(q, k, v, rounds)
        return super().__call__(q, self._keys(k), v, self._with_weight(call))

    def partial(  # type: ignore[override]
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rounds = self._rounds(call)
        if rounds:
            return self._mean(q, k, v, rounds), None
        return super().partial(q, self._keys(k), v, self._with_weight(call))

    def _mean(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rounds: Sequence[Call]
    ) -> torch.Tensor:
        """The mean of the outputs of the rounds in which a query has a key."""
        found = [super(ListedKernel, self).partial(q, self._keys(k), v, each) for each in rounds]
        there = [(lse > -math.inf).to(lse.dtype)[..., None] for _, lse in found]
        total = torch.stack([out * some for (out, _), some in zip(found, there, strict=True)]).sum(
            0
        )
        return (total / torch.stack(there).sum(0).clamp(min=1)).to(q.dtype)

    def _keys(self, k: torch.Tensor) -> torch.Tensor:
        return unit(k) if self.work.unit_keys else k

    def _rounds(self, call: Call) -> list[Call]:
        """The calls whose outputs are averaged, if that is asked for."""
        if len(self.work.decided) != 1:
            return []
        leaf = self.work.decided[0]
        return [replace(call, data={**call.data, leaf: each}) for each in call.data[leaf].rounds()]

    def _with_weight(self, call: Call) -> Call:
        """The call with what its choice learns among the tables, so that it gets its gradient."""
        weight = call.data[self.work.decided[0]].weight
        return call if weight is None else replace(call, tables={**call.tables, WEIGHT: weight})

    def composed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Partial:
        if WEIGHT in call.tables:
            leaf = self.work.decided[0]
            choice = replace(call.data[leaf], weight=call.tables[WEIGHT])
            call = replace(call, data={**call.data, leaf: choice})
        return super().composed(q, k, v, call)

    def _rests(self, call: Call) -> Iterator[tuple[slice, SteppedKernel, Call]]:
        """The kernels of what stands beside, each with its samples and their call."""
        if self.rest is not None and not self.rest.work.reads:
            yield slice(None), self.rest.of_sample({}, 0), call
        elif self.rest is not None:
            data = {name: call.data[name][:, 0] for name in self.rest.work.reads}
            for sample in range(len(data[self.rest.work.reads[0]])):
                part = slice(sample, sample + 1)
                padding = None if call.padding is None else call.padding[part]
                line = call.line + sample * len(self.heads)
                its = replace(call, padding=padding, line=line)
                yield part, self.rest.of_sample(data, sample), its

    def build_differentiable(self) -> DenseKernel:
        return DenseKernel(self.work, self.heads, self.device)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scale: float
    ) -> Partial:
        call, _ = _apart(call)
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(q.shape, dtype=wide)
        lse = q.new_full(q.shape[:-1], -math.inf, dtype=wide)
        for of, kernel, its in self._rests(call):
            out[of], lse[of] = kernel.forward(q[of], k[of], v[of], its, scale)
        for part in self._parts(q, call):
            mine = part.of_q(q).to(wide) * scale
            keys = [part.of_k(x).to(wide) for x in (k, v)]
            known = None if self.rest is None else _known(part.of_q(out), part.of_q(lse))
            for some in self._together(part):
                known = _merged(known, some, mine, keys)
            if known is not None:
                part.of_q(out).copy_(known.outs.view(mine.shape))
                part.of_q(lse).copy_(known.tops.view(mine.shape[:-1])).mul_(1 / LOG2E)
        if self.work.normalize == "softmax1":
            out, lse = with_zero((out, lse), in_place=True)
        return out.to(q.dtype), lse

    def backward(
        self, grad: torch.Tensor, saved: Sequence[torch.Tensor], call: Call, scale: float
    ) -> Sequence[torch.Tensor]:
        q, k, v, out, lse = saved
        wide = lse.dtype
        call, weight = _apart(call)
        of_weight = None if weight is None else torch.zeros_like(weight, dtype=wide)
        grads = [x.new_zeros(x.shape, dtype=wide) for x in (q, k, v)]
        tables = [torch.zeros_like(table) for table in call.tables.values()]
        for of, kernel, its in self._rests(call):
            found = kernel.backward(grad[of], [x[of] for x in saved], its, scale)
            totals = [*(x[of] for x in grads), *tables]
            for total, share in zip(totals, found, strict=True):
                total += share
        lse = lse.masked_fill(lse == -math.inf, 0.0) * LOG2E
        delta = (grad.to(wide) * out).sum(-1)
        for part in self._parts(q, call):
            mine = part.of_q(q).to(wide) * scale
            above = part.of_q(grad).to(wide), part.of_q(delta), part.of_q(lse)
            keys = [part.of_k(x).to(wide) for x in (k, v)]
            for some in self._together(part):
                for placed in some:
                    if of_weight is not None:
                        placed.sums = torch.zeros_like(placed.lists, dtype=wide).flatten(0, 1)
                of_q, *of_keys = _gradients(some, mine, keys, above)
                part.of_q(grads[0]).add_(of_q.view(mine.shape), alpha=scale)
                for total, x in zip(grads[1:], of_keys, strict=True):
                    part.of_k(total).add_(x.view(part.of_k(total).shape))
                for placed in some:
                    if of_weight is not None and placed.sums is not None:
                        sums = placed.sums.view(placed.lists.shape)
                        choice = part.data[self.work.decided[0]]
                        of_weight[part.samples, part.query_heads] += choice.of_weight(sums)
                    if placed.changes is not None:
                        for total, share in zip(tables, placed.changes.grads.values(), strict=True):
                            total += share
        if weight is not None and of_weight is not None:
            tables.append(of_weight.to(weight.dtype))
        return *(x.to(y.dtype) for x, y in zip(grads, (q, k, v), strict=True)), *tables

    def _placed(self, part: Part) -> Iterator[Placed]:
        return part.placed(self.parts.products, self._covers, self.changes)

    def _together(self, part: Part) -> Iterator[list[Placed]]:
        """The layouts of a part, some at a time."""
        each = self._placed(part)
        while some := list(islice(each, LIMITS.merged)):
            yield some

    def _parts(self, q: torch.Tensor, call: Call) -> Iterator[Part]:
        return parts_of(q, self.work.n_k, call, self.parts.products)


def _apart(call: Call) -> tuple[Call, torch.Tensor | None]:
    """The call with its own tables alone, and what its choice learns."""
    tables = dict(call.tables)
    weight = tables.pop(WEIGHT, None)
    return replace(call, tables=tables), weight


def _known(out: torch.Tensor, lse: torch.Tensor) -> Partials:
    """What has been found as results of rows: their totals are 1."""
    tops = lse.reshape(-1) * LOG2E
    return Partials(out.reshape(-1, out.shape[-1]), torch.ones_like(tops), tops)


def _merged(
    known: Partials | None, some: Sequence[Placed], q: torch.Tensor, keys: Sequence[torch.Tensor]
) -> Partials:
    """The results of all queries over some layouts, and those that are known."""
    rows = sum(placed.slots[0] for placed in some)
    rows += 0 if known is None else len(known)
    into = Partials.room("results", rows, keys[1].shape[-1], q.dtype)
    columns = []
    if known is not None:
        into.put(known)
        columns.append(torch.arange(len(known), device=q.device))
    for placed in some:
        columns.append(placed.by_queries(attention.forward(placed.tiles(q, *keys), into)))
    return into.merged(side_by_side(columns))


def _gradients(
    some: Sequence[Placed],
    q: torch.Tensor,
    keys: Sequence[torch.Tensor],
    above: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """The gradients of all queries, keys and values, [rows, d] each, over some layouts, given that
    of the output, delta and the log-sum-exps in units of ln 2."""
    slots = [placed.slots for placed in some]
    into = Partials.room("results", sum(x for x, _ in slots), q.shape[-1], q.dtype)
    total = sum(x for _, x in slots)
    of_keys = [
        scratch(f"gradients {number}", (total, x.shape[-1]), x.dtype).zero_()
        for number, x in enumerate(keys)
    ]
    by_queries, by_keys, first = [], [], 0
    for placed, (_, count) in zip(some, slots, strict=True):
        tiles = placed.tiles(q, *keys)
        mine = [x[first : first + count] for x in of_keys]
        of_k, of_v = (x.view(like.shape) for x, like in zip(mine, (tiles.k, tiles.v), strict=True))
        uses = zip(above, ("grad", "delta", "lse"), strict=True)
        grad, delta, lse = (placed.of_q(x, use) for x, use in uses)
        where = attention.backward(tiles, (grad, delta, lse), (of_k, of_v), into)
        by_queries.append(placed.by_queries(where))
        by_keys.append(placed.by_keys(torch.arange(first, first + count, device=q.device)))
        first += count
    own = side_by_side(by_keys)
    return [into.summed(side_by_side(by_queries)).outs, *(summed(x, own) for x in of_keys)]
