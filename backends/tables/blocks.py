"""Blocks of tables in pieces that stay in the cache: where their rows lie, and their masks.

Rows that follow one another at one distance, within blocks and from block to block, are one strided
view and cost no copy. Others are gathered. Numbers of blocks are arranged as the flash kernel takes
them: [batch, heads, rows, size].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from threading import local

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.common.composed import DeviceBatch
from attnspec.backends.common.masks import added_by
from attnspec.backends.common.merging import Partial, merge
from attnspec.layout.tables import Batch
from attnspec.limits import LIMITS

ALIKE = 0.9
"""The share of neighbours in blocks that lie at one distance, from which on rows are read there."""

REREAD = 1.5
"""How often a key is read from which on a copy in order pays."""

TILE = 4
"""Rows that are copied as one, at least."""

SINGLE = 8
"""One in how many of the blocks for which there is room a run must have to be a piece by itself."""

Positions = tuple[np.ndarray, np.ndarray]
"""Where queries [n_q] and keys [n_k] stand, int64."""

Added = tuple[Tensor | None, Tensor | None]
"""What is added to scores, and the rows without a key; None for nothing, and for no such rows."""


@dataclass(frozen=True)
class Lattice:
    """Blocks whose first rows are `first + i * outer + j * inner`, i < `many`, j < `each`; their
    rows lie `gap` apart."""

    first: int
    many: int
    outer: int
    each: int
    inner: int
    gap: int


def lattice_of(starts: np.ndarray, gap: int = 1) -> Lattice | None:
    """The blocks with these first rows, all of them different, as a lattice; None if they are
    none."""
    first, count = int(starts[0]), len(starts)
    if count == 1:
        return Lattice(first, 1, 0, 1, 1, gap)
    gaps = starts[1:] - starts[:-1]
    inner = int(gaps[0])
    other = np.flatnonzero(gaps != inner)
    if inner <= 0:
        return None
    if not len(other):
        return Lattice(first, 1, 0, count, inner, gap)
    each = int(other[0]) + 1
    if count % each:
        return None
    table = starts.reshape(-1, each)
    outer = int(table[1, 0] - table[0, 0])
    wanted = first + outer * np.arange(len(table))[:, None] + inner * np.arange(each)
    if outer <= 0 or (table != wanted).any() or len(np.unique(starts)) < count:
        return None
    return Lattice(first, len(table), outer, each, inner, gap)


@dataclass(frozen=True)
class Arrangement:
    """How blocks become the first two dimensions: `many` times `each`, the larger stride first; one
    times all of them is blocks first, heads second."""

    many: int
    each: int
    swapped: bool = False

    def arrange(self, x: Tensor) -> Tensor:
        """[c, blocks, …] -> [batch, heads, …]."""
        if self.many == 1:
            return x.transpose(0, 1)
        x = x.reshape(self.many, self.each, *x.shape[2:])
        return x.transpose(0, 1) if self.swapped else x

    def back(self, x: Tensor) -> Tensor:
        """[batch, heads, …] -> [c, blocks, …]."""
        if self.many == 1:
            return x.transpose(0, 1)
        x = x.transpose(0, 1) if self.swapped else x
        return x.reshape(1, self.many * self.each, *x.shape[2:])


class Blocks:
    """Blocks of rows of one side, int64 [blocks, height], -1 for a place that is not a row; `to`
    arranges what is read of them."""

    def __init__(self, rows: np.ndarray, to: Arrangement | None = None) -> None:
        self.rows = rows
        self.count, self.height = rows.shape
        self.to = Arrangement(1, self.count) if to is None else to

    @cached_property
    def _real(self) -> np.ndarray | None:
        """The places that are rows, bool [blocks, height]; None where all are."""
        real = self.rows >= 0
        return None if real.all() else real

    @cached_property
    def lattice(self) -> Lattice | None:
        """The blocks as a strided view, if they are one."""
        gap = 1
        if self._real is not None:
            return None
        if self.height > 1:
            gap = int(self.rows[0, 1] - self.rows[0, 0])
            if gap <= 0 or (np.diff(self.rows, axis=1) != gap).any():
                return None
        return lattice_of(self.rows[:, 0], gap)

    @cached_property
    def _arranged(self) -> Lattice | None:
        """The same as they are arranged."""
        at, many, each = self.lattice, self.to.many, self.to.each
        if at is None or (at.many, at.each) == (many, each):
            return at
        if at.many > 1 or at.each != many * each:
            return None
        return replace(at, many=many, each=each, outer=each * at.inner)

    @cached_property
    def tile(self) -> int:
        """The most rows so that the blocks consist of whole tiles of them: t tile, t tile + 1, …"""
        flat = self.rows.ravel()
        if self._real is not None or not len(flat):
            return 1
        breaks = np.flatnonzero(np.diff(flat) != 1) + 1
        starts = flat[np.concatenate([[0], breaks])]
        return int(np.gcd.reduce(np.concatenate([breaks, starts, [self.height]])))

    @cached_property
    def index(self) -> Tensor:
        """The row of every place, int64 [blocks * height]; the first one in place of none."""
        return torch.from_numpy(np.maximum(self.rows, 0).ravel())

    @cached_property
    def tile_index(self) -> Tensor | None:
        """The tile of every block, if tiles can be taken whole: int64 [blocks * tiles]."""
        if self.tile < TILE:
            return None
        return torch.from_numpy(self.rows[:, :: self.tile].ravel() // self.tile)

    @cached_property
    def missing(self) -> Tensor | None:
        """The places that are not rows, or None."""
        return None if self._real is None else torch.from_numpy(np.flatnonzero(~self._real))

    @cached_property
    def present(self) -> Tensor:
        """The places that are rows."""
        return torch.from_numpy(np.flatnonzero(self.rows >= 0))

    def views(self, *tensors: Tensor) -> list[Tensor] | None:
        """The blocks of tensors [c, rows, …] as views [batch, heads, height, …], or None."""
        at = self._arranged
        if at is None or (at.many > 1 and tensors[0].shape[0] > 1):
            return None
        views = []
        for x in tensors:
            head, row, *rest = x.stride()
            size, strides = [at.each, x.shape[0]], [at.inner * row, head]
            if at.many > 1:
                size, strides = [at.many, at.each], [at.outer * row, at.inner * row]
                if self.to.swapped:
                    size, strides = size[::-1], strides[::-1]
            size += self.height, *x.shape[2:]
            strides += at.gap * row, *rest
            views.append(x.as_strided(size, strides, x.storage_offset() + at.first * row))
        return views

    def read(self, blank: str = "", **named: Tensor) -> list[Tensor]:
        """The blocks of tensors [c, rows, …] as [batch, heads, height, …], where they lie or in
        buffers of their names; places that are not rows repeat the first row, or are zero in the
        tensor `blank`."""
        views = self.views(*named.values())
        return self.gathered(blank, **named) if views is None else views

    def gathered(self, blank: str = "", **named: Tensor) -> list[Tensor]:
        """The same in buffers."""
        blocks = []
        for name, x in named.items():
            count, rest = x.shape[0], x.shape[2:]
            taken = scratch(name, (count, self.count * self.height, *rest), x.dtype)
            if self.tile_index is not None:
                tiles = _tiles(x, self.tile)
                into = taken.view(count, -1, *tiles.shape[2:])
                torch.index_select(tiles, 1, self.tile_index, out=into)
            else:
                torch.index_select(x, 1, self.index, out=taken)
                if name == blank and self.missing is not None:
                    taken.index_fill_(1, self.missing, 0.0)
            blocks.append(self.to.arrange(taken.view(count, self.count, self.height, *rest)))
        return blocks

    def rows_of(self, result: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, heads, height, …] -> the rows that there are [c, m, …], and which they are."""
        flat = self.to.back(result).flatten(1, 2)
        if self.missing is None:
            return flat, self.index
        return flat.index_select(1, self.present), self.index[self.present]

    def put(self, into: Partial, result: Partial, more: bool) -> None:
        """Put an output [batch, heads, height, …] and its log-sum-exps into the rows of
        [c, rows, …] that they stand for, or merge them with what is there where there is `more`."""
        there = self.views(*into)
        if there is None:
            (rows, index), (sums, _) = (self.rows_of(x) for x in result)
            if more:
                known = into[0].index_select(1, index), into[1].index_select(1, index)
                merge(known, (rows, sums))
                rows, sums = known
            for x, y in zip(into, (rows, sums), strict=True):
                x.index_copy_(1, index, y.to(x.dtype))
        elif more:
            merge((there[0], there[1]), result)
        else:
            there[0].copy_(result[0])
            there[1].copy_(result[1])

    def add(self, into: Tensor, shares: Tensor) -> None:
        """Add [batch, heads, height, …] to the rows of [c, rows, …]; no row stands twice."""
        there = self.views(into)
        if there is not None:
            there[0] += shares
            return
        rows, index = self.rows_of(shares)
        into.index_add_(1, index, rows.to(into.dtype))

    @cached_property
    def _single(self) -> tuple[Blocks, ...] | None:
        """Every block by itself, where each is a view."""
        parts = tuple(Blocks(rows[None]) for rows in self.rows)
        return parts if all(block.lattice is not None for block in parts) else None

    @cached_property
    def _columns(self) -> tuple[Blocks, ...] | None:
        """The first, second, … tile of all blocks, where no tile stands twice among them."""
        places = range(0, self.height, self.tile)
        if self.tile < TILE or len(places) > LIMITS.tiles_added:
            return None
        parts = tuple(Blocks(self.rows[:, x : x + self.tile], self.to) for x in places)
        return parts if all(part.lattice is not None for part in parts) else None

    def add_overlapping(self, into: Tensor, shares: Tensor) -> None:
        """The same where several blocks may have one row."""
        size = self.tile
        if self.count == 1:
            self.add(into, shares)
        elif self.count <= min(LIMITS.tiles_added, self.height // size) and self._single:
            each = self.to.back(shares)
            for number, block in enumerate(self._single):
                block.add(into, each[:, number][None])
        elif self._columns is not None:
            for place, part in enumerate(self._columns):
                part.add(into, shares[:, :, place * size : (place + 1) * size])
        elif self.tile_index is not None:
            shares = self.to.back(shares)
            tiles = shares.reshape(len(shares), -1, size, shares.shape[-1])
            _tiles(into, size).index_add_(1, self.tile_index, tiles.to(into.dtype))
        else:
            # a view would add to rows that blocks have in common once
            rows, index = self.rows_of(shares)
            into.index_add_(1, index, rows.to(into.dtype))


def _tiles(x: Tensor, size: int) -> Tensor:
    """[c, rows, …] as [c, tiles, size, …], without rows that make no whole tile."""
    return torch.unflatten(x[:, : x.shape[1] // size * size], 1, (-1, size))


def arrangement(q: Blocks, k: Blocks, heads: int) -> Arrangement:
    """How the blocks of queries and keys are arranged so that most of them are views."""
    for side in (q, k):
        at = side.lattice
        if heads == 1 and at is not None and at.many > 1:
            return Arrangement(at.many, at.each, at.inner > at.outer)
    return Arrangement(1, q.count)


class _Scratch(local):
    """Buffers of one thread: fresh memory costs more than what is computed in it."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, torch.dtype], Tensor] = {}


_scratch = _Scratch()


def scratch(use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the CPU, valid until the next one for the same use."""
    count = math.prod(shape)
    buffer = _scratch.kept.get((use, dtype))
    if buffer is None or buffer.numel() < count:
        # a buffer made in inference mode could not be written to outside of it
        with torch.inference_mode(False):
            buffer = torch.empty(count, dtype=dtype, device="cpu")
        if count <= LIMITS.buffer:
            _scratch.kept[use, dtype] = buffer
    return buffer[:count].view(shape)


class Order:
    """Rows of a tensor one behind the other, int64 [places], -1 for a place without a row; where it
    is `natural`, as they lie: then nothing is moved."""

    def __init__(self, rows: np.ndarray | None = None) -> None:
        self.natural = rows is None
        self.blocks = Blocks(np.zeros((1, 0), np.int64) if rows is None else rows[None])

    def room(self, **named: Tensor) -> Sequence[Tensor]:
        """Buffers [c, places, …] of their names for what is put into tensors [c, rows, …]."""
        if self.natural:
            return (*named.values(),)
        return [
            scratch(name, (x.shape[0], self.blocks.height, *x.shape[2:]), x.dtype)
            for name, x in named.items()
        ]

    def take(self, blank: str = "", **named: Tensor) -> Sequence[Tensor]:
        """[c, rows, …] -> [c, places, …] in buffers of their names; a place without a row repeats
        the first row, or is zero in the tensor `blank`."""
        if self.natural:
            return (*named.values(),)
        return [x[0] for x in self.blocks.gathered(blank, **named)]

    @cached_property
    def _back(self) -> Tensor:
        """The place of every row, where every row has one: int64 [rows]."""
        index = self.blocks.index[self.blocks.present]
        return torch.empty_like(index).index_copy_(0, index, self.blocks.present)

    def put(self, into: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Put [c, places, …] where it belongs in [c, rows, …], if every row has a place."""
        for x, y in zip(into, rows, strict=True) if not self.natural else ():
            torch.index_select(y, 1, self._back, out=x)

    def add(self, into: Tensor, rows: Tensor) -> None:
        """Add [c, places, …] to the rows [c, rows, …] that it stands for."""
        self.blocks.add(into, rows[None])


AS_THEY_LIE = Order()


class Step:
    """The batches of one step, and both sides as they are read: where they lie, or put in order.
    Gradients of keys are added to rows in an order more often than keys are read in it."""

    def __init__(
        self, batches: Sequence[Batch[np.ndarray]], n_q: int, positions: Positions
    ) -> None:
        q, k = [batch.q for batch in batches], [batch.k for batch in batches]
        queries = np.concatenate([np.zeros(0, np.int64), *(rows.ravel() for rows in q)])
        self.complete = int((queries >= 0).sum()) == n_q
        self.q_order = AS_THEY_LIE
        if self.complete and not gap_of(q):
            self.q_order = Order(queries)
            ends = np.cumsum([0, *(rows.size for rows in q)])
            at = np.arange(len(queries))
            q = [at[a:b].reshape(x.shape) for (a, b), x in zip(pairwise(ends), q, strict=True)]
        gap, back, moved = gap_of(k), AS_THEY_LIE, k
        if gap != 1 and batches:
            order, moved = in_order(k)
            back = Order(order)
        reads = sum(rows.size for rows in k)
        moves = not back.natural and (not gap or reads > REREAD * max(1, back.blocks.height))
        # forward and backward
        self.k_orders = (back if moves else AS_THEY_LIE), back
        self.batches = [
            TensorBatch(batch, rows, (keys if not moves else places, places), positions)
            for batch, rows, keys, places in zip(batches, q, k, moved, strict=True)
        ]
        self._pieces: dict[tuple[int, int, bool, bool], tuple[Piece, ...]] = {}

    def pieces(self, heads: int, size: int, back: bool, scored: bool) -> tuple[Piece, ...]:
        """The pieces of all batches for so many heads of a size."""
        key = heads, size, back, scored
        if key not in self._pieces:
            each = (batch.cut(*key) for batch in self.batches)
            self._pieces[key] = tuple(piece for pieces in each for piece in pieces)
        return self._pieces[key]


class Piece:
    """Some blocks of a batch with what is added to their scores."""

    def __init__(self, batch: TensorBatch, low: int, high: int, heads: int, back: bool) -> None:
        self.batch, self.low, self.high = batch, low, high
        self.q, self.k = Blocks(batch.q[low:high]), Blocks(batch.k[back][low:high])
        self.to = self.q.to = self.k.to = arrangement(self.q, self.k, heads)

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """The rows of queries [blocks, h] and of keys [blocks, w]."""
        return self.batch.rows(self.low, self.high)

    def bias(self, padding: Tensor | None, kind: torch.dtype) -> Added:
        """What is added to scores [batch, heads, h, w], in a type, and the rows without a key, bool
        [batch, heads, h]; `padding` is 0 or -inf for every key."""
        bias, empty = self.batch.added(self.low, self.high)
        if padding is not None:
            real = padding[self.rows[1]][:, None]
            bias = real if bias is None else bias + real
            empty = (bias == -math.inf).all(-1)
        if bias is not None:
            bias = bias[None].to(kind)
            bias = bias if bias.shape[1] == 1 else self.to.arrange(bias)
        if empty is not None:
            empty = empty[None]
            empty = empty if empty.shape[1] == 1 else self.to.arrange(empty)
        return bias, empty


class TensorBatch(DeviceBatch):
    """A batch with its rows as they are read, keys forward and backward, and what its masks add."""

    def __init__(
        self,
        tables: Batch[np.ndarray],
        q: np.ndarray,
        k: tuple[np.ndarray, np.ndarray],
        positions: Positions,
    ) -> None:
        super().__init__(tables, torch.device("cpu"))
        self.tables, self.q, self.k, self.positions = tables, q, k, positions
        # masks of blocks, each its own, are kept from call to call as long as they are small
        size = self.blocks * self.height * self.width if self.differ else 0
        self.affordable = size <= LIMITS.mask_kept
        starts = lattice_of(q[:, 0])
        # blocks that follow one another at one distance
        self.run = self.blocks if starts is None else starts.each

    def added(self, low: int, high: int) -> Added:
        """What is added to the scores of some blocks, 0 or -inf [1 or blocks, h, w], and their rows
        without a key, bool [1 or blocks, h]; None for nothing, and where every row has one."""
        if not self.affordable:
            return self._added(low, high)
        bias, empty = self._all
        if bias is None or not self.differ:
            return bias, empty
        return bias[low:high], None if empty is None else empty[low:high]

    @cached_property
    def _all(self) -> Added:
        return self._added(0, self.blocks)

    def _added(self, low: int, high: int) -> Added:
        pairs = self.mask(low, high, slice(0, self.height))
        if pairs is None:
            return None, None
        empty = ~pairs.any(-1)
        return added_by(pairs, torch.float32), empty if bool(empty.any()) else None

    def rows(self, low: int, high: int) -> tuple[Tensor, Tensor]:
        """The rows of queries and of keys of some blocks."""
        return self.queries[low:high], self.keys[low:high]

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
        """Blocks in parts whose temporaries stay below `LIMITS.piece` numbers; `scored` where
        scores are among them."""
        if self.blocks == 1:
            yield Piece(self, 0, 1, heads, back)
            return
        # keys that are read where they lie take no memory; their gradients always do
        lattice = Blocks(self.k[back]).lattice
        lying = lattice is not None and not back
        per_block = heads * size * (self.height if lying else max(self.height, self.width))
        if self.tiled is not None:
            per_block = max(per_block, self.height * self.width)
        if scored:
            per_block = max(per_block, heads * self.height * self.width)
        # backward there are twice as many temporaries: keys and values, and the gradients of both
        most = max(1, (LIMITS.piece // 2 if back else LIMITS.piece) // max(1, per_block))
        if lattice is not None and lattice.many > 1 < heads and SINGLE * self.run >= most:
            # several heads lie where they are for one run alone
            most = min(most, self.run)
        for low, high in _cuts(self.blocks, self.run, most):
            yield Piece(self, low, high, heads, back)


def _cuts(blocks: int, run: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `most` blocks that are whole runs, or parts of one."""
    step = most // run * run
    if step:
        for low in range(0, blocks, step):
            yield low, min(low + step, blocks)
        return
    for first in range(0, blocks, run):
        for low in range(first, first + run, most):
            yield low, min(low + most, first + run)


def gap_of(rows: Sequence[np.ndarray]) -> int:
    """The distance of most neighbours in blocks [blocks, height], 0 where there is none of most."""
    pairs = [(each[:, 1:], each[:, :-1]) for each in rows]
    gaps = [(high - low)[(high >= 0) & (low >= 0)] for high, low in pairs]
    steps = np.concatenate([np.zeros(0, np.int64), *gaps])
    if not len(steps):
        return 1
    gap = int(np.median(steps))
    return gap if gap > 0 and float((steps == gap).mean()) >= ALIKE else 0


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
