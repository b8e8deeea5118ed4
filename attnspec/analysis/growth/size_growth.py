"""How fast sizes grow with n: n**a log(n)**b, written (a, b)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from attnspec.ir.scalars import Apply, Scalar, Symbol

Growth: TypeAlias = "tuple[Fraction, Fraction]"
"""The exponents of n and of log n."""

CONSTANT: Growth = (Fraction(0), Fraction(0))
LINEAR: Growth = (Fraction(1), Fraction(0))
QUADRATIC: Growth = (Fraction(2), Fraction(0))


@dataclass(frozen=True)
class Range:
    """A growth that is at least `low` and at most `high`."""

    low: Growth
    high: Growth


def size_growth(scalar: Scalar) -> Growth | None:
    """The growth of a size that is at least a constant; None where it is not known."""
    match scalar:
        case Symbol("n"):
            return LINEAR
        case Symbol() | bool():
            return CONSTANT
        case Apply(op, args):
            return _applied(op, args)
        case _:
            return CONSTANT


def _applied(op: str, args: tuple[Scalar, ...]) -> Growth | None:
    if op == "**":
        base = size_growth(args[0])
        if base is None or isinstance(args[1], Symbol | Apply):
            return None
        power = Fraction(args[1]).limit_denominator(1000)
        return base[0] * power, base[1] * power
    found = [size_growth(arg) for arg in args]
    known = [growth for growth in found if growth is not None]
    if len(known) < len(found):
        return None
    match op:
        case "+" | "max":
            return max(known)
        case "min":
            return min(known)
        case "*":
            # nothing grows as no times something
            none = any(not isinstance(arg, Symbol | Apply) and arg <= 0 for arg in args)
            return None if none else times(*known)
        case "-":
            # of two sizes that grow alike nothing may be left
            return known[0] if known[0] > known[1] or known == [CONSTANT, CONSTANT] else None
        case "/" | "//":
            return max(over(*known), CONSTANT) if known[0] >= known[1] else CONSTANT
        case "isqrt" | "sqrt":
            return known[0][0] / 2, known[0][1] / 2
        case "log2":
            if known[0] == CONSTANT:
                return CONSTANT
            return (Fraction(0), Fraction(1)) if known[0][0] else None
        case "ceil" | "floor" | "abs":
            return known[0]
        case _:
            return None


def growth_text(growth: Growth) -> str:
    """A growth as it is written in the language: n**1.5, n * log2(n)."""
    power, logs = growth
    parts = []
    if power:
        parts.append("n" if power == 1 else f"n**{float(power):g}")
    if logs:
        parts.append("log2(n)" if logs == 1 else f"log2(n)**{float(logs):g}")
    return " * ".join(parts) or "a constant"


def exactly(growth: Growth) -> Range:
    """That many pairs, all of them at most."""
    growth = min(growth, QUADRATIC)
    return Range(growth, growth)


def times(first: Growth, second: Growth) -> Growth:
    """The growth of a product."""
    return first[0] + second[0], first[1] + second[1]


def over(first: Growth, second: Growth) -> Growth:
    """The growth of a quotient."""
    return first[0] - second[0], first[1] - second[1]
