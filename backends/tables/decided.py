"""The kernels of data-dependent graphs: the tables of their choices, and the rest of the
graph in tables of its own, merged.

Where the fast way cannot go (transforms, dropout, derivatives of derivatives) the dense definition
computes the same, which takes a number for every pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

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
from attnspec.backends.tables.blocks import attend, derive
from attnspec.backends.tables.changed_scores import Learned, ScoreChanges
from attnspec.backends.tables.kernel import SteppedKernel
from attnspec.backends.tables.listed import ListedStep, listed_steps
from attnspec.backends.tables.per_sample import ReadingKernel
from attnspec.graphs.patterns.full import Full
from attnspec.graphs.token_sets import inputs_in
from attnspec.lower.costs import seconds_for, weighed
from attnspec.lower.work import Call, Work

WEIGHT = "weight of a choice"
"""What stands for it among the tables of a call."""


class DecidedTables(SoftmaxKernel):
    """Attention over the tables of a call's choices, and over the rest of the graph, which has a
    kernel `of_rest`."""

    of_rest: Callable[..., Any] = ReadingKernel

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
        self.rest: Any = None
        if parts.rest is not None:
            reads = inputs_in(parts.rest)
            rest = replace(work, relation=parts.rest, reads=reads, normalize="softmax")
            self.rest = self.of_rest(rest, heads, device)

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
        return type(self)(work, self.heads, self.device, self.parts)

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

    def _steps(
        self, part: Part, size: int, factors: list[Tensor] | None = None
    ) -> Iterator[ListedStep]:
        """The steps of a part for numbers of a size, as `listed_steps` has them."""
        for number, placed in enumerate(self.placed(part)):
            merges = number > 0 or self.rest is not None
            yield from listed_steps(placed, merges, size, factors)

    def _scores(self, part: Part, call: Call, grads: Learned) -> ScoreChanges | None:
        heads = range(part.shape[1] * part.shape[2])[part.query_heads]
        return self.changes and self.changes.of(heads, call.tables, grads)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> Partial:
        call, _ = _without_weight(call)
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(q.shape, dtype=wide)
        lse = q.new_full(q.shape[:-1], -math.inf, dtype=wide)
        for of, kernel, its in self.rests(call):
            out[of], lse[of] = kernel.forward(q[of], k[of], v[of], its, scale)
        for part in self.parts_of(q, call):
            rows, *result = (_in_line(part.of_q(x), 4) for x in (q, out, lse))
            keys = [_in_line(part.of_k(x), 3).to(wide) for x in (k, v)]
            steps, scores = self._steps(part, q.shape[-1]), self._scores(part, call, {})
            attend(steps, rows.to(wide), keys, (result[0], result[1]), None, scale, scores)
            for into, x in zip((out, lse), result, strict=True):
                _put_back(part.of_q(into), x)
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
            rows = [_in_line(part.of_q(x), 4).to(wide) for x in (grad, q, out, lse)]
            keys = [_in_line(part.of_k(x), 3).to(wide) for x in (k, v)]
            into = [part.of_q(grads[0]), *(part.of_k(x) for x in grads[1:])]
            lines = [_in_line(x, x.dim() - 1) for x in into]
            factors: list[Tensor] | None = None if of_weight is None else []
            scores = self._scores(part, call, tables)
            derive(self._steps(part, q.shape[-1], factors), rows, keys, lines, None, scale, scores)
            for target, x in zip(into, lines, strict=True):
                _put_back(target, x)
            if of_weight is not None:
                choice = part.data[self.work.decided[0]]
                total = of_weight[part.samples, part.query_heads]
                total += sum(choice.of_weight(sums.to(wide)) for sums in factors or ())
        if weight is not None and of_weight is not None:
            tables[WEIGHT] = of_weight.to(weight.dtype)
        pairs = zip(grads, (q, k, v), strict=True)
        return *(x.to(y.dtype) for x, y in pairs), *tables.values()


def _in_line(x: Tensor, axes: int) -> Tensor:
    """All rows of a tensor whose first axes number them, as those of one head [1, rows, …]."""
    return x.flatten(0, axes - 1)[None]


def _put_back(into: Tensor, line: Tensor) -> None:
    """Rows in line where they were taken from, if they do not lie there."""
    if line.data_ptr() != into.data_ptr():
        into.copy_(line.view(into.shape))


def _without_weight(call: Call) -> tuple[Call, Tensor | None]:
    """The call with its own tables alone, and what its choice learns."""
    tables = dict(call.tables)
    weight = tables.pop(WEIGHT, None)
    return replace(call, tables=tables), weight


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
