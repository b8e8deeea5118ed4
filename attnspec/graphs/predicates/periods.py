"""Predicates that do not change when positions move by a period: tiles that far apart are alike.

`q // b` grows by one when q moves by b, `q % b` stays as it is, and a comparison stays as it is
where both of its sides grow alike. So a predicate is taken apart at its `and`, `or` and `not`, and
each comparison asked by which steps both positions may move, together or each by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import lcm, prod

from attnspec.ir.scalars import Apply, Scalar, Symbol, is_whole
from attnspec.limits import LIMITS

_STEADY = frozenset(("<", "<=", ">", ">=", "==", "!=", "one_of", "within"))
_JOINING = frozenset(("and", "or", "not"))


@dataclass(frozen=True)
class Period:
    """How far positions may move: queries by any multiple of `q` and keys by any of `k`, each by
    itself, or both together by any of `both`; 0 where they must not move."""

    q: int = 0
    k: int = 0
    both: int = 0


def comparisons(predicate: Scalar) -> Iterator[Scalar]:
    """The parts that a predicate joins by `and`, `or` and `not`."""
    if isinstance(predicate, Apply) and predicate.op in _JOINING:
        for part in predicate.args:
            yield from comparisons(part)
    else:
        yield predicate


@lru_cache(maxsize=256)
def period_of(comparison: Scalar) -> Period:
    """The periods of a predicate of q and k in which n is filled in."""
    divisors = [*_divisors(comparison)]
    periods = {"q": 0, "k": 0, "both": 0}
    for name in periods:
        moved = {"q", "k"} if name == "both" else {name}
        for step in sorted({1, lcm(*divisors), prod(divisors)}):
            if step <= LIMITS.period and _growth(comparison, moved, step) == 0:
                periods[name] = step
                break
    return Period(**periods)


def _divisors(scalar: Scalar) -> Iterator[int]:
    if isinstance(scalar, Apply):
        if scalar.op in ("//", "%") and type(scalar.args[1]) is int and scalar.args[1] > 0:
            yield scalar.args[1]
        for part in scalar.args:
            yield from _divisors(part)


def _growth(scalar: Scalar, moved: set[str], step: int) -> int | None:
    """By how much an integer grows whenever the moved positions grow by `step`; None where that
    differs or is not known."""
    match scalar:
        case Symbol(name):
            if "." in name:
                return None
            return step if name in moved else 0
        case Apply(op, args):
            parts = [_growth(part, moved, step) for part in args]
            if all(part == 0 for part in parts):
                return 0
            present = [part for part in parts if part is not None]
            # fractions are rounded, and not alike everywhere
            if len(present) < len(parts) or not all(is_whole(part) for part in args):
                return None
            return _grown(op, args, present)
        case _:
            return 0


def _grown(op: str, args: tuple[Scalar, ...], parts: list[int]) -> int | None:
    if op in _STEADY:
        return 0 if len(set(parts)) == 1 else None
    match op, parts:
        case "+", (a, b):
            return a + b
        case "-", (a, b):
            return a - b
        case "neg", (a,):
            return -a
        case "min" | "max", _:
            return parts[0] if len(set(parts)) == 1 else None
        case "*", (a, b):
            left, right = args
            if type(right) is int and b == 0:
                return a * right
            return b * left if type(left) is int and a == 0 else None
        case "//" | "%", (a, 0):
            divisor = args[1]
            if type(divisor) is not int or divisor <= 0 or a % divisor:
                return None
            return a // divisor if op == "//" else 0
    return None
