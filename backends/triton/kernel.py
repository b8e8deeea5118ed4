"""The kernel of tile lists as a kernel of softmax attention: a fast way on the GPU, and tiles in
plain operations where it cannot go."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnspec.backends.bands.kernel import ByTiles
from attnspec.backends.bands.per_sample import ReadingBands
from attnspec.backends.common.exact import Partial
from attnspec.backends.triton.attention import Passing, TileAttention
from attnspec.backends.triton.tables import StepTables
from attnspec.backends.triton.tuning import ON_GPU
from attnspec.layout.steps import bands_of, layouts_of
from attnspec.layout.tile_layout import StepLayout
from attnspec.lower.work import Call, Work


class TritonKernel(ByTiles):
    """Attention over disjoint steps on the GPU; under the interpreter, on the CPU.

    Dropout, transforms and derivatives of derivatives go by tiles in natural order, and so do
    float64 on a GPU, for which there is no room, and bfloat16 under the interpreter, which has no
    such numbers.
    """

    one_size = False

    def __init__(
        self,
        work: Work,
        heads: tuple[int, ...],
        device: torch.device,
        layouts: Sequence[StepLayout],
    ) -> None:
        super().__init__(work, heads, device)
        steps = [StepTables(layout, device) for layout in layouts]
        self.attention = TileAttention(work, heads, device, steps)

    def takes(self, q: torch.Tensor) -> bool:
        return q.dtype != (torch.float64 if q.is_cuda else torch.bfloat16)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scale: float
    ) -> Partial:
        out, lse = self.attention.forward(_passing(q, k, v, call, scale), call.tables)
        return out.view(*q.shape[:-1], -1), lse.view(q.shape[:-1])

    def derivatives(
        self,
        saved: Sequence[torch.Tensor],
        grad: torch.Tensor,
        of_lse: torch.Tensor | None,
        call: Call,
        scale: float,
    ) -> Sequence[torch.Tensor]:
        q, k, v, out, lse = saved
        delta = (grad.to(lse.dtype) * out).sum(-1)
        if of_lse is not None:
            delta -= of_lse.masked_fill(lse == -torch.inf, 0.0)
        above = (grad.flatten(1, 2), lse.flatten(1, 2), delta.flatten(1, 2))
        found = self.attention.backward(_passing(q, k, v, call, scale), call.tables, above)
        return found[0].view(q.shape), *found[1:]


class ReadingLists(ReadingBands):
    """Lists for graphs that read run-time inputs, made for each sample when these are seen."""

    def known(self, work: Work) -> TritonKernel:
        bands = bands_of(work.relation, work.n_q, work.n_k, ON_GPU)
        layouts = layouts_of(bands, work.n_q, work.n_k)
        return TritonKernel(work, self.heads, self.device, layouts)


def _passing(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scale: float
) -> Passing:
    return Passing((q.flatten(1, 2), k, v), call.padding, scale)
