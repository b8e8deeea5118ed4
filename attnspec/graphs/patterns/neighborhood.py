"""Neighbourhoods on a grid: the odd-sized box around the query, shifted inside at the borders.

Per axis, with half = extent // 2: the keys from clamp(q - half) on, as many as the box is long, so
that every query has the same number of keys. A box longer than an axis is the whole axis.
Edges: cells times the product of min(box, axis) over the axes.
Source: Hassani et al. 2023, "Neighborhood Attention Transformer", section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import ClassVar

import numpy as np

from attnspec.graphs.grid import Boxes, Grid, grid_for
from attnspec.graphs.relation import Changing, Elementwise, Progressions, Relation, Tiles, covered
from attnspec.ir.parameters import RelationError, argument, context


@dataclass(frozen=True)
class Neighborhood(Relation):
    """The cells of the box around the query's cell; extra tokens take no part."""

    extents: tuple[int, ...] = argument(
        "extents", "length of the box of keys along its axis", least=1, odd=True, positional=True
    )
    shape: tuple[int, ...] = context("grid")
    extra_tokens: int = context("extra_tokens")

    name: ClassVar = "neighborhood"
    one_sequence: ClassVar = "needs positions on a grid"
    reads_itself: ClassVar = True
    needs_grid: ClassVar = True
    changes: ClassVar = Changing(
        "is moved inside at the ends of the grid", "give the grid extents that are numbers"
    )

    def __post_init__(self) -> None:
        grid = grid_for(self.name, self.shape, self.extra_tokens)
        if len(self.extents) != len(grid.extents):
            raise RelationError(
                f"`neighborhood` needs one extent for each of the grid's {len(grid.extents)} axes,"
                f" got {len(self.extents)}"
            )
        for extent in self.extents:
            if extent < 1 or extent % 2 == 0:
                raise RelationError(
                    f"`neighborhood` needs odd extents, got {extent}: for other boxes use `where`"
                )

    @property
    def grid(self) -> Grid:
        return Grid(self.shape, self.extra_tokens)

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        grid = self.grid
        mask = grid.inside(q) & grid.inside(k)
        axes = zip(grid.coordinates(q), grid.coordinates(k), self.extents, self.shape, strict=True)
        for at, key, box, length in axes:
            half = box // 2
            near = abs(at - key) <= half
            low = (at < half) & (key < box)
            high = (at > length - 1 - half) & (key >= length - box)
            mask = mask & (near | low | high)
        return mask

    def progressions(self, q: np.ndarray, n: int) -> Progressions:
        grid = self.grid
        # one range along the last axis for each line of the box
        boxes = [min(box, length) for box, length in zip(self.extents, self.shape, strict=True)]
        first = [
            _first(at, box, length)[:, None]
            for at, box, length in zip(grid.coordinates(q), boxes, self.shape, strict=True)
        ]
        lines = np.indices(boxes[:-1]).reshape(len(boxes) - 1, -1)
        places = [begin + line for begin, line in zip(first[:-1], lines, strict=True)]
        start = grid.position([*places, np.broadcast_to(first[-1], places[0].shape)])
        stop = np.minimum(start + boxes[-1], n)
        return start, np.where(grid.inside(q)[:, None], stop, start), 1

    def boxes(self) -> tuple[tuple[int, ...], int]:
        return self.shape, self.extra_tokens

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        if not (isinstance(q, Boxes) and isinstance(k, Boxes) and q.grid == k.grid == self.grid):
            return super().phase(q, k, n)
        parts = []
        for axis, (box, length) in enumerate(zip(self.extents, self.shape, strict=True)):
            low, high = q.low[axis], q.high[axis]
            size = min(box, length)
            # away from the borders the neighbourhood moves with the query
            inside = (low >= box // 2) & (high - box // 2 <= length - size)
            parts += [low - k.low[axis], np.where(inside, -1, low)]
        return parts

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        grid = self.grid
        kinds = [grid.cover(q), grid.cover(k)]
        for (q_low, q_high), (k_low, k_high), box, length in zip(
            grid.ranges(q), grid.ranges(k), self.extents, self.shape, strict=True
        ):
            size = min(box, length)
            least, most = _first(q_low, size, length), _first(q_high, size, length)
            full = (k_low >= most) & (k_high < least + size)
            kinds.append(covered(full, (k_high >= least) & (k_low < most + size)))
        return np.asarray(reduce(np.minimum, kinds))

    def edges(self, n: int) -> int:
        grid = self.grid
        if n < grid.offset + grid.cells:
            return Relation.edges(self, n)
        pairs = zip(self.extents, self.shape, strict=True)
        return grid.cells * prod(min(box, length) for box, length in pairs)


def _first(at: np.ndarray, box: int, length: int) -> np.ndarray:
    """Where the box of a coordinate begins on an axis that is at least as long."""
    return np.asarray(np.clip(at - box // 2, 0, length - box))
