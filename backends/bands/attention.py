"""Steps in torch on the CPU: every step through the flash kernel, merged by log-sum-exps.

A step is cut into pieces that stay in the cache; each is merged into the output as soon as it is
computed. The backward of a step, given the merged output and log-sum-exps, returns exactly its
share of the gradients, and the shares add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from attnspec.backends.bands.blocks import Piece, TensorStrip
from attnspec.backends.bands.changed_scores import HeadScores, ScoreChanges
from attnspec.backends.bands.views import Ordered, Read, frame_of, ordered_frame, scratch
from attnspec.backends.common.threads import each
from attnspec.layout.batches import strips_of
from attnspec.layout.tile_layout import StepLayout

HEAD = 1 << 17
"""Numbers of keys up to which several heads are computed together."""

WORTH = 1 << 24
"""Pairs from which on parts are computed side by side: some 20 milliseconds. Threads that torch has
just used for something else are in the way for the first few."""

TALLEST = 2048
"""Queries of a tall block: more would not make its products faster."""

REREAD = 1.5
"""How often a key is read from which on a copy in order pays."""

Result = TypeVar("Result")

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
        self.area = sum(strip.rows.size * strip.columns.shape[1] for strip in strips)
        self.area *= layout.q.size * layout.k.size
        masks = torch.from_numpy(layout.masks)
        positions = tuple(side.positions.reshape(-1, side.size) for side in (layout.q, layout.k))
        self.strips = [
            TensorStrip(strip, self.queries, k, masks, (positions[0], positions[1]))
            for strip in strips
        ]

    def pieces(
        self, keys: Read, heads: int, size: int, back: bool, scored: bool
    ) -> Iterator[Piece]:
        """The pieces of all strips for so many heads of a size."""
        for strip in self.strips:
            yield from strip.pieces(keys, heads, size, back, scored)


class SteppedAttention:
    """Softmax attention over disjoint steps, on the CPU; with `one_more` logit 0 in every row for
    `softmax1`, and changed scores, if there are any."""

    def __init__(
        self,
        layouts: Sequence[StepLayout],
        changes: ScoreChanges | None = None,
        one_more: bool = False,
    ) -> None:
        self.steps = [Step(layout) for layout in layouts]
        self.changes, self.one_more = changes, one_more

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding: torch.Tensor | None,
        scale: float,
        tables: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [B, K, R, n_q, d], k and v [B, K, n_k, d], padding bool [B, n_k], learned tables
        [K R, buckets] -> the output like q and the log-sum-exps [B, K, R, n_q], -inf where a query
        has no key."""
        wide = torch.promote_types(q.dtype, torch.float32)
        shape = q.shape
        if self.steps and self.steps[0].complete:
            out, lse = q.new_empty(shape), q.new_empty(shape[:-1], dtype=wide)
        else:
            out, lse = q.new_zeros(shape), q.new_full(shape[:-1], -math.inf, dtype=wide)

        def part(at: tuple[int, slice]) -> None:
            self._forward_part((q, k, v, out, lse), at, padding, scale, tables)

        self._spread(part, q, k)
        if self.one_more:
            total = torch.logaddexp(lse, lse.new_zeros(()))
            out *= torch.exp(lse - total)[..., None].to(out.dtype)
            lse = total
        return out, lse

    def _spread(
        self, part: Callable[[tuple[int, slice]], Result], q: torch.Tensor, k: torch.Tensor
    ) -> list[Result]:
        """The results of all parts, computed side by side where that is worth it."""
        batch, heads, ratio = q.shape[:3]
        if sum(step.area for step in self.steps) * batch * heads * ratio < WORTH:
            return [part(at) for at in _parts(k, heads)]
        # enough parts for all threads
        each_sample = -(-torch.get_num_threads() // batch)
        return each(part, _parts(k, -(-heads // each_sample)))

    def _forward_part(
        self,
        tensors: Sequence[torch.Tensor],
        at: tuple[int, slice],
        padding: torch.Tensor | None,
        scale: float,
        tables: Mapping[str, torch.Tensor] | None,
    ) -> None:
        """Some heads of a sample: fills in their output and log-sum-exps."""
        q, k, v, out, lse = tensors
        sample, heads = at
        wide = lse.dtype
        for number, step in enumerate(self.steps):
            k_now = step.keys.take(k[sample, heads], "keys")
            v_now = step.keys.take(v[sample, heads], "values")
            real = padding_of(step, padding, sample, wide)
            for group in range(q.shape[2]):
                own = sample, heads, group
                q_now = step.queries.take(q[own], "queries")
                # what is written for the first time need not be read before
                fresh = step.complete and number == 0
                place = step.queries.room if fresh else step.queries.take
                into = place(out[own], "result"), place(lse[own], "sums")
                scores = self._scores(heads, group, q.shape[2], tables)
                sizes = len(k_now), q.shape[-1]
                for piece in step.pieces(step.keys, *sizes, False, scores is not None):
                    bias, empty = piece.bias(real, wide)
                    rows = (
                        piece.q.read(q_now, piece.to, "q"),
                        piece.k.read(k_now, piece.to, "k"),
                        piece.k.read(v_now, piece.to, "v"),
                    )
                    if scores is None or scores.additive:
                        bias = _with_added(bias, scores, piece, wide)
                        found, sums = _flash(*rows, 0.0, False, attn_mask=bias, scale=scale)
                    else:
                        found, sums = scores.forward(piece, rows, bias, scale, wide)
                    if empty is not None:
                        sums = sums.masked_fill(empty, -math.inf)
                    put = _merge if number else _write
                    put(*into, piece, found, sums)
                step.queries.put(out[own], into[0])
                step.queries.put(lse[own], into[1])

    def _scores(
        self, heads: slice, group: int, ratio: int, tables: Mapping[str, torch.Tensor] | None
    ) -> HeadScores | None:
        """The changes for one query head of each of some key heads."""
        if self.changes is None:
            return None
        chosen = range(*self._chosen(heads, group, ratio).indices(heads.stop * ratio))
        return self.changes.of(tuple(chosen), tables or {})

    def _chosen(self, heads: slice, group: int, ratio: int) -> slice:
        """The query heads of these key heads' groups."""
        return slice(heads.start * ratio + group, heads.stop * ratio, ratio)

    def backward(
        self,
        grad: torch.Tensor,
        saved: Sequence[torch.Tensor],
        padding: torch.Tensor | None,
        scale: float,
        tables: Mapping[str, torch.Tensor] | None = None,
        into: Sequence[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of q, k and v, and of the tables if any of them asks; `saved` are q, k, v
        and what `forward` returned. The first three are added to what is in `into`, if it is there,
        in the type of the log-sum-exps."""
        q, k, v, out, lse = saved
        # a query without a key has weights 0 whatever its log-sum-exp, as long as it is finite
        lse = lse.masked_fill(lse == -math.inf, 0.0)
        wide = lse.dtype
        if into is None:
            into = q.new_zeros(q.shape), *(x.new_zeros(x.shape, dtype=wide) for x in (k, v))
        grad_q, grad_k, grad_v = into

        def part(at: tuple[int, slice]) -> list[torch.Tensor]:
            tensors = (grad, q, k, v, out, lse, grad_q, grad_k, grad_v)
            return self._backward_part(tensors, at, padding, scale, tables)

        of_tables = zip(*self._spread(part, q, k), strict=True)
        grad_tables = [torch.stack(shares).sum(0) for shares in of_tables]
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), *grad_tables

    def _backward_part(
        self,
        tensors: Sequence[torch.Tensor],
        at: tuple[int, slice],
        padding: torch.Tensor | None,
        scale: float,
        tables: Mapping[str, torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        """Some heads of a sample: fills in the gradients of q, k and v, returns those of tables."""
        grad, q, k, v, out, lse, grad_q, grad_k, grad_v = tensors
        sample, heads = at
        wide = lse.dtype
        grad_tables = [torch.zeros_like(table) for table in (tables or {}).values()]
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
            real = padding_of(step, padding, sample, wide)
            for group in range(q.shape[2]):
                own = sample, heads, group
                # rows that are not there would add to the gradients of their keys
                rows = [step.queries.take(grad[own], "grad rows", blank=True)]
                for x, use in ((q, "q rows"), (out, "out rows"), (lse, "lse rows")):
                    rows.append(step.queries.take(x[own], use))
                # with what earlier steps have added
                q_sums = step.queries.take(grad_q[own], "query gradients")
                scores = self._scores(heads, group, q.shape[2], tables)
                sizes = len(k_now), q.shape[-1]
                for piece in step.pieces(keys, *sizes, True, scores is not None):
                    parts, shares = _piece_back(piece, rows, k_now, v_now, real, scale, scores)
                    for total, share in zip(grad_tables, shares, strict=False):
                        total[self._chosen(heads, group, q.shape[2])] += share
                    piece.q.add(q_sums, parts[0], piece.to)
                    piece.k.add_overlapping(sums[0], parts[1], piece.to)
                    piece.k.add_overlapping(sums[1], parts[2], piece.to)
                step.queries.put(grad_q[own], q_sums)
            if keys.ordered is not None:
                for target, found in zip(targets, sums, strict=True):
                    keys.ordered.add(target, found)
        return grad_tables


def _piece_back(
    piece: Piece,
    rows: Sequence[torch.Tensor],
    k: torch.Tensor,
    v: torch.Tensor,
    padding: torch.Tensor | None,
    scale: float,
    scores: HeadScores | None,
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """The gradients of a piece's queries, keys and values, and of learned tables."""
    grad, q, out, lse = rows
    bias, _ = piece.bias(padding, lse.dtype)
    given = [
        piece.q.read(grad, piece.to, "grad", blank=True),
        piece.q.read(q, piece.to, "q"),
        piece.k.read(k, piece.to, "k"),
        piece.k.read(v, piece.to, "v"),
        piece.q.read(out, piece.to, "out"),
        piece.q.read(lse, piece.to, "lse").contiguous(),
    ]
    if scores is not None and (scores.learned or not scores.additive):
        return scores.backward(piece, given, bias, scale)
    bias = _with_added(bias, scores, piece, lse.dtype)
    return _flash_backward(*given, 0.0, False, attn_mask=bias, scale=scale), ()


def _with_added(
    bias: torch.Tensor | None, scores: HeadScores | None, piece: Piece, kind: torch.dtype
) -> torch.Tensor | None:
    """What stands in for a piece's mask: with what additive changes add."""
    if scores is None:
        return bias
    added = scores.added(piece, kind)
    return added if bias is None else added + bias


def _parts(k: torch.Tensor, most: int) -> list[tuple[int, slice]]:
    """Samples and ranges of at most so many heads that are computed together."""
    batch, heads, length, size = k.shape
    step = max(1, min(most, HEAD // max(1, length * size)))
    return [
        (sample, slice(low, min(low + step, heads)))
        for sample in range(batch)
        for low in range(0, heads, step)
    ]


def padding_of(
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
