"""The kernels of tables: the flash kernel's steps on the CPU, and plain operations elsewhere.

A step is cut into pieces that stay in the cache; each is merged into the output as soon as it is
computed. The backward of a step, given the merged output and log-sum-exps, returns exactly its
share of the gradients, and the shares add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
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
from attnspec.backends.decided.tables import Part
from attnspec.backends.one_block.dense import DenseKernel
from attnspec.backends.tables.blocks import Step, attend, derive
from attnspec.backends.tables.changed_scores import Learned, ScoreChanges
from attnspec.layout.steps import bands_of, stepped_tables
from attnspec.layout.tables import Tables
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Work

Walked = tuple[Part, Iterable[Step], "Tensor | None", "ScoreChanges | None"]
"""What is computed together: its steps, what is added for each of its keys [n_k], or None, and the
changes of its scores."""


class ByTables(SoftmaxKernel):
    """Goes by tables where its own kernel cannot go; where inputs are read, by the definition."""

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
        result = self._begun(q, k, v, call, scale)
        for part, steps, padding, scores in self._parts(q, call, {}):
            rows, *lines = (self._rows(part.of_q(x), 3) for x in (q, *result))
            keys = [self._rows(part.of_k(x), 2) for x in (k, v)]
            attend(steps, rows, keys, (lines[0], lines[1]), padding, scale, scores)
            _put_back(map(part.of_q, result), lines)
        return result[0].to(q.dtype), result[1]

    def backward(
        self, grad: Tensor, saved: Sequence[Tensor], call: Call, scale: float
    ) -> Sequence[Tensor]:
        q, k, v, out, lse = saved
        into, tables = self._begun_back(grad, saved, call, scale)
        # a query without a key has weights 0 whatever its log-sum-exp, as long as it is finite
        lse = lse.masked_fill(lse == -math.inf, 0.0)
        for part, steps, padding, scores in self._parts(q, call, tables):
            rows = [self._rows(part.of_q(x), 3) for x in (grad, q, out, lse)]
            keys = [self._rows(part.of_k(x), 2) for x in (k, v)]
            targets = [part.of_q(into[0]), *map(part.of_k, into[1:])]
            lines = [self._rows(x, x.dim() - 2) for x in targets]
            derive(steps, rows, keys, lines, padding, scale, scores)
            _put_back(targets, lines)
        grads = (x.to(y.dtype) for x, y in zip(into, (q, k, v), strict=True))
        return *grads, *tables.values()

    def _begun(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> Partial:
        """The output and log-sum-exps that the walk merges into."""
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(q.shape, dtype=self._summing(q.dtype, wide))
        return out, q.new_full(q.shape[:-1], -math.inf, dtype=wide)

    def _begun_back(
        self, grad: Tensor, saved: Sequence[Tensor], call: Call, scale: float
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The gradients of q, k and v and those of tables that the walk adds to."""
        *tensors, _, lse = saved
        kinds = self._summing(tensors[0].dtype, lse.dtype), lse.dtype, lse.dtype
        into = [x.new_zeros(x.shape, dtype=kind) for x, kind in zip(tensors, kinds, strict=True)]
        return into, {name: torch.zeros_like(table) for name, table in call.tables.items()}

    def _summing(self, kind: torch.dtype, wide: torch.dtype) -> torch.dtype:
        """The type in which the shares of steps are added, so that a sum is rounded once."""
        return wide if len(self.steps) > 1 else kind

    def _rows(self, x: Tensor, axes: int) -> Tensor:
        """Rows as the steps number them [c, n, …] of a tensor whose first axes lie before these."""
        return x.flatten(0, axes - 1)

    def _parts(self, q: Tensor, call: Call, grads: Learned) -> Iterator[Walked]:
        """All samples of one padding together, as many heads as there is room for."""
        batch, heads, ratio, *rows = q.shape
        n_k = self.work.n_k
        each = max(1, ratio * max(n_k, rows[0]) * rows[1])
        for samples, real in samples_of(batch, call.padding):
            padding = None
            if real is not None:
                padding = added_by(real, torch.promote_types(q.dtype, torch.float32), LOWEST)
            for some in some_together(samples, heads, LIMITS.heads_together // each):
                part = Part(*some, slice(None), (batch, heads, ratio, rows[0]), n_k, call)
                count, (low, high) = some[0].stop - some[0].start, (some[1].start, some[1].stop)
                its = [*range(low * ratio, high * ratio)] * count
                scores = self.changes and self.changes.of(its, call.tables, grads)
                yield part, self.steps, padding, scores


def _put_back(targets: Iterable[Tensor], lines: Sequence[Tensor]) -> None:
    """Rows in line where they were taken from, if they do not lie there."""
    for into, line in zip(targets, lines, strict=True):
        if line.data_ptr() != into.data_ptr():
            into.copy_(line.view(into.shape))


def tables_of_work(work: Work) -> Tables[np.ndarray]:
    """The tables of a work of static pairs, in the steps that cost least."""
    return stepped_tables(bands_of(work.relation, work.n_q, work.n_k))
