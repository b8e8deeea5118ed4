"""The pairs that several relations share: read by some queries, counted, and the other way round.

Three kinds answer the same three questions: progressions in closed form, edges listed one by one,
and either of them with queries and keys exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from attnspec.analysis.counting.progressions import Ends, Group, grouped
from attnspec.graphs.operators import Intersection, Shift, Transpose, Union
from attnspec.graphs.predicates.comparisons import Between, ranked_keys
from attnspec.graphs.predicates.listable import lists_rows
from attnspec.graphs.progressions import shared_progressions
from attnspec.graphs.relation import Progressions, Relation, in_runs
from attnspec.graphs.stack import TooMuch
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import InternalError

Conjunction: TypeAlias = "Banded | Listed | Turned"
"""The pairs of some relations at one length n: a matrix that is known by its products."""


@dataclass(frozen=True)
class Banded:
    """Relations whose common keys are progressions, or ranges by their values; else every pair."""

    relations: tuple[Relation, ...]
    n: int

    def _progressions(self, queries: np.ndarray) -> Progressions | None:
        if not self.relations:
            start = np.zeros((len(queries), 1), np.int64)
            return start, start + self.n, 1
        return shared_progressions([each.progressions(queries, self.n) for each in self.relations])

    @cached_property
    def _order(self) -> np.ndarray | None:
        """The order of the keys of a single comparison."""
        if len(self.relations) == 1 and isinstance(self.relations[0], Between):
            return ranked_keys(self.relations[0], self.n).order
        return None

    @cached_property
    def width(self) -> int:
        """Progressions of a query, 0 where there is no such form."""
        part = self._progressions(np.zeros(1, np.int64))
        if part is None:
            return int(self._order is not None)
        width = int(np.broadcast_shapes(*map(np.shape, part))[-1])
        return width if width <= LIMITS.width else 0

    def groups(self, queries: np.ndarray) -> Iterator[Group]:
        """The keys of queries by steps; `row` counts them."""
        size = max(1, LIMITS.listed_at_once // max(1, self.width))
        for first in range(0, len(queries), size):
            some = queries[first : first + size]
            part = self._progressions(some)
            for group in self._ordered(some) if part is None else grouped(part, self.n):
                group.row = group.row + first
                yield group

    def _ordered(self, queries: np.ndarray) -> Iterator[Group]:
        (relation,) = self.relations
        if not isinstance(relation, Between):
            raise InternalError(f"no closed form of {relation}")
        first, last, _ = relation.ranges(queries, self.n)
        some = np.flatnonzero(last > first)
        if len(some):
            yield Group(self.n, 1, some, first[some], (last - first)[some], self._order)

    def mark(self, queries: np.ndarray, into: np.ndarray) -> Ends:
        """Set `into`, bool [n], at every key that one of the queries reads (ascending, int64); all
        of these lie between the ends that are returned."""
        low, high = self.n, 0
        for group in self.groups(queries):
            first, last = group.mark(into)
            low, high = min(low, first), max(high, last)
        return low, high

    def tally(self, queries: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """For each key how many of the queries read it, or the sum of their weights, int64 [n]."""
        total = np.zeros(self.n, np.int64)
        for group in self.groups(queries):
            total += group.tally(weights)
        return total

    def sums(self, values: np.ndarray) -> np.ndarray:
        """For each query the sum of the values [n] of its keys, int64 [n]."""
        total = np.zeros(self.n, np.int64)
        for group in self.groups(np.arange(self.n)):
            total += np.bincount(group.row, group.sums(values), self.n).astype(np.int64)
        return total


class Listed:
    """The edges of a relation one by one: `keys[pointers[q] : pointers[q + 1]]` are those of q."""

    def __init__(self, relation: Relation, n: int) -> None:
        require_listable(relation, n)
        counts, parts, total = [], [], 0
        for first, last in relation.chunks(n):
            q, k = relation.rows(first, last, n)
            total += len(k)
            if total > LIMITS.pairs_listed:
                raise TooMuch(f"more than {LIMITS.pairs_listed:,} pairs are not listed, n = {n:,}")
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
        return np.asarray(self.keys[in_runs(begin, lengths)])

    def mark(self, queries: np.ndarray, into: np.ndarray) -> Ends:
        into[self._keys_of(queries)] = True
        return 0, self.n

    def tally(self, queries: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        if weights is not None:
            weights = np.repeat(weights, np.diff(self.pointers)[queries])
        return np.bincount(self._keys_of(queries), weights, self.n).astype(np.int64, copy=False)

    def sums(self, values: np.ndarray) -> np.ndarray:
        before = np.zeros(len(self.keys) + 1, np.int64)
        np.cumsum(values[self.keys], out=before[1:])
        return np.diff(before[self.pointers])


@dataclass(frozen=True)
class Turned:
    """The reversed pairs of a conjunction."""

    inner: Conjunction
    n: int

    def mark(self, queries: np.ndarray, into: np.ndarray) -> Ends:
        into |= self.tally(queries) > 0
        return 0, self.n

    def tally(self, queries: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        values = np.zeros(self.n, np.int64)
        values[queries] = 1 if weights is None else weights
        return self.inner.sums(values)

    def sums(self, values: np.ndarray) -> np.ndarray:
        return self.inner.tally(np.arange(self.n), values)


def shared(relations: tuple[Relation, ...], n: int) -> Conjunction:
    """The pairs that all of some relations have; TooMuch where they cannot be listed."""
    conjunction = quickly_shared(relations, n)
    if conjunction is not None:
        return conjunction
    return Listed(relations[0] if len(relations) == 1 else Intersection(relations), n)


def quickly_shared(relations: tuple[Relation, ...], n: int) -> Conjunction | None:
    """The same without a list of pairs, None where it takes one."""
    band = Banded(relations, n)
    if band.width:
        return band
    turned = [_reversed(relation) for relation in relations]
    if any(isinstance(relation, Transpose) for relation in relations) and None not in turned:
        other = Banded(tuple(relation for relation in turned if relation is not None), n)
        if other.width:
            return Turned(other, n)
    return None


def _reversed(relation: Relation) -> Relation | None:
    return relation.term if isinstance(relation, Transpose) else relation.transposed()


# --- whether pairs can be listed, and what that takes ---------------------------------------------


def to_list(relation: Relation, n: int) -> float:
    """About how many pairs are examined to list the rows of a relation."""
    match relation:
        case Union(terms):
            return sum(to_list(term, n) for term in terms)
        case Intersection(terms):
            # rows are those of the sparsest term, as far as the others have them
            return min(to_list(term, n) for term in terms)
        case Shift(term) | Transpose(term):
            return to_list(term, n)
        case _:
            return relation.typical_degree(n) * n if lists_rows(relation, n) else float(n * n)


def require_listable(relation: Relation, n: int) -> None:
    """Raise TooMuch where finding the rows of a relation means looking at too many pairs."""
    if n > LIMITS.positions_listed or (
        n * n > LIMITS.pairs_evaluated and to_list(relation, n) > LIMITS.pairs_listed
    ):
        raise TooMuch(f"to list a graph at n = {n:,} too many pairs must be tested")
