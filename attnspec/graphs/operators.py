"""Operators between relations: `| & - ~`, `transpose`, `shift`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import and_, or_
from typing import ClassVar

import numpy as np

from attnspec.graphs.progressions import shared_progressions, union_progressions
from attnspec.graphs.relation import (
    EMPTY,
    FULL,
    SOME,
    Edges,
    Elementwise,
    Progressions,
    Relation,
    Tiles,
    concatenated,
    evaluate_pairs,
    expand,
    phase_of,
    rows_by_cover,
    sort_edges,
)


@dataclass(frozen=True)
class _Joined(Relation):
    """Terms whose pairs, and answers for tiles, are joined one after the other."""

    terms: tuple[Relation, ...]
    pairs: ClassVar[Callable[..., Elementwise]]
    tiles: ClassVar[Callable[..., np.ndarray]]

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return reduce(self.pairs, (term.holds(q, k, n) for term in self.terms))

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        return [part for term in self.terms for part in phase_of(term, q, k, n)]

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        return reduce(self.tiles, (term.cover(q, k, n) for term in self.terms))

    def transposed(self) -> Relation | None:
        turned = [term.transposed() for term in self.terms]
        bounded = tuple(term for term in turned if term is not None)
        return type(self)(bounded) if len(bounded) == len(turned) else None


@dataclass(frozen=True)
class Union(_Joined):
    """The pairs of any of the terms."""

    name: ClassVar = "|"
    pairs: ClassVar = or_
    tiles: ClassVar = np.maximum

    def progressions(self, q: np.ndarray, n: int) -> Progressions | None:
        return union_progressions([term.progressions(q, n) for term in self.terms])

    def rows(self, first: int, last: int, n: int) -> Edges:
        closed = self.progressions(np.arange(first, last), n)
        if closed is not None:
            return expand(first, closed)
        if sum(_typical_degree(term, n) for term in self.terms) >= n:
            # the terms together list more pairs than there are to look at
            return rows_by_cover(self, first, last, n)
        q, k = concatenated(term.rows(first, last, n) for term in self.terms)
        return sort_edges(q, k, unique=True)


@dataclass(frozen=True)
class Intersection(_Joined):
    """The pairs of all of the terms."""

    name: ClassVar = "&"
    pairs: ClassVar = and_
    tiles: ClassVar = np.minimum

    def progressions(self, q: np.ndarray, n: int) -> Progressions | None:
        return shared_progressions([term.progressions(q, n) for term in self.terms])

    def rows(self, first: int, last: int, n: int) -> Edges:
        closed = self.progressions(np.arange(first, last), n)
        if closed is not None:
            return Relation.rows(self, first, last, n)
        sparsest = min(self.terms, key=lambda term: _typical_degree(term, n))
        q, k = sparsest.rows(first, last, n)
        for term in self.terms:
            if term is not sparsest and len(q):
                kept = evaluate_pairs(term, q, k, n)
                q, k = q[kept], k[kept]
        return q, k


@dataclass(frozen=True)
class Complement(Relation):
    """The pairs that are not in the term."""

    term: Relation
    name: ClassVar = "~"

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return self.term.holds(q, k, n) ^ True

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        return phase_of(self.term, q, k, n)

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        return np.asarray(FULL - self.term.cover(q, k, n), dtype=np.uint8)

    def transposed(self) -> Relation | None:
        term = self.term.transposed()
        return None if term is None else Complement(term)


@dataclass(frozen=True)
class Transpose(Relation):
    """The reversed pairs, for terms that have no transpose of their own (see `transpose_of`)."""

    term: Relation
    name: ClassVar = "transpose"

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return self.term.holds(k, q, n)

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        return phase_of(self.term, k, q, n)

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        return self.term.cover(k, q, n)

    def rows(self, first: int, last: int, n: int) -> Edges:
        q, k = _reversed_edges(self.term, n)
        low, high = np.searchsorted(q, [first, last])
        return q[low:high], k[low:high]

    def transposed(self) -> Relation | None:
        return self.term


@dataclass(frozen=True)
class Shift(Relation):
    """The pairs (q, k) with (q - by, k - by) in the term; what leaves the sequence is lost."""

    term: Relation
    by: int
    name: ClassVar = "shift"

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        low, high = max(0, self.by), min(n, n + self.by)
        inside = (q >= low) & (q < high) & (k >= low) & (k < high)
        # positions outside are moved inside before the term sees them; `inside` drops the answer
        q_from = (q - self.by) * (q >= low) * (q < high)
        k_from = (k - self.by) * (k >= low) * (k < high)
        return inside & self.term.holds(q_from, k_from, n)

    def progressions(self, q: np.ndarray, n: int) -> Progressions | None:
        low, high = max(0, self.by), min(n, n + self.by)
        inside = (q >= low) & (q < high)
        inner = self.term.progressions(np.where(inside, q - self.by, 0), n)
        if inner is None:
            return None
        start, stop, step = inner
        window = np.where(inside, low, 0)[:, None], np.where(inside, high, 0)[:, None], 1
        return shared_progressions([(start + self.by, stop + self.by, step), window])

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        low, high = max(0, self.by), min(n, n + self.by)
        inside = (q.start >= low) & (q.last < high) & (k.start >= low) & (k.last < high)
        within = phase_of(self.term, self._moved(q, inside), self._moved(k, inside), n)
        outside = [np.where(inside, -1, tiles.start) for tiles in (q, k)]
        return [*(np.where(inside, part, 0) for part in within), *outside]

    def _moved(self, tiles: Tiles, fits: np.ndarray) -> Tiles:
        """Where tiles stand in the term; of those that do not fit the first position."""
        start = np.where(fits, tiles.start - self.by, 0)
        return Tiles(start, np.where(fits, tiles.stop - self.by, 1), tiles.step)

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        low, high = max(0, self.by), min(n, n + self.by)
        outside = (q.last < low) | (q.start >= high) | (k.last < low) | (k.start >= high)
        inside = (q.start >= low) & (q.last < high) & (k.start >= low) & (k.last < high)
        if high <= low:
            return np.full(np.broadcast_shapes(outside.shape), EMPTY, np.uint8)
        counts = self.term.cover(
            self._moved(q, (q.start >= low) & (q.last < high)),
            self._moved(k, (k.start >= low) & (k.last < high)),
            n,
        )
        answer = np.where(outside, EMPTY, np.where(inside, counts, SOME))
        return answer.astype(np.uint8)

    def rows(self, first: int, last: int, n: int) -> Edges:
        low, high = max(0, self.by), min(n, n + self.by)
        first, last = max(first, low), min(last, high)
        if first >= last:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        q, k = self.term.rows(first - self.by, last - self.by, n)
        q, k = q + self.by, k + self.by
        kept = (k >= low) & (k < high)
        return q[kept], k[kept]

    def transposed(self) -> Relation | None:
        term = self.term.transposed()
        return None if term is None else Shift(term, self.by)


def difference(first: Relation, *others: Relation) -> Relation:
    """The pairs of the first that are in none of the others."""
    return Intersection((first, *(Complement(other) for other in others)))


def transpose_of(term: Relation) -> Relation:
    """The relation of the reversed pairs, in closed form where the term knows it."""
    return term.transposed() or Transpose(term)


@lru_cache(maxsize=256)
def _typical_degree(relation: Relation, n: int) -> float:
    # a complement is never the term to start from: its rows are found by looking at every key
    return float("inf") if isinstance(relation, Complement) else relation.typical_degree(n)


@lru_cache(maxsize=2)
def _reversed_edges(relation: Relation, n: int) -> Edges:
    parts = [relation.rows(first, last, n) for first, last in relation.chunks(n)]
    if not parts:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    q, k = concatenated(parts)
    return sort_edges(k, q)
