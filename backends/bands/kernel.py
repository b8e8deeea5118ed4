"""The kernel of stepped attention: autograd around it, and what stands in where it cannot go."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnspec.backends.bands.attention import HEAD, SteppedAttention
from attnspec.backends.bands.changed_scores import ScoreChanges
from attnspec.backends.common.pieces import widened
from attnspec.backends.common.score_formula import scale_of
from attnspec.backends.common.torch_modes import is_transformed
from attnspec.backends.tiles.kernel import TiledKernel
from attnspec.layout.runs import runs_of
from attnspec.layout.tile_layout import StepLayout, tile_layout
from attnspec.lower.cache import apart
from attnspec.lower.work import Call, Work

TILE = 64
"""The tile size of the stand-in."""


class SteppedKernel:
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

    def _folds(self, k: torch.Tensor) -> bool:
        """Whether samples are so small that several are computed together."""
        return self.attention.changes is None and 2 * k[0].numel() <= HEAD

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        batch, heads, rows, size = q.shape
        out_size = v.shape[-1]
        if (
            call.dropout_p
            or not size
            or not out_size
            or not k.shape[2]
            or is_transformed()
            or torch.compiler.is_compiling()
        ):
            return self.tiled(q, k, v, call)
        q = q.reshape(batch, k.shape[1], heads // k.shape[1], rows, size)
        if batch > 1 and call.padding is None and self._folds(k):
            # to samples of few numbers the heads of others are more heads of their own
            q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
        wide = max(size, out_size)
        parts = [widened(x, wide) for x in (q, k, v)]
        scale = scale_of(self.work, size)
        tables = dict(call.tables)
        learned = (*parts, *tables.values())
        if torch.is_grad_enabled() and any(x.requires_grad for x in learned):
            out: torch.Tensor = _Stepped.apply(  # type: ignore[no-untyped-call]
                *parts, call.padding, self, scale, tuple(tables), *tables.values()
            )
        else:
            q, k, v = parts
            out, _ = self.attention.forward(q, k, v, call.padding, scale, tables)
        return out[..., :out_size].reshape(batch, heads, rows, out_size)


class _Stepped(torch.autograd.Function):
    """The steps, with tiles in natural order for derivatives of the derivative."""

    @staticmethod
    def forward(ctx, q, k, v, padding, kernel, scale, names, *tables):  # type: ignore[no-untyped-def]
        learned = dict(zip(names, tables, strict=True))
        out, lse = kernel.attention.forward(q, k, v, padding, scale, learned)
        ctx.save_for_backward(q, k, v, out, lse, *tables)
        ctx.kernel, ctx.padding, ctx.scale, ctx.names = kernel, padding, scale, names
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, out, lse, *tables = ctx.saved_tensors
        learned = dict(zip(ctx.names, tables, strict=True))
        if torch.is_grad_enabled():
            call = Call(padding=ctx.padding, tables=learned)
            out = ctx.kernel.tiled.composed(q, k, v, call, fused=False)
            given = q, k, v, *tables
            found = iter(
                torch.autograd.grad(
                    out, [x for x in given if x.requires_grad], grad, create_graph=True
                )
            )
            grads = [next(found) if x.requires_grad else None for x in given]
        else:
            saved = q, k, v, out, lse
            grads = ctx.kernel.attention.backward(grad, saved, ctx.padding, ctx.scale, learned)
        return *grads[:3], None, None, None, None, *grads[3:]
