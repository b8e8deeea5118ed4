"""Going on with a graph: the keys that later positions may read, and what the next ones read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias, cast

import torch
from torch.nn import functional

from attnspec.backends.common.kv_keeper import Keeper, Kept
from attnspec.backends.common.kv_ring import Ring, Rows
from attnspec.backends.common.score_formula import Blocks, Formula, scale_of
from attnspec.backends.common.torch_modes import apart, is_transformed
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache
from attnspec.lower.work import Call, Streamable, Work

Outputs: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"
"""The output [B, H, t, d_v], and its log-sum-exps [B, H, t] if there are any."""


@dataclass(frozen=True, eq=False)
class InPieces:
    """Goes on some positions at a time: many take time and memory in proportion to their number,
    where a position meets all keys of its step, though it reads few."""

    stream: Streamable

    def step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: Call,
        state: object,
        with_lse: bool = False,
    ) -> tuple[Outputs, object]:
        if q.shape[2] <= LIMITS.stream:
            return self.stream.step(q, k, v, call, state, with_lse)
        outs, sums = [], []
        for low in range(0, q.shape[2], LIMITS.stream):
            at = slice(low, low + LIMITS.stream)
            padding = None if call.padding is None else call.padding[:, at]
            data = {name: values[:, at] for name, values in call.data.items()}
            here = replace(call, padding=padding, data=data)
            parts = q[:, :, at], k[:, :, at], v[:, :, at]
            (out, lse), state = self.stream.step(*parts, here, state, with_lse)
            outs.append(out)
            if lse is not None:
                sums.append(lse)
        return (torch.cat(outs, 2), torch.cat(sums, 2) if sums else None), state


@dataclass(frozen=True, eq=False)
class GraphStream:
    """Goes on with a graph: keeps the keys that a later position may read, no other."""

    work: Work
    keeper: Keeper
    rows: Cache[int, Rows] = field(default_factory=lambda: Cache(LIMITS.rows_kept))

    def step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: Call,
        state: object,
        with_lse: bool = False,
    ) -> tuple[Outputs, object]:
        fused = self.work.plain and not with_lse and not _is_followed(q, k, v)
        ring = self._ring(state, k, v) if call.in_place and q.shape[2] == 1 else None
        if ring is not None:
            ring = ring.written(k, v, call.padding)
            number = (ring.count - 1) // LIMITS.ring
            rows = self.rows.get(number, lambda: apart(lambda: self._rows(number)))
            given = ring.keys, ring.values, rows.formula, rows.blocks(ring)
            return self._attended(q, *given, call, fused), ring
        before = state.kept() if isinstance(state, Ring) else cast("Kept | None", state)
        seen = self.keeper.seen(self.work, k, v, call, before)
        given = seen.keys, seen.values, seen.formula, seen.blocks
        fused = fused and not _is_followed(seen.keys, seen.values)
        return self._attended(q, *given, call, fused), seen.kept

    def _rows(self, number: int) -> Rows:
        return Rows.of(self.work, self.keeper, number)

    def _ring(self, state: object, k: torch.Tensor, v: torch.Tensor) -> Ring | None:
        """What is kept, where the next position may be written into it."""
        before = cast("Kept | Ring | None", state)
        # what is written over must not be needed for derivatives
        if before is None or self.work.reads or _is_followed(k, v, before.keys, before.values):
            return None
        ring = Ring.of(before, self.keeper) if isinstance(before, Kept) else before
        return ring if ring is not None and ring.is_writable else None

    def _attended(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        formula: Formula,
        blocks: Blocks,
        call: Call,
        fused: bool,
    ) -> Outputs:
        """What queries read of keys [B, K, w, d] and values [B, K, w, d_v]."""
        batch, heads, rows, size = q.shape
        keys, mask = k.shape[1], blocks.mask
        if fused:
            out = functional.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if mask is None else mask[:, 0, 0],
                scale=scale_of(self.work, size),
                enable_gqa=heads > keys,
            )
            return out, None
        grouped = q.reshape(batch, keys, heads // keys, 1, rows, size)
        out, lse = formula.partial(grouped, k[:, :, None], v[:, :, None], blocks, call)
        lse = None if lse is None else lse.reshape(batch, heads, rows)
        return out.reshape(batch, heads, rows, v.shape[-1]), lse


def _is_followed(*given: torch.Tensor) -> bool:
    """Whether derivatives may be asked for: the fused kernel has no second ones."""
    return is_transformed() or (torch.is_grad_enabled() and any(x.requires_grad for x in given))
