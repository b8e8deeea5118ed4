"""One side of the tiles of a step: positions in an order, cut into tiles.

Residue classes, one after the other, are cut into arithmetic progressions; lists into parts; grids
into boxes, along a Z-order curve, so that boxes that are near have near numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from attnspec.graphs.grid import Boxes, Grid, boxes_of
from attnspec.graphs.relation import Spans, Tiles, in_runs
from attnspec.layout.orders import Boxed, Listed, Side


@dataclass(frozen=True, eq=False)
class Axis:
    """One side of a step: the positions first <= p < last, class by class, in tiles.

    `offsets[c]:offsets[c + 1]` are the tiles of class c, whose positions are first + c modulo the
    step. The tiles of a list are the spans of its positions. `codes` are the numbers of boxes along
    the curve, ascending.
    """

    first: int
    last: int
    side: Side
    size: int
    tiles: Tiles
    offsets: np.ndarray
    codes: np.ndarray | None = None

    @property
    def count(self) -> int:
        """The number of tiles."""
        return int(self.offsets[-1])

    @cached_property
    def positions(self) -> np.ndarray:
        """The position of every place of every tile, int64 [count, size]; -1 beyond short ones."""
        if isinstance(self.side, Listed):
            positions = np.full(self.count * self.size, -1, np.int64)
            chosen = _listed_in(self.side, self.first, self.last)
            positions[: len(chosen)] = chosen
            return positions.reshape(-1, self.size)
        if isinstance(self.tiles, Boxes):
            return _cells_of(self.tiles, self.first, self.last, self.size)
        at = self.tiles.start[:, None] + np.arange(self.size) * self.tiles.step
        return np.where(at < self.tiles.stop[:, None], at, -1)

    def ranked(self, index: np.ndarray) -> np.ndarray:
        """Numbers in whose order tiles are read: tiles of boxes line by line, so that a pattern
        that moves with the query reads them in the same order everywhere."""
        if self.codes is None:
            return index
        return np.asarray(np.argsort(np.argsort(self.tiles.start))[index])

    def inside(self, below: Axis, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first of the finer tiles in each of these tiles, and the one behind the last."""
        factor = self.size // below.size
        if self.codes is not None and below.codes is not None:
            low = self.codes[index] * factor
            return np.searchsorted(below.codes, low), np.searchsorted(below.codes, low + factor)
        group = np.searchsorted(self.offsets, index, "right") - 1
        first = below.offsets[group] + (index - self.offsets[group]) * factor
        return first, np.minimum(first + factor, below.offsets[group + 1])


@lru_cache(maxsize=64)
def axis(first: int, last: int, side: Side, size: int) -> Axis:
    """The tiles of a range of positions, grouped by residue, or of those that are listed."""
    if isinstance(side, Listed):
        chosen = _listed_in(side, first, last)
        count = -(-len(chosen) // size)
        lists = chosen[np.minimum(np.arange(count * size), len(chosen) - 1)].reshape(-1, size)
        ends, which = (lists.min(1), lists.max(1) + 1), np.arange(count)
        tiles = Spans(*ends, lists=lists, which=which)
        return Axis(first, last, side, size, tiles, np.array([0, count]))
    if isinstance(side, Boxed):
        return _boxed(first, last, side, size)
    starts = np.arange(first, min(last, first + side), dtype=np.int64)
    counts = -(-(last - starts) // (size * side))
    offsets = np.append(0, np.cumsum(counts))
    begin = np.repeat(starts, counts) + in_runs(0, counts) * size * side
    end = np.minimum(begin + size * side, last)
    return Axis(first, last, side, size, Tiles(begin, end, side), offsets)


def _listed_in(side: Listed, first: int, last: int) -> np.ndarray:
    return side.positions[(side.positions >= first) & (side.positions < last)]


def _boxed(first: int, last: int, side: Boxed, size: int) -> Axis:
    """The cells of a grid in boxes; coarse ones are whole ones of the next finer size, their sides
    doubled one by one, the last first."""
    box, rank = list(side.box), len(side.box)
    doubled = (size // side.size).bit_length() - 1
    for step in range(doubled):
        box[rank - 1 - step % rank] *= 2
    extents, sides = np.array([side.extents, box])[:, :, None]
    places = np.indices(tuple(-(-extents // sides).ravel())).reshape(rank, -1)
    codes = _interleaved(places, doubled)
    order = np.argsort(codes)
    low = places[:, order] * sides
    high = np.minimum(low + sides, extents) - 1
    tiles = boxes_of(Grid(side.extents, side.offset), tuple(low), tuple(high))
    return Axis(first, last, side, size, tiles, np.array([0, len(order)]), codes[order])


def _interleaved(places: np.ndarray, doubled: int) -> np.ndarray:
    """The numbers of boxes along the curve: the bits of their coordinates in turns, from the axis
    on that is doubled next."""
    rank = len(places)
    code = np.zeros(places.shape[1], np.int64)
    for bit in range(int(places.max(initial=0)).bit_length() * rank):
        at = places[rank - 1 - (doubled + bit) % rank]
        code |= ((at >> (bit // rank)) & 1) << bit
    return code


def _cells_of(boxes: Boxes, first: int, last: int, size: int) -> np.ndarray:
    """The positions of every box, those that there are first: int64 [boxes, size]."""
    found = np.full((len(boxes.start), size), -1, np.int64)
    shapes = np.stack(boxes.shape)
    for shape in np.unique(shapes, axis=1).T:
        chosen = np.flatnonzero((shapes == shape[:, None]).all(axis=0))
        inside = np.indices(tuple(shape)).reshape(len(shape), -1)
        cells = [low[chosen][:, None] + at for low, at in zip(boxes.low, inside, strict=True)]
        found[chosen, : inside.shape[1]] = boxes.grid.position(cells)
    missing = (found < first) | (found >= last)
    found[missing] = -1
    order = np.argsort(missing, axis=1, kind="stable")
    return np.take_along_axis(found, order, axis=1)
