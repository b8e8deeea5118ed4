"""Predicates of `where` taken apart: comparisons whose two sides ask for one position each.

`u(q) <= v(k)` and its like need no look at pairs: with the keys in the order of v, each query reads
one range. Where v never falls that order is the natural one, and where the keys of equal v are an
arithmetic progression (residues, columns of a grid) so are the keys of a query.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol, TypeAlias

import numpy as np

from attnspec.algebra import Complement, Intersection, Union
from attnspec.grids import AXES, Grid
from attnspec.intervals import bounds
from attnspec.relations import (
    Edges,
    Elementwise,
    Progressions,
    Relation,
    RelationError,
    expand,
    sort_edges,
)
from attnspec.scalars import Apply, Scalar, ScalarError, evaluate, fold, symbols

MOST_BANDS = 16
"""The most ranges of a difference that stand for its remainder."""

WIDE = 8
"""Values so many times further apart than they are many are searched, not looked up."""

_EXACT = 2.0**53
_TURNED = {">=": "<=", ">": "<"}
_WHOLE = frozenset("+ - * // % neg isqrt ceil floor min max abs".split())


@dataclass(frozen=True)
class Between(Relation):
    """The pairs with low(q) <= value(k) <= high(q); None is no limit. n is filled in."""

    low: Scalar | None
    value: Scalar
    high: Scalar | None
    extents: tuple[int, ...] = ()

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        value = self._looked_up("k", self.value, np.asarray(k), n)
        held: Elementwise = (q == q) & (k == k)
        if self.low is not None:
            held = held & (self._looked_up("q", self.low, np.asarray(q), n) <= value)
        if self.high is not None:
            held = held & (value <= self._looked_up("q", self.high, np.asarray(q), n))
        return held

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
        q, place = expand(first, (begin[:, None], end[:, None], 1))
        return sort_edges(q, place if ranked.order is None else ranked.order[place])

    def ranges(self, q: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, Ranked]:
        """The keys of each query as a range of places in the order of the keys' values."""
        ranked = ranked_keys(self, n)
        low = None if self.low is None else self._at("q", self.low, q)
        high = None if self.high is None else self._at("q", self.high, q)
        if ranked.falls:
            low, high = (None if end is None else -end for end in (high, low))
        first, last = np.zeros(len(q), np.int64), np.full(len(q), n)
        if low is not None:
            first = ranked.below(low)
        if high is not None:
            last = ranked.up_to(high)
        return first, np.maximum(first, last), ranked

    def _looked_up(self, side: str, scalar: Scalar, position: np.ndarray, n: int) -> np.ndarray:
        """As `_at`; of many positions each is computed once."""
        if position.size <= n:
            return self._at(side, scalar, position)
        return np.asarray(self._at(side, scalar, np.arange(n))[position])

    def _at(self, side: str, scalar: Scalar, position: np.ndarray) -> np.ndarray:
        values = {side: position}
        if self.extents:
            grid = Grid(self.extents)
            for axis, at in zip(AXES[len(self.extents)], grid.coordinates(position), strict=True):
                values[f"{side}.{axis}"] = at
        try:
            return np.broadcast_to(np.asarray(evaluate(scalar, values)), position.shape)
        except ScalarError as error:
            raise RelationError(f"`where` has no value: {error}") from None


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

    def below(self, limits: np.ndarray) -> np.ndarray:
        """How many keys have a value below each limit, int64 of the shape of the limits."""
        if self._counts is None or not np.issubdtype(limits.dtype, np.integer):
            return np.searchsorted(self.values, limits, side="left")
        least = int(self.values[0])
        found = np.clip(limits, least, int(self.values[-1]) + 1)
        found -= least
        # where every value comes once, that is the number already
        return found if self._is_plain else np.asarray(self._counts[found])

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
        look into a table where a search takes a step for each binary digit of n. None where values
        are not whole, or far apart."""
        values = self.values
        if len(values) == 0 or not np.issubdtype(values.dtype, np.integer):
            return None
        span = int(values[-1]) - int(values[0]) + 1
        if span > WIDE * len(values):
            return None
        found = np.zeros(span + 1, np.int64)
        np.cumsum(np.bincount(values - values[0], minlength=span), out=found[1:])
        return found


@lru_cache(maxsize=64)
def ranked_keys(relation: Between, n: int) -> Ranked:
    """The keys of a comparison in the order of their values."""
    values = relation._at("k", relation.value, np.arange(n))
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


class Predicated(Protocol):
    """A relation by a predicate, with the grid whose coordinates it may ask for."""

    @property
    def predicate(self) -> Scalar: ...

    @property
    def extents(self) -> tuple[int, ...]: ...

    @property
    def extra_tokens(self) -> int: ...


OfPredicate: TypeAlias = Callable[[Scalar, "tuple[int, ...]"], Relation]
"""The relation of a predicate on a grid."""


def taken_apart(relation: Predicated, n: int, where: OfPredicate) -> Relation | None:
    """The same pairs at n as operators of simpler relations, or None."""
    asked = any("." in name for name in symbols(relation.predicate))
    if relation.extra_tokens and asked:
        # a part that asks for no coordinates would hold for positions that have none
        return None
    try:
        predicate = fold(relation.predicate, {"n": n})
    except ScalarError:
        return None
    if not isinstance(predicate, Apply):
        return None
    return _parts(predicate, _Sides(relation.extents if asked else (), n, where))


@dataclass(frozen=True)
class _Sides:
    """What predicates are taken apart for: the grid, () where none is asked for, and n; and what
    their parts are."""

    extents: tuple[int, ...]
    n: int
    of: OfPredicate

    def where(self, predicate: Scalar) -> Relation:
        return self.of(predicate, self.extents)

    def range(self, scalar: Scalar) -> tuple[float, float]:
        """The least and most that a scalar may be."""
        ends = {side: (np.asarray(0), np.asarray(self.n - 1)) for side in "qk"}
        for axis, extent in zip(AXES.get(len(self.extents), ()), self.extents, strict=True):
            for side in "qk":
                ends[f"{side}.{axis}"] = np.asarray(0), np.asarray(extent - 1)
        low, high = bounds(scalar, ends)
        return float(low), float(high)

    def exact(self, scalar: Scalar) -> bool:
        """Whether no number on the way to a value is too large to be exact."""
        low, high = self.range(scalar)
        parts = scalar.args if isinstance(scalar, Apply) else ()
        return max(-low, high) < _EXACT and all(self.exact(part) for part in parts)


def _parts(predicate: Apply, at: _Sides) -> Relation | None:
    op, args = predicate.op, predicate.args
    match op:
        case "and":
            return Intersection(tuple(at.where(part) for part in args))
        case "or":
            return Union(tuple(at.where(part) for part in args))
        case "not":
            return Complement(at.where(args[0]))
        case "!=":
            return Complement(at.where(Apply("==", args)))
        case "within":
            x, first, last = args
            return Intersection(
                (at.where(Apply("<=", (first, x))), at.where(Apply("<=", (x, last))))
            )
        case "one_of" if len(args) > 1:
            return Union(tuple(at.where(Apply("==", (args[0], each))) for each in args[1:]))
        case ">=" | ">":
            return at.where(Apply(_TURNED[op], (args[1], args[0])))
        case "<=" | "<" | "==" if at.exact(predicate):
            return _compared(op, args[0], args[1], at)
        case _:
            return None


def _compared(op: str, first: Scalar, second: Scalar, at: _Sides) -> Relation | None:
    """`first op second`: as limits of one number, where the two can be told apart."""
    strict = op == "<"
    if strict and not (is_whole(first) and is_whole(second)):
        return None
    # whole numbers a < b are those with a <= b - 1
    upper = _sum(second, -1) if strict else second
    if _constant(upper):
        return _limited(upper if op == "==" else None, first, upper, at)
    if _constant(first):
        lower = _sum(first, 1) if strict else first
        return _limited(lower, second, lower if op == "==" else None, at)
    difference = Apply("-", (first, upper))
    return _limited(0 if op == "==" else None, difference, 0, at)


def _limited(
    low: Scalar | None, number: Scalar, high: Scalar | None, at: _Sides
) -> Relation | None:
    """low <= number <= high with constant limits, None for no limit."""
    if isinstance(number, Apply) and number.op == "abs":
        (inner,) = number.args
        if low is None and high is not None:
            return _limited(Apply("neg", (high,)), inner, high, at)
        ends = [None if end is None else Apply("neg", (end,)) for end in (high, low)]
        sides = (_limited(low, inner, high, at), _limited(ends[0], inner, ends[1], at))
        positive = _number(low) if low is not None else None
        if None in sides or positive is None or positive < 0:
            return None
        return Union(tuple(side for side in sides if side is not None))
    found = _separated(number)
    if found is not None:
        of_query, of_key = found
        # low <= u(q) + w(k) <= high, that is low - u <= w <= high - u
        limits = (
            None if end is None else _settled(Apply("-", (end, of_query))) for end in (low, high)
        )
        lower, upper = limits
        return Between(lower, of_key, upper, at.extents)
    if isinstance(number, Apply) and number.op == "%":
        return _remainder(low, number, high, at)
    return None


def _remainder(
    low: Scalar | None, number: Apply, high: Scalar | None, at: _Sides
) -> Relation | None:
    """low <= x mod m <= high: equal remainders of the two sides of x, or few ranges of x."""
    inner, modulus = number.args
    if not isinstance(modulus, int) or modulus < 1 or not is_whole(inner):
        return None
    least = 0 if low is None else _number(low)
    most = modulus - 1 if high is None else _number(high)
    if least is None or most is None:
        return None
    least, most = max(0, least), min(modulus - 1, most)
    found = _separated(inner)
    if least == most and found is not None:
        of_query, of_key = found
        wanted = Apply("%", (Apply("-", (least, of_query)), modulus))
        return Between(wanted, Apply("%", (of_key, modulus)), wanted, at.extents)
    start, stop = (int(end // modulus) for end in at.range(inner))
    if stop - start >= MOST_BANDS:
        return None
    bands = [
        _limited(turn * modulus + least, inner, turn * modulus + most, at)
        for turn in range(start, stop + 1)
    ]
    return None if None in bands else Union(tuple(band for band in bands if band is not None))


def _separated(number: Scalar) -> tuple[Scalar, Scalar] | None:
    """A part that asks for the query and one that asks for the key, whose sum is the number."""
    asked = _asked(number)
    if "k" not in asked:
        return number, 0
    if "q" not in asked:
        return 0, number
    if not isinstance(number, Apply) or number.op not in ("+", "-", "neg"):
        return None
    parts = [_separated(arg) for arg in number.args]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if number.op == "neg":
        known = [(0, 0), *known]
    op = "+" if number.op == "+" else "-"
    left, right = known
    of_query, of_key = (_settled(Apply(op, pair)) for pair in zip(left, right, strict=True))
    return of_query, of_key


def _asked(scalar: Scalar) -> set[str]:
    """Which of q and k a scalar asks for."""
    return {name.split(".")[0] for name in symbols(scalar)}


def _constant(scalar: Scalar) -> bool:
    return not _asked(scalar)


def _number(scalar: Scalar) -> int | None:
    value = _settled(scalar)
    return value if isinstance(value, int) else None


def _settled(scalar: Scalar) -> Scalar:
    """Whatever is constant computed."""
    nothing: Mapping[str, int] = {}
    return fold(scalar, nothing)


def _sum(scalar: Scalar, number: int) -> Scalar:
    return _settled(Apply("+", (scalar, number)))


def is_whole(scalar: Scalar) -> bool:
    """Whether a scalar is a whole number whatever q and k are."""
    if isinstance(scalar, Apply):
        rounded = scalar.op in ("isqrt", "ceil", "floor")
        return rounded or (scalar.op in _WHOLE and all(is_whole(arg) for arg in scalar.args))
    return not isinstance(scalar, float)
