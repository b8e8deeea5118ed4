"""Positions that are cells of a grid, row-major, behind tokens that are not."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from attnspec.graphs.relation import FULL, Elementwise, Tiles, covered
from attnspec.ir.parameters import RelationError

AXES = {2: ("row", "col"), 3: ("time", "row", "col")}
"""The names of a grid's coordinates by its rank, slowest first."""


@dataclass(frozen=True)
class Grid:
    """Cells of the given extents at positions offset, offset + 1, …"""

    extents: tuple[int, ...]
    offset: int = 0

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the coordinates."""
        return AXES[len(self.extents)]

    @property
    def cells(self) -> int:
        return prod(self.extents)

    @property
    def strides(self) -> tuple[int, ...]:
        """The distance in cells from one coordinate to the next, for each axis."""
        return tuple(prod(self.extents[axis + 1 :]) for axis in range(len(self.extents)))

    def inside(self, position: Elementwise) -> Elementwise:
        """Whether a position is a cell."""
        return (position >= self.offset) & (position < self.offset + self.cells)

    def coordinates(self, position: Elementwise) -> list[Elementwise]:
        """The coordinates of each position; those of the first cell where it is not a cell."""
        cell = self.cell(position)
        return [self.coordinate(cell, axis) for axis in range(len(self.extents))]

    def cell(self, position: Elementwise) -> Elementwise:
        """The number of the cell at each position, 0 where there is none."""
        return (position - self.offset) * self.inside(position)

    def coordinate(self, cell: Elementwise, axis: int) -> Elementwise:
        """One of the coordinates of each cell, without a division that changes nothing: lists of
        pairs are long."""
        stride = self.strides[axis]
        at = cell if stride == 1 else cell // stride
        return at if axis == 0 else at % self.extents[axis]

    def position(self, coordinates: list[np.ndarray]) -> np.ndarray:
        """The position of the cell with these coordinates."""
        pairs = zip(coordinates, self.strides, strict=True)
        return np.asarray(self.offset + sum(at * stride for at, stride in pairs))

    def cover(self, tiles: Tiles) -> np.ndarray:
        """Whether all, some or none of a tile's positions are cells."""
        if isinstance(tiles, Boxes) and tiles.grid == self:
            return np.full(tiles.start.shape, FULL, np.uint8)
        end = self.offset + self.cells
        full = (tiles.start >= self.offset) & (tiles.last < end)
        return covered(full, (tiles.last >= self.offset) & (tiles.start < end))

    def ranges(self, tiles: Tiles) -> list[tuple[np.ndarray, np.ndarray]]:
        """The least and the greatest coordinate that a tile's cells can have, for each axis."""
        if isinstance(tiles, Boxes) and tiles.grid == self:
            return list(zip(tiles.low, tiles.high, strict=True))
        first = np.clip(tiles.start - self.offset, 0, self.cells - 1)
        last = np.clip(tiles.last - self.offset, 0, self.cells - 1)
        answer = []
        for stride, extent in zip(self.strides, self.extents, strict=True):
            turns = first // (stride * extent) != last // (stride * extent)
            low = np.where(turns, 0, first // stride % extent)
            answer.append((low, np.where(turns, extent - 1, last // stride % extent)))
        return answer


@dataclass(frozen=True, kw_only=True)
class Boxes(Tiles):
    """Boxes of cells: all whose coordinate on each axis is `low` at least and `high` at most.

    As tiles they are their spans: what is known of a span is true of the cells in it.
    """

    grid: Grid
    low: tuple[np.ndarray, ...]
    high: tuple[np.ndarray, ...]

    @property
    def count(self) -> np.ndarray:
        return np.asarray(prod(self.shape))

    @property
    def shape(self) -> list[np.ndarray]:
        return [high - low + 1 for low, high in zip(self.low, self.high, strict=True)]

    def take(self, index: np.ndarray) -> Boxes:
        low, high = (tuple(at[index] for at in side) for side in (self.low, self.high))
        return boxes_of(self.grid, low, high)


def boxes_of(grid: Grid, low: tuple[np.ndarray, ...], high: tuple[np.ndarray, ...]) -> Boxes:
    """The boxes with these least and greatest coordinates."""
    start, last = grid.position(list(low)), grid.position(list(high))
    return Boxes(start, last + 1, grid=grid, low=low, high=high)


def grid_for(pattern: str, extents: tuple[int, ...], offset: int) -> Grid:
    """The grid a pattern stands on; raises RelationError where there is none."""
    if len(extents) not in AXES:
        raise RelationError(f"`{pattern}` needs `sequence grid(H, W)` or `sequence grid(T, H, W)`")
    if min(extents) < 1:
        raise RelationError(f"`{pattern}` needs a grid of extents at least 1, got {extents}")
    return Grid(extents, offset)
