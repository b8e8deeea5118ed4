"""Summary columns: the last c cells of every stride, k mod s >= s - c.

Edges, with c <= s: n ((n // s) c + max(0, n mod s - (s - c))).
Source: Child, Gray, Radford, Sutskever 2019, "Generating Long Sequences with Sparse Transformers",
section 4.3 (the second head of the fixed pattern).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.graphs.patterns.where import Where
from attnspec.graphs.relation import Elementwise, Progressions, Relation, Tiles
from attnspec.graphs.tile_cover import covered
from attnspec.ir.parameters import argument
from attnspec.ir.scalars import Apply, Symbol


@dataclass(frozen=True)
class Summary(Relation):
    """The keys at the end of every stride, for every query."""

    stride: int = argument("integer", "positions from one summary to the next", least=1)
    cells: int = argument("integer", "summary positions at the end of each stride", least=1)

    name: ClassVar = "summary"
    sides: ClassVar = "k"
    exact_cover: ClassVar = True

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return (q == q) & (k % self.stride >= self.stride - self.cells)

    def progressions(self, q: np.ndarray, n: int) -> Progressions:
        start, stop, step = summary_progressions(n, self.stride, self.cells)
        shape = (len(q), len(start))
        return np.broadcast_to(start, shape), np.broadcast_to(stop, shape), step

    def edges(self, n: int) -> int:
        return n * summaries(n, self.stride, self.cells)

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        return [k.start % self.stride + 0 * q.start]

    def strides(self, n: int) -> tuple[tuple[int, int], ...]:
        return ((1, self.stride),)

    def listing(self, n: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        position = np.arange(n)
        return None, position[position % self.stride >= self.stride - self.cells]

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        answer = summary_cover(k, self.stride, self.cells)
        return np.broadcast_to(answer, np.broadcast_shapes(q.start.shape, k.start.shape))

    def transposed(self) -> Relation:
        place = Apply("%", (Symbol("q"), self.stride))
        return Where(Apply(">=", (place, self.stride - self.cells)))

    @classmethod
    def samples(cls) -> Iterator[Summary]:
        for stride, cells in ((1, 1), (4, 1), (5, 2), (8, 8), (16, 3), (3, 100), (1000, 900)):
            yield cls(stride, cells)


def summaries(n: int, stride: int, cells: int) -> int:
    """How many of the first n positions are summaries."""
    cells = min(cells, stride)
    return n // stride * cells + max(0, n % stride - (stride - cells))


def summary_progressions(n: int, stride: int, cells: int) -> tuple[np.ndarray, np.ndarray, int]:
    """The summaries as the end of each stride, or as a comb for each cell: whichever are fewer."""
    cells = min(cells, stride)
    if cells <= n // stride + 1:
        places = np.arange(stride - cells, min(stride, n))
        return places, np.full(len(places), n), stride
    start = np.arange(stride - cells, n, stride)
    return start, np.minimum(start + cells, n), 1


def summary_cover(k: Tiles, stride: int, cells: int) -> np.ndarray:
    """The cover of the keys alone; exact for tiles of consecutive keys."""
    cells = min(cells, stride)
    if k.step == 1:
        place = k.start % stride
        ends = place + k.last - k.start
        full = (place >= stride - cells) & (ends < stride)
        return covered(full | (cells == stride), ends >= stride - cells)
    if k.step % stride == 0:
        held = k.start % stride >= stride - cells
        return covered(held, held)
    return covered(np.full(k.start.shape, cells == stride), np.full(k.start.shape, True))
