"""Relations that are drawn: tables of edges, made once for each n and kept for a while."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Protocol

import numpy as np

from attnspec.progressions import covered
from attnspec.relations import Edges, Elementwise, Relation, Tiles


class Drawing(Hashable, Protocol):
    """Whatever draws the edges of a graph of n nodes, the same each time."""

    def draw(self, n: int) -> Edges:
        """The edges (q, k) in any order, with or without repeats."""
        ...


@dataclass(frozen=True, eq=False)
class EdgeTable:
    """The edges of a graph of n nodes as ascending numbers q n + k."""

    n: int
    codes: np.ndarray

    def holds(self, q: Elementwise, k: Elementwise) -> Elementwise:
        code = q * self.n + k
        if len(self.codes) == 0:
            return code != code
        at = np.searchsorted(self.codes, code)
        return self.codes[np.minimum(at, len(self.codes) - 1)] == code

    def rows(self, first: int, last: int) -> Edges:
        low, high = np.searchsorted(self.codes, [first * self.n, max(first, last) * self.n])
        part = self.codes[low:high]
        return part // self.n, part % self.n

    def cover(self, q: Tiles, k: Tiles) -> np.ndarray:
        """Exact: the edges of each tile are counted."""
        q_start, q_last, k_start, k_count, size = np.broadcast_arrays(
            q.start, q.last, k.start, k.count, q.count * k.count
        )
        # keys in the order of their residues: what a tile of keys covers is then one range
        width = self.n // k.step + 1
        begin = (k_start % k.step * width + k_start // k.step).ravel()
        end = begin + k_count.ravel()
        tiles, member = np.unique(q_start * self.n + q_last, return_inverse=True)
        order = np.argsort(member, axis=None, kind="stable")
        bounds = np.searchsorted(member.ravel()[order], np.arange(len(tiles) + 1))
        found = np.empty(size.size, np.int64)
        for index, tile in enumerate(tiles):
            first, last = divmod(int(tile), self.n)
            rows, keys = self.rows(first, last + 1)
            keys = keys[(rows - first) % q.step == 0]
            places = np.sort(keys % k.step * width + keys // k.step)
            here = order[bounds[index] : bounds[index + 1]]
            ends = np.searchsorted(places, end[here])
            found[here] = ends - np.searchsorted(places, begin[here])
        count = found.reshape(size.shape)
        return covered(count == size, count > 0)


@lru_cache(maxsize=16)
def table_of(drawing: Drawing, n: int) -> EdgeTable:
    """The table of a drawing at n."""
    q, k = drawing.draw(n)
    return EdgeTable(n, np.unique(q * n + k))


class Drawn(Relation):
    """A relation whose edges are drawn position by position."""

    numpy_only: ClassVar = True
    exact_cover: ClassVar = True

    def draw(self, n: int) -> Edges:
        """The edges (q, k) of a sequence of n positions."""
        raise NotImplementedError

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return table_of(self, n).holds(q, k)

    def rows(self, first: int, last: int, n: int) -> Edges:
        return table_of(self, n).rows(first, last)

    def degrees(self, n: int) -> np.ndarray:
        q, _ = table_of(self, n).rows(0, n)
        return np.bincount(q, minlength=n)

    def edges(self, n: int) -> int:
        return len(table_of(self, n).codes)

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        return table_of(self, n).cover(q, k)
