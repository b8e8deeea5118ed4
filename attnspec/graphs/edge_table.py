"""Relations that are drawn: tables of edges, made once for each n and kept for a while."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, Protocol

import numpy as np

from attnspec.graphs.relation import SOME, Edges, Elementwise, Relation, Tiles, covered
from attnspec.limits import LIMITS

_MANY = 64
"""Edges that are expected in a tile from which on there surely is one."""

_EDGES = 4
"""Edges for each pair of tiles up to which every edge is put into its tile."""

FEW = 64
"""A range of rows that is this much shorter than the sequence is drawn by itself."""


class Drawing(Hashable, Protocol):
    """Whatever draws the edges of a graph of n nodes, the same each time."""

    def draw(self, n: int) -> np.ndarray:
        """The keys of each node in any order, repeats or not, int32 [n, m]; -1 is for no key."""
        ...


@dataclass(frozen=True, eq=False)
class _Tiled:
    """Disjoint tiles by their places in the order of residues, `width` places for each residue:
    tile i is `begin[i]` to `end[i]`. `number` says which tiles were asked for."""

    step: int
    width: int
    begin: np.ndarray
    end: np.ndarray
    number: np.ndarray

    def of(self, position: np.ndarray) -> np.ndarray:
        """The number of the tile of each position, that of no tile where it is in none."""
        place = position % self.step * self.width + position // self.step
        tile = np.searchsorted(self.begin, place, side="right") - 1
        return np.where((tile >= 0) & (place <= self.end[tile]), tile, len(self.begin))


@dataclass(frozen=True, eq=False)
class EdgeTable:
    """The edges of n nodes: row q has the keys `keys[starts[q]:starts[q + 1]]`, int32, rising."""

    n: int
    starts: np.ndarray
    keys: np.ndarray

    @cached_property
    def codes(self) -> np.ndarray:
        """The edges as ascending numbers q n + k."""
        return np.asarray(np.repeat(np.arange(self.n) * self.n, np.diff(self.starts)) + self.keys)

    def holds(self, q: Elementwise, k: Elementwise) -> Elementwise:
        code = q * self.n + k
        if len(self.codes) == 0:
            return code != code
        at = np.searchsorted(self.codes, code)
        return self.codes[np.minimum(at, len(self.codes) - 1)] == code

    def listed(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """The number of keys of each node first <= q < last, and these keys one after the other."""
        starts = self.starts[first : last + 1]
        return np.diff(starts), self.keys[starts[0] : starts[-1]]

    def rows(self, first: int, last: int) -> Edges:
        starts = self.starts[first : max(first, last) + 1]
        keys = self.keys[starts[0] : starts[-1]].astype(np.int64)
        return np.repeat(np.arange(first, first + len(starts) - 1), np.diff(starts)), keys

    def cover(self, q: Tiles, k: Tiles) -> np.ndarray:
        """Exact: the edges of each tile are counted."""
        count = self._sorted_out(q, k)
        if count is not None:
            return covered(count == q.count * k.count, count > 0)
        q_start, q_last, k_start, k_count, size = np.broadcast_arrays(
            q.start, q.last, k.start, k.count, q.count * k.count
        )
        tiles, member = np.unique(q_start * self.n + q_last, return_inverse=True)
        high = int(np.max((q_last - q_start) // q.step, initial=0)) + 1
        if k.step == 1 and high * size.size <= LIMITS.lookups * len(tiles):
            count = self._counted(q_start, q_last, q.step, k_start, k_count, high)
            return covered(count == size, count > 0)
        # keys in the order of their residues: what a tile of keys covers is then one range
        width = self.n // k.step + 1
        begin = (k_start % k.step * width + k_start // k.step).ravel()
        end = begin + k_count.ravel()
        order = np.argsort(member, axis=None, kind="stable")
        bounds = np.searchsorted(member.ravel()[order], np.arange(len(tiles) + 1))
        counts = np.empty(size.size, np.int64)
        for index, tile in enumerate(tiles):
            first, last = divmod(int(tile), self.n)
            rows, keys = self.rows(first, last + 1)
            keys = keys[(rows - first) % q.step == 0]
            places = np.sort(keys % k.step * width + keys // k.step)
            here = order[bounds[index] : bounds[index + 1]]
            ends = np.searchsorted(places, end[here])
            counts[here] = ends - np.searchsorted(places, begin[here])
        count = counts.reshape(size.shape)
        return covered(count == size, count > 0)

    def _sorted_out(self, q: Tiles, k: Tiles) -> np.ndarray | None:
        """The edges in tiles, each edge put into its own; None where there are more edges than
        pairs of tiles, or tiles overlap."""
        shape = np.broadcast_shapes(q.start.shape, k.start.shape)
        if not math.prod(shape):
            return np.zeros(shape, np.int64)
        first, last = int(q.start.min()), int(q.last.max()) + 1
        if self.starts[last] - self.starts[first] > _EDGES * math.prod(shape):
            return None
        rows, columns = self._tiled(q), self._tiled(k)
        if rows is None or columns is None:
            return None
        queries, keys = self.rows(first, last)
        code = rows.of(queries) * (len(columns.begin) + 1) + columns.of(keys)
        codes, counts = np.unique(code, return_counts=True)
        asked = rows.number * (len(columns.begin) + 1) + columns.number
        at = np.minimum(np.searchsorted(codes, asked), max(0, len(codes) - 1))
        if not len(codes):
            return np.zeros(shape, np.int64)
        return np.where(codes[at] == asked, counts[at], 0)

    def _tiled(self, tiles: Tiles) -> _Tiled | None:
        """The distinct tiles of one side; None where two of them overlap."""
        width = self.n // tiles.step + 1
        first, last = (
            at % tiles.step * width + at // tiles.step for at in (tiles.start, tiles.last)
        )
        code, number = np.unique(first * (width * tiles.step) + last, return_inverse=True)
        begin, end = np.divmod(code, width * tiles.step)
        if (begin[1:] <= end[:-1]).any():
            return None
        return _Tiled(tiles.step, width, begin, end, number.reshape(first.shape))

    def _counted(
        self,
        q_start: np.ndarray,
        q_last: np.ndarray,
        step: int,
        k_start: np.ndarray,
        k_count: np.ndarray,
        high: int,
    ) -> np.ndarray:
        """The edges in tiles of at most `high` queries and of consecutive keys, row by row."""
        counts = np.zeros(q_start.shape, np.int64)
        for row in range(high):
            q = q_start + row * step
            code = q * self.n + k_start
            ends = np.searchsorted(self.codes, code + k_count)
            counts += np.where(q <= q_last, ends - np.searchsorted(self.codes, code), 0)
        return counts


def table_from(drawn: np.ndarray) -> EdgeTable:
    """The table of keys [n, m] in any order; sorts them in place."""
    degrees = np.full(len(drawn), drawn.shape[1])
    parts = [np.zeros(0, np.int32)]
    for first in range(0, len(drawn), LIMITS.rows_drawn):
        part = drawn[first : first + LIMITS.rows_drawn]
        if (part[:, 1:] < part[:, :-1]).any():
            part.sort(axis=1)
        kept = part >= 0
        kept[:, 1:] &= part[:, 1:] != part[:, :-1]
        if not kept.all():
            degrees[first : first + LIMITS.rows_drawn] = kept.sum(axis=1)
            part = part[kept]
        parts.append(part.ravel())
    starts = np.concatenate([[0], np.cumsum(degrees)])
    return EdgeTable(len(drawn), starts, np.concatenate(parts))


@lru_cache(maxsize=16)
def table_of(drawing: Drawing, n: int) -> EdgeTable:
    """The table of a drawing at n."""
    return table_from(drawing.draw(n))


class Drawn(Relation):
    """A relation whose edges are drawn position by position."""

    numpy_only: ClassVar = True
    scattered: ClassVar = True

    def draw(self, n: int) -> np.ndarray:
        """The keys of each of n positions, as a `Drawing` has them."""
        raise NotImplementedError

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return table_of(self, n).holds(q, k)

    def rows(self, first: int, last: int, n: int) -> Edges:
        return table_of(self, n).rows(first, last)

    def edges(self, n: int) -> int:
        return len(table_of(self, n).keys)

    def even_share(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        """The least share of a tile's pairs that are edges as often as elsewhere, for each pair of
        tiles; 0 where nothing is known."""
        return np.ones(np.broadcast_shapes(q.start.shape, k.start.shape))

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        """Exact, as sure as can be: tiles in which many edges are expected are not examined."""
        density = self.typical_degree(n) / max(1, n)
        expected = self.even_share(q, k, n) * q.count * k.count * density
        sure = (expected > _MANY) & (density < 0.5)
        if sure.all():
            return np.full(sure.shape, SOME, np.uint8)
        counts = table_of(self, n).cover(q, k)
        return np.where(sure, SOME, counts).astype(np.uint8)
