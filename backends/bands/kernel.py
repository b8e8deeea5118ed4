"""The kernel of stepped attention: the flash kernel's steps, and tiles where they cannot go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from attnspec.backends.bands.attention import SteppedAttention
from attnspec.backends.bands.changed_scores import ScoreChanges
from attnspec.backends.common.exact import Composed, JoinedKernel, Partial, SoftmaxKernel
from attnspec.backends.dense.kernel import DenseKernel
from attnspec.backends.tiles.kernel import TiledKernel
from attnspec.layout.cutting import Uncut
from attnspec.layout.runs import runs_of
from attnspec.layout.stacking import stacked
from attnspec.layout.tile_layout import StepLayout, tile_layout
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Work


class ByTiles(SoftmaxKernel):
    """What is there by tiles in natural order where the flash kernel cannot go; where inputs are
    read, by the definition."""

    def __init__(self, work: Work, heads: tuple[int, ...], device: torch.device) -> None:
        self.work, self.heads, self.device = work, heads, device

    def build_differentiable(self) -> Composed:
        work = self.work
        if work.reads:
            return DenseKernel(work, self.heads, self.device)
        layout = tile_layout(work.relation, work.n_q, work.n_k, LIMITS.tile)
        return TiledKernel(work, self.heads, self.device, runs_of(layout), layout.masks)

    def traced(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
        if self.work.reads:
            return self.composed(q, k, v, call)[0]
        return cast(TiledKernel, self.differentiable).traced(q, k, v, call)


class SteppedKernel(ByTiles):
    """Attention over disjoint steps."""

    def __init__(
        self,
        work: Work,
        heads: tuple[int, ...],
        device: torch.device,
        layouts: Sequence[StepLayout],
    ) -> None:
        super().__init__(work, heads, device)
        self.attention = SteppedAttention(layouts, self._changes(), work.normalize == "softmax1")

    def _changes(self) -> ScoreChanges | None:
        return ScoreChanges(self.work, self.heads) if self.work.changes else None

    def below(self, n: int) -> SteppedKernel | None:
        """That of the first n positions alone, between which pairs are the same; None where its
        blocks are no parts of these."""
        found = self.at(n)
        try:
            found.attention = self.attention.below(n, found._changes())
        except Uncut:
            return None
        return found

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scale: float
    ) -> Partial:
        return self.attention.forward(q, k, v, call.padding, scale, call.tables)

    def backward(
        self, grad: torch.Tensor, saved: Sequence[torch.Tensor], call: Call, scale: float
    ) -> Sequence[torch.Tensor]:
        return self.attention.backward(grad, saved, call.padding, scale, call.tables)


class JoinedSteps(JoinedKernel):
    """Heads of different graphs as one sequence of as many positions, whose steps are theirs."""

    def __init__(
        self,
        groups: Sequence[tuple[Work, tuple[int, ...]]],
        device: torch.device,
        layouts: Sequence[Sequence[StepLayout]],
    ) -> None:
        self.work = groups[0][0]
        self.each = [(ByTiles(work, members, device), len(members)) for work, members in groups]
        heads = [
            mine for mine, (_, count) in zip(layouts, self.each, strict=True) for _ in range(count)
        ]
        sizes = self.work.n_q, self.work.n_k
        steps = [stacked(step, *sizes) for step in zip(*heads, strict=True)]
        self.attention = SteppedAttention(steps, None, self.work.normalize == "softmax1")

    def below(self, n: int) -> JoinedSteps | None:
        """That of the first n positions alone, as of one graph."""
        found = self.at(n)
        try:
            found.attention = self.attention.below(n)
        except Uncut:
            return None
        found.each = [(kernel.at(n), count) for kernel, count in self.each]
        return found

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


def _of_queries(x: torch.Tensor) -> torch.Tensor:
    """[B, K, R, n, d] as one head [B, 1, 1, K R n, d]."""
    return x.reshape(len(x), 1, 1, -1, x.shape[-1])


def _of_heads(x: torch.Tensor, ratio: int) -> torch.Tensor:
    """The keys of every query head, [B, K, n, d], as those of one head [B, 1, K R n, d]."""
    return x.repeat_interleave(ratio, 1).reshape(len(x), 1, -1, x.shape[-1])


def _for_heads(padding: torch.Tensor | None, heads: int) -> torch.Tensor | None:
    """Padding [B, n] once for every head [B, H n]."""
    return None if padding is None else padding.repeat(1, heads)
