"""Pairs between some queries and some keys of a long sequence, laid out as one short sequence.

The queries stand last, as in a call with a cache, the keys from position 0 on; positions before the
first query and behind the last key have no pairs. So every room below plans a part of a sequence
as it plans a whole one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from attnspec.graphs.operators import Complement, Intersection, Transpose, Union
from attnspec.graphs.progressions import shared_progressions
from attnspec.graphs.relation import (
    EMPTY,
    SOME,
    DataDependent,
    Elementwise,
    Progressions,
    Relation,
    Tiles,
    phase_of,
)
from attnspec.graphs.token_sets import reads_data
from attnspec.limits import LIMITS


@dataclass(frozen=True, eq=False)
class Numbering:
    """Positions in the order that tensors have, int64 [m], none twice, m > 0; equal by identity."""

    positions: np.ndarray

    def __len__(self) -> int:
        return len(self.positions)

    def at(self, index: Elementwise) -> Elementwise:
        """The positions of these numbers."""
        # a tensor takes tensors
        new = getattr(index, "new_tensor", np.asarray)
        return new(self.positions)[index]

    @cached_property
    def step(self) -> int:
        """The distance of most neighbours, 1 where that is none of a run."""
        apart, times = np.unique(np.diff(self.positions), return_counts=True)
        return max(1, int(apart[times.argmax()])) if len(apart) else 1

    @cached_property
    def run(self) -> np.ndarray:
        """The number of the run, of neighbours `step` apart, in which each stands."""
        return np.cumsum(
            np.diff(self.positions, prepend=self.positions[0] - self.step) != self.step
        )

    @cached_property
    def ascending(self) -> bool:
        return bool((np.diff(self.positions) > 0).all())

    @cached_property
    def runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Start and stop of each run, and how many positions stand before it."""
        first = np.flatnonzero(np.diff(self.run, prepend=-1))
        last = np.append(first[1:], len(self)) - 1
        return self.positions[first], self.positions[last] + 1, first

    def hull(self, low: np.ndarray, last: np.ndarray) -> Tiles:
        """Ranges that hold the positions numbered `low` to `last`, and others."""
        if self.ascending:
            return Tiles(self.positions[low], self.positions[last] + 1)
        least, most = int(self.positions.min()), int(self.positions.max())
        return Tiles(np.full_like(low, least), np.full_like(low, most + 1))


@dataclass(frozen=True)
class Gathered(Relation):
    """The pairs of a term of `length` positions between listed queries and keys; query i stands at
    position `first` + i, key j at j."""

    term: Relation
    length: int
    queries: Numbering
    keys: Numbering
    first: int

    name: ClassVar = "gathered"
    numpy_only: ClassVar = True

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        here, there = q >= self.first, k < len(self.keys)
        # positions outside are moved inside before the term sees them
        query, present = self.queries.at((q - self.first) * here), self.keys.at(k * there)
        return here & there & self.term.holds(query, present, self.length)

    def progressions(self, q: np.ndarray, n: int) -> Progressions | None:
        starts, stops, before = self.keys.runs
        single = len(starts) == 1
        if not (
            single or (len(starts) <= LIMITS.runs and self.keys.step == 1 and self.keys.ascending)
        ):
            return None
        real = q >= self.first
        rows = self.term.progressions(
            self.queries.positions[np.maximum(q - self.first, 0)], self.length
        )
        met = shared_progressions([rows, (starts[None], stops[None], self.keys.step)])
        if met is None:
            return None
        start, stop, step = np.broadcast_arrays(*met)
        some = (stop > start) & real[:, None]
        # an empty progression may begin anywhere
        at = np.maximum(np.searchsorted(starts, start, side="right") - 1, 0)
        each = self.keys.step
        low = np.where(some, before[at] + (start - starts[at]) // each, 0)
        high = np.where(some, before[at] - (starts[at] - stop) // each, 0)
        return low, high, np.where(some, step // each, 1)

    def parts(self) -> tuple[Relation, ...] | None:
        parts = self.term.parts()
        if parts is None:
            return None
        rest = self.length, self.queries, self.keys, self.first
        return tuple(Gathered(part, *rest) for part in parts)

    def strides(self, n: int) -> tuple[tuple[int, int], ...]:
        sides = self.queries.step, self.keys.step
        pairs = (
            tuple(step // np.gcd(step, side).item() for step, side in zip(pair, sides, strict=True))
            for pair in self.term.strides(self.length)
        )
        return tuple(dict.fromkeys((q, k) for q, k in pairs if max(q, k) > 1))

    def listing(self, n: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        q, k = self.term.listing(self.length)
        if q is not None:
            q = np.flatnonzero(np.isin(self.queries.positions, q)) + self.first
        return q, None if k is None else np.flatnonzero(np.isin(self.keys.positions, k))

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        (in_q, query), (in_k, present) = self._queries(q), self._keys(k)
        inside = in_q & in_k
        within = phase_of(self.term, query, present, self.length)
        outside = [np.where(inside, -1, tiles.start) for tiles in (q, k)]
        return [*(np.where(inside, part, 0) for part in within), *outside]

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        (in_q, query), (in_k, present) = self._queries(q), self._keys(k)
        none = (q.last < self.first) | (k.start >= len(self.keys))
        inside = in_q & in_k
        counts = self.term.cover(query, present, self.length)
        if not inside.all():
            # of positions that are not a run, what holds of a range around them
            sides = (q, self.queries, self.first), (k, self.keys, 0)
            ranges = [side.hull(*_ends(tiles, side, first)) for tiles, side, first in sides]
            about = self.term.cover(ranges[0], ranges[1], self.length)
            whole = (q.start >= self.first) & (k.last < len(self.keys))
            counts = np.where(inside, counts, np.where(whole | (about == EMPTY), about, SOME))
        return np.where(none, EMPTY, counts).astype(np.uint8)

    def _queries(self, tiles: Tiles) -> tuple[np.ndarray, Tiles]:
        return _moved(tiles, self.queries, self.first)

    def _keys(self, tiles: Tiles) -> tuple[np.ndarray, Tiles]:
        return _moved(tiles, self.keys, 0)


def _ends(tiles: Tiles, side: Numbering, first: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the first and the last of tiles that are on a side."""
    low, last = (np.clip(at - first, 0, len(side) - 1) for at in (tiles.start, tiles.last))
    return low, last


def _moved(tiles: Tiles, side: Numbering, first: int) -> tuple[np.ndarray, Tiles]:
    """Which tiles are in one run of a side, and where they stand in the long sequence; of others
    some tile of one position."""
    low, last = _ends(tiles, side, first)
    inside = (tiles.start >= first) & (tiles.last - first < len(side))
    inside = inside & (side.run[low] == side.run[last])
    start = side.positions[low]
    stop = np.where(inside, side.positions[last], start) + 1
    return inside, Tiles(start, stop, tiles.step * side.step)


def gathered(
    relation: Relation, n: int, queries: np.ndarray, keys: np.ndarray
) -> tuple[Relation, int, int]:
    """A relation of n positions between queries and keys at some of them, as works take it: the
    relation, of how many positions, and how many the last are that are queries.

    A data-dependent choice stays as it is, under `|` and `&` alone: it chooses between these
    queries and keys.
    """
    length = max(len(queries), len(keys))
    alike = len(queries) == len(keys) and bool((queries == keys).all())
    if alike and bool((np.diff(queries) == 1).all()) and _is_free(relation):
        return relation, length, length
    sides = Numbering(queries), Numbering(keys)

    def placed(term: Relation) -> Relation:
        if isinstance(term, Union | Intersection):
            return type(term)(tuple(map(placed, term.terms)))
        if isinstance(term, DataDependent):
            return term
        return Gathered(term, n, *sides, length - len(queries))

    return placed(relation), length, len(queries)


def _is_free(relation: Relation) -> bool:
    """Whether pairs of a range of positions are those that a sequence of its length has: they
    depend on q - k alone, and on sizes that are bound."""
    if isinstance(relation, Union | Intersection):
        return all(map(_is_free, relation.terms))
    if isinstance(relation, Complement | Transpose):
        return _is_free(relation.term)
    return not (
        relation.anchored
        or relation.needs_grid
        or relation.data_dependent
        or relation.changes
        or reads_data(relation)
    )
