"""Bounds of scalar expressions over boxes: how `where` answers for whole tiles without evaluating.

Every quantity is a pair (least, most), numbers or arrays; a truth value is such a pair of booleans.
The pair always encloses the values taken, so a decided answer is right and an undecided one costs
only an evaluation. Where an expression has no value (division by zero) anything may be said of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from attnspec.ir.scalars import TURNED, Apply, Scalar, Symbol, is_whole

Bounds: TypeAlias = "tuple[np.ndarray, np.ndarray]"

_EXACT = 2.0**53
"""Whole numbers below this are exact in float64."""

_TINY = 2.0**-1074


def bounds(scalar: Scalar, values: Mapping[str, Bounds]) -> Bounds:
    """The least and most that a scalar takes where its symbols range over `values`, float arrays.

    A truth value is 0.0 or 1.0; where no bound is known the ends are infinite.
    """
    match scalar:
        case Symbol(name):
            low, high = values[name]
            return np.asarray(low, dtype=float), np.asarray(high, dtype=float)
        case Apply("one_of", (number, *members)) if _are_listed(number, members):
            return _among(bounds(number, values), members)  # type: ignore[arg-type]
        case Apply(op, args):
            with np.errstate(all="ignore"):
                return _outward(_apply(op, [bounds(arg, values) for arg in args]))
        case _ if hasattr(scalar, "high"):
            # a number that stands in a written file has bounds of its own
            low, high = scalar.low, scalar.high  # type: ignore[union-attr]
            return np.asarray(low, dtype=float), np.asarray(high, dtype=float)
        case _:
            constant = np.asarray(float(scalar))
            return _outward((constant, constant))


def reach_of(scalar: Scalar, ranges: Mapping[str, Bounds]) -> float:
    """A bound of the absolute value of every number met on the way to a scalar's value."""
    low, high = bounds(scalar, ranges)
    largest = float(np.max(np.maximum(np.abs(low), np.abs(high)), initial=0))
    if isinstance(scalar, Apply):
        return max(largest, *(reach_of(arg, ranges) for arg in scalar.args))
    return largest


def _outward(a: Bounds) -> Bounds:
    """The bounds without NaN, and widened where whole numbers are rounded."""
    low, high = (np.asarray(end) for end in a)
    # a NaN is never inside
    if low.size and low.min() > -_EXACT and high.size and high.max() < _EXACT:
        return low, high
    low = np.where(np.isnan(low), -np.inf, low)
    high = np.where(np.isnan(high), np.inf, high)
    low = np.where(np.abs(low) >= _EXACT, np.nextafter(low, -np.inf), low)
    return low, np.where(np.abs(high) >= _EXACT, np.nextafter(high, np.inf), high)


def _apply(op: str, a: list[Bounds]) -> Bounds:
    match op:
        case "**":
            return _power(a[0], a[1])
        case "sqrt":
            return np.sqrt(np.maximum(a[0][0], 0)), np.sqrt(np.maximum(a[0][1], 0))
        case "isqrt":
            return _whole_root(a[0])
        case "log2":
            # logarithms differ in the last bits from one library to the next
            low, high = (np.log2(np.maximum(end, _TINY)) for end in a[0])
            return low - 1e-9, high + 1e-9
        case "+":
            return a[0][0] + a[1][0], a[0][1] + a[1][1]
        case "-":
            return a[0][0] - a[1][1], a[0][1] - a[1][0]
        case "neg":
            return -a[0][1], -a[0][0]
        case "*":
            return _corners(np.multiply, a[0], a[1])
        case "//" | "/":
            return _quotient(op, a[0], a[1])
        case "%":
            return _remainder(a[0], a[1])
        case "abs":
            low, high = a[0]
            straddles = (low < 0) & (high > 0)
            ends = np.minimum(abs(low), abs(high)), np.maximum(abs(low), abs(high))
            return np.where(straddles, 0.0, ends[0]), ends[1]
        case "min" | "and":
            return _reduce(np.minimum, a)
        case "max" | "or":
            return _reduce(np.maximum, a)
        case "ceil" | "floor":
            rounded = np.ceil if op == "ceil" else np.floor
            return rounded(a[0][0]), rounded(a[0][1])
        case "<":
            return _truth(a[0][1] < a[1][0], a[0][0] < a[1][1])
        case "<=":
            return _truth(a[0][1] <= a[1][0], a[0][0] <= a[1][1])
        case ">" | ">=":
            return _apply(TURNED[op], [a[1], a[0]])
        case "==":
            return _equal(a[0], a[1])
        case "!=":
            return _apply("not", [_equal(a[0], a[1])])
        case "not":
            return 1 - a[0][1], 1 - a[0][0]
        case "within":
            return _apply("and", [_apply("<=", [a[1], a[0]]), _apply("<=", [a[0], a[2]])])
        case "item":
            return _reduce(np.minimum, a[1:])[0], _reduce(np.maximum, a[1:])[1]
        case "one_of":
            return _apply("or", [_equal(a[0], member) for member in a[1:]] or [_never()])
        case _:
            return _unbounded()


def _are_listed(number: Scalar, members: Sequence[Scalar]) -> bool:
    """Whether a whole number is looked for in a list of whole numbers that are exact."""
    return is_whole(number) and all(type(m) is int and abs(m) < _EXACT for m in members)


def _among(a: Bounds, members: Sequence[int]) -> Bounds:
    """Whether a whole number is one of a list, in one search however long the list is."""
    every = np.unique(np.array(members, float))
    if not len(every):
        return _never()
    low, high = a
    first, last = np.searchsorted(every, low), np.searchsorted(every, high, "right")
    # as many as there are whole numbers from the first that is met to the last
    least, most = every[np.minimum(first, len(every) - 1)], every[np.maximum(last, 1) - 1]
    always = (low >= least) & (high <= most) & (most - least == last - first - 1)
    return _truth(always & (last > first), last > first)


def _unbounded() -> Bounds:
    return np.asarray(-np.inf), np.asarray(np.inf)


def _never() -> Bounds:
    return np.asarray(0.0), np.asarray(0.0)


def _truth(always: np.ndarray, sometimes: np.ndarray) -> Bounds:
    return np.asarray(always, dtype=float), np.asarray(sometimes, dtype=float)


def _equal(a: Bounds, b: Bounds) -> Bounds:
    single = (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0])
    return _truth(single, (a[0] <= b[1]) & (b[0] <= a[1]))


def _corners(op: Callable[[np.ndarray, np.ndarray], np.ndarray], a: Bounds, b: Bounds) -> Bounds:
    corners = np.broadcast_arrays(*(op(x, y) for x in a for y in b))
    return np.minimum.reduce(corners), np.maximum.reduce(corners)


def _reduce(op: np.ufunc, a: list[Bounds]) -> Bounds:
    low, high = a[0]
    for next_low, next_high in a[1:]:
        low, high = op(low, next_low), op(high, next_high)
    return low, high


def _quotient(op: str, a: Bounds, b: Bounds) -> Bounds:
    divide = _floored if op == "//" else np.divide
    if b[0].size == 1 and b[0] == b[1] and b[0] > 0:
        # the usual case, in half the divisions
        return divide(a[0], b[0]), divide(a[1], b[0])
    zero = (b[0] <= 0) & (b[1] >= 0)
    low, high = _corners(divide, a, b)
    return np.where(zero, -np.inf, low), np.where(zero, np.inf, high)


def _floored(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a // b, in an eighth of the time where both are whole numbers that are exact: a quotient that
    is not a whole number is then further from the next one than it is rounded."""
    if _are_whole(a) and _are_whole(b):
        return np.asarray(np.floor(a / b))
    return np.asarray(np.floor_divide(a, b))


def _are_whole(a: np.ndarray) -> bool:
    return bool(((np.abs(a) < _EXACT) & (a == np.floor(a))).all())


def _remainder(a: Bounds, b: Bounds) -> Bounds:
    """A remainder lies between 0 and the divisor; within one turn it grows with the dividend."""
    size = b[0]
    constant = (b[0] == b[1]) & (size > 0)
    turns = _floored(a[0], size), _floored(a[1], size)
    one_turn = constant & (turns[0] == turns[1])
    if all(map(_are_whole, (size, *a))):
        rest = a[0] - turns[0] * size, a[1] - turns[1] * size
    else:
        rest = np.remainder(a[0], size), np.remainder(a[1], size)
    low = np.where(one_turn, rest[0], np.where(b[0] > 0, 0.0, -np.inf))
    high = np.where(one_turn, rest[1], np.where(b[0] > 0, b[1], np.inf))
    return low, high


def _whole_root(a: Bounds) -> Bounds:
    low, high = (np.sqrt(np.maximum(end, 0)) for end in a)
    # the root of a whole number that is exact is never rounded up to the next one
    exact = (a[0] == np.floor(a[0])) & (a[0] < _EXACT / 2)
    return np.floor(np.where(exact, low, np.nextafter(low, 0))), high


def _power(a: Bounds, b: Bounds) -> Bounds:
    whole = np.all((b[0] == b[1]) & (b[0] >= 0) & (b[0] == np.floor(b[0])))
    if not whole and not np.all((a[0] >= 1) & (b[0] >= 0)):
        return _unbounded()
    low, high = _corners(np.power, a, b)
    # an even power of a range around zero comes down to zero
    low = np.where((a[0] < 0) & (a[1] > 0), np.minimum(low, 0.0), low)
    # powers that are not whole numbers differ in the last bit from one library to the next
    low = np.where(low == np.floor(low), low, np.nextafter(low, -np.inf))
    return low, np.where(high == np.floor(high), high, np.nextafter(high, np.inf))
