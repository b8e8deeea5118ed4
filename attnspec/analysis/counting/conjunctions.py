"""The pairs that several relations share: read by some queries, counted, and the other way round.

Three kinds answer the same three questions: progressions in closed form, edges listed one by one,
and either of them with queries and keys exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from attnspec.analysis.counting.affordable import MOST_LISTED, require_listable
from attnspec.analysis.counting.progressions import Ends, Group, closed, common, grouped
from attnspec.graphs.operators import Intersection, Transpose
from attnspec.graphs.predicates.comparisons import Between, ranked_keys
from attnspec.graphs.relation import Progressions, Relation
from attnspec.graphs.stack import TooMuch
from attnspec.text.diagnostics import InternalError

CHUNK = 1 << 21
"""Progressions made in one go."""


class Conjunction(Protocol):
    """The pairs of some relations at one length n."""

    def mark(self, queries: np.ndarray, into: np.ndarray) -> Ends:
        """Set `into`, bool [n], at every key that one of the queries reads (ascending, int64); all
        of these lie between the ends that are returned."""
        ...

    def tally(self, queries: np.ndarray) -> np.ndarray:
        """For each key how many of the queries read it, int64 [n]."""
        ...

    def members(self, marked: np.ndarray) -> np.ndarray:
        """For each query how many of the marked keys (bool [n]) it reads, int64 [n]."""
        ...


@dataclass(frozen=True)
class Banded:
    """Relations whose common keys are progressions; every pair where there are none."""

    relations: tuple[Relation, ...]
    n: int

    def progressions(self, queries: np.ndarray) -> Progressions | None:
        """The keys of queries, or None where there is no closed form."""
        if not self.relations:
            start = np.zeros((len(queries), 1), np.int64)
            return start, start + self.n, 1
        return common([closed(relation, queries, self.n) for relation in self.relations])

    @cached_property
    def width(self) -> int:
        """Progressions of a query, 0 where there is no closed form."""
        part = self.progressions(np.zeros(1, np.int64))
        return 0 if part is None else int(np.broadcast_shapes(*map(np.shape, part))[-1])

    def groups(self, queries: np.ndarray) -> Iterator[Group]:
        """The keys of queries by steps; rows count within each chunk of queries."""
        size = max(1, CHUNK // max(1, self.width))
        for first in range(0, len(queries), size):
            part = self.progressions(queries[first : first + size])
            if part is None:
                raise InternalError(f"no closed form of {self.relations}")
            for group in grouped(part, self.n):
                group.row = group.row + first
                yield group

    def mark(self, queries: np.ndarray, into: np.ndarray) -> Ends:
        low, high = self.n, 0
        for group in self.groups(queries):
            first, last = group.mark(into)
            low, high = min(low, first), max(high, last)
        return low, high

    def tally(self, queries: np.ndarray) -> np.ndarray:
        total = np.zeros(self.n, np.int64)
        for group in self.groups(queries):
            total += group.tally()
        return total

    def members(self, marked: np.ndarray) -> np.ndarray:
        total = np.zeros(self.n, np.int64)
        for group in self.groups(np.arange(self.n)):
            counts = np.bincount(group.row, group.members(marked), self.n)
            total += counts.astype(np.int64)
        return total


class Listed:
    """The edges of a relation one by one: `keys[pointers[q] : pointers[q + 1]]` are those of q."""

    def __init__(self, relation: Relation, n: int) -> None:
        require_listable(relation, n)
        counts, parts, total = [], [], 0
        for first, last in relation.chunks(n):
            q, k = relation.rows(first, last, n)
            total += len(k)
            if total > MOST_LISTED:
                raise TooMuch(f"more than {MOST_LISTED:,} pairs are not listed, n = {n:,}")
            counts.append(np.bincount(q - first, minlength=last - first))
            parts.append(k.astype(np.int32))
        self.n = n
        self.pointers = np.zeros(n + 1, np.int64)
        np.cumsum(np.concatenate([*counts, np.zeros(0, np.int64)]), out=self.pointers[1:])
        self.keys = np.concatenate([*parts, np.zeros(0, np.int32)])

    def _keys_of(self, queries: np.ndarray) -> np.ndarray:
        if len(queries) == self.n:
            return self.keys
        begin = self.pointers[queries]
        lengths = self.pointers[queries + 1] - begin
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        return np.asarray(self.keys[np.arange(total) + np.repeat(begin - ends + lengths, lengths)])

    def mark(self, queries: np.ndarray, into: np.ndarray) -> Ends:
        into[self._keys_of(queries)] = True
        return 0, self.n

    def tally(self, queries: np.ndarray) -> np.ndarray:
        return np.bincount(self._keys_of(queries), minlength=self.n)

    def members(self, marked: np.ndarray) -> np.ndarray:
        before = np.zeros(len(self.keys) + 1, np.int64)
        np.cumsum(marked[self.keys], out=before[1:])
        return np.diff(before[self.pointers])


@dataclass(frozen=True)
class Ordered:
    """A comparison whose keys are a range in the order of their values."""

    relation: Between
    n: int

    def group(self, queries: np.ndarray) -> Group:
        """The keys of queries as ranges in the order of the keys."""
        first, last, _ = self.relation.ranges(queries, self.n)
        some = np.flatnonzero(last > first)
        return Group(self.n, 1, some, first[some], (last - first)[some])

    @property
    def order(self) -> np.ndarray:
        """The keys by their values, int64 [n]."""
        order = ranked_keys(self.relation, self.n).order
        return np.arange(self.n) if order is None else order

    def mark(self, queries: np.ndarray, into: np.ndarray) -> Ends:
        found = np.zeros(self.n, bool)
        group = self.group(queries)
        if len(group.row):
            group.mark(found)
        into[self.order[found]] = True
        return 0, self.n

    def tally(self, queries: np.ndarray) -> np.ndarray:
        total = np.empty(self.n, np.int64)
        total[self.order] = self.group(queries).tally()
        return total

    def members(self, marked: np.ndarray) -> np.ndarray:
        group = self.group(np.arange(self.n))
        total = np.zeros(self.n, np.int64)
        total[group.row] = group.members(marked[self.order])
        return total


@dataclass(frozen=True)
class Turned:
    """The reversed pairs of a conjunction."""

    inner: Conjunction
    n: int

    def mark(self, queries: np.ndarray, into: np.ndarray) -> Ends:
        into |= self.tally(queries) > 0
        return 0, self.n

    def tally(self, queries: np.ndarray) -> np.ndarray:
        marked = np.zeros(self.n, bool)
        marked[queries] = True
        return self.inner.members(marked)

    def members(self, marked: np.ndarray) -> np.ndarray:
        return self.inner.tally(np.flatnonzero(marked))


def shared(relations: tuple[Relation, ...], n: int) -> Conjunction:
    """The pairs that all of some relations have; TooMuch where they cannot be listed."""
    band = Banded(relations, n)
    if band.width:
        return band
    turned = [_reversed(relation) for relation in relations]
    if any(isinstance(relation, Transpose) for relation in relations) and None not in turned:
        other = Banded(tuple(relation for relation in turned if relation is not None), n)
        if other.width:
            return Turned(other, n)
    if len(relations) == 1 and isinstance(relations[0], Between):
        return Ordered(relations[0], n)
    return Listed(relations[0] if len(relations) == 1 else Intersection(relations), n)


def _reversed(relation: Relation) -> Relation | None:
    return relation.term if isinstance(relation, Transpose) else relation.transposed()
