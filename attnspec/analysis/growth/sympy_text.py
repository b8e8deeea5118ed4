"""Counts and sizes as sympy expressions in n."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import reduce

import sympy
from sympy.printing.str import StrPrinter

from attnspec.analysis.growth.fitting import Formula, Piece, Polynomial
from attnspec.analysis.growth.size_growth import Growth
from attnspec.ir.scalars import Apply, Scalar, Symbol

N = sympy.Symbol("n")
"""The length in every expression; a plain symbol, so that `sympy.Symbol("n")` is the same."""


def order_expression(growth: Growth) -> sympy.Expr:
    """n**a * log(n)**b."""
    power, logs = (sympy.Rational(part.numerator, part.denominator) for part in growth)
    return N**power * sympy.log(N) ** logs


def of_polynomial(polynomial: Polynomial, variables: Sequence[sympy.Expr]) -> sympy.Expr:
    """A polynomial of these variables."""
    terms = []
    for monomial, coefficient in polynomial.terms:
        factors = [variables[index] for index in monomial]
        number = sympy.Rational(coefficient.numerator, coefficient.denominator)
        terms.append(reduce(lambda a, b: a * b, factors, number))
    return sympy.expand(sympy.Add(*terms))


def of_formulas(formulas: Sequence[tuple[int, Formula]]) -> sympy.Expr:
    """The sum of formulas, each times a number; cases by n where minima and maxima bite."""
    starts = sorted({piece.start for _, formula in formulas for piece in formula.pieces})
    least = max(formula.pieces[0].start for _, formula in formulas)
    cases: list[tuple[sympy.Expr, int]] = []
    for start in (start for start in starts if start >= least):
        parts = []
        for times, formula in formulas:
            piece = [piece for piece in formula.pieces if piece.start <= start][-1]
            parts.append(times * _of_piece(piece))
        total = sympy.expand(sympy.Add(*parts))
        if not cases or cases[-1][0] != total:
            cases.append((total, start))
    if len(cases) == 1 and least == 0:
        return cases[0][0]
    ordered = [(expression, N >= start) for expression, start in reversed(cases)]
    if least == 0:
        ordered[-1] = ordered[-1][0], sympy.true
    return sympy.Piecewise(*ordered, evaluate=False)


def _of_piece(piece: Piece) -> sympy.Expr:
    variables = [of_scalar(variable) for variable in piece.variables]
    cases = [(of_polynomial(case, variables), high) for _, high, case in piece.cases]
    if len(cases) == 1:
        return cases[0][0]
    inner = [(expression, variables[1] < high) for expression, high in cases[:-1]]
    return sympy.Piecewise(*inner, (cases[-1][0], True), evaluate=False)


def total(parts: Sequence[sympy.Expr]) -> sympy.Expr:
    """The sum of counts, one expression for each of their common cases."""
    return parts[0] if len(parts) == 1 else sympy.Add(*parts)


# sympy has no types
class _Readable(StrPrinter):  # type: ignore[misc]
    """Cases as they are said: `32*n - 496 for n >= 31, n**2/2 + n/2 otherwise`."""

    def _print_Piecewise(self, cases: sympy.Piecewise) -> str:
        said = [
            f"{self._print(part)} " + ("otherwise" if when == True else f"for {self._print(when)}")  # noqa: E712
            for part, when in cases.args
        ]
        return f"({', '.join(said)})"

    def _print_floor(self, whole: sympy.floor) -> str:
        (inner,) = whole.args
        if isinstance(inner, sympy.Pow) and inner.exp == sympy.S.Half:
            return f"isqrt({self._print(inner.base)})"
        return f"floor({self._print(inner)})"


def readable(formula: sympy.Expr) -> str:
    """A formula on one line, for people: its cases in words."""
    words: str = _Readable().doprint(formula)
    return words[1:-1] if isinstance(formula, sympy.Piecewise) else words


def value(formula: sympy.Expr, n: int) -> sympy.Expr:
    """The value of a formula at a length."""
    return sympy.simplify(formula.subs(N, n))


def of_scalar(scalar: Scalar) -> sympy.Expr:
    """A scalar of the language, of n alone."""
    match scalar:
        case Symbol():
            return N
        case Apply(op, args):
            return _FUNCTIONS[op](*[of_scalar(arg) for arg in args])
        case float():
            return sympy.nsimplify(scalar)
        case _:
            return sympy.Integer(scalar)


_FUNCTIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: sympy.floor(a / b),
    "%": sympy.Mod,
    "**": lambda a, b: a**b,
    "neg": lambda a: -a,
    "isqrt": lambda a: sympy.floor(sympy.sqrt(a)),
    "sqrt": sympy.sqrt,
    "log2": lambda a: sympy.log(a, 2),
    "ceil": sympy.ceiling,
    "floor": sympy.floor,
    "item": lambda index, *items: sympy.Piecewise(
        *((item, sympy.Eq(index, place)) for place, item in enumerate(items[:-1])),
        (items[-1], True),
    ),
    "min": sympy.Min,
    "max": sympy.Max,
    "abs": sympy.Abs,
}


def growth_value(growth: Growth, n: int) -> float:
    """n**a * log(n)**b as a number, for n > 1."""
    power, logs = (float(Fraction(part)) for part in growth)
    return float(n**power * math.log(n) ** logs)
