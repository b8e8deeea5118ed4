"""The kernels of data-dependent graphs: the tables of their choices, and the rest of the
graph in tables of its own, merged.

Where the fast way cannot go (transforms, dropout, derivatives of derivatives) the dense definition
computes the same, which takes a number for every pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from attnspec.backends.decided.tables import Part, parts_of_call
from attnspec.backends.one_block.backend import definition_of
from attnspec.backends.one_block.dense import DenseKernel
from attnspec.backends.tables.blocks import Walked, WalkingKernel
from attnspec.backends.tables.changed_scores import Learned, changes_of
from attnspec.backends.tables.kernel import SteppedKernel
from attnspec.backends.tables.listed import ListedStep, listed_steps
from attnspec.backends.tables.per_sample import ReadingKernel
from attnspec.graphs.patterns.full import Full
from attnspec.graphs.token_sets import inputs_in
from attnspec.lower.costs import seconds_for, weighed
from attnspec.lower.work import Call, Heads, Work

WEIGHT = "weight of a choice"
"""What stands for it among the tables of a call."""


class DecidedTables(WalkingKernel):
    """Attention over the tables of a call's choices, and over the rest of the graph, which has a
    kernel `of_rest`; all lists are those of one head."""

    of_rows, of_keys, widens = (1, 4), (1, 3), True
    of_rest: Callable[..., Any] = ReadingKernel

    def __init__(
        self,
        work: Work,
        heads: Heads,
        device: torch.device,
        parts: Parts,
        most_seconds: float = math.inf,
    ) -> None:
        self.work, self.heads, self.device, self.parts = work, heads, device, parts
        self.most_seconds = most_seconds
        self.changes = changes_of(work, heads)
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

    def rests(self, call: Call, batch: int) -> Iterable[tuple[slice, Any, Call]]:
        """The kernels of what stands beside, in tables, each with its samples and their call."""
        if self.rest is None:
            return ()
        data = {name: call.data[name][:, 0] for name in self.rest.work.reads}
        samples = self.rest.samples(replace(call, data=data), batch, len(self.heads))
        return cast("Iterable[tuple[slice, Any, Call]]", samples)

    def parts_of(self, q: Tensor, call: Call) -> Iterator[Part]:
        """The parts of a call that are computed together."""
        return parts_of_call(q, self.work.n_k, call, self.parts.products)

    def _begun(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> Partial:
        out, lse = super()._begun(q, k, v, call, scale)
        for of, kernel, its in self.rests(call, len(q)):
            out[of], lse[of] = kernel.forward(q[of], k[of], v[of], its, scale)
        return out, lse

    def _begun_back(
        self, grad: Tensor, saved: Sequence[Tensor], call: Call, scale: float
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        into, tables = super()._begun_back(grad, saved, call, scale)
        for of, kernel, its in self.rests(call, len(grad)):
            shares = kernel.backward(grad[of], [x[of] for x in saved], its, scale)
            totals = [*(x[of] for x in into), *tables.values()]
            for total, share in zip(totals, shares, strict=True):
                total += share
        return into, tables

    def _steps(self, part: Part, size: int, factors: list[Tensor] | None) -> Iterator[ListedStep]:
        """The steps of a part; a call with derivatives keeps them unless their masks are large."""
        kept, key, steps = part.call.kept, str(part.queries), []
        # no more bytes than queries, keys, values and outputs take
        room = 16 * size * math.prod(part.sizes)
        if kept is None or factors is not None:
            kept, room = {}, 0
        for step in kept.get(key, ()):
            yield step
            step.cut.clear()  # pieces and their step would keep each other
        if key in kept:
            return
        layouts = part.tables(self.parts.products)
        for step in listed_steps(layouts, self.rest is not None, size, factors):
            room -= step.nbytes
            if room > 0:
                step.cut.extend(step.pieces_of(size))
                steps.append(step)
            yield step
        if room > 0:
            kept[key] = steps

    def _parts(self, q: Tensor, call: Call, grads: Learned) -> Iterator[Walked]:
        learned = {name: table for name, table in call.tables.items() if name != WEIGHT}
        of_weight = grads.get(WEIGHT)
        for part in self.parts_of(q, call):
            factors: list[Tensor] | None = None if of_weight is None else []
            heads = torch.arange(part.shape[1] * part.shape[2], device="cpu")[part.query_heads]
            scores = self.changes and self.changes(heads, learned, grads)
            of_q, of_k = (None, *part.queries), (None, part.samples, part.heads)
            steps = self._steps(part, q.shape[-1], factors)
            yield of_q, of_k, steps, None, scores
            if of_weight is not None:
                choice = part.data[self.work.decided[0]]
                total = of_weight[part.samples, part.query_heads]
                for sums in factors or ():
                    sums = sums.view(*total.shape[:2], *sums.shape[1:])
                    total += choice.of_weight(sums.to(total.dtype))


class MeansKernel:
    """A work whose one choice are clusters of queries, `count` of them: their means read all keys,
    and each query gets what the mean of its cluster gets."""

    def __init__(self, work: Work, heads: Heads, device: torch.device, count: int) -> None:
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
