"""Where the rows of blocks lie in a tensor, and how they are read and written there.

Rows that follow one another at one distance, within blocks and from block to block, are one strided
view and cost no copy. Others are gathered. Numbers of blocks are arranged as the flash kernel takes
them: [batch, heads, rows, size].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import local

import numpy as np
import torch

from attnspec.limits import LIMITS

ALIKE = 0.9
"""The share of neighbours in blocks that lie at one distance, from which on rows are read there."""

REREAD = 1.5
"""How often a key is read from which on a copy in order pays."""

TILE = 4
"""Rows that are copied as one, at least."""


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

    def split(self, many: int, each: int) -> Lattice | None:
        """The same blocks as `many` times `each`, or None."""
        if (self.many, self.each) == (many, each):
            return self
        if self.many > 1 or self.each != many * each:
            return None
        return Lattice(self.first, many, each * self.inner, each, self.inner, self.gap)


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
    """How blocks become the first two dimensions: `many` times `each`, the larger stride first."""

    many: int
    each: int
    swapped: bool

    def arrange(self, x: torch.Tensor) -> torch.Tensor:
        """[c, blocks, …] -> [batch, heads, …]."""
        if self.many == 1:
            return x.transpose(0, 1)
        x = x.reshape(self.many, self.each, *x.shape[2:])
        return x.transpose(0, 1) if self.swapped else x

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, heads, …] -> [c, blocks, …]."""
        if self.many == 1:
            return x.transpose(0, 1)
        x = x.transpose(0, 1) if self.swapped else x
        return x.reshape(1, self.many * self.each, *x.shape[2:])


class Blocks:
    """Blocks of rows of one side, int64 [blocks, height], -1 for a place that is not a row."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self.count, self.height = rows.shape

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
    def tile(self) -> int:
        """The most rows so that the blocks consist of whole tiles of them: t tile, t tile + 1, …"""
        flat = self.rows.ravel()
        if self._real is not None or not len(flat):
            return 1
        breaks = np.flatnonzero(np.diff(flat) != 1) + 1
        starts = flat[np.concatenate([[0], breaks])]
        return int(np.gcd.reduce(np.concatenate([breaks, starts, [self.height]])))

    @cached_property
    def index(self) -> torch.Tensor:
        """The row of every place, int64 [blocks * height]; the first one in place of none."""
        return torch.from_numpy(np.maximum(self.rows, 0).ravel())

    @cached_property
    def tile_index(self) -> torch.Tensor | None:
        """The tile of every block, if tiles can be taken whole: int64 [blocks * tiles]."""
        if self.tile < TILE:
            return None
        return torch.from_numpy(self.rows[:, :: self.tile].ravel() // self.tile)

    @cached_property
    def missing(self) -> torch.Tensor | None:
        """The places that are not rows, or None."""
        return None if self._real is None else torch.from_numpy(np.flatnonzero(~self._real))

    @cached_property
    def present(self) -> torch.Tensor:
        """The places that are rows."""
        return torch.from_numpy(np.flatnonzero(self.rows >= 0))

    def view(self, x: torch.Tensor, to: Arrangement) -> torch.Tensor | None:
        """The blocks of x [c, rows, …] as a view [batch, heads, height, …], or None."""
        if self.lattice is None:
            return None
        found = self.lattice.split(to.many, to.each)
        if found is None or (found.many > 1 and len(x) > 1):
            return None
        row = x.stride(1)
        offset = x.storage_offset() + found.first * row
        rest, strides = (self.height, *x.shape[2:]), (found.gap * row, *x.stride()[2:])
        if to.many == 1:
            lead, steps = (found.each, len(x)), (found.inner * row, x.stride(0))
        else:
            lead, steps = (found.many, found.each), (found.outer * row, found.inner * row)
            if to.swapped:
                lead, steps = lead[::-1], steps[::-1]
        return x.as_strided((*lead, *rest), (*steps, *strides), offset)

    def read(self, x: torch.Tensor, to: Arrangement, use: str, blank: bool = False) -> torch.Tensor:
        """The blocks of x [c, rows, …] as [batch, heads, height, …], where they lie or in a buffer
        for the use; places that are not rows repeat the first row, or are zero with `blank`."""
        found = self.view(x, to)
        if found is not None:
            return found
        taken = scratch(use, (len(x), self.count * self.height, *x.shape[2:]), x.dtype)
        if self.tile_index is not None:
            tiles = _tiles(x, self.tile)
            into = taken.view(len(x), -1, *tiles.shape[2:])
            torch.index_select(tiles, 1, self.tile_index, out=into)
        else:
            torch.index_select(x, 1, self.index, out=taken)
            if blank and self.missing is not None:
                taken.index_fill_(1, self.missing, 0.0)
        return to.arrange(taken.view(len(x), self.count, self.height, *x.shape[2:]))

    def rows_of(self, found: torch.Tensor, to: Arrangement) -> tuple[torch.Tensor, torch.Tensor]:
        """[batch, heads, height, …] -> the rows that there are [c, m, …], and which they are."""
        flat = to.back(found).flatten(1, 2)
        if self.missing is None:
            return flat, self.index
        return flat.index_select(1, self.present), self.index[self.present]

    def write(self, into: torch.Tensor, found: torch.Tensor, to: Arrangement) -> None:
        """Put [batch, heads, height, …] into the rows of [c, rows, …] that it stands for."""
        place = self.view(into, to)
        if place is not None:
            place.copy_(found)
            return
        rows, index = self.rows_of(found, to)
        into.index_copy_(1, index, rows.to(into.dtype))

    def add(self, into: torch.Tensor, found: torch.Tensor, to: Arrangement) -> None:
        """Add [batch, heads, height, …] to the rows of [c, rows, …]; no row stands twice."""
        place = self.view(into, to)
        if place is not None:
            place += found
            return
        rows, index = self.rows_of(found, to)
        into.index_add_(1, index, rows.to(into.dtype))

    @cached_property
    def _single(self) -> tuple[Blocks, ...] | None:
        """Every block by itself, where each is a view."""
        found = tuple(Blocks(rows[None]) for rows in self.rows)
        return found if all(block.lattice is not None for block in found) else None

    @cached_property
    def _columns(self) -> tuple[Blocks, ...] | None:
        """The first, second, … tile of all blocks, where no tile stands twice among them."""
        places = range(0, self.height, self.tile)
        if self.tile < TILE or len(places) > LIMITS.tiles_added:
            return None
        found = tuple(Blocks(self.rows[:, place : place + self.tile]) for place in places)
        return found if all(part.lattice is not None for part in found) else None

    def add_overlapping(self, into: torch.Tensor, found: torch.Tensor, to: Arrangement) -> None:
        """The same where several blocks may have one row."""
        size = self.tile
        if self.count == 1:
            self.add(into, found, to)
        elif self.count <= min(LIMITS.tiles_added, self.height // size) and self._single:
            each = to.back(found)
            for number, block in enumerate(self._single):
                block.add(into, each[:, number][None], side_by_side(block))
        elif self._columns is not None:
            for place, part in enumerate(self._columns):
                part.add(into, found[:, :, place * size : (place + 1) * size], to)
        elif self.tile_index is not None:
            found = to.back(found)
            tiles = found.reshape(len(found), -1, size, found.shape[-1])
            _tiles(into, size).index_add_(1, self.tile_index, tiles.to(into.dtype))
        else:
            # a view would add to rows that blocks have in common once
            rows, index = self.rows_of(found, to)
            into.index_add_(1, index, rows.to(into.dtype))


def _tiles(x: torch.Tensor, size: int) -> torch.Tensor:
    """[c, rows, …] as [c, tiles, size, …], without rows that make no whole tile."""
    return torch.unflatten(x[:, : x.shape[1] // size * size], 1, (-1, size))


def side_by_side(blocks: Blocks) -> Arrangement:
    """Blocks first, heads second: [blocks, c, …]."""
    return Arrangement(1, blocks.count, False)


def arrangement(q: Blocks, k: Blocks, heads: int) -> Arrangement:
    """How the blocks of queries and keys are arranged so that most of them are views."""
    for side in (q, k):
        found = side.lattice
        if heads == 1 and found is not None and found.many > 1:
            return Arrangement(found.many, found.each, found.inner > found.outer)
    return side_by_side(q)


class _Scratch(local):
    """Buffers of one thread: fresh memory costs more than what is computed in it."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, torch.dtype], torch.Tensor] = {}


_scratch = _Scratch()


def scratch(use: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor on the CPU, valid until the next one for the same use."""
    count = math.prod(shape)
    found = _scratch.kept.get((use, dtype))
    if found is None or found.numel() < count:
        # a buffer made in inference mode could not be written to outside of it
        with torch.inference_mode(False):
            found = torch.empty(count, dtype=dtype, device="cpu")
        if count <= LIMITS.buffer:
            _scratch.kept[use, dtype] = found
    return found[:count].view(shape)


class Order:
    """Rows of a tensor one behind the other, int64 [places], -1 for a place without a row; where it
    is `natural`, as they lie: then nothing is moved."""

    def __init__(self, rows: np.ndarray | None = None) -> None:
        self.natural = rows is None
        self.blocks = Blocks(np.zeros((1, 0), np.int64) if rows is None else rows[None])

    def __len__(self) -> int:
        return int(self.blocks.height)

    def take(self, x: torch.Tensor, use: str, blank: bool = False) -> torch.Tensor:
        """[c, rows, …] -> [c, places, …] in a buffer; a place without a row repeats the first row,
        or is zero with `blank`."""
        if self.natural:
            return x
        found = self.room(x, use)
        for part, into in zip(x.unbind(0), found.unbind(0), strict=True):
            torch.index_select(part, 0, self.blocks.index, out=into)
        if blank and self.blocks.missing is not None:
            found.index_fill_(1, self.blocks.missing, 0.0)
        return found

    def room(self, x: torch.Tensor, use: str) -> torch.Tensor:
        """A buffer [c, places, …] for what is put into x [c, rows, …]."""
        if self.natural:
            return x
        return scratch(use, (len(x), len(self), *x.shape[2:]), x.dtype)

    @cached_property
    def _back(self) -> torch.Tensor:
        """The place of every row, where every row has one: int64 [rows]."""
        index = self.blocks.index[self.blocks.present]
        return torch.empty_like(index).index_copy_(0, index, self.blocks.present)

    def put(self, into: torch.Tensor, found: torch.Tensor) -> None:
        """Put [c, places, …] where it belongs in [c, rows, …], if every row has a place."""
        if self.natural:
            return
        for target, part in zip(into.unbind(0), found.unbind(0), strict=True):
            torch.index_select(part, 0, self._back, out=target)

    def add(self, into: torch.Tensor, found: torch.Tensor) -> None:
        """Add [c, places, …] to the rows [c, rows, …] that it stands for."""
        index = self.blocks.index
        if self.blocks.missing is not None:
            found, index = found.index_select(1, self.blocks.present), index[self.blocks.present]
        for target, part in zip(into.unbind(0), found.unbind(0), strict=True):
            target.index_add_(0, index, part)


def gap_of(rows: Sequence[np.ndarray]) -> int:
    """The distance of most neighbours in blocks [blocks, height], 0 where there is none of most."""
    gaps = np.concatenate([np.zeros(0, np.int64), *(_gaps(each) for each in rows)])
    if not len(gaps):
        return 1
    gap = int(np.median(gaps))
    share = float((gaps == gap).mean())
    return gap if gap > 0 and share >= ALIKE else 0


def _gaps(rows: np.ndarray) -> np.ndarray:
    both = (rows[:, 1:] >= 0) & (rows[:, :-1] >= 0)
    return np.asarray(np.diff(rows, axis=1)[both])


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
    found = dict(zip(turns, np.split(rank[place.ravel()], ends), strict=True))
    parts = [found[turn].reshape(each.shape) for turn, each in enumerate(rows)]
    return flat[np.sort(first)], parts
