"""Where the tiles of a step lie in memory, and how blocks of them are read and written in torch.

Tiles that follow one another, within residue classes and from class to class, are one strided view
and cost no copy. Others are gathered. Numbers of blocks are arranged as the flash kernel takes
them: [batch, heads, rows, size].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from threading import local

import numpy as np
import torch

from attnspec.layout.cutting import Side
from attnspec.layout.tile_layout import Places
from attnspec.limits import LIMITS


@dataclass(frozen=True, eq=False)
class Frame:
    """How the tiles of one side lie in a tensor.

    `rows` int64 [tiles, size] is the row of every place, 0 for a place behind a short tile; `real`
    is False there. `step` is the distance between the rows of every whole tile, 0 where there is no
    such distance. In `packed` frames tile t is the rows t * size, t * size + 1, … The rows are
    those of sequences of `length` positions each, one behind the other.
    """

    rows: np.ndarray
    real: np.ndarray
    step: int
    packed: bool
    length: int

    @property
    def size(self) -> int:
        return int(self.rows.shape[1])

    @cached_property
    def whole(self) -> np.ndarray:
        """Which tiles have all of their rows, bool [tiles]."""
        return np.asarray(self.real.all(axis=1))

    @cached_property
    def side(self) -> Side:
        """The positions of the tiles, each in its own sequence."""
        return Side(np.where(self.real, self.rows % self.length, -1))

    @cached_property
    def single(self) -> bool:
        """Whether there is but one sequence."""
        return bool(self.rows.max(initial=0) < self.length)

    @cached_property
    def runs(self) -> np.ndarray:
        """How many places of every tile, the first ones, are rows at the distance `step`: a short
        tile may have rows at another, those of another sequence for example."""
        other = self.rows[:, 1:] - self.rows[:, :-1] != self.step
        return np.asarray(np.argmax(np.pad(other, ((0, 0), (0, 1)), constant_values=True), 1) + 1)

    def below(self, n: int) -> Frame:
        """The first n positions of every sequence, in the same tiles."""
        at = self.side.positions
        real = self.real & (at < n)
        rows = np.where(real, self.rows // self.length * n + at, 0)
        return Frame(rows, real, self.step, self.packed and self.single, n)


def frame_of(axis: Places) -> Frame:
    """The tiles of a side where they lie among the positions from `axis.first` on."""
    places = (axis.positions - axis.first).reshape(axis.count, axis.size)
    real = axis.positions.reshape(axis.count, axis.size) >= 0
    rows = np.where(real, places, 0)
    step = 1 if axis.natural else _step(rows[real.all(axis=1)])
    return Frame(rows, real, step, axis.natural, axis.sequence)


def ordered_frame(frame: Frame) -> Frame:
    """The tiles of a frame after `Ordered` has put them one behind the other."""
    return packed_frame(*frame.rows.shape)


def packed_frame(tiles: int, size: int) -> Frame:
    """So many tiles of a size one behind the other."""
    rows = np.arange(tiles * size).reshape(tiles, size)
    return Frame(rows, np.ones(rows.shape, bool), 1, True, rows.size)


def _step(rows: np.ndarray) -> int:
    """The one distance between neighbours in every row, 0 if there is none."""
    if not rows.size:
        return 0
    if rows.shape[1] == 1:
        return 1
    gaps = np.diff(rows, axis=1)
    return int(gaps[0, 0]) if gaps[0, 0] > 0 and (gaps == gaps[0, 0]).all() else 0


@dataclass(frozen=True)
class Lattice:
    """Blocks whose first rows are `first + i * outer + j * inner`, i < `many`, j < `each`."""

    first: int
    many: int
    outer: int
    each: int
    inner: int

    def split(self, many: int, each: int) -> Lattice | None:
        """The same blocks as `many` times `each`, or None."""
        if (self.many, self.each) == (many, each):
            return self
        if self.many > 1 or self.each != many * each:
            return None
        return Lattice(self.first, many, each * self.inner, each, self.inner)


def lattice_of(starts: np.ndarray) -> Lattice | None:
    """The blocks with these first rows, all of them different, as a lattice; None if they are
    none."""
    first, count = int(starts[0]), len(starts)
    if count == 1:
        return Lattice(first, 1, 0, 1, 1)
    gaps = starts[1:] - starts[:-1]
    inner = int(gaps[0])
    other = np.flatnonzero(gaps != inner)
    if inner <= 0:
        return None
    if not len(other):
        return Lattice(first, 1, 0, count, inner)
    each = int(other[0]) + 1
    if count % each:
        return None
    table = starts.reshape(-1, each)
    outer = int(table[1, 0] - table[0, 0])
    wanted = first + outer * np.arange(len(table))[:, None] + inner * np.arange(each)
    if outer <= 0 or (table != wanted).any() or len(np.unique(starts)) < count:
        return None
    return Lattice(first, len(table), outer, each, inner)


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
    """Some blocks of tiles of one side: `tiles` int64 [blocks, tiles of a block], of which only the
    first `height` places count, and are rows, if that is given."""

    def __init__(self, frame: Frame, tiles: np.ndarray, height: int | None = None) -> None:
        self.frame, self.count = frame, len(tiles)
        self.cut = height is not None
        if height is None:
            height = tiles.shape[1] * frame.size
        self.tiles, self.height = tiles[:, : -(-height // frame.size)], height
        self.lattice = self._lattice()

    def _lattice(self) -> Lattice | None:
        frame, tiles = self.frame, self.tiles
        several = tiles.shape[1] - 1
        if not frame.step or not (self.cut or frame.whole[tiles].all()):
            return None
        if self.cut:
            runs = frame.runs[tiles]
            if (runs[:, several] < self.height - several * frame.size).any():
                return None
            if (runs[:, :several] < frame.size).any():
                return None
        starts = frame.rows[tiles, 0]
        if (starts[:, 1:] - starts[:, :-1] != frame.size * frame.step).any():
            return None
        return lattice_of(starts[:, 0])

    @cached_property
    def index(self) -> torch.Tensor:
        """The row of every place of every block, int64 [blocks * height]."""
        rows = self.frame.rows[self.tiles].reshape(self.count, -1)
        return torch.from_numpy(rows[:, : self.height].ravel())

    @cached_property
    def tile_index(self) -> torch.Tensor | None:
        """The tile of every block, if tiles can be taken whole: int64 [blocks * tiles]."""
        if self.frame.packed and not self.cut and self.frame.whole[self.tiles].all():
            return torch.from_numpy(self.tiles.ravel().copy())
        return None

    @cached_property
    def missing(self) -> torch.Tensor | None:
        """The places that are no rows, or None."""
        if self.cut:
            return None
        real = self.frame.real[self.tiles].ravel()
        return None if real.all() else torch.from_numpy(np.flatnonzero(~real))

    @cached_property
    def present(self) -> torch.Tensor:
        """The places that are rows."""
        return torch.from_numpy(np.flatnonzero(self.frame.real[self.tiles].ravel()))

    def view(self, x: torch.Tensor, to: Arrangement) -> torch.Tensor | None:
        """The blocks of x [c, rows, …] as a view [batch, heads, height, …], or None."""
        if self.lattice is None:
            return None
        found = self.lattice.split(to.many, to.each)
        if found is None or (found.many > 1 and len(x) > 1):
            return None
        row = x.stride(1)
        offset = x.storage_offset() + found.first * row
        rest, strides = (self.height, *x.shape[2:]), (self.frame.step * row, *x.stride()[2:])
        if to.many == 1:
            lead, steps = (found.each, len(x)), (found.inner * row, x.stride(0))
        else:
            lead, steps = (found.many, found.each), (found.outer * row, found.inner * row)
            if to.swapped:
                lead, steps = lead[::-1], steps[::-1]
        return x.as_strided((*lead, *rest), (*steps, *strides), offset)

    def read(self, x: torch.Tensor, to: Arrangement, use: str, blank: bool = False) -> torch.Tensor:
        """The blocks of x [c, rows, …] as [batch, heads, height, …], where they lie or in a buffer
        for the use; places that are no rows repeat the first row, or are zero with `blank`."""
        found = self.view(x, to)
        if found is not None:
            return found
        taken = scratch(use, (len(x), self.count * self.height, *x.shape[2:]), x.dtype)
        if self.tile_index is not None:
            size = self.frame.size
            tiles = whole_tiles(x, size)
            torch.index_select(
                tiles, 1, self.tile_index, out=taken.view(len(x), -1, *tiles.shape[2:])
            )
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
    def single(self) -> tuple[Blocks, ...] | None:
        """Every block by itself, where each is a view."""
        height = self.height if self.cut else None
        found = tuple(Blocks(self.frame, tiles[None], height) for tiles in self.tiles)
        return found if all(block.lattice is not None for block in found) else None

    @cached_property
    def columns(self) -> tuple[Blocks, ...] | None:
        """The first, second, … tile of all blocks, where no tile stands twice among them."""
        if self.cut or self.tiles.shape[1] > LIMITS.tiles_added:
            return None
        places = range(self.tiles.shape[1])
        found = tuple(Blocks(self.frame, self.tiles[:, [place]]) for place in places)
        return found if all(part.lattice is not None for part in found) else None

    def add_overlapping(self, into: torch.Tensor, found: torch.Tensor, to: Arrangement) -> None:
        """The same where several blocks may have one tile."""
        size = self.frame.size
        if self.count <= min(LIMITS.tiles_added, self.tiles.shape[1]) and self.single is not None:
            each = to.back(found)
            for number, block in enumerate(self.single):
                block.add(into, each[:, number][None], side_by_side(block))
        elif self.columns is not None:
            for place, part in enumerate(self.columns):
                part.add(into, found[:, :, place * size : (place + 1) * size], to)
        elif self.tile_index is not None:
            found = to.back(found)
            tiles = found.reshape(len(found), -1, size, found.shape[-1])
            whole_tiles(into, size).index_add_(1, self.tile_index, tiles.to(into.dtype))
        elif self.cut and self.count > 1:
            # a view would add to rows that blocks have in common once
            rows, index = self.rows_of(found, to)
            into.index_add_(1, index, rows.to(into.dtype))
        else:
            self.add(into, found, to)


def whole_tiles(x: torch.Tensor, size: int) -> torch.Tensor:
    """[c, rows, …] as [c, tiles, size, …], without rows that make no whole tile."""
    count = x.shape[1] // size
    return x[:, : count * size].view(len(x), count, size, *x.shape[2:])


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


class Ordered:
    """Puts rows in the order of a frame's tiles, and gradients back; those of the first n positions
    alone, if that is given."""

    def __init__(self, frame: Frame, n: int | None = None) -> None:
        self._given, self._n = frame, n

    def below(self, n: int) -> Ordered:
        """The same of the first n positions alone."""
        return Ordered(self._given, n)

    @cached_property
    def _frame(self) -> Frame:
        return self._given if self._n is None else self._given.below(self._n)

    @cached_property
    def index(self) -> torch.Tensor:
        """The row of every place, int64 [tiles * size]."""
        return torch.from_numpy(self._frame.rows.ravel())

    @cached_property
    def present(self) -> torch.Tensor | None:
        """The places that are rows; None where all are."""
        real = self._frame.real.ravel()
        return None if real.all() else torch.from_numpy(np.flatnonzero(real))

    @cached_property
    def missing(self) -> torch.Tensor | None:
        """The places that are no rows, or None."""
        real = self._frame.real.ravel()
        return None if real.all() else torch.from_numpy(np.flatnonzero(~real))

    def take(self, x: torch.Tensor, use: str, blank: bool = False) -> torch.Tensor:
        """[c, rows, …] -> [c, tiles * size, …] in a buffer; a place that is no row repeats the
        first, or is zero with `blank`."""
        found = scratch(use, (len(x), len(self.index), *x.shape[2:]), x.dtype)
        for part, into in zip(x.unbind(0), found.unbind(0), strict=True):
            torch.index_select(part, 0, self.index, out=into)
        if blank and self.missing is not None:
            found.index_fill_(1, self.missing, 0.0)
        return found

    @cached_property
    def back(self) -> torch.Tensor:
        """The place of every row, where every row has one: int64 [rows]."""
        index = self.index if self.present is None else self.index[self.present]
        places = self.present
        if places is None:
            places = torch.arange(len(self.index), device=self.index.device)
        return torch.empty_like(index).index_copy_(0, index, places)

    def put(self, into: torch.Tensor, found: torch.Tensor) -> None:
        """Put [c, tiles * size, …] where it belongs in [c, rows, …], if every row has a place."""
        for target, part in zip(into.unbind(0), found.unbind(0), strict=True):
            torch.index_select(part, 0, self.back, out=target)

    def add(self, into: torch.Tensor, found: torch.Tensor) -> None:
        """Add [c, tiles * size, …] to the rows [c, rows, …] that it stands for."""
        index = self.index
        if self.present is not None:
            found, index = found.index_select(1, self.present), index[self.present]
        for target, part in zip(into.unbind(0), found.unbind(0), strict=True):
            target.index_add_(0, index, part)


@dataclass(frozen=True, eq=False)
class Read:
    """One side of a step as it is read: where it lies, or in order."""

    frame: Frame
    ordered: Ordered | None

    def below(self, n: int) -> Read:
        """The same of the first n positions of one sequence."""
        return self if self.ordered is None else Read(self.frame, self.ordered.below(n))

    def take(self, x: torch.Tensor, use: str, blank: bool = False) -> torch.Tensor:
        """[c, positions, …] as the frame has it; with `blank` zero where there is no position."""
        return x if self.ordered is None else self.ordered.take(x, use, blank)

    def room(self, x: torch.Tensor, use: str) -> torch.Tensor:
        """Where results for the positions of x [c, positions, …] are put: x, or a buffer."""
        if self.ordered is None:
            return x
        return scratch(use, (len(x), len(self.ordered.index), *x.shape[2:]), x.dtype)

    def put(self, into: torch.Tensor, found: torch.Tensor) -> None:
        """Bring what was put there to the positions [c, positions, …]."""
        if self.ordered is not None:
            self.ordered.put(into, found)
