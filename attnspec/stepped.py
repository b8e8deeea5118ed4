"""Steps in torch on the CPU: every step through the flash kernel, merged by log-sum-exps.

A step is cut into pieces that stay in the cache; each is merged into the output as soon as it is
computed. The backward of a step, given the merged output and log-sum-exps, returns exactly its
share of the gradients, and the shares add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from attnspec.ordered import StepLayout
from attnspec.placing import Ordered, Read, frame_of, ordered_frame, scratch
from attnspec.strip_pieces import Piece, TensorStrip
from attnspec.strips import strips_of

HEAD = 1 << 17
"""Numbers of keys up to which several heads are computed together."""

TALLEST = 2048
"""Queries of a tall block: more would not make its products faster."""

REREAD = 1.5
"""How often a key is read from which on a copy in order pays."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Step:
    """One step: its strips, and both sides as they are read."""

    def __init__(self, layout: StepLayout) -> None:
        tallest = max(1, TALLEST // layout.q.size)
        q, k = frame_of(layout.q), frame_of(layout.k)
        strips = strips_of(layout, tallest)
        every = int(q.real.sum()) == layout.q.last - layout.q.first
        self.complete = every and sum(strip.rows.size for strip in strips) == len(q.rows)
        # rows that follow no progression are put in order once, if that is all of them
        put = q.step == 0 and every
        self.queries = Read(ordered_frame(q), Ordered(q)) if put else Read(q, None)
        moved = Read(ordered_frame(k), Ordered(k))
        self.backward_keys = Read(k, None) if k.packed else moved
        reads = sum(strip.columns.size for strip in strips)
        few = k.step > 0 and reads <= REREAD * max(1, len(k.rows))
        self.keys = Read(k, None) if k.packed or few else moved
        self.order = Ordered(k)
        masks = torch.from_numpy(layout.masks)
        self.strips = [TensorStrip(strip, self.queries, k, masks) for strip in strips]

    def pieces(self, keys: Read, heads: int, size: int, back: bool) -> Iterator[Piece]:
        """The pieces of all strips for so many heads of a size."""
        for strip in self.strips:
            yield from strip.pieces(keys, heads, size, back)


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
        shape = q.shape
        if self.steps and self.steps[0].complete:
            out, lse = q.new_empty(shape), q.new_empty(shape[:-1], dtype=wide)
        else:
            out, lse = q.new_zeros(shape), q.new_full(shape[:-1], -math.inf, dtype=wide)
        for sample, heads in _parts(k):
            for number, step in enumerate(self.steps):
                k_now = step.keys.take(k[sample, heads], "keys")
                v_now = step.keys.take(v[sample, heads], "values")
                real = _padding(step, padding, sample, wide)
                for group in range(q.shape[2]):
                    at = sample, heads, group
                    q_now = step.queries.take(q[at], "queries")
                    # what is written for the first time need not be read before
                    fresh = step.complete and number == 0
                    place = step.queries.room if fresh else step.queries.take
                    into = place(out[at], "result"), place(lse[at], "sums")
                    for piece in step.pieces(step.keys, len(k_now), q.shape[-1], back=False):
                        bias, empty = piece.bias(real, wide)
                        found, sums = _flash(
                            piece.q.read(q_now, piece.to, "q"),
                            piece.k.read(k_now, piece.to, "k"),
                            piece.k.read(v_now, piece.to, "v"),
                            0.0,
                            False,
                            attn_mask=bias,
                            scale=scale,
                        )
                        if empty is not None:
                            sums = sums.masked_fill(empty, -math.inf)
                        put = _merge if number else _write
                        put(*into, piece, found, sums)
                    step.queries.put(out[at], into[0])
                    step.queries.put(lse[at], into[1])
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
        for sample, heads in _parts(k):
            targets = grad_k[sample, heads], grad_v[sample, heads]
            for step in self.steps:
                keys = step.backward_keys
                k_now = keys.take(k[sample, heads], "keys")
                v_now = keys.take(v[sample, heads], "values")
                sums = targets
                if keys.ordered is not None:
                    uses = ("key gradients", "value gradients")
                    k_sums, v_sums = (scratch(u, tuple(k_now.shape), wide).zero_() for u in uses)
                    sums = k_sums, v_sums
                real = _padding(step, padding, sample, wide)
                for group in range(q.shape[2]):
                    at = sample, heads, group
                    # rows that are not there would add to the gradients of their keys
                    rows = [step.queries.take(grad[at], "grad rows", blank=True)]
                    for x, use in ((q, "q rows"), (out, "out rows"), (lse, "lse rows")):
                        rows.append(step.queries.take(x[at], use))
                    # with what earlier steps have added
                    q_sums = step.queries.take(grad_q[at], "query gradients")
                    for piece in step.pieces(keys, len(k_now), q.shape[-1], back=True):
                        parts = _piece_back(piece, rows, k_now, v_now, real, scale)
                        piece.q.add(q_sums, parts[0], piece.to)
                        piece.add_keys(sums[0], parts[1])
                        piece.add_keys(sums[1], parts[2])
                    step.queries.put(grad_q[at], q_sums)
                if keys.ordered is not None:
                    for target, found in zip(targets, sums, strict=True):
                        keys.ordered.add(target, found)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _piece_back(
    piece: Piece,
    rows: Sequence[torch.Tensor],
    k: torch.Tensor,
    v: torch.Tensor,
    padding: torch.Tensor | None,
    scale: float,
) -> Sequence[torch.Tensor]:
    """The gradients of a piece's queries, keys and values."""
    grad, q, out, lse = rows
    bias, _ = piece.bias(padding, lse.dtype)
    found: Sequence[torch.Tensor] = _flash_backward(
        piece.q.read(grad, piece.to, "grad", blank=True),
        piece.q.read(q, piece.to, "q"),
        piece.k.read(k, piece.to, "k"),
        piece.k.read(v, piece.to, "v"),
        piece.q.read(out, piece.to, "out"),
        piece.q.read(lse, piece.to, "lse").contiguous(),
        0.0,
        False,
        attn_mask=bias,
        scale=scale,
    )
    return found


def _parts(k: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Samples and ranges of heads that are computed together."""
    batch, heads, length, size = k.shape
    step = max(1, HEAD // max(1, length * size))
    for sample in range(batch):
        for low in range(0, heads, step):
            yield sample, slice(low, min(low + step, heads))


def _padding(
    step: Step, padding: torch.Tensor | None, sample: int, kind: torch.dtype
) -> torch.Tensor | None:
    """0 for a real key and -inf for another, in the order of the tiles."""
    if padding is None:
        return None
    real = torch.zeros(padding.shape[1], dtype=kind).masked_fill_(~padding[sample], -math.inf)
    return step.order.take(real[None], "padding")[0]


def _write(
    out: torch.Tensor,
    lse: torch.Tensor,
    piece: Piece,
    found: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Put a piece's result into the output [c, n_q, d] and its log-sum-exps [c, n_q]."""
    piece.q.write(out, found, piece.to)
    piece.q.write(lse, sums, piece.to)


def _merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    piece: Piece,
    found: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Merge a piece's result into the output [c, n_q, d] and its log-sum-exps [c, n_q]."""
    o1, l1 = piece.q.view(out, piece.to), piece.q.view(lse, piece.to)
    if o1 is not None and l1 is not None:
        o1.lerp_(found, _share(l1, sums).to(o1.dtype))
        torch.logaddexp(l1, sums, out=l1)
        return
    found, index = piece.q.rows_of(found, piece.to)
    sums, _ = piece.q.rows_of(sums, piece.to)
    o1, l1 = out.index_select(1, index), lse.index_select(1, index)
    out.index_copy_(1, index, o1.lerp_(found, _share(l1, sums).to(o1.dtype)))
    lse.index_copy_(1, index, torch.logaddexp(l1, sums))


def _share(l1: torch.Tensor, l2: torch.Tensor) -> torch.Tensor:
    """The second result's weight in a merge, [..., 1]; 0 where neither has a key."""
    return torch.sigmoid(l2 - l1).nan_to_num_(0.0)[..., None]
