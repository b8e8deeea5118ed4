"""Runs of tiles in torch: pieces are gathered, computed by the best means at hand, and put back.

Plain softmax goes through `scaled_dot_product_attention`; whatever is not, is transformed by
torch.func, or is asked for its log-sum-exps, goes through the formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional

from attnspec.backends.common.dropping import kept
from attnspec.backends.common.exact import grouped
from attnspec.backends.common.pieces import (
    Piece,
    TensorRun,
    folded,
    keys_of,
    rows_of,
)
from attnspec.backends.common.score_formula import Blocks, Formula, scale_of, widened
from attnspec.backends.common.torch_modes import is_transformed
from attnspec.layout.runs import Run
from attnspec.lower.work import Call, Work


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
        self.positions = [torch.from_numpy(at).to(device) for at in work.positions]
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
        return self.traced(grouped(q, k), k, v, call).reshape(*q.shape[:3], v.shape[-1])

    def partial(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output [B, H, n_q, d_v] and its log-sum-exps [B, H, n_q], if there are any."""
        out, lse = self.composed(grouped(q, k), k, v, call)
        return out.reshape(*q.shape[:3], v.shape[-1]), None if lse is None else lse.flatten(1, 2)

    def traced(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
        """The output [B, K, R, n_q, d_v] of q [B, K, R, n_q, d]."""
        if not self._fuses(q, k, v):
            return self.composed(q, k, v, call)[0]
        kind = q.dtype
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            # gradients of what several pieces read add up in float32
            q, k, v = widened(q), widened(k), widened(v)
        outs = []
        for piece in self._pieces(q, k):
            own = rows_of(q, piece), keys_of(k, piece), keys_of(v, piece)
            rows, keys, values = (x.to(kind) for x in own)
            outs.append(self._sdpa(rows, keys, values, piece, call))
        if not outs:
            return self._nothing(q, k, v, call)[0]
        return self._in_order([out.flatten(3, 4) for out in outs])

    def _fuses(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether torch's own attention does, which on the CPU has no second derivative."""
        if not (self.plain and q.shape[-1] and v.shape[-1]) or is_transformed():
            return False
        graded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        return not (q.is_cpu and graded)

    def composed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same by the formula, and its log-sum-exps [B, K, R, n_q], if there are any."""
        kind, outs, sums = q.dtype, [], []
        q, k, v = widened(q), widened(k), widened(v)
        for piece in self._pieces(q, k):
            parts = rows_of(q, piece), keys_of(k, piece), keys_of(v, piece)
            queries = piece.run.queries[piece.rows].view(piece.blocks, -1)
            left = kept(call, q.shape[:3], queries, piece.run.keys(piece))
            blocks = replace(self.blocks(piece, call), kept=left)
            out, lse = self.formula.partial(*parts, blocks, call)
            outs.append(out.flatten(3, 4).to(kind))
            if lse is not None:
                sums.append(lse.flatten(3, 4)[..., None])
        if not outs:
            return self._nothing(q.to(kind), k, v, call)
        if not sums:
            return self._in_order(outs), None
        empty = 0.0 if self.work.normalize == "softmax1" else -torch.inf
        return self._in_order(outs), self._in_order(sums, empty)[..., 0]

    def _pieces(self, q: torch.Tensor, k: torch.Tensor) -> Iterator[Piece]:
        heads, repeat, size = q.shape[:2].numel(), q.shape[2], q.shape[-1]
        for run in self.runs:
            per_block = heads * max(run.width * size, repeat * run.height * run.width)
            yield from run.pieces(per_block, per_block // max(1, run.height))

    def _nothing(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """No query has a key; the formula says so in a way that can be differentiated."""
        none = Blocks(None, None)
        parts = q.unsqueeze(3), k[:, :, None, :0], v[:, :, None, :0]
        out, lse = self.formula.partial(*parts, none, call)
        return out[:, :, :, 0], None if lse is None else lse[:, :, :, 0]

    def _in_order(self, parts: Sequence[torch.Tensor], empty: float = 0.0) -> torch.Tensor:
        """The parts [B, K, R, …, e] of runs for the queries in order; `empty` for others."""
        if self.in_order:
            return torch.cat([*parts], 3)
        first = parts[0]
        rest = first.new_full((*first.shape[:3], 1, first.shape[-1]), empty)
        return torch.cat([*parts, rest], 3).index_select(3, self.order)

    def blocks(self, piece: Piece, call: Call) -> Blocks:
        """The distances and the mask of a piece."""
        run, distance = piece.run, None
        if self.formula.needs_distance or call.padding is not None:
            keys = run.keys(piece)
        if self.formula.needs_distance:
            queries = run.queries[piece.rows].view(piece.blocks, piece.height)
            own, known = self.positions
            distance = own[queries][..., None] - known[keys][:, None]
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
            mask = mask.repeat(1, repeat, 1)
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
