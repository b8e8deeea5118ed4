"""Tables in differentiable operations of torch, on any device: pieces of blocks are gathered,
computed by the formula, put in order, and steps are merged.

Where nothing asks for a derivative or a log-sum-exp, plain softmax in one step goes through
`scaled_dot_product_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.common.dropping import kept
from attnspec.backends.common.exact import ByKeyHead, fused
from attnspec.backends.common.merging import Outputs, merged, with_zero
from attnspec.backends.common.score_formula import Blocks, Formula, scale_of, widened
from attnspec.backends.common.torch_modes import is_transformed, unseen
from attnspec.layout.tables import Batch, Tables, Tiled, unfolded
from attnspec.limits import LIMITS
from attnspec.lower.work import MERGED, Call, Heads, Work


class DeviceBatch:
    """A batch with its rows and masks as tensors of a device; places that are not rows have the one
    before them, or the first one. Masks `differ` where blocks have masks of their own."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        def brought(x: np.ndarray) -> Tensor:
            return torch.from_numpy(x).to(device)

        self.queries, self.keys = brought(filled(batch.q)), brought(filled(batch.k))
        self.rows = brought(batch.q >= 0) if (batch.q < 0).any() else None
        (self.blocks, self.height), self.width = batch.q.shape, batch.k.shape[1]
        mask, self.tiled = batch.mask, None
        self.differ = isinstance(mask, Tiled) or (mask is not None and len(mask) > 1)
        if isinstance(mask, Tiled):
            self.tiled, mask = Tiled(brought(mask.kinds), brought(mask.tiles)), None
        elif mask is None and (batch.k < 0).any():
            mask, self.differ = batch.k[:, None] >= 0, True
        self.pairs = None if mask is None else brought(mask)

    def mask(self, low: int, high: int, rows: slice) -> Tensor | None:
        """The pairs of some blocks and their queries, bool [1 or blocks, h or 1, w]; None where
        every pair is an edge."""
        if self.tiled is None:
            if self.pairs is None:
                return None
            return self.pairs[low:high] if self.differ else self.pairs[:, rows]
        tall = self.tiled.tiles.shape[1]
        above = rows.start // tall
        kinds = self.tiled.kinds[low:high, above : -(-rows.stop // tall)]
        mask = unfolded(self.tiled.tiles, kinds)
        return mask[:, rows.start - above * tall : rows.stop - above * tall]


class Piece:
    """Some blocks of a batch, and some of their queries: rows of the query tensor int64
    [blocks, h], and of the key tensor [blocks, w]."""

    def __init__(self, batch: DeviceBatch, blocks: slice, rows: slice) -> None:
        self.batch, self.blocks, self.rows = batch, blocks, rows
        self.queries, self.keys = batch.queries[blocks, rows], batch.keys[blocks]

    @property
    def mask(self) -> Tensor | None:
        """The pairs, bool [1 or blocks, h or 1, w]; None where every pair is an edge."""
        return self.batch.mask(self.blocks.start, self.blocks.stop, self.rows)

    def of_queries(self, x: Tensor) -> Tensor:
        """[B, K, R, n_q, d] -> [B, K, R, blocks, h, d]."""
        return _of(x, 3, self.queries)

    def of_keys(self, x: Tensor) -> Tensor:
        """[B, K, n_k, d] -> [B, K, blocks, w, d]."""
        return _of(x, 2, self.keys)


def _of(x: Tensor, axis: int, index: Tensor) -> Tensor:
    rows = x.index_select(axis, index.reshape(-1))
    return torch.unflatten(rows, axis, tuple(index.shape))


def filled(rows: np.ndarray) -> np.ndarray:
    """Rows int [G, h] with one in each place: nothing is read that its block does not read anyway,
    as long as that reads something."""
    real = rows >= 0
    if real.all():
        return rows if rows.flags.writeable else rows.copy()
    before = np.maximum.accumulate(np.where(real, np.arange(rows.shape[1]), 0), axis=1)
    return np.asarray(np.maximum(np.take_along_axis(rows, before, axis=1), 0))


def places_of(rows: np.ndarray, count: int) -> np.ndarray:
    """The place among rows int [m], -1 for none, of each of so many, m where it has none."""
    place = np.full(count, len(rows))
    place[rows[rows >= 0]] = np.flatnonzero(rows >= 0)
    return place


class ComposedStep:
    """The batches of one step, and where each query stands among theirs."""

    def __init__(self, batches: Sequence[Batch], n_q: int, device: torch.device) -> None:
        self.batches = [DeviceBatch(batch, device) for batch in batches]
        rows = np.concatenate([np.zeros(0, np.int64), *(batch.q.ravel() for batch in batches)])
        place = places_of(rows, n_q)
        self.in_order = len(rows) == n_q and bool((place == np.arange(n_q)).all())
        self.place = torch.from_numpy(place).to(device)

    def pieces(self, q: Tensor) -> Iterator[Piece]:
        """Parts of all batches, in order, whose temporaries for q [B, K, R, n_q, d] stay below
        `LIMITS.piece` numbers: some blocks, or else some rows of one."""
        heads, repeat, size = q.shape[:2].numel(), q.shape[2], q.shape[-1]
        for batch in self.batches:
            height, width = max(1, batch.height), batch.width
            block = max(1, heads * width * max(size, repeat * height))
            many = max(1, LIMITS.piece // block)
            tall = height if batch.blocks > 1 else max(1, LIMITS.piece * height // block)
            for low in range(0, batch.blocks, many):
                for first in range(0, height, tall):
                    yield Piece(batch, slice(low, low + many), slice(first, first + tall))

    def ordered(self, parts: Sequence[Tensor], empty: float = 0.0) -> Tensor:
        """What pieces have found [B, K, R, blocks, h, …] for the queries in order; `empty` for
        those that are in no block."""
        flat = [part.flatten(3, 4) for part in parts]
        if self.in_order:
            return torch.cat(flat, 3)
        first = flat[0]
        rest = first.new_full((*first.shape[:3], 1, *first.shape[4:]), empty)
        return torch.cat([*flat, rest], 3).index_select(3, self.place)


class ComposedTables(ByKeyHead):
    """Attention over tables; weights that are not merged by log-sum-exps in one step alone."""

    def __init__(self, work: Work, heads: Heads, device: torch.device, tables: Tables) -> None:
        self.work, self.tables = work, tables
        plain = replace(work, normalize="softmax") if work.normalize in MERGED else work
        self.formula = Formula(plain, heads, device)
        self.positions = [torch.from_numpy(at).to(device) for at in work.positions]
        # where no query has a key, a block without keys says so in a way that can be differentiated
        none = Batch(np.arange(tables.n_q)[None], np.zeros((1, 0), np.int64), None)
        self.steps = [ComposedStep(step, tables.n_q, device) for step in tables.steps or ((none,),)]

    def traced(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """The output [B, K, R, n_q, d_v] of q [B, K, R, n_q, d]."""
        kind, unasked = q.dtype, unseen(q, k, v)
        one = self.work.plain and len(self.tables.steps) == 1 and q.shape[-1] and v.shape[-1]
        # torch's own attention has no second derivative on the CPU
        if not one or is_transformed() or not (unasked or not q.is_cpu):
            return self.composed(q, k, v, call)[0]
        if not unasked:
            # gradients of what several pieces read add up in float32
            q, k, v = widened(q), widened(k), widened(v)
        outs, scale = [], scale_of(self.work, q.shape[-1])
        for piece in self.steps[0].pieces(q):
            rows = piece.of_queries(q).to(kind).transpose(2, 3)
            keys, values = (piece.of_keys(x).to(kind).flatten(0, 1) for x in (k, v))
            mask, shape = self.blocks(piece, call).mask, rows.shape[:-1]
            if mask is not None:
                # under padding [B, 1, 1, G, h or 1, w]
                every = mask.dim() == 3
                mask = mask[None] if every else mask.repeat_interleave(k.shape[1], 0)[:, 0, 0]
                mask = mask.repeat(1, 1, shape[3] if mask.shape[2] > 1 else 1, 1)
            rows = rows.flatten(3, 4).flatten(0, 1)[:, :, None]
            out = fused(rows, keys, values, mask, scale, call.dropout_p)
            if mask is not None:
                out = out.masked_fill(~mask.any(-1, keepdim=True)[:, :, None], 0.0)
            outs.append(out.view(*shape, v.shape[-1]).transpose(2, 3))
        return self.steps[0].ordered(outs)

    def composed(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Outputs:
        """The same by the formula, and its log-sum-exps [B, K, R, n_q], if there are any."""
        kind = q.dtype
        q, k, v = widened(q), widened(k), widened(v)
        parts = (self._step(step, q, k, v, call) for step in self.steps)
        out, lse = reduce(merged, parts)  # type: ignore[arg-type]
        if self.work.normalize == "softmax1" and lse is not None:
            out, lse = with_zero((out, lse))
        return out.to(kind), lse

    def _step(self, step: ComposedStep, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Outputs:
        partials = []
        for piece in step.pieces(q):
            left = kept(call, q.shape[:3], piece.queries, piece.keys)
            blocks = replace(self.blocks(piece, call), kept=left)
            parts = piece.of_queries(q), piece.of_keys(k), piece.of_keys(v)
            partials.append(self.formula.partial(*parts, blocks, call))
        outs, sums = zip(*partials, strict=True)
        return step.ordered(outs), None if sums[0] is None else step.ordered(sums, -torch.inf)

    def blocks(self, piece: Piece, call: Call) -> Blocks:
        """The mask of a piece, and what its scores read."""
        mask, symbols, rows = piece.mask, {}, piece.batch.rows
        if rows is not None and not self.work.changes.everywhere:
            # a changed score of a row that only fills up may not be a number
            rows = rows[piece.blocks, piece.rows, None]
            mask = rows if mask is None else mask & rows
        if self.work.changes.placed:
            query, present = self.positions
            symbols = {"q": query[piece.queries][..., None], "k": present[piece.keys][:, None]}
        if call.padding is not None:
            real = call.padding[:, piece.keys][:, None, None, :, None]
            mask = real if mask is None else mask & real
        return Blocks(mask, symbols=symbols)
