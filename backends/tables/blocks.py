"""Blocks of tables in pieces that stay in the cache: where their rows lie, and their masks.

Blocks of rows that follow one another, at one distance from block to block, are one strided view
and cost no copy. Others are gathered. Numbers of blocks are arranged as the flash kernel takes
them: [blocks, heads, rows, size].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from threading import local
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.common.composed import DeviceBatch
from attnspec.backends.common.exact import SoftmaxKernel, clear_empty, flash, flash_backward
from attnspec.backends.common.masks import added_by
from attnspec.backends.common.merging import LOWEST, Partial, merge
from attnspec.layout.tables import Batch
from attnspec.limits import LIMITS
from attnspec.lower.work import Call

ALIKE = 0.9
"""The share of neighbours in blocks that follow one another, from which on rows are read there."""

TILE = 4
"""Rows that are copied as one, at least."""

SINGLE = 8
"""One in how many of the blocks for which there is room a run must have to be a piece by itself."""

LOG2E = math.log2(math.e)
"""The score 1 in units of ln 2, in which products count scores: powers of two take a third of the
time of those of e."""

Positions = tuple[np.ndarray, np.ndarray]
"""Where queries [n_q] and keys [n_k] stand, int64."""


class Blocks:
    """Blocks of one side: of rows int64 [blocks, height], -1 less a row for a place that is none,
    where that row is read, or of the numbers of tiles of a `size` [blocks, height / size], all of
    which are there."""

    def __init__(self, rows: np.ndarray, size: int = 1) -> None:
        self.rows, self.size = rows, size
        self.count, self.height = len(rows), rows.shape[1] * size

    @cached_property
    def missing(self) -> Tensor | None:
        """The places that are not rows, or None."""
        none = self.rows.ravel() < 0
        return torch.from_numpy(none.nonzero()[0]) if none.any() else None

    @cached_property
    def lattice(self) -> tuple[int, int] | None:
        """How far the next block is, and the next row of a block, if that is the same everywhere
        and no row is missing; else None."""
        rows = self.rows
        count, width = rows.shape
        first, last = int(rows[0, 0]), int(rows[-1, -1])
        apart = int(rows[1, 0]) - first if count > 1 else 1
        step = int(rows[0, 1]) - first if width > 1 and self.size == 1 else 1
        # the ends alone say so of most blocks that are scattered
        ends = (count - 1) * apart + (width - 1) * step
        if first < 0 or min(apart, step) <= 0 or last - first != ends:
            return None
        starts = np.arange(first, first + count * apart, apart)
        lies = (rows == starts[:, None] + step * np.arange(width)).all()
        return (apart * self.size, step) if lies else None

    @cached_property
    def tile(self) -> int:
        """The most rows so that the blocks consist of whole tiles of them: t tile, t tile + 1, …"""
        flat = self.rows.ravel()
        # the first rows alone say so of most
        ends = flat[:TILE].tolist()
        if self.size > 1 or ends != list(range(ends[0], ends[0] + len(ends))):
            return self.size
        if self.missing is not None:
            return 1
        breaks = np.flatnonzero(np.diff(flat) != 1) + 1
        starts = flat[np.concatenate([[0], breaks])]
        return int(np.gcd.reduce(np.concatenate([breaks, starts, [self.height]])))

    @cached_property
    def index(self) -> Tensor:
        """The row that is read at every place, int64 [blocks * height]."""
        rows = self.rows if self.missing is None else np.maximum(self.rows, -1 - self.rows)
        if self.size > 1:
            rows = rows[..., None] * self.size + np.arange(self.size)
        return torch.from_numpy(rows.ravel())

    @cached_property
    def tile_index(self) -> Tensor | None:
        """The tile of every block, if tiles can be taken whole: int64 [blocks * tiles]."""
        if self.tile < TILE:
            return None
        tiles = self.rows if self.size > 1 else self.rows[:, :: self.tile] // self.tile
        return torch.from_numpy(tiles.ravel())

    @cached_property
    def present(self) -> Tensor:
        """The places that are rows, of blocks of rows."""
        return torch.from_numpy(np.flatnonzero(self.rows >= 0))

    def views(self, *tensors: Tensor) -> list[Tensor] | None:
        """The blocks of tensors [c, rows, …] as views [blocks, c, height, …], or None."""
        if self.lattice is None:
            return None
        (apart, step), first, views = self.lattice, int(self.rows[0, 0]) * self.size, []
        for x in tensors:
            size, row = (self.count, x.shape[0], self.height, *x.shape[2:]), x.stride(1)
            strides = apart * row, x.stride(0), step * row, *x.stride()[2:]
            views.append(x.as_strided(size, strides, x.storage_offset() + first * row))
        return views

    def read(self, **named: Tensor) -> list[Tensor]:
        """The blocks of tensors [c, rows, …] as [blocks, c, height, …], where they lie or in
        buffers of their names; places that are not rows repeat one, with a log-sum-exp [c, rows]
        of infinity, so that they weigh nothing."""
        views = self.views(*named.values())
        if views is not None:
            return views
        index, blocks = self.tile_index, []
        for name, x in named.items():
            count, rest = x.shape[0], x.shape[2:]
            tiles = x if index is None else _tiles(x, self.tile)
            at = self.index if index is None else index
            taken = scratch(name, (count, at.shape[0], *tiles.shape[2:]), x.dtype)
            if count > 1 and x.is_contiguous():
                torch.index_select(tiles, 1, at, out=taken)
            else:
                # along the first axis torch takes two thirds of the time, and copies nothing
                for line, into in zip(tiles, taken, strict=True):
                    torch.index_select(line, 0, at, out=into)
            if not rest and self.missing is not None:
                taken.index_fill_(1, self.missing, math.inf)
            blocks.append(taken.view(count, self.count, self.height, *rest).transpose(0, 1))
        return blocks

    def _rows_of(self, result: Tensor) -> tuple[Tensor, Tensor]:
        """[blocks, c, height, …] -> the rows that there are [c, m, …], and which they are."""
        flat = result.transpose(0, 1).flatten(1, 2)
        if self.missing is None:
            return flat, self.index
        return flat.index_select(1, self.present), self.index[self.present]

    def put(self, into: Sequence[Tensor], result: Sequence[Tensor], more: bool) -> None:
        """Put an output [blocks, c, height, …] and its log-sum-exps, or gradients, into the rows of
        [c, rows, …] that they stand for, or merge them with what is there where there is `more`."""
        there = self.views(*into)
        if there is None:
            rows, index = zip(*map(self._rows_of, result), strict=True)
            known = [x.index_select(1, index[0]) for x in into] if more else rows
            if more:
                merge(known, rows)
            for x, y in zip(into, known, strict=True):
                x.index_copy_(1, index[0], y.to(x.dtype))
        elif more:
            merge(there, result)
        else:
            for x, y in zip(there, result, strict=True):
                if x.data_ptr() != y.data_ptr():
                    # one block of all these rows, maybe, so that lines come first
                    x.transpose(0, 1).copy_(y.transpose(0, 1).reshape(x.transpose(0, 1).shape))

    def add(self, into: Tensor, shares: Tensor) -> None:
        """Add [blocks, c, height, …] to rows of [c, rows, …]; several blocks may share a row."""
        if self.lattice is not None:
            # blocks of one view must have no row in common, which would be added to once
            apart, row = self.lattice
            within = apart * (self.count - 1) < row
            step = 1 if within else -(-self.height * row // apart)
            (blocks,) = cast("list[Tensor]", self.views(into))
            for first in range(min(step, self.count)):
                blocks[first::step] += shares[first::step]
        elif self.tile_index is not None:
            tiles = shares.transpose(0, 1).reshape(len(into), -1, self.tile, shares.shape[-1])
            _add_at(_tiles(into, self.tile), self.tile_index, tiles)
        else:
            rows, index = self._rows_of(shares)
            _add_at(into, index, rows)


def _add_at(into: Tensor, index: Tensor, x: Tensor) -> None:
    """Add x [c, m, …] to the places of an index, which may stand there several times."""
    # torch adds along the first axis several times as fast
    for line, share in zip(into, x, strict=True):
        line.index_add_(0, index, share.to(into.dtype))


def _tiles(x: Tensor, size: int) -> Tensor:
    """[c, rows, …] as [c, tiles, size, …], without rows that make no whole tile."""
    count = x.shape[1] // size
    return x[:, : count * size].view(x.shape[0], count, size, *x.shape[2:])


_buffers = local()
"""Those of one thread: fresh memory costs more than what is computed in it."""


def scratch(use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the CPU, valid until the next one for the same use."""
    count, key = math.prod(shape), (use, dtype)
    kept: dict[Any, Tensor] = _buffers.__dict__
    buffer = kept.get(key)
    if buffer is None or buffer.numel() < count:
        # a buffer made in inference mode could not be written to outside of it
        with torch.inference_mode(False):
            buffer = torch.empty(count, dtype=dtype, device="cpu")
        if count <= LIMITS.buffer:
            kept[key] = buffer
    return buffer[:count].view(shape)


def scratch_rows(use: str, x: Tensor, places: int) -> Tensor:
    """A buffer [c, places, …] for what belongs to [c, rows, …]."""
    return scratch(use, (len(x), places, *x.shape[2:]), x.dtype)


class Order:
    """Rows of a tensor one behind the other, int64 [places], -1 for a place without a row; where
    `rows` is None, as they lie: then nothing is moved."""

    def __init__(self, rows: np.ndarray | None = None) -> None:
        self.blocks = None if rows is None else Blocks(rows[None])

    def take(self, **named: Tensor) -> Sequence[Tensor]:
        """[c, rows, …] -> [c, places, …] in buffers of their names."""
        blocks = self.blocks
        return [x[0] for x in blocks.read(**named)] if blocks else (*named.values(),)

    def zeros(self, **named: Tensor) -> Sequence[Tensor]:
        """Zeros in buffers [c, places, …] of their names, for what is added to [c, rows, …]; these
        themselves where they are as they lie."""
        if self.blocks is None:
            return (*named.values(),)
        return [scratch_rows(name, x, self.blocks.height).zero_() for name, x in named.items()]

    def add(self, into: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Add what there is in `zeros` to the rows [c, rows, …] that it stands for."""
        if self.blocks is not None:
            for x, y in zip(into, rows, strict=True):
                self.blocks.add(x, y[None])


AS_THEY_LIE = Order()


class Repeated:
    """Rows of queries int64 [m], -1 for none, of which each is computed at several of `count`
    places, by one step or some: int64 [m, r], `count` for none; None before the last step."""

    def __init__(self, rows: np.ndarray, places: Tensor | None, count: int) -> None:
        # the last place stands for none
        self.blocks, self.each, self.places = Blocks(rows[None]), places, count + 1

    def room(self, **named: Tensor) -> Sequence[Tensor]:
        """Buffers [1, places, …] of their names for an output [1, rows, e] or its gradient, and
        [2, places] for `raw` log-sum-exps."""
        room = [x if x.dim() > 2 else x.expand(2, -1) for x in named.values()]
        return [scratch_rows(x, y, self.places) for x, y in zip(named, room, strict=True)]

    def raw(self, part: Partial) -> Partial:
        """The output, and as [b, 2, h] the log-sum-exp in units of ln 2, and what divides it: 1."""
        out, lse = part
        return out, torch.cat([lse * LOG2E, torch.ones_like(lse)], 1)

    def put(self, into: Sequence[Tensor], rows: Sequence[Tensor], more: bool) -> None:
        """Put what there is in `room` where it belongs, as `Blocks.put` does."""
        if self.each is None:
            return
        (out,), (tops, totals) = rows
        tops[-1], totals[-1] = LOWEST, 1.0
        logs = tops.take(self.each) / LOG2E
        lse = (logs + totals.take(self.each).log_()).logsumexp(-1, keepdim=True)
        out = _summed(out, self.each, logs.sub_(lse).exp_())
        self.blocks.put(into, (out[None, None], lse.T[None]), more)

    def add(self, into: Tensor, rows: Tensor) -> None:
        """Add what there is in `room` to the rows [1, rows, e] that it stands for."""
        if self.each is not None:
            self.blocks.add(into, _summed(rows[0], self.each)[None, None])


def _summed(x: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sums [m, e] of rows of x at places [m, r], times their weights; the last row is 0."""
    x[-1] = 0.0
    starts = torch.arange(0, places.numel(), places.shape[1], device="cpu")
    weights = None if weights is None else weights.flatten()
    bag = torch.embedding_bag(x, places.flatten(), starts, False, 0, False, weights)
    return bag[0]


class Step:
    """The batches of one step, and its keys as they are read: where they lie, or put in order."""

    forward: Any = None
    backward: Any = None
    """What computes a piece in less time than the flash kernel and its backward, if there is
    something: both from the tensors of these, the bias, the scale, and where results go."""

    repeated: Repeated | None = None
    """Where the results of queries go that are computed at several places, if some are."""

    weigh: Callable[[Piece, Sequence[Tensor], Sequence[Tensor]], None] | None = None
    """Takes the gradients of the factors of keys and values of a piece, from those of both."""

    def __init__(self, batches: Sequence[Batch], positions: Positions, merges: bool) -> None:
        self.merges = merges
        k, self.k_order = [batch.k for batch in batches], AS_THEY_LIE
        if not follows(k):
            order, k = in_order(k)
            self.k_order = Order(order)
        each = zip(batches, k, strict=True)
        self.batches = [TensorBatch(*sides, positions) for sides in each]
        self._pieces: dict[tuple[int, int, bool, bool], tuple[Piece, ...]] = {}

    def pieces(self, heads: int, size: int, back: bool, scored: bool) -> Iterable[Piece]:
        """The pieces of all batches for so many heads of a size."""
        key = heads, size, back, scored
        if key not in self._pieces:
            each = (batch.cut(*key) for batch in self.batches)
            self._pieces[key] = tuple(piece for pieces in each for piece in pieces)
        return self._pieces[key]


class Piece:
    """Some blocks of a batch; what is computed of their queries belongs to the rows `into`."""

    def __init__(self, batch: TensorBatch, low: int, high: int) -> None:
        self.q = self.into = Blocks(batch.q[low:high])
        self.k = Blocks(batch.k[low:high])
        self.batch, self.low, self.high = batch, low, high

    def bias(self, padding: Tensor | None, kind: torch.dtype) -> Tensor | None:
        """What is added to scores [blocks, c, h, w] in a type; `padding` is added for each key."""
        bias = self.batch.kept
        if bias is None:
            bias = self.batch.added(self.low, self.high)
        elif bias.shape[0] > 1:
            bias = bias[self.low : self.high]
        if padding is not None:
            real = padding[self.batch.keys[self.low : self.high]][:, None]
            bias = real if bias is None else bias + real
        return None if bias is None else bias[:, None].to(kind)

    def places(self, alike: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """The numbers of queries [blocks, h] and keys [blocks, w] among all, with `alike` those of
        the first block where all are as far apart; and the heads of the queries where they are not
        those of c."""
        low, high = (0, 1) if alike and self.batch.alike else (self.low, self.high)
        return self.batch.queries[low:high], self.batch.keys[low:high], None


class TensorBatch(DeviceBatch):
    """A batch with its keys as they are read, and what its masks add."""

    def __init__(self, tables: Batch, k: np.ndarray, positions: Positions) -> None:
        super().__init__(tables, torch.device("cpu"))
        self.tables, self.q, self.k, self.positions = tables, tables.q, k, positions
        # masks of blocks, each its own, are kept from call to call as long as they are small
        size = self.blocks * self.height * self.width if self.differ else 0
        self.kept = None if size > LIMITS.mask_kept else self.added(0, self.blocks)

    def added(self, low: int, high: int) -> Tensor | None:
        """What is added to the scores of some blocks [1 or blocks, h, w], or None."""
        pairs = self.mask(low, high, slice(0, self.height))
        return None if pairs is None else added_by(pairs, torch.float32, LOWEST)

    @cached_property
    def alike(self) -> bool:
        """Whether all keys are as far from their queries as in the first block: then blocks differ
        by where they start alone."""
        if self.blocks == 1:
            return True
        q, k = (
            np.where(rows < 0, -1, at[rows])
            for rows, at in zip((self.tables.q, self.tables.k), self.positions, strict=True)
        )
        first = q[:, :1]
        if min(q[0].min(), k[0].min(), first.min()) < 0:
            return False
        return all(((x - first == x[:1] - first[:1]) | (x < 0)).all() for x in (q, k))

    def cut(self, heads: int, size: int, back: bool, scored: bool) -> Iterator[Piece]:
        """Blocks in parts whose temporaries stay below `LIMITS.piece` numbers, of one run where
        that is long; `scored` where scores are among them."""
        # keys that are read where they lie take no memory; their gradients always do
        lying = Blocks(self.k).lattice is not None and not back
        per_block = heads * size * (self.height if lying else max(self.height, self.width))
        if self.tiled is not None:
            per_block = max(per_block, self.height * self.width)
        if scored:
            per_block = max(per_block, heads * self.height * self.width)
        # backward there are twice as many temporaries: keys and values, and the gradients of both
        most = max(1, (LIMITS.piece // 2 if back else LIMITS.piece) // max(1, per_block))
        gaps = np.diff(self.k[:, 0])
        run = 1 + int(np.argmax(np.append(gaps != gaps[:1], True)))
        span = run if SINGLE * run >= most else most
        for first in range(0, self.blocks, span):
            last = min(first + span, self.blocks)
            for low in range(first, last, most):
                yield Piece(self, low, min(low + most, last))


def follows(rows: Sequence[np.ndarray]) -> bool:
    """Whether most neighbours in blocks [blocks, height] follow one another."""
    pairs = [(each[:, 1:], each[:, :-1]) for each in rows]
    gaps = [(high - low)[(high >= 0) & (low >= 0)] for high, low in pairs]
    return float((np.concatenate([np.ones(1, np.int64), *gaps]) == 1).mean()) >= ALIKE


def in_order(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The distinct rows of blocks [blocks, height] in the order of their first appearance, in the
    largest of these first, and the place of each row among them. Places behind the rows of a short
    tile are distinct, too."""
    # the few blocks at the ends of classes would part the many between them
    turns = sorted(range(len(rows)), key=lambda turn: -rows[turn].size)
    flat = np.concatenate([rows[turn].ravel() for turn in turns])
    real = flat >= 0
    at = np.arange(len(flat))
    last = np.maximum.accumulate(np.where(real, at, 0))
    behind = at - last
    names = np.where(real, flat, -1 - (np.maximum(flat[last], 0) * (1 + behind.max()) + behind))
    _, first, place = np.unique(names, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    ends = np.cumsum([rows[turn].size for turn in turns])[:-1]
    places = dict(zip(turns, np.split(rank[place.ravel()], ends), strict=True))
    parts = [places[turn].reshape(each.shape) for turn, each in enumerate(rows)]
    return flat[np.sort(first)], parts


Index = tuple["slice | None", ...]

Walked = tuple[Index, Index, Iterable[Step], "Tensor | None", Any]
"""What is computed together: which queries [B, K, R, …] and keys [B, K, …], its steps, what is
added for each of its keys [n_k], or None, and the changes of its scores."""


class WalkingKernel(SoftmaxKernel):
    """Softmax attention that walks the steps of its parts, one after the other.

    `of_rows` and `of_keys` are the axes that become one, so that [c, n, …] is left; `widens` says
    that it computes in float32 at least; `several`, that it sums over steps, rounded once;
    `complete`, that the first step has every query.
    """

    of_rows, of_keys, widens, several, complete = (0, 2), (0, 1), False, True, False

    _parts: Callable[[Tensor, Call, Any], Iterator[Walked]]
    """(q, call, grads) -> what is computed together; gradients of tables are added to `grads`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> Partial:
        result = self._begun(q, k, v, call, scale)
        wide = result[1].dtype
        kind = wide if self.widens else q.dtype
        for of_q, of_k, steps, padding, scores in self._parts(q, call, {}):
            rows, *lines = [x[of_q].flatten(*self.of_rows) for x in (q, *result)]
            rows, (out, lse) = rows.to(kind), lines
            keys, values = [x[of_k].flatten(*self.of_keys).to(kind) for x in (k, v)]
            for step in steps:
                repeated, bent = step.repeated, scores and scores.scores.bends
                k_now, v_now = step.k_order.take(keys=keys, values=values)
                now = repeated.room(result=out, sums=lse) if repeated else lines
                merges = step.merges and not repeated
                for piece in step.pieces(rows.shape[0], q.shape[-1], False, scores is not None):
                    bias, room = piece.bias(padding, wide), None
                    parts = *piece.q.read(q=rows), *piece.k.read(k=k_now, v=v_now)
                    if scores is not None and not bent:
                        bias = scores.added(piece, bias, wide)
                    if bent:
                        part = scores.forward(piece, [x.to(wide) for x in parts], bias, scale)
                    elif step.forward is not None:
                        room = None if merges else piece.into.views(*now)
                        part = step.forward(parts, bias, scale, room)
                    else:
                        part = flash(*parts, 0.0, False, attn_mask=bias, scale=scale)
                    if room is None:
                        raw = repeated.raw(part) if repeated else part
                        piece.into.put(now, raw, merges)
                if repeated:
                    repeated.put(lines, now, step.merges)
            clear_empty(out, lse)
            _put_back([x[of_q] for x in result], lines)
        return result[0].to(q.dtype), result[1]

    def backward(
        self, grad: Tensor, saved: Sequence[Tensor], call: Call, scale: float
    ) -> Sequence[Tensor]:
        q, k, v, out, lse = saved
        into, tables = self._begun_back(grad, saved, call, scale)
        wide = lse.dtype
        kind = wide if self.widens else q.dtype
        # a query without a key has weights 0 whatever its log-sum-exp, as long as it is finite
        lse = lse.masked_fill(lse == -math.inf, 0.0)
        for of_q, of_k, steps, padding, scores in self._parts(q, call, tables):
            rows = [x[of_q].flatten(*self.of_rows).to(kind) for x in (grad, q, out)]
            rows.append(lse[of_q].flatten(*self.of_rows))
            keys, values = [x[of_k].flatten(*self.of_keys).to(kind) for x in (k, v)]
            targets = [into[0][of_q], *(x[of_k] for x in into[1:])]
            each = zip(targets, (self.of_rows, self.of_keys, self.of_keys), strict=True)
            lines = [x.flatten(*axes) for x, axes in each]
            names = ("grad", "q", "out", "lse")
            bent = scores is not None and (scores.learned or scores.scores.bends)
            for step in steps:
                repeated, order = step.repeated, step.k_order
                k_now, v_now = order.take(keys=keys, values=values)
                mine, narrow = rows, step.backward is not None and not bent
                if narrow:
                    mine = [*rows[:2], (rows[0] * rows[2]).sum(-1, keepdim=True), rows[3]]
                q_sums = repeated.room(query_gradients=lines[0]) if repeated else lines[:1]
                sums = order.zeros(key_gradients=lines[1], value_gradients=lines[2])
                for piece in step.pieces(rows[1].shape[0], q.shape[-1], True, scores is not None):
                    bias, room = piece.bias(padding, wide), None
                    *above, out_now, lse_now = piece.q.read(**dict(zip(names, mine, strict=True)))
                    both = piece.k.read(k=k_now, v=v_now)
                    parts = *above, *both, out_now, lse_now.contiguous()
                    if scores is not None and not bent:
                        bias = scores.added(piece, bias, wide)
                    if bent:
                        grads = scores.backward(piece, parts, bias, scale)
                    elif narrow:
                        room = piece.into.views(*q_sums) if repeated else None
                        grads = step.backward(parts, bias, scale, room)
                    else:
                        grads = flash_backward(*parts, 0.0, False, attn_mask=bias, scale=scale)
                    if not repeated:
                        piece.q.add(q_sums[0], grads[0])
                    elif room is None:
                        piece.into.put(q_sums, grads[:1], False)
                    for total, share in zip(sums, grads[1:], strict=True):
                        piece.k.add(total, share)
                    if step.weigh is not None:
                        step.weigh(piece, both, grads[1:])
                if repeated:
                    repeated.add(lines[0], q_sums[0])
                order.add(lines[1:], sums)
            _put_back(targets, lines)
        grads = (x.to(y.dtype) for x, y in zip(into, (q, k, v), strict=True))
        return *grads, *tables.values()

    def _begun(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> Partial:
        """The output and log-sum-exps that the walk merges into."""
        wide = torch.promote_types(q.dtype, torch.float32)
        begun = q.new_empty if self.complete else q.new_zeros
        out = begun(q.shape, dtype=wide if self.widens or self.several else q.dtype)
        return out, q.new_full(q.shape[:-1], -math.inf, dtype=wide)

    def _begun_back(
        self, grad: Tensor, saved: Sequence[Tensor], call: Call, scale: float
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The gradients of q, k and v and those of tables that the walk adds to."""
        *tensors, _, lse = saved
        kind = lse.dtype if self.widens or self.several else tensors[0].dtype
        kinds = kind, lse.dtype, lse.dtype
        into = [x.new_zeros(x.shape, dtype=kind) for x, kind in zip(tensors, kinds, strict=True)]
        return into, {name: torch.zeros_like(table) for name, table in call.tables.items()}


def _put_back(targets: Iterable[Tensor], lines: Sequence[Tensor]) -> None:
    """Put numbers where they belong, if they do not lie there."""
    for into, line in zip(targets, lines, strict=True):
        if line.data_ptr() != into.data_ptr():
            into.copy_(line.view(into.shape))
