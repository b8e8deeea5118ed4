"""The kernels of tables: the flash kernel's steps on the CPU, and plain operations elsewhere.

A step is cut into pieces that stay in the cache; each is merged into the output as soon as it is
computed. The backward of a step, given the merged output and log-sum-exps, returns exactly its
share of the gradients, and the shares add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.common.composed import ComposedTables
from attnspec.backends.common.exact import (
    ByKeyHead,
    Several,
    SoftmaxKernel,
    flash,
    flash_backward,
    samples_of,
)
from attnspec.backends.common.masks import added_by
from attnspec.backends.common.merging import LOWEST, Partial
from attnspec.backends.common.torch_modes import apart
from attnspec.backends.one_block.dense import DenseKernel
from attnspec.backends.tables.blocks import Step, scratch
from attnspec.backends.tables.changed_scores import ScoreChanges
from attnspec.layout.steps import bands_of, stepped_tables
from attnspec.layout.tables import Tables, side_by_side
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache
from attnspec.lower.work import Call, Work

QUERIES, KEYS = 3, 2
"""The axes of positions in tensors of queries, [B, K, R, n_q, …], and of keys, [B, K, n_k, …]."""


class ByTables(SoftmaxKernel):
    """What is there by tables where its own kernel cannot go; where inputs are read, by the
    definition."""

    def __init__(
        self,
        work: Work,
        heads: tuple[int, ...],
        device: torch.device,
        tables: Tables[np.ndarray] | None = None,
    ) -> None:
        self.work, self.heads, self.device, self._tables = work, heads, device, tables

    @cached_property
    def tables(self) -> Tables[np.ndarray]:
        """The tables of the work."""
        return self._tables or tables_of_work(self.work)

    def build_differentiable(self) -> ByKeyHead:
        if self.work.reads or self.work.changes.inputs:
            return DenseKernel(self.work, self.heads, self.device)
        return ComposedTables(self.work, self.heads, self.device, self.tables)


class SteppedKernel(ByTables):
    """Softmax attention over the tables of disjoint steps, on the CPU, with changed scores if
    there are any."""

    def __init__(
        self,
        work: Work,
        heads: tuple[int, ...],
        device: torch.device,
        tables: Tables[np.ndarray] | None = None,
    ) -> None:
        super().__init__(work, heads, device, tables)
        self.steps = [
            Step(batches, work.positions, number > 0)
            for number, batches in enumerate(self.tables.steps)
        ]
        self.changes = ScoreChanges.of_work(work, heads)
        self._several: Cache[int, SteppedKernel] = Cache(LIMITS.paddings_laid_out)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> Partial:
        if several := self._of_several(q, k, call):
            parts = _as_one(q, QUERIES), _as_one(k, KEYS), _as_one(v, KEYS)
            results = several[0].forward(*parts, several[1], scale)
            return _as_many(results[0], QUERIES, len(q)), _as_many(results[1], QUERIES, len(q))
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_zeros(q.shape), q.new_full(q.shape[:-1], -math.inf, dtype=wide)
        for some, real, scores in self._parts(q, k, call):
            keys = [x[some].flatten(0, 1) for x in (k, v)]
            rows, into, sums = (x[some].flatten(0, 2) for x in (q, out, lse))
            total = self._summing(into, wide, "merged results")
            padding = None if real is None else added_by(real, wide, LOWEST)
            attend(self.steps, rows, keys, (total, sums), padding, scale, scores)
            if total is not into:
                into.copy_(total)
        return out, lse

    def _of_several(self, q: Tensor, k: Tensor, call: Call) -> tuple[SteppedKernel, Call] | None:
        """What computes short samples of different padding in the calls of one sequence, and the
        call of it; None elsewhere: they are computed together anyway, or one by one."""
        padding, count = call.padding, q.shape[0]
        if padding is None or self.changes is not None or not self.steps:
            return None
        few = count * k.shape[2:].numel() <= LIMITS.heads_together
        if not few or bool((padding == padding[:1]).all()):
            return None

        def build() -> SteppedKernel:
            tables = side_by_side([self.tables] * count)
            return SteppedKernel(self.work, self.heads, self.device, tables)

        several = self._several.get(count, lambda: apart(build))
        return several, replace(call, padding=padding.reshape(1, -1))

    def _summing(self, x: Tensor, wide: torch.dtype, use: str) -> Tensor:
        """Where the shares of steps add up to x, which is zero at first: itself, or a wider buffer
        where several steps meet, so that a sum is rounded once."""
        if x.dtype == wide or len(self.steps) < 2:
            return x
        return scratch(use, tuple(x.shape), wide).zero_()

    def _parts(
        self, q: Tensor, k: Tensor, call: Call
    ) -> Iterator[tuple[tuple[slice, slice], Tensor | None, ScoreChanges | None]]:
        """The samples and key heads that are computed together, which keys are real, bool [n_k] or
        None, and the changes of their scores: all samples of one padding, as many heads as there is
        room for; scores are changed sample by sample."""
        batch, heads, ratio = q.shape[:3]
        each = max(1, ratio * max(k.shape[2:].numel(), q.shape[3:].numel()))
        room = max(1, LIMITS.heads_together // each)
        for samples, real in samples_of(batch, call.padding, self.changes is not None):
            many = max(1, room // heads)
            for first in range(samples.start, samples.stop, many):
                some = slice(first, min(first + many, samples.stop))
                step = heads if many * heads <= room else min(heads, room)
                for low in range(0, heads, step):
                    high = min(low + step, heads)
                    its = range(low * ratio, high * ratio)
                    scores = self.changes and self.changes.of(its, call.tables)
                    yield (some, slice(low, high)), real, scores

    def backward(
        self, grad: Tensor, saved: Sequence[Tensor], call: Call, scale: float
    ) -> Sequence[Tensor]:
        q, k, v, out, lse = saved
        if several := self._of_several(q, k, call):
            axes = QUERIES, QUERIES, KEYS, KEYS, QUERIES, QUERIES
            above, *rest = (_as_one(x, at) for x, at in zip((grad, *saved), axes, strict=True))
            grads = several[0].backward(above, rest, several[1], scale)
            return [_as_many(x, at, len(q)) for x, at in zip(grads, axes[1:4], strict=True)]
        # a query without a key has weights 0 whatever its log-sum-exp, as long as it is finite
        lse = lse.masked_fill(lse == -math.inf, 0.0)
        into = q.new_zeros(q.shape), *(x.new_zeros(x.shape, dtype=lse.dtype) for x in (k, v))
        tables = {name: torch.zeros_like(table) for name, table in call.tables.items()}
        for some, real, scores in self._parts(q, k, call):
            rows = [x[some].flatten(0, 2) for x in (grad, q, out, lse)]
            keys = [x[some].flatten(0, 1) for x in (k, v)]
            of_q, *targets = (x[some].flatten(0, x.dim() - 3) for x in into)
            total = self._summing(of_q, lse.dtype, "sums of query gradients")
            padding = None if real is None else added_by(real, lse.dtype, LOWEST)
            derive(self.steps, rows, keys, (total, *targets), padding, scale, scores)
            if total is not of_q:
                of_q.copy_(total)
            for name, share in scores.grads.items() if scores is not None else ():
                tables[name] += share
        return into[0], into[1].to(k.dtype), into[2].to(v.dtype), *tables.values()


def attend(
    steps: Iterable[Step],
    q: Tensor,
    keys: Sequence[Tensor],
    result: Partial,
    padding: Tensor | None,
    scale: float,
    scores: ScoreChanges | None,
) -> None:
    """Fills in the output and log-sum-exps of q [c R, n_q, d] over keys and values [c, n_k, d], or
    merges them with what is there; `padding` [n_k] is what is added for every key."""
    out, lse = result
    wide = lse.dtype
    for step in steps:
        (q_now,) = step.q_order.take(queries=q)
        k_now, v_now = step.k_order.take(keys=keys[0], values=keys[1])
        now = step.q_order.room(result=out, sums=lse)
        for piece in step.pieces(q.shape[0], q.shape[2], False, scores is not None):
            bias = piece.bias(padding, wide)
            rows = (*piece.q.read(q=q_now), *piece.k.read(k=k_now, v=v_now))
            if scores is None or not scores.scores.bends:
                if scores is not None:
                    bias = scores.added(piece, bias, wide)
                part = flash(*rows, 0.0, False, attn_mask=bias, scale=scale)
            else:
                wider = [x.to(wide) for x in rows]
                part = scores.forward(wider, bias, scale, scores.of_piece(piece))
            piece.into.put((now[0], now[1]), part, step.q_order.natural and step.merges)
        step.q_order.put(result, now, step.merges)
    empty = lse < LOWEST / 2
    if bool(empty.any()):
        out.masked_fill_(empty[..., None], 0.0)
        lse.masked_fill_(empty, -math.inf)


def derive(
    steps: Iterable[Step],
    rows: Sequence[Tensor],
    keys: Sequence[Tensor],
    into: Sequence[Tensor],
    padding: Tensor | None,
    scale: float,
    scores: ScoreChanges | None,
) -> None:
    """Adds up the gradients of q, k and v, and those of tables; `rows` are the gradient of the
    output, q, the output and its log-sum-exps, 0 for a query without a key."""
    grad, q, out, lse = rows
    wide = lse.dtype
    for step in steps:
        queries, order = step.q_order, step.k_order
        k_now, v_now = order.take(keys=keys[0], values=keys[1])
        now = queries.take(grad_rows=grad, q_rows=q, out_rows=out, lse_rows=lse)
        q_sums = queries.room(query_gradients=into[0])
        sums = order.zeros(key_gradients=into[1], value_gradients=into[2])
        for piece in step.pieces(q.shape[0], q.shape[2], True, scores is not None):
            bias = piece.bias(padding, wide)
            named = dict(zip(("grad", "q", "out", "lse"), now, strict=True))
            *above, out_now, lse_now = piece.q.read(**named)
            parts = *above, *piece.k.read(k=k_now, v=v_now), out_now, lse_now.contiguous()
            if scores is not None and (scores.learned or scores.scores.bends):
                grads = scores.backward(parts, bias, scale, scores.of_piece(piece))
            else:
                if scores is not None:
                    bias = scores.added(piece, bias, wide)
                grads = flash_backward(*parts, 0.0, False, attn_mask=bias, scale=scale)
            if queries.natural:
                piece.q.add(q_sums[0], grads[0])
            else:
                piece.into.put(q_sums, grads[:1], False)
            for total, share in zip(sums, grads[1:], strict=True):
                piece.k.add(total, share)
            if step.of_factors is not None:
                piece.weigh(step.of_factors, parts[2:4], grads[1:])
        queries.add(into[:1], q_sums)
        order.add(into[1:], sums)


class JoinedSteps(SteppedKernel):
    """Heads of different graphs as one sequence of as many positions, whose steps are theirs."""

    def __init__(
        self, groups: Sequence[tuple[Work, tuple[int, ...]]], device: torch.device
    ) -> None:
        self.each = [(ByTables(work, members, device), len(members)) for work, members in groups]
        tables = [kernel.tables for kernel, count in self.each for _ in range(count)]
        super().__init__(groups[0][0], (), device, side_by_side(tables))

    def build_differentiable(self) -> ByKeyHead:
        return Several(self.each)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> Partial:
        parts = _of_queries(q), _of_heads(k, q.shape[2]), _of_heads(v, q.shape[2])
        out, lse = super().forward(*parts, _for_heads(call, q), scale)
        return out.reshape(q.shape), lse.reshape(q.shape[:-1])

    def backward(
        self, grad: Tensor, saved: Sequence[Tensor], call: Call, scale: float
    ) -> Sequence[Tensor]:
        q, k, v, out, lse = saved
        keys = [_of_heads(x, q.shape[2]) for x in (k, v)]
        saved = (_of_queries(q), *keys, _of_queries(out), lse.reshape(len(q), 1, 1, -1))
        grads = super().backward(_of_queries(grad), saved, _for_heads(call, q), scale)
        shape = (len(q), k.shape[1], q.shape[2], k.shape[2], -1)
        of_keys = [x.reshape(shape).sum(2) for x in grads[1:]]
        return grads[0].reshape(q.shape), of_keys[0], of_keys[1]


def tables_of_work(work: Work) -> Tables[np.ndarray]:
    """The tables of a work of static pairs, in the steps that cost least."""
    return stepped_tables(bands_of(work.relation, work.n_q, work.n_k))


def _of_queries(x: Tensor) -> Tensor:
    """[B, K, R, n, d] as one head [B, 1, 1, K R n, d]."""
    return x.reshape(len(x), 1, 1, -1, x.shape[-1])


def _of_heads(x: Tensor, ratio: int) -> Tensor:
    """The keys of every query head, [B, K, n, d], as those of one head [B, 1, K R n, d]."""
    return x.repeat_interleave(ratio, 1).reshape(len(x), 1, -1, x.shape[-1])


def _for_heads(call: Call, q: Tensor) -> Call:
    """The call with its padding [B, n] once for every head [B, H n]."""
    if call.padding is None:
        return call
    return replace(call, padding=call.padding.repeat(1, q.shape[1] * q.shape[2]))


def _as_one(x: Tensor, axis: int) -> Tensor:
    """Samples [B, K, …, n, …] with positions along an axis as one [1, K, …, B n, …]."""
    return x.movedim(0, axis - 1).flatten(axis - 1, axis)[None]


def _as_many(x: Tensor, axis: int, batch: int) -> Tensor:
    """One sample as the `batch` that it was made of."""
    return torch.unflatten(x[0], axis - 1, (batch, -1)).movedim(axis - 1, 0)
