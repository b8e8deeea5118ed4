"""The kernel of stepped attention: the flash kernel's steps, and tiles where they cannot go."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnspec.backends.bands.attention import SteppedAttention
from attnspec.backends.bands.changed_scores import ScoreChanges
from attnspec.backends.common.exact import Partial, SoftmaxKernel
from attnspec.backends.tiles.kernel import TiledKernel
from attnspec.layout.runs import runs_of
from attnspec.layout.tile_layout import StepLayout, tile_layout
from attnspec.lower.cache import apart
from attnspec.lower.work import Call, Work

TILE = 64
"""The tile size of the stand-in."""


class SteppedKernel(SoftmaxKernel):
    """Attention over disjoint steps; by tiles in natural order where the flash kernel cannot go."""

    def __init__(
        self,
        work: Work,
        heads: tuple[int, ...],
        device: torch.device,
        layouts: Sequence[StepLayout],
    ) -> None:
        self.work, self.heads, self.device = work, heads, device
        changes = ScoreChanges(work, heads) if work.changes else None
        self.attention = SteppedAttention(layouts, changes, work.normalize == "softmax1")
        self._tiled: TiledKernel | None = None

    @property
    def tiled(self) -> TiledKernel:
        """The same attention by tiles in natural order, in differentiable operations."""
        if self._tiled is None:
            # it is kept, so the modes of this call must not reach it
            self._tiled = apart(self._by_tiles)
        return self._tiled

    def make_traceable(self) -> None:
        """Builds what a traced call runs."""
        _ = self.tiled

    def _by_tiles(self) -> TiledKernel:
        work = self.work
        layout = tile_layout(work.relation, work.n_q, work.n_k, TILE)
        return TiledKernel(work, self.heads, self.device, runs_of(layout), layout.masks)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scale: float
    ) -> Partial:
        return self.attention.forward(q, k, v, call.padding, scale, call.tables)

    def backward(
        self, grad: torch.Tensor, saved: Sequence[torch.Tensor], call: Call, scale: float
    ) -> Sequence[torch.Tensor]:
        return self.attention.backward(grad, saved, call.padding, scale, call.tables)

    def composed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Partial:
        return self.tiled.composed(q, k, v, call)

    def traced(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
        return self.tiled.traced(q, k, v, call)
