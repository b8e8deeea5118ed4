"""The kernels of tables: the flash kernel's steps on the CPU, and plain operations elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from attnspec.backends.common.composed import ComposedTables
from attnspec.backends.common.exact import ByKeyHead, Several, SoftmaxKernel
from attnspec.backends.common.merging import Partial
from attnspec.backends.one_block.dense import DenseKernel
from attnspec.backends.tables.attend import SteppedAttention
from attnspec.backends.tables.changed_scores import ScoreChanges
from attnspec.layout.steps import bands_of, stepped_tables
from attnspec.layout.tables import Tables, side_by_side
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
    """Attention over the tables of disjoint steps."""

    def __init__(
        self,
        work: Work,
        heads: tuple[int, ...],
        device: torch.device,
        tables: Tables[np.ndarray] | None = None,
    ) -> None:
        super().__init__(work, heads, device, tables)
        changes = ScoreChanges.of_work(work, heads)
        self.attention = SteppedAttention(self.tables, changes, work.normalize == "softmax1")

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scale: float
    ) -> Partial:
        return self.attention.forward(q, k, v, call.padding, scale, call.tables)

    def backward(
        self, grad: torch.Tensor, saved: Sequence[torch.Tensor], call: Call, scale: float
    ) -> Sequence[torch.Tensor]:
        return self.attention.backward(grad, saved, call.padding, scale, call.tables)


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

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scale: float
    ) -> Partial:
        parts = _of_queries(q), _of_heads(k, q.shape[2]), _of_heads(v, q.shape[2])
        padding = _for_heads(call.padding, q.shape[1] * q.shape[2])
        out, lse = self.attention.forward(*parts, padding, scale)
        return out.reshape(q.shape), lse.reshape(q.shape[:-1])

    def backward(
        self, grad: torch.Tensor, saved: Sequence[torch.Tensor], call: Call, scale: float
    ) -> Sequence[torch.Tensor]:
        q, k, v, out, lse = saved
        padding = _for_heads(call.padding, q.shape[1] * q.shape[2])
        keys = [_of_heads(x, q.shape[2]) for x in (k, v)]
        given = (_of_queries(q), *keys, _of_queries(out), lse.reshape(len(q), 1, 1, -1))
        found = self.attention.backward(_of_queries(grad), given, padding, scale)
        shape = (len(q), k.shape[1], q.shape[2], k.shape[2], -1)
        of_keys = [x.reshape(shape).sum(2) for x in found[1:]]
        return found[0].reshape(q.shape), of_keys[0], of_keys[1]


def tables_of_work(work: Work) -> Tables[np.ndarray]:
    """The tables of a work of static pairs, in the steps that cost least."""
    return stepped_tables(bands_of(work.relation, work.n_q, work.n_k))


def _of_queries(x: torch.Tensor) -> torch.Tensor:
    """[B, K, R, n, d] as one head [B, 1, 1, K R n, d]."""
    return x.reshape(len(x), 1, 1, -1, x.shape[-1])


def _of_heads(x: torch.Tensor, ratio: int) -> torch.Tensor:
    """The keys of every query head, [B, K, n, d], as those of one head [B, 1, K R n, d]."""
    return x.repeat_interleave(ratio, 1).reshape(len(x), 1, -1, x.shape[-1])


def _for_heads(padding: torch.Tensor | None, heads: int) -> torch.Tensor | None:
    """Padding [B, n] once for every head [B, H n]."""
    return None if padding is None else padding.repeat(1, heads)
