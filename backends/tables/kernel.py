"""The kernels of tables: the flash kernel's steps on the CPU, and plain operations elsewhere.

A step is cut into pieces that stay in the cache; each is merged into the output as soon as it is
computed. The backward of a step, given the merged output and log-sum-exps, returns exactly its
share of the gradients, and the shares add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from attnspec.backends.common.composed import ComposedTables
from attnspec.backends.common.exact import ByKeyHead, SoftmaxKernel, samples_of, some_together
from attnspec.backends.common.masks import added_by
from attnspec.backends.common.merging import LOWEST, wide_type
from attnspec.backends.one_block.dense import DenseKernel
from attnspec.backends.tables.blocks import Step, Walked, WalkingKernel
from attnspec.backends.tables.changed_scores import Learned, changes_of
from attnspec.layout.steps import stepped_tables, work_bands
from attnspec.layout.tables import Tables
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Heads, Work


class ByTables(SoftmaxKernel):
    """Goes by tables where its own kernel cannot go; where inputs are read, by the definition."""

    def __init__(self, work: Work, heads: Heads, device: torch.device) -> None:
        self.work, self.heads, self.device = work, heads, device

    @cached_property
    def tables(self) -> Tables:
        """The tables of the work."""
        return tables_of_work(self.work)

    def build_differentiable(self) -> ByKeyHead:
        if self.work.reads or self.work.changes.inputs:
            return DenseKernel(self.work, self.heads, self.device)
        return ComposedTables(self.work, self.heads, self.device, self.tables)


class SteppedKernel(WalkingKernel, ByTables):
    """Softmax attention over the tables of disjoint steps on the CPU, of changed scores, too."""

    def __init__(
        self, work: Work, heads: Heads, device: torch.device, tables: Tables | None = None
    ) -> None:
        super().__init__(work, heads, device)
        if tables is not None:
            self.tables = tables
        steps = self.tables.steps
        self.steps = [Step(x, work.positions, number > 0) for number, x in enumerate(steps)]
        self.complete = sum(int((x.q >= 0).sum()) for x in steps[0]) == work.n_q if steps else False
        # so that a sum is rounded once
        self.several = len(self.steps) > 1
        self.changes = changes_of(work, heads)

    def _parts(self, q: Tensor, call: Call, grads: Learned) -> Iterator[Walked]:
        """All samples of one padding together, as many heads as there is room for."""
        batch, heads, ratio, *rows = q.shape
        n_k = self.work.n_k
        each = max(1, ratio * max(n_k, rows[0]) * rows[1])
        every = torch.arange(heads * ratio, device="cpu").view(heads, ratio).expand(q.shape[:3])
        for samples, real in samples_of(batch, call.padding):
            padding = None if real is None else added_by(real, wide_type(q), LOWEST)
            for some in some_together(samples, heads, LIMITS.heads_together // each):
                scores = self.changes and self.changes(every[some].flatten(), call.tables, grads)
                yield some, some, self.steps, padding, scores


def tables_of_work(work: Work) -> Tables:
    """The tables of a work of static pairs, in the steps that cost least."""
    return stepped_tables(work_bands(work))
