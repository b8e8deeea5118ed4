"""Summary columns: the last c cells of every stride, k mod s >= s - c.

Edges, with c <= s: n ((n // s) c + max(0, n mod s - (s - c))).
Source: Child, Gray, Radford, Sutskever 2019, "Generating Long Sequences with Sparse Transformers",
section 4.3 (the second head of the fixed pattern).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.graphs.patterns.where import Where
from attnspec.graphs.relation import Elementwise, Relation, Tiles, covered
from attnspec.graphs.token_sets import OfKeys, Runs, TokenSet
from attnspec.ir.parameters import argument
from attnspec.ir.scalars import Apply, Symbol


@dataclass(frozen=True)
class StrideEnds(TokenSet):
    """The last `cells` positions of every stride."""

    stride: int
    cells: int

    @property
    def first(self) -> int:
        """The place in a stride from which on positions are in the set."""
        return max(0, self.stride - self.cells)

    def contains(self, i: Elementwise, n: int) -> Elementwise:
        return i % self.stride >= self.first

    def size(self, n: int) -> int:
        return n // self.stride * (self.stride - self.first) + max(0, n % self.stride - self.first)

    def runs(self, n: int) -> Runs:
        start = np.arange(self.first, n, self.stride)
        return start, np.minimum(start + self.stride - self.first, n), 1

    def progressions(self, n: int) -> Runs:
        """The end of each stride, or a comb for each of its cells: whichever are fewer."""
        ends = -((self.first - n) // self.stride)
        if self.stride - self.first <= ends:
            places = np.arange(self.first, self.stride)
            return places, np.full(len(places), n), self.stride
        return self.runs(n)

    def phase(self, tiles: Tiles, n: int) -> np.ndarray:
        return np.asarray(tiles.start % self.stride)

    def cover(self, tiles: Tiles, n: int) -> np.ndarray:
        place = tiles.start % self.stride
        if tiles.step % self.stride == 0:
            return covered(place >= self.first, place >= self.first)
        if tiles.step > 1:
            return TokenSet.cover(self, tiles, n)
        ends = place + tiles.last - tiles.start
        full = (place >= self.first) & (ends < self.stride)
        return covered(full | (self.first == 0), ends >= self.first)


@dataclass(frozen=True)
class Summary(OfKeys):
    """The keys at the end of every stride, for every query."""

    stride: int = argument("integer", "positions from one summary to the next", least=1)
    cells: int = argument("integer", "summary positions at the end of each stride", least=1)

    name: ClassVar = "summary"

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return (q == q) & (k % self.stride >= self.stride - self.cells)

    def keys(self) -> TokenSet:
        return StrideEnds(self.stride, self.cells)

    def strides(self, n: int) -> tuple[tuple[int, int], ...]:
        return ((1, self.stride),)

    def transposed(self) -> Relation:
        place = Apply("%", (Symbol("q"), self.stride))
        return Where(Apply(">=", (place, self.stride - self.cells)))
