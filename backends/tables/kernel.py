"""The kernels of tables: the flash kernel's steps on the CPU, and plain operations elsewhere.

A step is cut into pieces that stay in the cache; each is merged into the output as soon as it is
computed. The backward of a step, given the merged output and log-sum-exps, returns exactly its
share of the gradients, and the shares add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
from attnspec.backends.common.merging import Partial
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
        n_q, positions = self.tables.n_q, work.positions
        self.steps = [Step(batches, n_q, positions) for batches in self.tables.steps]
        self.changes = ScoreChanges.of_work(work, heads)
        self._several: Cache[int, SteppedKernel] = Cache(LIMITS.paddings_laid_out)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> Partial:
        if several := self._of_several(q, k, call):
            parts = _as_one(q, QUERIES), _as_one(k, KEYS), _as_one(v, KEYS)
            results = several[0].forward(*parts, several[1], scale)
            return _as_many(results[0], QUERIES, len(q)), _as_many(results[1], QUERIES, len(q))
        wide = torch.promote_types(q.dtype, torch.float32)
        if self.steps and self.steps[0].complete:
            out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=wide)
        else:
            out, lse = q.new_zeros(q.shape), q.new_full(q.shape[:-1], -math.inf, dtype=wide)
        for some, real, scores in self._parts(q, k, call):
            keys = [x[some].flatten(0, 1) for x in (k, v)]
            result = out[some].flatten(0, 2), lse[some].flatten(0, 2)
            self._forward_part(q[some].flatten(0, 2), keys, result, real, scale, scores)
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

    def _forward_part(
        self,
        q: Tensor,
        keys: Sequence[Tensor],
        result: Partial,
        padding: Tensor | None,
        scale: float,
        scores: ScoreChanges | None,
    ) -> None:
        """Some heads, q [c R, n_q, d], keys and values [c, n_k, d], of samples of the same padding
        [n_k]: fills in their output and log-sum-exps."""
        lse = result[1]
        out, wide = self._summing(result[0], lse.dtype, "merged results"), lse.dtype
        real = None if padding is None else added_by(padding, wide)
        for number, step in enumerate(self.steps):
            queries = step.q_order
            (q_now,) = queries.take(queries=q)
            k_now, v_now = step.k_orders[False].take(keys=keys[0], values=keys[1])
            # what is written for the first time need not be read before
            place = queries.room if step.complete and number == 0 else queries.take
            out_now, lse_now = place(result=out, sums=lse)
            for piece in step.pieces(q.shape[0], q.shape[2], False, scores is not None):
                bias, empty = piece.bias(real, wide)
                rows = (*piece.q.read(q=q_now), *piece.k.read(k=k_now, v=v_now))
                if scores is None or not scores.scores.bends:
                    if scores is not None:
                        bias = scores.added(piece, bias, wide)
                    part, sums = flash(*rows, 0.0, False, attn_mask=bias, scale=scale)
                else:
                    wider = [x.to(wide) for x in rows]
                    part, sums = scores.forward(wider, bias, scale, scores.of_piece(piece))
                if empty is not None:
                    sums = sums.masked_fill(empty, -math.inf)
                piece.q.put((out_now, lse_now), (part, sums), number > 0)
            queries.put((out, lse), (out_now, lse_now))
        if out is not result[0]:
            result[0].copy_(out)

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
            targets = [x[some].flatten(0, x.dim() - 3) for x in into]
            self._backward_part(rows, keys, targets, real, scale, scores)
            for name, share in scores.grads.items() if scores is not None else ():
                tables[name] += share
        return into[0], into[1].to(k.dtype), into[2].to(v.dtype), *tables.values()

    def _backward_part(
        self,
        rows: Sequence[Tensor],
        keys: Sequence[Tensor],
        into: Sequence[Tensor],
        padding: Tensor | None,
        scale: float,
        scores: ScoreChanges | None,
    ) -> None:
        """Some heads: fills in the gradients of q, k and v, and adds up those of tables."""
        (grad, q, out, lse), (k, v), (of_q, *targets) = rows, keys, into
        wide = lse.dtype
        grad_q = self._summing(of_q, wide, "sums of query gradients")
        real = None if padding is None else added_by(padding, wide)
        for step in self.steps:
            queries, order = step.q_order, step.k_orders[True]
            k_now, v_now = order.take(keys=k, values=v)
            sums: Sequence[Tensor] = targets
            if not order.natural:
                uses = ("key gradients", "value gradients")
                sums = [scratch(use, tuple(k_now.shape), wide).zero_() for use in uses]
            # rows that are not there would add to the gradients of their keys; with what earlier
            # steps have added
            *now, q_sums = queries.take(
                "grad_rows",
                grad_rows=grad,
                q_rows=q,
                out_rows=out,
                lse_rows=lse,
                query_gradients=grad_q,
            )
            for piece in step.pieces(q.shape[0], q.shape[2], True, scores is not None):
                bias, _ = piece.bias(real, wide)
                named = dict(zip(("grad", "q", "out", "lse"), now, strict=True))
                *above, out_now, lse_now = piece.q.read("grad", **named)
                parts = *above, *piece.k.read(k=k_now, v=v_now), out_now, lse_now.contiguous()
                if scores is not None and (scores.learned or scores.scores.bends):
                    grads = scores.backward(parts, bias, scale, scores.of_piece(piece))
                else:
                    if scores is not None:
                        bias = scores.added(piece, bias, wide)
                    grads = flash_backward(*parts, 0.0, False, attn_mask=bias, scale=scale)
                piece.q.add(q_sums, grads[0])
                piece.k.add_overlapping(sums[0], grads[1])
                piece.k.add_overlapping(sums[1], grads[2])
            queries.put((grad_q,), (q_sums,))
            if not order.natural:
                for target, share in zip(targets, sums, strict=True):
                    order.add(target, share)
        if grad_q is not of_q:
            of_q.copy_(grad_q)


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
