"""The kernels of data-dependent graphs: the tables of their choices, and the rest of the
graph in tables of its own, merged.

Where the fast way cannot go (transforms, dropout, derivatives of derivatives) the dense definition
computes the same, which takes a number for every pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import cast

import torch
from torch import Tensor

from attnspec.backends.common.exact import SoftmaxKernel
from attnspec.backends.common.merging import Outputs, Partial, with_zero
from attnspec.backends.common.score_formula import unit
from attnspec.backends.common.torch_modes import apart
from attnspec.backends.decided.choice import mean_of, rounds_of
from attnspec.backends.decided.products import Parts
from attnspec.backends.decided.tables import Part, Placed, parts_of_call
from attnspec.backends.one_block.backend import definition_of
from attnspec.backends.one_block.dense import DenseKernel
from attnspec.backends.tables.blocks import scratch
from attnspec.backends.tables.changed_scores import ScoreChanges
from attnspec.backends.tables.kernel import SteppedKernel
from attnspec.backends.tables.listed import ListedTiles, Results, summed
from attnspec.backends.tables.per_sample import ReadingKernel
from attnspec.graphs.patterns.full import Full
from attnspec.graphs.token_sets import inputs_in
from attnspec.limits import LIMITS
from attnspec.lower.costs import seconds_for, weighed
from attnspec.lower.work import Call, Work

WEIGHT = "weight of a choice"
"""What stands for it among the tables of a call."""


class DecidedTables(SoftmaxKernel):
    """Attention over the tables of a call's choices, and over the rest of the graph."""

    def __init__(
        self,
        work: Work,
        heads: tuple[int, ...],
        device: torch.device,
        parts: Parts,
        most_seconds: float = math.inf,
    ) -> None:
        self.work, self.heads, self.device, self.parts = work, heads, device, parts
        self.most_seconds = most_seconds
        self.changes = ScoreChanges.of_work(work, heads)
        self.rest = None
        if parts.rest is not None:
            reads = inputs_in(parts.rest)
            rest = replace(work, relation=parts.rest, reads=reads, normalize="softmax")
            self.rest = ReadingKernel(rest, heads, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return self.partial(q, k, v, call)[0]

    def partial(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, call: Call
    ) -> Outputs:
        if self._is_dense(call):
            return self.definition.partial(q, k, v, call)
        rounds = rounds_of(self.work, call)
        return (self._mean(q, k, v, rounds), None) if rounds else super().partial(q, k, v, call)

    def _is_dense(self, call: Call) -> bool:
        """Whether the lists that inputs bring are so long that the definition takes less."""
        if self.most_seconds == math.inf:
            return False
        units = {"entry": 0.0, "pair": 0.0}
        for leaf in self.work.decided:
            choice = call.data[leaf]
            entries = int((choice.blocks >= 0).sum()) / choice.blocks.shape[:2].numel()
            units["entry"] += entries
            units["pair"] += entries * choice.size
        return seconds_for(weighed("tables", units)) > self.most_seconds

    @cached_property
    def definition(self) -> SoftmaxKernel:
        """All pairs at once."""
        backend, given = definition_of(self.work, self.device.type), (self.work, self.heads)
        return cast(SoftmaxKernel, apart(lambda: backend.build(*given, self.device)))

    def _mean(self, q: Tensor, k: Tensor, v: Tensor, rounds: Sequence[Call]) -> Tensor:
        """The mean of the outputs of the rounds in which a query has a key."""
        results = [super(DecidedTables, self.plain).partial(q, k, v, each) for each in rounds]
        some = [lse > -math.inf for _, lse in results]
        if self.plain is not self:
            results = [with_zero(each) for each in results]
        return mean_of([out for out, _ in results], some)

    @cached_property
    def plain(self) -> DecidedTables:
        """The kernel of a plain softmax, whose log-sum-exps tell rows without a key from others."""
        if self.work.normalize == "softmax":
            return self
        work = replace(self.work, normalize="softmax")
        return DecidedTables(work, self.heads, self.device, self.parts)

    def _fast(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Partial:
        weight = call.data[self.work.decided[0]].weight
        if weight is not None:
            # among the tables it gets its gradient
            call = replace(call, tables={**call.tables, WEIGHT: weight})
        return super()._fast(q, unit(k) if self.work.unit_keys else k, v, call)

    def composed(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Partial:
        if WEIGHT in call.tables:
            leaf = self.work.decided[0]
            choice = replace(call.data[leaf], weight=call.tables[WEIGHT])
            call = replace(call, data={**call.data, leaf: choice})
        return super().composed(q, k, v, call)

    def build_differentiable(self) -> DenseKernel:
        return DenseKernel(self.work, self.heads, self.device)

    def rests(self, call: Call) -> Iterator[tuple[slice, SoftmaxKernel, Call]]:
        """The kernels of what stands beside, in tables, each with its samples and their call."""
        if self.rest is None:
            return
        reads = self.rest.work.reads
        if not reads:
            yield slice(None), cast(SoftmaxKernel, self.rest.kernel_of({}, 0)), call
            return
        data = {name: call.data[name][:, 0] for name in reads}
        batch, heads = len(data[reads[0]]), len(self.heads)
        for some, kernel, mine in self.rest.samples(replace(call, data=data), batch, heads):
            yield some, cast(SoftmaxKernel, kernel), mine

    def parts_of(self, q: Tensor, call: Call) -> Iterator[Part]:
        """The parts of a call that are computed together."""
        return parts_of_call(q, self.work.n_k, call, self.parts.products)

    def placed(self, part: Part) -> Iterator[Placed]:
        """The tables of a part."""
        for product in self.parts.products:
            yield from part.tables(product)

    def _together(self, part: Part) -> Iterator[list[Placed]]:
        """The tables of a part, some at a time."""
        each = self.placed(part)
        while some := list(islice(each, LIMITS.merged)):
            yield some

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> Partial:
        call, _ = _without_weight(call)
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(q.shape, dtype=wide)
        lse = q.new_full(q.shape[:-1], -math.inf, dtype=wide)
        for of, kernel, its in self.rests(call):
            out[of], lse[of] = kernel.forward(q[of], k[of], v[of], its, scale)
        for part in self.parts_of(q, call):
            mine, keys = part.of_q(q).to(wide), [part.of_k(x).to(wide) for x in (k, v)]
            sums = None
            if self.rest is not None:
                flat = part.of_q(out).reshape(-1, out.shape[-1])
                sums = Results(flat, part.of_q(lse).reshape(-1))
            heads = range(part.shape[1] * part.shape[2])[part.query_heads]
            scores = self.changes and self.changes.of(heads, call.tables)
            for some in self._together(part):
                sums = _merged(sums, some, mine, keys, scale, scores)
            if sums is not None and sums.lse is not None:
                part.of_q(out).copy_(sums.outs.view(mine.shape))
                part.of_q(lse).copy_(sums.lse.view(mine.shape[:-1]))
        return out.to(q.dtype), lse

    def backward(
        self, grad: Tensor, saved: Sequence[Tensor], call: Call, scale: float
    ) -> Sequence[Tensor]:
        q, k, v, out, lse = saved
        wide = lse.dtype
        call, weight = _without_weight(call)
        of_weight = None if weight is None else torch.zeros_like(weight, dtype=wide)
        grads = [x.new_zeros(x.shape, dtype=wide) for x in (q, k, v)]
        tables = {name: torch.zeros_like(table) for name, table in call.tables.items()}
        for of, kernel, its in self.rests(call):
            shares = kernel.backward(grad[of], [x[of] for x in saved], its, scale)
            for total, share in zip(
                [*(x[of] for x in grads), *tables.values()], shares, strict=True
            ):
                total += share
        lse = lse.masked_fill(lse == -math.inf, 0.0)
        for part in self.parts_of(q, call):
            rows = [part.of_q(x).to(wide) for x in (grad, q, out, lse)]
            keys = [part.of_k(x).to(wide) for x in (k, v)]
            heads = range(part.shape[1] * part.shape[2])[part.query_heads]
            scores = self.changes and self.changes.of(heads, call.tables)
            for some in self._together(part):
                (of_q, *of_keys), factors = _gradients(
                    some, rows, keys, scale, scores, of_weight is not None
                )
                part.of_q(grads[0]).add_(of_q.view(rows[1].shape))
                for total, x in zip(grads[1:], of_keys, strict=True):
                    part.of_k(total).add_(x.view(part.of_k(total).shape))
                if of_weight is not None:
                    choice = part.data[self.work.decided[0]]
                    total = of_weight[part.samples, part.query_heads]
                    total += sum(choice.of_weight(sums) for sums in factors)
            for name, share in scores.grads.items() if scores is not None else ():
                tables[name] += share
        if weight is not None and of_weight is not None:
            tables[WEIGHT] = of_weight.to(weight.dtype)
        pairs = zip(grads, (q, k, v), strict=True)
        return *(x.to(y.dtype) for x, y in pairs), *tables.values()


def _without_weight(call: Call) -> tuple[Call, Tensor | None]:
    """The call with its own tables alone, and what its choice learns."""
    tables = dict(call.tables)
    weight = tables.pop(WEIGHT, None)
    return replace(call, tables=tables), weight


def _merged(
    known: Results | None,
    some: Sequence[Placed],
    q: Tensor,
    keys: Sequence[Tensor],
    scale: float,
    scores: ScoreChanges | None,
) -> Results:
    """The results of all queries over some layouts, and those that are known."""
    rows = sum(placed.q.slots for placed in some) + (0 if known is None else len(known.outs))
    into = Results.room("results", rows, keys[1].shape[-1], q.dtype, True)
    columns = []
    if known is not None:
        into.put(known)
        columns.append(torch.arange(len(known.outs), device=q.device))
    for placed in some:
        columns.append(ListedTiles(placed, keys, scale, scores).forward(q, into))
    return into.combined(torch.stack(columns, 1))


def _gradients(
    some: Sequence[Placed],
    rows: Sequence[Tensor],
    keys: Sequence[Tensor],
    scale: float,
    scores: ScoreChanges | None,
    weighed: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of all queries, keys and values, [rows, d] each, over some layouts, and those
    of the factors of their entries where these are `weighed`; `rows` as `ListedTiles.backward`
    takes them."""
    q, kind = rows[1], rows[1].dtype
    into = Results.room("results", sum(placed.q.slots for placed in some), q.shape[-1], kind, False)
    slots = [placed.k.slots for placed in some]
    of_keys = [
        scratch(f"gradients {number}", (sum(slots) + 1, x.shape[-1]), kind).zero_()
        for number, x in enumerate(keys)
    ]
    by_queries, by_keys, factors, first = [], [], [], 0
    for placed, count in zip(some, slots, strict=True):
        tiles = ListedTiles(placed, keys, scale, scores, weighed)
        mine = [x[first : first + count].view(-1, placed.k.size, x.shape[-1]) for x in of_keys]
        by_queries.append(tiles.backward(rows, mine, into))
        by_keys.append(placed.k.back(torch.arange(first, first + count, device=q.device)))
        if tiles.of_factors is not None:
            factors.append(tiles.of_factors.view(placed.lists.shape))
        first += count
    stacked = torch.stack(by_keys, 1)
    of_q = into.combined(torch.stack(by_queries, 1)).outs
    return [of_q, *(summed(x, stacked) for x in of_keys)], factors


class MeansKernel:
    """A work whose one choice are clusters of queries, `count` of them: their means read all keys,
    and each query gets what the mean of its cluster gets."""

    def __init__(
        self, work: Work, heads: tuple[int, ...], device: torch.device, count: int
    ) -> None:
        self.work, self.heads, self.device = work, heads, device
        means = replace(work, relation=Full(), n_q=count, reads=())
        self.inner = SteppedKernel(means, heads, device)

    @cached_property
    def definition(self) -> DenseKernel:
        """What drops single weights of each query."""
        return DenseKernel(self.work, self.heads, self.device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return self.partial(q, k, v, call)[0]

    def partial(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Outputs:
        """The output [B, H, n_q, d_v] and its log-sum-exps [B, H, n_q]."""
        if call.dropout_p:
            return self.definition.partial(q, k, v, call)
        clusters = call.data[self.work.decided[0]]
        out, lse = self.inner.partial(clusters.means(q), k, v, Call(padding=call.padding))
        # `softmax1` has one more key, whose score is 0
        empty = 0.0 if self.work.normalize == "softmax1" else -math.inf
        return clusters.spread(out, 0.0), clusters.spread(lse[..., None], empty)[..., 0]
