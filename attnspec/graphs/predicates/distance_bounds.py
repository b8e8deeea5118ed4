"""How far apart a predicate of `where` lets query and key be, at every length.

With d = q - k, whole numbers become a k + b d + c, where c lies between two bounds: sums and
products with constants exactly, quotients by a constant up to their rounding, all else by the
bounds of `intervals`. So `q - k` is d wherever k stands, and a comparison that never holds for all
k >= first and d > before is found without looking at a pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import numpy as np

from attnspec.ir.intervals import Bounds, bounds
from attnspec.ir.scalars import NEGATED, Apply, Scalar, Symbol, is_whole

FARTHEST = 1 << 31
"""Further apart than any two positions are."""

_LINEAR = frozenset(("+", "-", "neg", "*", "//"))

End: TypeAlias = "Fraction | float"
"""An end of a range: a fraction, or plus or minus infinity; a lower end is never plus infinity."""


def extent_of(predicate: Scalar) -> tuple[int, int] | None:
    """(first, before) where every pair k <= q for which a predicate holds has k < first or
    q - k <= before: the least `before` that bounds show and then the least `first`, None where they
    show none."""
    if not _never(predicate, FARTHEST, FARTHEST):
        return None
    before = _least(lambda limit: _never(predicate, FARTHEST, limit + 1))
    return _least(lambda limit: _never(predicate, limit, before + 1)), before


def _least(holds: Callable[[int], bool]) -> int:
    """The least number from 0 to FARTHEST from which on something holds; it holds at FARTHEST."""
    low, high = 0, FARTHEST
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _never(predicate: Scalar, first: int, after: int) -> bool:
    """Whether bounds show that a predicate holds for no k >= first and q - k >= after."""
    return bool(_Beyond(Fraction(first), Fraction(after)).truth(predicate)[1] == 0)


@dataclass(frozen=True)
class _Sum:
    """a k + b d + c with low <= c <= high."""

    of_key: Fraction
    of_distance: Fraction
    low: End
    high: End

    def scaled(self, by: Fraction) -> _Sum:
        ends = [end * by if by else Fraction(0) for end in (self.low, self.high)]
        return _Sum(self.of_key * by, self.of_distance * by, min(ends), max(ends))

    def __add__(self, other: _Sum) -> _Sum:
        return _Sum(
            self.of_key + other.of_key,
            self.of_distance + other.of_distance,
            self.low + other.low,
            self.high + other.high,
        )


@dataclass(frozen=True)
class _Beyond:
    """All k >= first and d = q - k >= after, of which bounds are asked."""

    first: Fraction
    after: Fraction

    def truth(self, predicate: Scalar) -> Bounds:
        """Whether a predicate always holds, and whether it ever does, as `intervals` says it."""
        if not isinstance(predicate, Apply):
            return bounds(predicate, {})
        op, args = predicate.op, predicate.args
        match op:
            case "and" | "or" | "not":
                return _bounds_of(op, [self.truth(arg) for arg in args])
            case "within":
                ends = (Apply("<=", (args[1], args[0])), Apply("<=", (args[0], args[2])))
                return self.truth(Apply("and", ends))
            case "one_of" if len(args) > 1:
                each = tuple(Apply("==", (args[0], arg)) for arg in args[1:])
                return self.truth(Apply("or", each))
            case _ if op in NEGATED and all(map(is_whole, args)):
                apart = self.sum_of(args[0]) + self.sum_of(args[1]).scaled(Fraction(-1))
                return _bounds_of(op, [self.range_of(apart), bounds(0, {})])
            case _:
                return self.value(predicate)

    def value(self, scalar: Scalar) -> Bounds:
        """The least and most of any scalar."""
        if is_whole(scalar):
            return self.range_of(self.sum_of(scalar))
        if not isinstance(scalar, Apply):
            return bounds(scalar, {})
        return _bounds_of(scalar.op, [self.value(arg) for arg in scalar.args])

    def sum_of(self, scalar: Scalar) -> _Sum:
        """A whole number."""
        match scalar:
            case Symbol("q"):
                return _Sum(Fraction(1), Fraction(1), Fraction(0), Fraction(0))
            case Symbol("k"):
                return _Sum(Fraction(1), Fraction(0), Fraction(0), Fraction(0))
            case Apply(op, args) if op in _LINEAR:
                total = self._linear(op, [self.sum_of(arg) for arg in args])
                if total is not None:
                    return total
            case _:
                pass
        low, high = self._bounds(scalar)
        return _Sum(Fraction(0), Fraction(0), _end(low), _end(high))

    def _bounds(self, scalar: Scalar) -> Bounds:
        """The least and most of a scalar by those of its parts."""
        match scalar:
            case Symbol():
                return np.asarray(-math.inf), np.asarray(math.inf)
            case Apply(op, args):
                return _bounds_of(op, [self.value(arg) for arg in args])
            case _:
                return bounds(scalar, {})

    def _linear(self, op: str, parts: list[_Sum]) -> _Sum | None:
        match op, parts:
            case "+", (left, right):
                return left + right
            case "-", (left, right):
                return left + right.scaled(Fraction(-1))
            case "neg", (only,):
                return only.scaled(Fraction(-1))
            case "*", (left, right):
                for one, other in ((left, right), (right, left)):
                    by = _constant(one)
                    if by is not None:
                        return other.scaled(by)
            case "//", (left, right):
                by = _constant(right)
                if by is not None and by > 0:
                    # whole numbers: what rounding down takes away is at most (by - 1) / by
                    total = left.scaled(1 / by)
                    low = total.low + (1 - by) / by
                    return _Sum(total.of_key, total.of_distance, low, total.high)
            case _:
                pass
        return None

    def range_of(self, found: _Sum) -> Bounds:
        """The least and most of a sum, rounded outward."""
        low, high = found.low, found.high
        for factor, least in ((found.of_key, self.first), (found.of_distance, self.after)):
            if factor > 0:
                low, high = low + factor * least, math.inf
            elif factor < 0:
                low, high = -math.inf, high + factor * least
        return np.asarray(_rounded(low, -math.inf)), np.asarray(_rounded(high, math.inf))


def _bounds_of(op: str, parts: list[Bounds]) -> Bounds:
    """What an operator makes of arguments between bounds."""
    names = [Symbol(str(place)) for place in range(len(parts))]
    return bounds(
        Apply(op, tuple(names)), {x.name: part for x, part in zip(names, parts, strict=True)}
    )


def _constant(found: _Sum) -> Fraction | None:
    plain = not found.of_key and not found.of_distance and found.low == found.high
    return found.low if plain and isinstance(found.low, Fraction) else None


def _end(value: np.ndarray) -> End:
    number = float(value)
    return number if math.isinf(number) else Fraction(number)


def _rounded(end: End, toward: float) -> float:
    """The end as a float; where none is exact, the next one toward an infinity."""
    number = float(end)
    exact = isinstance(end, float) or Fraction(number) == end
    return number if exact else math.nextafter(number, toward)
