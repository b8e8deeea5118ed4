"""At most how fast sizes grow with n: n**a log(n)**b, written (a, b)."""

from __future__ import annotations

from fractions import Fraction
from typing import TypeAlias

from attnspec.ir.scalars import Apply, Scalar, Symbol, symbols

Growth: TypeAlias = "tuple[Fraction, Fraction]"
"""The exponents of n and of log n."""

CONSTANT: Growth = (Fraction(0), Fraction(0))
LINEAR: Growth = (Fraction(1), Fraction(0))
QUADRATIC: Growth = (Fraction(2), Fraction(0))


def size_growth(scalar: Scalar) -> Growth | None:
    """The growth that a size does not exceed, a constant at least; None where it is not known."""
    growth = _growth(scalar)
    return None if growth is None else max(growth, CONSTANT)


def divisor_growth(scalar: Scalar) -> Growth | None:
    """The growth that a size of n alone has, neither less nor more; None where it is not known."""
    return None if set(symbols(scalar)) - {"n"} else size_growth(scalar)


def _growth(scalar: Scalar) -> Growth | None:
    match scalar:
        case Symbol("n"):
            return LINEAR
        case Apply(op, args):
            return _applied(op, args)
        case _:
            return CONSTANT


def _applied(op: str, args: tuple[Scalar, ...]) -> Growth | None:
    if op == "**":
        base = _growth(args[0])
        if base is None or isinstance(args[1], Symbol | Apply):
            return None
        power = Fraction(args[1]).limit_denominator(1000)
        return base[0] * power, base[1] * power
    growths = [_growth(arg) for arg in args]
    sizes = [growth for growth in growths if growth is not None]
    if len(sizes) < len(growths):
        return None
    match op:
        case "+" | "max":
            return max(sizes)
        case "min":
            return min(sizes)
        case "*":
            # nothing grows as no times something
            none = any(not isinstance(arg, Symbol | Apply) and arg <= 0 for arg in args)
            return None if none else times(*sizes)
        case "-":
            # of two sizes that grow alike nothing may be left
            return sizes[0] if sizes[0] > sizes[1] or sizes == [CONSTANT, CONSTANT] else None
        case "/" | "//":
            return None if divisor_growth(args[1]) is None else over(*sizes)
        case "isqrt" | "sqrt":
            return sizes[0][0] / 2, sizes[0][1] / 2
        case "log2":
            if sizes[0] == CONSTANT:
                return CONSTANT
            return (Fraction(0), Fraction(1)) if sizes[0][0] > 0 else None
        case "ceil":
            return max(sizes[0], CONSTANT)
        case "floor" | "abs":
            return sizes[0]
        case _:
            return None


def growth_text(growth: Growth) -> str:
    """A growth as it is written in the language: n**(3/2), n * log2(n), 1 for a constant."""
    power, logs = growth
    parts = []
    if power:
        parts.append("n" if power == 1 else f"n**{_exponent(power)}")
    if logs:
        parts.append("log2(n)" if logs == 1 else f"log2(n)**{_exponent(logs)}")
    return " * ".join(parts) or "1"


def _exponent(power: Fraction) -> str:
    return f"{power}" if power.denominator == 1 else f"({power})"


def times(first: Growth, second: Growth) -> Growth:
    """The growth of a product."""
    return first[0] + second[0], first[1] + second[1]


def over(first: Growth, second: Growth) -> Growth:
    """The growth of a quotient."""
    return first[0] - second[0], first[1] - second[1]
