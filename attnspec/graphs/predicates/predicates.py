"""Predicates of `where` taken apart: comparisons whose two sides ask for one position each.

`u(q) <= v(k)` and its like need no look at pairs (see `comparisons`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import numpy as np

from attnspec.graphs.grid import AXES
from attnspec.graphs.operators import Complement, Intersection, Union
from attnspec.graphs.predicates.comparisons import Among, Between
from attnspec.graphs.predicates.symmetry import asks_coordinates
from attnspec.graphs.relation import Relation
from attnspec.ir.intervals import bounds
from attnspec.ir.scalars import TURNED, Apply, Scalar, ScalarError, fold, is_whole, symbols
from attnspec.limits import LIMITS

_EXACT = 2.0**53


def disjuncts(predicate: Scalar) -> tuple[Scalar, ...]:
    """Predicates without `or` of which one holds wherever the predicate does; itself alone where
    they would be too many."""
    parts = _disjuncts(predicate, True)
    return (predicate,) if parts is None else tuple(dict.fromkeys(parts))


def conjuncts(predicate: Scalar) -> tuple[Scalar, ...]:
    """The predicates that a predicate joins by `and`."""
    if isinstance(predicate, Apply) and predicate.op == "and":
        return tuple(each for arg in predicate.args for each in conjuncts(arg))
    return (predicate,)


def _disjuncts(predicate: Scalar, wanted: bool) -> list[Scalar] | None:
    """As `disjuncts`, of a predicate or of its negation; None where they are too many."""
    op, args = (predicate.op, predicate.args) if isinstance(predicate, Apply) else ("", ())
    if op == "not":
        return _disjuncts(args[0], not wanted)
    if op not in ("and", "or"):
        return [predicate if wanted else Apply("not", (predicate,))]
    parts = [_disjuncts(arg, wanted) for arg in args]
    present = [part for part in parts if part is not None]
    split = (op == "or") == wanted
    count = sum(map(len, present)) if split else math.prod(map(len, present))
    if len(present) < len(parts) or count > LIMITS.parts:
        return None
    if split:
        return [each for part in present for each in part]
    return [
        Apply("and", tuple(each for one in chosen for each in conjuncts(one)))
        for chosen in product(*present)
    ]


OfPredicate: TypeAlias = Callable[[Scalar, "tuple[int, ...]"], Relation]
"""The relation of a predicate on a grid."""


def taken_apart(
    predicate: Scalar, extents: tuple[int, ...], extra_tokens: int, n: int, where: OfPredicate
) -> Relation | None:
    """The pairs of a predicate at n as operators of simpler relations, or None."""
    asked = asks_coordinates(predicate)
    if extra_tokens and asked:
        # a part that asks for no coordinates would hold for positions that have none
        return None
    try:
        predicate = fold(predicate, {"n": n})
    except ScalarError:
        return None
    if not isinstance(predicate, Apply):
        return None
    return _parts(predicate, _Sides(extents if asked else (), n, where))


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
            relation = _among(predicate, at) if at.exact(predicate) else None
            return relation or Union(
                tuple(at.where(Apply("==", (args[0], each))) for each in args[1:])
            )
        case ">=" | ">":
            return at.where(Apply(TURNED[op], (args[1], args[0])))
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
    if not _asked(upper):
        return _limited(upper if op == "==" else None, first, upper, at)
    if not _asked(first):
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
    separated = _separated(number)
    if separated is not None:
        of_query, of_key = separated
        # low <= u(q) + w(k) <= high, that is low - u <= w <= high - u
        lower, upper = (
            None if end is None else _settled(Apply("-", (end, of_query))) for end in (low, high)
        )
        return Between(lower, of_key, upper, at.extents)
    if isinstance(number, Apply) and number.op == "%":
        return _remainder(low, number, high, at)
    return None


def _among(predicate: Apply, at: _Sides) -> Relation | None:
    """A whole number that is one of a list: one relation, however long the list is."""
    number, *others = predicate.args
    members = {member for member in others if type(member) is int}
    if len(members) < len(set(others)) or not is_whole(number):
        return None
    if isinstance(number, Apply) and number.op == "abs":
        (number,) = number.args
        members = {sign * member for member in members if member >= 0 for sign in (1, -1)}
    sides = _separated(number)
    if sides is None:
        return None
    low, high = at.range(number)
    return Among(*sides, tuple(sorted(m for m in members if low <= m <= high)), at.extents)


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
    sides = _separated(inner)
    if least == most and sides is not None:
        of_query, of_key = sides
        wanted = Apply("%", (Apply("-", (least, of_query)), modulus))
        return Between(wanted, Apply("%", (of_key, modulus)), wanted, at.extents)
    start, stop = (int(end // modulus) for end in at.range(inner))
    if stop - start >= LIMITS.runs:
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
    present = [part for part in parts if part is not None]
    if len(present) < len(parts):
        return None
    if number.op == "neg":
        present = [(0, 0), *present]
    op = "+" if number.op == "+" else "-"
    left, right = present
    of_query, of_key = (_settled(Apply(op, pair)) for pair in zip(left, right, strict=True))
    return of_query, of_key


def _asked(scalar: Scalar) -> set[str]:
    """Which of q and k a scalar asks for."""
    return {name.split(".")[0] for name in symbols(scalar)}


def _number(scalar: Scalar) -> int | None:
    value = _settled(scalar)
    return value if isinstance(value, int) else None


def _settled(scalar: Scalar) -> Scalar:
    """Whatever is constant computed."""
    return fold(scalar, {})


def _sum(scalar: Scalar, number: int) -> Scalar:
    return _settled(Apply("+", (scalar, number)))
