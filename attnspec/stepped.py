"""Steps in torch on the CPU: every step through the flash kernel, merged by log-sum-exps.

Heads are computed a few at a time, so that their keys in the order of a step stay in the cache. The
backward of a step, given the merged output and log-sum-exps, returns exactly its share of the
gradients, and the shares add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attnspec.ordered import Axis, StepLayout
from attnspec.strips import Strip, progression, strips_of

PIECE = 1 << 20
"""Numbers in the largest gathered temporary: what stays in the cache and costs no page faults."""

HEAD = 1 << 20
"""Numbers of keys that are put in order at a time."""

TALLEST = 2048
"""Queries of a tall block: more would not make its products faster."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Side:
    """Queries or keys in the order of a step, padded to whole tiles."""

    def __init__(self, axis: Axis) -> None:
        self.size, self.count = axis.size, axis.count
        self.length = axis.last - axis.first
        places = axis.positions - axis.first
        real = axis.positions >= 0
        self.plain = axis.natural and self.count * self.size == self.length
        self.at = torch.from_numpy(np.where(real, places, 0))
        self.real = None if real.all() else torch.from_numpy(np.flatnonzero(real))
        self.back = torch.from_numpy(places[real])
        self.padded = None if real.all() else torch.from_numpy(np.flatnonzero(~real))

    def ordered(self, x: torch.Tensor) -> torch.Tensor:
        """[c, length, …] -> [c, count * size, …]; what is padded repeats the first position."""
        if self.plain:
            return x
        return torch.stack([part.index_select(0, self.at) for part in x.unbind(0)])

    def blanked(self, x: torch.Tensor) -> torch.Tensor:
        """As `ordered`, with zeros in what is padded."""
        found = self.ordered(x)
        return found if self.padded is None else found.index_fill_(1, self.padded, 0.0)

    def add(self, into: torch.Tensor, found: torch.Tensor) -> None:
        """Add [c, count * size, …] to the positions [c, length, …] that it stands for."""
        if self.plain:
            into += found
            return
        for target, part in zip(into.unbind(0), found.unbind(0), strict=True):
            target.index_add_(
                0, self.back, part if self.real is None else part.index_select(0, self.real)
            )


@dataclass(frozen=True, eq=False)
class Piece:
    """Blocks `low:high` of a strip."""

    strip: TensorStrip
    low: int
    high: int


class TensorStrip:
    """A strip with its tiles and masks as tensors."""

    def __init__(self, strip: Strip, layout: StepLayout) -> None:
        self.blocks, self.tall = strip.rows.shape
        self.wide = strip.columns.shape[1]
        self.height, self.width = self.tall * layout.q.size, self.wide * layout.k.size
        self.q_size, self.k_size = layout.q.size, layout.k.size
        self.rows = torch.from_numpy(strip.rows.ravel().copy())
        self.columns = torch.from_numpy(strip.columns.copy())
        self.row_run = progression(strip.rows[:, 0]) if _adjacent(strip.rows) else None
        self.column_run = progression(strip.columns[:, 0]) if _adjacent(strip.columns) else None
        self.bias = _bias(strip.mask)
        self.kinds = None if strip.kinds is None else torch.from_numpy(strip.kinds.copy())
        self.empty = None
        if strip.mask is not None and not strip.mask.any(-1).all():
            self.empty = torch.from_numpy(~strip.mask.any(-1))

    def pieces(self, heads: int, size: int, back: bool) -> Iterator[Piece]:
        """Blocks in parts whose temporaries stay below PIECE numbers; the way back returns the
        gradients of every block's keys, also where forward has but a view of them."""
        per_block = heads * (self.width if back or self.column_run is None else 0) * size
        if self.kinds is not None:
            per_block += self.height * self.width
        step = self.blocks if per_block == 0 else max(1, PIECE // per_block)
        for low in range(0, self.blocks, step):
            yield Piece(self, low, min(low + step, self.blocks))


def _adjacent(tiles: np.ndarray) -> bool:
    return bool((np.diff(tiles, axis=1) == 1).all())


def _bias(mask: np.ndarray | None) -> torch.Tensor | None:
    """0 where the mask holds, else -inf: float32 [1, 1, h, w]."""
    if mask is None:
        return None
    held = torch.from_numpy(mask)
    return torch.zeros(mask.shape, device="cpu").masked_fill_(~held, -math.inf)[None, None]


class Step:
    """One step: its strips, and both sides in its order."""

    def __init__(self, layout: StepLayout) -> None:
        tallest = max(1, TALLEST // layout.q.size)
        self.q, self.k = Side(layout.q), Side(layout.k)
        self.strips = [TensorStrip(strip, layout) for strip in strips_of(layout, tallest)]
        self.masks = torch.zeros(layout.masks.shape, device="cpu").masked_fill_(
            torch.from_numpy(~layout.masks), -math.inf
        )
        covered = sum(strip.blocks * strip.tall for strip in self.strips)
        self.complete = covered == self.q.count

    def scores_bias(
        self, piece: Piece, padding: torch.Tensor | None, kind: torch.dtype
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What to add to the scores of a piece [1, 1 or blocks, h, w], and the rows without a key,
        bool [1 or blocks, h]; None where nothing is added, or every row has one.

        `padding` is 0 or -inf for every key in order.
        """
        strip = piece.strip
        bias, empty = strip.bias, strip.empty
        if strip.kinds is not None:
            kinds = strip.kinds[piece.low : piece.high]
            bias = self.masks[kinds.clamp(min=0)].masked_fill((kinds < 0)[..., None, None], 0.0)
            bias = bias.transpose(2, 3).flatten(3, 4).flatten(1, 2)[None]
            empty = (bias[0] == -math.inf).all(-1)
        if padding is not None:
            columns = strip.columns[piece.low : piece.high]
            real = padding.view(-1, strip.k_size)[columns].flatten(1)[None, :, None]
            bias = real.expand(-1, -1, strip.height, -1) if bias is None else bias + real
            empty = (bias[0] == -math.inf).all(-1)
        if bias is not None and bias.dtype != kind:
            bias = bias.to(kind)
        return bias, empty if empty is None else empty.view(-1, strip.height)

    def queries(self, x: torch.Tensor, piece: Piece) -> torch.Tensor:
        """[c, rows in order, d] -> [c, blocks, h, d]."""
        strip = piece.strip
        return _tiles(x, strip.row_run, strip.rows, strip.q_size, strip.tall, piece)

    def keys(self, x: torch.Tensor, piece: Piece) -> torch.Tensor:
        """[c, keys in order, d] -> [c, blocks, w, d]."""
        strip = piece.strip
        return _tiles(x, strip.column_run, strip.columns.view(-1), strip.k_size, strip.wide, piece)

    def put(self, into: torch.Tensor, piece: Piece, found: torch.Tensor) -> None:
        """Write [c, blocks, h, …] to the rows in order [c, rows, …]."""
        strip = piece.strip
        if strip.row_run is not None:
            _tiles(into, strip.row_run, strip.rows, strip.q_size, strip.tall, piece).copy_(found)
            return
        tiles = into.view(into.shape[0], -1, strip.q_size, *into.shape[2:])
        rows = strip.rows[piece.low * strip.tall : piece.high * strip.tall]
        tiles.index_copy_(1, rows, found.reshape(len(found), len(rows), *tiles.shape[2:]))

    def add_keys(self, into: torch.Tensor, piece: Piece, found: torch.Tensor) -> None:
        """Add [c, blocks, w, d] to the keys in order [c, keys, d]."""
        strip = piece.strip
        tiles = into.view(into.shape[0], -1, strip.k_size, into.shape[2])
        parts = found.reshape(*found.shape[:2], strip.wide, strip.k_size, found.shape[-1])
        if strip.column_run is not None:
            first, gap = strip.column_run
            for place in range(strip.wide):
                start = first + piece.low * gap + place
                stop = start + (piece.high - piece.low - 1) * gap + 1
                tiles[:, start:stop:gap] += parts[:, :, place]
            return
        columns = strip.columns[piece.low : piece.high]
        tiles.index_add_(1, columns.flatten(), parts.flatten(1, 2).to(into.dtype))


def _tiles(
    x: torch.Tensor,
    run: tuple[int, int] | None,
    index: torch.Tensor,
    size: int,
    each: int,
    piece: Piece,
) -> torch.Tensor:
    """The tiles of a piece's blocks, `each` of them: a view where they follow a progression."""
    if run is None:
        tiles = x.reshape(x.shape[0], -1, size, *x.shape[2:])
        found = tiles.index_select(1, index[piece.low * each : piece.high * each])
        return found.reshape(x.shape[0], -1, each * size, *x.shape[2:])
    first, gap = run
    start = (first + piece.low * gap) * size
    return x.as_strided(
        (x.shape[0], piece.high - piece.low, each * size, *x.shape[2:]),
        (x.stride(0), gap * size * x.stride(1), x.stride(1), *x.stride()[2:]),
        x.storage_offset() + start * x.stride(1),
    )


class SteppedAttention:
    """Plain softmax attention over disjoint steps, on the CPU."""

    def __init__(self, layouts: Sequence[StepLayout]) -> None:
        self.steps = [Step(layout) for layout in layouts]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [B, K, R, n_q, d], k and v [B, K, n_k, d], padding bool [B, n_k] -> the output like q
        and the log-sum-exps [B, K, R, n_q], -inf where a query has no key."""
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(q.shape)
        lse = q.new_full(q.shape[:-1], -math.inf, dtype=wide)
        for sample, heads in self._parts(k):
            k_part, v_part = k[sample, heads], v[sample, heads]
            for number, step in enumerate(self.steps):
                k_now, v_now = step.k.ordered(k_part), step.k.ordered(v_part)
                real = self._padding(step, padding, sample, wide)
                for group in range(q.shape[2]):
                    at = sample, heads, group
                    parts = step.q.ordered(q[at]), k_now, v_now
                    first = number == 0 and step.q.plain
                    into = (out[at], lse[at]) if first else None
                    found = self._step(step, *parts, real, scale, into)
                    if not first:
                        _merge(out[at], lse[at], step, *found)
        return out, lse

    def _step(
        self,
        step: Step,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding: torch.Tensor | None,
        scale: float,
        into: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if into is None:
            out = torch.zeros_like(q) if not step.complete else torch.empty_like(q)
            wide = torch.promote_types(q.dtype, torch.float32)
            lse = q.new_full(q.shape[:2], -math.inf, dtype=wide)
        else:
            out, lse = into
        for strip in step.strips:
            for piece in strip.pieces(q.shape[0], q.shape[2], back=False):
                bias, empty = step.scores_bias(piece, padding, lse.dtype)
                found, sums = _flash(
                    step.queries(q, piece),
                    step.keys(k, piece),
                    step.keys(v, piece),
                    0.0,
                    False,
                    attn_mask=bias,
                    scale=scale,
                )
                if empty is not None:
                    sums = sums.masked_fill(empty, -math.inf)
                step.put(out, piece, found)
                step.put(lse, piece, sums)
        return out, lse

    def backward(
        self,
        grad: torch.Tensor,
        saved: Sequence[torch.Tensor],
        padding: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients of q, k and v; `saved` are q, k, v and what `forward` returned."""
        q, k, v, out, lse = saved
        # a query without a key has weights 0 whatever its log-sum-exp, as long as it is finite
        lse = lse.masked_fill(lse == -math.inf, 0.0)
        wide = lse.dtype
        grad_q = q.new_zeros(q.shape)
        grad_k, grad_v = (x.new_zeros(x.shape, dtype=wide) for x in (k, v))
        for sample, heads in self._parts(k):
            k_part, v_part = k[sample, heads], v[sample, heads]
            for step in self.steps:
                k_now, v_now = step.k.ordered(k_part), step.k.ordered(v_part)
                real = self._padding(step, padding, sample, wide)
                sums = [k_now.new_zeros(k_now.shape, dtype=wide) for _ in range(2)]
                for group in range(q.shape[2]):
                    at = sample, heads, group
                    # rows that are padded would add to the gradients of their keys
                    rows = [
                        step.q.blanked(grad[at]),
                        *[step.q.ordered(x[at]) for x in (q, out, lse)],
                    ]
                    found = torch.zeros_like(rows[1])
                    for strip in step.strips:
                        for piece in strip.pieces(len(k_now), k_now.shape[2], back=True):
                            self._piece_back(
                                step, piece, rows, k_now, v_now, real, scale, found, sums
                            )
                    step.q.add(grad_q[at], found)
                step.k.add(grad_k[sample, heads], sums[0])
                step.k.add(grad_v[sample, heads], sums[1])
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)

    def _piece_back(
        self,
        step: Step,
        piece: Piece,
        rows: Sequence[torch.Tensor],
        k: torch.Tensor,
        v: torch.Tensor,
        padding: torch.Tensor | None,
        scale: float,
        grad_q: torch.Tensor,
        sums: Sequence[torch.Tensor],
    ) -> None:
        grad, q, out, lse = rows
        bias, _ = step.scores_bias(piece, padding, lse.dtype)
        parts = _flash_backward(
            step.queries(grad, piece),
            step.queries(q, piece),
            step.keys(k, piece),
            step.keys(v, piece),
            step.queries(out, piece),
            step.queries(lse, piece).contiguous(),
            0.0,
            False,
            attn_mask=bias,
            scale=scale,
        )
        step.put(grad_q, piece, parts[0])
        step.add_keys(sums[0], piece, parts[1])
        step.add_keys(sums[1], piece, parts[2])

    def _parts(self, k: torch.Tensor) -> Iterator[tuple[int, slice]]:
        """Samples and ranges of heads that are computed together."""
        batch, heads, length, size = k.shape
        step = max(1, HEAD // max(1, length * size))
        for sample in range(batch):
            for low in range(0, heads, step):
                yield sample, slice(low, min(low + step, heads))

    def _padding(
        self, step: Step, padding: torch.Tensor | None, sample: int, kind: torch.dtype
    ) -> torch.Tensor | None:
        if padding is None:
            return None
        real = padding.new_zeros(padding.shape[1], dtype=kind)
        real.masked_fill_(~padding[sample], -math.inf)
        return step.k.ordered(real[None, :, None])[0, :, 0]


def _merge(
    out: torch.Tensor, lse: torch.Tensor, step: Step, found: torch.Tensor, sums: torch.Tensor
) -> None:
    """Merge a step's result, in its order, into the output [c, n_q, d] and its log-sum-exps."""
    side = step.q
    if not side.plain and side.real is not None:
        found, sums = found.index_select(1, side.real), sums.index_select(1, side.real)
    for head in range(len(out)):
        o2, l2 = found[head], sums[head]
        o1, l1 = out[head], lse[head]
        if not side.plain:
            o1, l1 = o1.index_select(0, side.back), l1.index_select(0, side.back)
        weight = torch.sigmoid(l2 - l1).nan_to_num_(0.0)
        merged = torch.lerp(o1, o2, weight[:, None].to(o1.dtype))
        total = torch.logaddexp(l1, l2)
        if side.plain:
            out[head].copy_(merged)
            lse[head].copy_(total)
        else:
            out[head].index_copy_(0, side.back, merged)
            lse[head].index_copy_(0, side.back, total)
