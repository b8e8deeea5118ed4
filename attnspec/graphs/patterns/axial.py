"""Lines of a grid: at most one coordinate differs.

Edges of an H x W grid: H W (H + W - 1); of T x H x W: T H W (T + H + W - 2).
Source: Ho et al. 2019, "Axial Attention in Multidimensional Transformers", section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import ClassVar

import numpy as np

from attnspec.graphs.grid import Grid, grid_for
from attnspec.graphs.operators import Intersection
from attnspec.graphs.patterns.block import Block
from attnspec.graphs.patterns.residue import Residue
from attnspec.graphs.relation import Elementwise, Progressions, Relation, Tiles, covered
from attnspec.ir.parameters import context


@dataclass(frozen=True)
class Axial(Relation):
    """The cells on the lines through the query's cell; extra tokens take no part."""

    extents: tuple[int, ...] = context("grid")
    extra_tokens: int = context("extra_tokens")

    name: ClassVar = "axial"
    one_sequence: ClassVar = "needs positions on a grid"
    reads_itself: ClassVar = True
    symmetric: ClassVar = True
    needs_grid: ClassVar = True

    def __post_init__(self) -> None:
        grid_for(self.name, self.extents, self.extra_tokens)

    @property
    def grid(self) -> Grid:
        return Grid(self.extents, self.extra_tokens)

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        grid = self.grid
        pairs = zip(grid.coordinates(q), grid.coordinates(k), strict=True)
        same = [a == b for a, b in pairs]
        lines = [reduce(and_, same[:axis] + same[axis + 1 :]) for axis in range(len(same))]
        return grid.inside(q) & grid.inside(k) & reduce(or_, lines)

    def progressions(self, q: np.ndarray, n: int) -> Progressions:
        grid = self.grid
        # the line along the last axis is one range; the others leave the query out
        start: list[np.ndarray] = []
        stop: list[np.ndarray] = []
        step: list[int] = []
        for axis, (at, stride, extent) in enumerate(
            zip(grid.coordinates(q), grid.strides, grid.extents, strict=True)
        ):
            first, end = q - at * stride, q + (extent - 1 - at) * stride + 1
            if axis == len(grid.extents) - 1:
                start, stop, step = [*start, first], [*stop, end], [*step, stride]
            else:
                start, stop = [*start, first, q + stride], [*stop, q, end]
                step = [*step, stride, stride]
        ends = np.minimum(np.stack(stop, axis=1), n)
        starts = np.stack(start, axis=1)
        return starts, np.where(grid.inside(q)[:, None], ends, starts), np.array([step])

    def parts(self) -> tuple[Relation, ...] | None:
        grid = self.grid
        if grid.offset:
            return None
        # a line along an axis: equal residues modulo its stride, within one turn of the axis
        return tuple(
            Intersection((Residue(stride), Block(stride * extent)))
            for stride, extent in zip(grid.strides, grid.extents, strict=True)
        )

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        grid = self.grid
        same = []
        for (q_low, q_high), (k_low, k_high) in zip(grid.ranges(q), grid.ranges(k), strict=True):
            one = (q_low == k_high) & (q_high == k_low)
            same.append(covered(one, (q_low <= k_high) & (k_low <= q_high)))
        lines = [reduce(np.minimum, same[:axis] + same[axis + 1 :]) for axis in range(len(same))]
        cells = np.minimum(grid.cover(q), grid.cover(k))
        return np.asarray(np.minimum(reduce(np.maximum, lines), cells))

    def edges(self, n: int) -> int:
        grid = self.grid
        if n < grid.offset + grid.cells:
            return Relation.edges(self, n)
        return grid.cells * (sum(grid.extents) - len(grid.extents) + 1)
