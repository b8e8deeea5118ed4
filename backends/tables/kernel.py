"""The kernels of tables: the flash kernel's steps on the CPU, and plain operations elsewhere.

A step is cut into pieces that stay in the cache; each is merged into the output as soon as it is
computed. The backward of a step, given the merged output and log-sum-exps, returns exactly its
share of the gradients, and the shares add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.common.composed import ComposedTables
from attnspec.backends.common.exact import (
    ByKeyHead,
    SoftmaxKernel,
    samples_of,
    some_together,
)
from attnspec.backends.common.masks import added_by
from attnspec.backends.common.merging import LOWEST, Partial
from attnspec.backends.one_block.dense import DenseKernel
from attnspec.backends.tables.blocks import Step, attend, derive
from attnspec.backends.tables.changed_scores import Learned, ScoreChanges
from attnspec.layout.steps import bands_of, stepped_tables
from attnspec.layout.tables import Tables
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Work


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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> Partial:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(q.shape, dtype=self._summing(q.dtype, wide))
        lse = q.new_full(q.shape[:-1], -math.inf, dtype=wide)
        for some, padding, scores in self._parts(q, k, call, wide, {}):
            keys = [x[some].flatten(0, 1) for x in (k, v)]
            rows, into, sums = [x[some].flatten(0, 2) for x in (q, out, lse)]
            attend(self.steps, rows, keys, (into, sums), padding, scale, scores)
        return out.to(q.dtype), lse

    def _summing(self, kind: torch.dtype, wide: torch.dtype) -> torch.dtype:
        """The type in which the shares of steps are added, so that a sum is rounded once."""
        return wide if len(self.steps) > 1 else kind

    def _parts(
        self, q: Tensor, k: Tensor, call: Call, wide: torch.dtype, grads: Learned
    ) -> Iterator[tuple[tuple[slice, slice], Tensor | None, ScoreChanges | None]]:
        """The samples and key heads that are computed together, what is added for each of their
        keys [n_k], or None, and the changes of their scores: all samples of one padding, as many
        heads as there is room for."""
        batch, heads, ratio = q.shape[:3]
        each = max(1, ratio * max(k.shape[2:].numel(), q.shape[3:].numel()))
        for samples, real in samples_of(batch, call.padding):
            padding = None if real is None else added_by(real, wide, LOWEST)
            for some in some_together(samples, heads, LIMITS.heads_together // each):
                count, (low, high) = some[0].stop - some[0].start, (some[1].start, some[1].stop)
                its = [*range(low * ratio, high * ratio)] * count
                yield some, padding, self.changes and self.changes.of(its, call.tables, grads)

    def backward(
        self, grad: Tensor, saved: Sequence[Tensor], call: Call, scale: float
    ) -> Sequence[Tensor]:
        q, k, v, out, lse = saved
        # a query without a key has weights 0 whatever its log-sum-exp, as long as it is finite
        lse = lse.masked_fill(lse == -math.inf, 0.0)
        kind = self._summing(q.dtype, lse.dtype)
        kinds = zip((q, k, v), (kind, lse.dtype, lse.dtype), strict=True)
        into = [x.new_zeros(x.shape, dtype=kind) for x, kind in kinds]
        tables = {name: torch.zeros_like(table) for name, table in call.tables.items()}
        for some, padding, scores in self._parts(q, k, call, lse.dtype, tables):
            rows = [x[some].flatten(0, 2) for x in (grad, q, out, lse)]
            keys = [x[some].flatten(0, 1) for x in (k, v)]
            targets = [x[some].flatten(0, x.dim() - 3) for x in into]
            derive(self.steps, rows, keys, targets, padding, scale, scores)
        grads = (x.to(y.dtype) for x, y in zip(into, (q, k, v), strict=True))
        return *grads, *tables.values()


def tables_of_work(work: Work) -> Tables[np.ndarray]:
    """The tables of a work of static pairs, in the steps that cost least."""
    return stepped_tables(bands_of(work.relation, work.n_q, work.n_k))
