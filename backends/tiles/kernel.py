"""Runs of tiles in torch: pieces are gathered, computed by the best means at hand, and put back.

Three means, one meaning. On the CPU, plain softmax goes through torch's flash kernel, whose
backward recomputes the weights, so that nothing but the output and its log-sum-exps is kept. Where
that kernel cannot go, `scaled_dot_product_attention` computes the pieces; and whatever is not plain
softmax, or is transformed by torch.func, goes through the formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.nn import functional

from attnspec.backends.common.pieces import (
    Piece,
    TensorRun,
    add,
    bias_of,
    folded,
    in_rows,
    keys_of,
    put,
    rows_of,
    widened,
)
from attnspec.backends.common.score_formula import HALF, Blocks, Formula, scale_of
from attnspec.backends.common.torch_modes import is_transformed
from attnspec.layout.runs import Run
from attnspec.lower.work import Call, Work

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TiledKernel:
    """Attention over the runs of a layout."""

    def __init__(
        self,
        work: Work,
        heads: tuple[int, ...],
        device: torch.device,
        runs: Sequence[Run],
        masks: np.ndarray,
    ) -> None:
        self.work = work
        self.plain = work.plain
        self.formula = Formula(work, heads, device)
        self.tile = masks.shape[-1]
        bank = torch.from_numpy(masks).to(device) if len(masks) else None
        self.runs = [TensorRun(run, self.tile, bank, device) for run in runs]
        covered = np.concatenate([np.zeros(0, np.int64), *[run.queries.ravel() for run in runs]])
        order = np.full(work.n_q, len(covered))
        order[covered] = np.arange(len(covered))
        self.order = torch.from_numpy(order).to(device)
        self.complete = len(covered) == work.n_q
        self.in_order = self.complete and bool((np.diff(covered) == 1).all())

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        batch, heads, rows, size = q.shape
        q = q.view(batch, k.shape[1], heads // k.shape[1], rows, size)
        out_size = v.shape[-1]
        plain = self.plain and size > 0 and out_size > 0 and not is_transformed()
        if plain and not call.dropout_p and q.is_cpu and not torch.compiler.is_compiling():
            # the kernel knows one head size; zeros change no score, and their outputs are cut off
            wide = max(size, out_size)
            out = self._flash(
                widened(q, wide),
                widened(k, wide),
                widened(v, wide),
                call.padding,
                scale_of(self.work, size),
            )[..., :out_size]
        else:
            out = self.composed(q, k, v, call, fused=plain)
        return out.reshape(batch, heads, rows, out_size)

    # --- through the flash kernel --------------------------------------------------------------

    def _flash(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            out: torch.Tensor = _Flash.apply(q, k, v, padding, self, scale)  # type: ignore[no-untyped-call]
            return out
        return self.forward(q, k, v, padding, scale, None)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding: torch.Tensor | None,
        scale: float,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """The output [B, K, R, n_q, d]; fills `lse` [B, K, R, n_q] if there is one."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if not self.complete:
            out.zero_()
        for sample, block in self._samples(q, k, padding):
            q_part, k_part, v_part, out_part = q[sample], k[sample], v[sample], out[sample]
            for piece in block:
                mask = bias_of(piece, q_part, None if padding is None else padding[sample])
                found, sums = _flash(
                    folded(rows_of(q_part, piece)),
                    keys_of(k_part, piece).flatten(0, 1),
                    keys_of(v_part, piece).flatten(0, 1),
                    0.0,
                    False,
                    attn_mask=mask,
                    scale=scale,
                )
                put(out_part, piece, found)
                if lse is not None:
                    put(lse[sample][..., None], piece, sums[..., None])
        return out

    def backward(
        self,
        grad: torch.Tensor,
        saved: Sequence[torch.Tensor],
        padding: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients of q, k and v from those of the output; `saved` are q, k, v, out, lse."""
        q, k, v, out, lse = saved
        grad = in_rows(grad)
        # the sums over several query tiles are kept in float32 for half types
        wide = torch.float32 if q.dtype in HALF else q.dtype
        tiles = -(-k.shape[2] // self.tile)
        shape = (*k.shape[:2], tiles, self.tile, k.shape[3])
        grad_q = torch.zeros_like(q, memory_format=torch.contiguous_format)
        grad_k, grad_v = (q.new_zeros(shape, dtype=wide) for _ in range(2))
        for sample, block in self._samples(q, k, padding):
            real = None if padding is None else padding[sample]
            for piece in block:
                parts = _flash_backward(
                    folded(rows_of(grad[sample], piece)),
                    folded(rows_of(q[sample], piece)),
                    keys_of(k[sample], piece).flatten(0, 1),
                    keys_of(v[sample], piece).flatten(0, 1),
                    folded(rows_of(out[sample], piece)),
                    folded(rows_of(lse[sample][..., None], piece))[..., 0],
                    0.0,
                    False,
                    attn_mask=bias_of(piece, q[sample], real),
                    scale=scale,
                )
                put(grad_q[sample], piece, parts[0])
                add(grad_k[sample], piece, parts[1])
                add(grad_v[sample], piece, parts[2])
        grad_k, grad_v = (
            part.flatten(2, 3)[:, :, : k.shape[2]].to(k.dtype) for part in (grad_k, grad_v)
        )
        return grad_q, grad_k, grad_v

    def _samples(
        self, q: torch.Tensor, k: torch.Tensor, padding: torch.Tensor | None
    ) -> Iterator[tuple[slice, Iterator[Piece]]]:
        """Samples that are computed together, with their pieces: one by one if they differ in
        padding, because a mask is shared by all of a call's leading dimension."""
        batch, keys, repeat, _, size = q.shape
        step = batch if padding is None else 1
        for low in range(0, batch, step):
            heads = step * keys
            for run in self.runs:
                per_block = heads * size * max(run.width, repeat * run.height)
                per_row = heads * size * repeat
                if padding is not None or run.kinds is not None:
                    per_row = max(per_row, repeat * run.width)
                yield slice(low, low + step), run.pieces(per_block, per_row)

    # --- in differentiable operations ----------------------------------------------------------

    def composed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, fused: bool
    ) -> torch.Tensor:
        """The output [B, K, R, n_q, e] piece by piece, with `scaled_dot_product_attention` if
        `fused`, else by the formula."""
        batch, keys, repeat, _, size = q.shape
        outs = []
        for run in self.runs:
            heads = batch * keys
            per_block = heads * max(run.width * size, repeat * run.height * run.width)
            if torch.compiler.is_compiling():
                # a traced graph is better short: whoever compiles it plans its memory
                per_block = 0
            for piece in run.pieces(per_block, per_block // max(1, run.height)):
                parts = rows_of(q, piece), keys_of(k, piece), keys_of(v, piece)
                if fused:
                    found = self._sdpa(*parts, piece, call)
                else:
                    found = self.formula(*parts, self.blocks(piece, call), call)
                outs.append(found.flatten(3, 4))
        if not outs:
            # no query has a key; the formula says so in a way that can be differentiated
            none = Blocks(None, None)
            found = self.formula(q.unsqueeze(3), k[:, :, None, :0], v[:, :, None, :0], none, call)
            return found[:, :, :, 0]
        if self.in_order:
            return torch.cat(outs, 3)
        empty = q.new_zeros(batch, keys, repeat, 1, v.shape[-1])
        return torch.cat([*outs, empty], 3).index_select(3, self.order)

    def blocks(self, piece: Piece, call: Call) -> Blocks:
        """The distances and the mask of a piece."""
        run = piece.run
        keys = run.keys(piece)
        distance = None
        if self.formula.needs_distance:
            queries = run.queries[piece.rows].view(piece.blocks, piece.height)
            distance = (queries + self.work.n_k - self.work.n_q)[..., None] - keys[:, None]
        mask = run.mask(piece)
        if call.padding is not None:
            real = call.padding[:, keys][:, None, None, :, None]
            mask = real if mask is None else mask & real
        return Blocks(distance, mask)

    def _sdpa(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, call: Call
    ) -> torch.Tensor:
        batch, keys, repeat, blocks, height, size = q.shape
        mask = piece.run.mask(piece)
        if mask is not None:
            mask = mask.repeat(*[1] * (mask.dim() - 2), repeat, 1)
        if call.padding is not None:
            real = call.padding[:, piece.run.keys(piece)][:, None, :, None]
            mask = real if mask is None else mask & real
            mask = mask.expand(batch, keys, blocks, repeat * height, -1).flatten(0, 1)
        found = functional.scaled_dot_product_attention(
            folded(q),
            k.flatten(0, 1),
            v.flatten(0, 1),
            attn_mask=mask,
            dropout_p=call.dropout_p,
            scale=scale_of(self.work, size),
        )
        found = found.view(batch, keys, blocks, repeat, height, v.shape[-1])
        return found.transpose(2, 3)


class _Flash(torch.autograd.Function):
    """The flash path, with the composed one for derivatives of its derivative."""

    @staticmethod
    def forward(ctx, q, k, v, padding, kernel, scale):  # type: ignore[no-untyped-def]
        lse = q.new_zeros(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
        out = kernel.forward(q, k, v, padding, scale, lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel, ctx.padding, ctx.scale = kernel, padding, scale
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, *rest = ctx.saved_tensors
        if torch.is_grad_enabled():
            out = ctx.kernel.composed(q, k, v, Call(padding=ctx.padding), fused=False)
            wanted = [x for x in (q, k, v) if x.requires_grad]
            found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
            grads = tuple(next(found) if x.requires_grad else None for x in (q, k, v))
        else:
            grads = ctx.kernel.backward(grad, (q, k, v, *rest), ctx.padding, ctx.scale)
        return *grads, None, None, None
