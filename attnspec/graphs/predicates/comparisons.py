"""Comparisons of a number of the query with one of the key, and which keys each query then reads.

With the keys in the order of their numbers each query reads one range of them, or one for each of a
few numbers. Where the numbers never fall that order is the natural one, and where the keys of equal
numbers are an arithmetic progression (residues, columns of a grid) so are the keys of a query.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from attnspec.graphs.grid import AXES, Grid
from attnspec.graphs.relation import Edges, Elementwise, Progressions, Relation, expand, sort_edges
from attnspec.ir.parameters import RelationError
from attnspec.ir.scalars import Scalar, ScalarError, evaluate

WIDE = 8
"""Values so many times further apart than they are many are searched, not looked up."""


@dataclass(frozen=True)
class Between(Relation):
    """The pairs with low(q) <= value(k) <= high(q); None means unbounded. n is filled in."""

    low: Scalar | None
    value: Scalar
    high: Scalar | None
    extents: tuple[int, ...] = ()

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        value = _looked_up(self, "k", self.value, np.asarray(k), n)
        mask: Elementwise = (q == q) & (k == k)
        if self.low is not None:
            mask = mask & (_looked_up(self, "q", self.low, np.asarray(q), n) <= value)
        if self.high is not None:
            mask = mask & (value <= _looked_up(self, "q", self.high, np.asarray(q), n))
        return mask

    def progressions(self, q: np.ndarray, n: int) -> Progressions | None:
        first, last, ranked = self.ranges(q, n)
        if ranked.order is None:
            return first[:, None], last[:, None], 1
        if self.low is None or self.low != self.high or ranked.step is None:
            return None
        # the keys of one value: the first of them, how many they are, and how far apart
        start = ranked.order[np.minimum(first, n - 1)]
        step = ranked.step[np.minimum(first, n - 1)]
        return start[:, None], (start + (last - first) * step)[:, None], step[:, None]

    def rows(self, first: int, last: int, n: int) -> Edges:
        if self.progressions(np.zeros(1, np.int64), n) is not None or first >= last:
            return Relation.rows(self, first, last, n)
        begin, end, ranked = self.ranges(np.arange(first, last), n)
        return ranked.edges(first, begin[:, None], end[:, None])

    def ranges(self, q: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, Ranked]:
        """The keys of each query as a range of places in the order of the keys' values."""
        ranked = ranked_keys(self, n)
        low = None if self.low is None else _at(self, "q", self.low, q)
        high = None if self.high is None else _at(self, "q", self.high, q)
        if ranked.falls:
            low, high = (None if end is None else -end for end in (high, low))
        first, last = np.zeros(len(q), np.int64), np.full(len(q), n)
        if low is not None:
            first = ranked.below(low)
        if high is not None:
            last = ranked.up_to(high)
        return first, np.maximum(first, last), ranked


@dataclass(frozen=True)
class Among(Relation):
    """The pairs with of_query(q) + value(k) among the members: whole numbers, ascending, each
    once. n is filled in."""

    of_query: Scalar
    value: Scalar
    members: tuple[int, ...]
    extents: tuple[int, ...] = ()

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        value = _looked_up(self, "k", self.value, np.asarray(k), n)
        return np.isin(value + _looked_up(self, "q", self.of_query, np.asarray(q), n), self.members)

    def progressions(self, q: np.ndarray, n: int) -> Progressions | None:
        first, last, ranked = self.ranges(q, n)
        return (first, last, 1) if ranked.order is None else None

    def rows(self, first: int, last: int, n: int) -> Edges:
        if self.progressions(np.zeros(1, np.int64), n) is not None or first >= last:
            return Relation.rows(self, first, last, n)
        begin, end, ranked = self.ranges(np.arange(first, last), n)
        return ranked.edges(first, begin, end)

    def ranges(self, q: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, Ranked]:
        """The keys of each query as a range of places, in the order of the keys' values, for each
        of the members."""
        ranked = ranked_keys(self, n)
        wanted = np.array(self.members, np.int64) - _at(self, "q", self.of_query, q)[:, None]
        wanted = -wanted if ranked.falls else wanted
        return ranked.below(wanted), ranked.up_to(wanted), ranked


def _looked_up(
    relation: Between | Among, side: str, scalar: Scalar, position: np.ndarray, n: int
) -> np.ndarray:
    """As `_at`; of many positions each is computed once."""
    if position.size <= n:
        return _at(relation, side, scalar, position)
    return np.asarray(_at(relation, side, scalar, np.arange(n))[position])


def _at(relation: Between | Among, side: str, scalar: Scalar, position: np.ndarray) -> np.ndarray:
    """The value of a scalar of one side at positions."""
    values = {side: position}
    if relation.extents:
        axes = AXES[len(relation.extents)]
        coordinates = Grid(relation.extents).coordinates(position)
        values |= {f"{side}.{axis}": at for axis, at in zip(axes, coordinates, strict=True)}
    try:
        return np.broadcast_to(np.asarray(evaluate(scalar, values)), position.shape)
    except ScalarError as error:
        raise RelationError(f"the condition of `where` has no value: {error}") from None


@dataclass(frozen=True, eq=False)
class Ranked:
    """The keys by value: `order` [n] lists them, None where that is their own order.

    `values` [n] ascend, and stand negated where they fall (`falls`). `step` [n] is the distance
    between neighbours of equal value at each place, None where some value has no one such distance.
    """

    order: np.ndarray | None
    values: np.ndarray
    step: np.ndarray | None = None
    falls: bool = False

    def edges(self, first: int, begin: np.ndarray, end: np.ndarray) -> Edges:
        """The edges of consecutive queries from `first` on, whose keys are ranges of places."""
        q, place = expand(first, (begin, end, 1))
        return sort_edges(q, place if self.order is None else self.order[place])

    def below(self, limits: np.ndarray) -> np.ndarray:
        """How many keys have a value below each limit, int64 of the shape of the limits."""
        if self._counts is None or not np.issubdtype(limits.dtype, np.integer):
            return np.searchsorted(self.values, limits, side="left")
        least = int(self.values[0])
        ranks = np.clip(limits, least, int(self.values[-1]) + 1)
        ranks -= least
        # where every value comes once, that is the number already
        return ranks if self._is_plain else np.asarray(self._counts[ranks])

    def up_to(self, limits: np.ndarray) -> np.ndarray:
        """How many keys have a value up to each limit."""
        if self._counts is None or not np.issubdtype(limits.dtype, np.integer):
            return np.searchsorted(self.values, limits, side="right")
        return self.below(np.minimum(limits, int(self.values[-1])) + 1)

    @cached_property
    def _is_plain(self) -> bool:
        values = self.values
        return int(values[-1]) - int(values[0]) == len(values) - 1 and bool(
            (values[1:] != values[:-1]).all()
        )

    @cached_property
    def _counts(self) -> np.ndarray | None:
        """How many keys lie below each whole number from the least value to one above the most: a
        read of a table where a search takes a step for each binary digit of n. None where values
        are not whole, or far apart."""
        values = self.values
        if len(values) == 0 or not np.issubdtype(values.dtype, np.integer):
            return None
        span = int(values[-1]) - int(values[0]) + 1
        if span > WIDE * len(values):
            return None
        counts = np.zeros(span + 1, np.int64)
        np.cumsum(np.bincount(values - values[0], minlength=span), out=counts[1:])
        return counts


@lru_cache(maxsize=64)
def ranked_keys(relation: Between | Among, n: int) -> Ranked:
    """The keys of a comparison in the order of their values."""
    values = _at(relation, "k", relation.value, np.arange(n))
    if (values[1:] >= values[:-1]).all():
        return Ranked(None, values)
    if (values[1:] <= values[:-1]).all():
        return Ranked(None, -values, falls=True)
    order = np.argsort(values, kind="stable")
    values = values[order]
    gaps = np.diff(order)
    inside = values[1:] == values[:-1]
    begins = np.flatnonzero(np.append(True, ~inside))
    step = np.append(np.where(inside, gaps, 1), 1)[begins]
    step = np.repeat(step, np.diff(np.append(begins, n)))
    regular = bool((gaps[inside] == step[:-1][inside]).all())
    return Ranked(order, values, step if regular else None)
