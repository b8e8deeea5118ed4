"""Polynomials with rational coefficients through given values, exactly or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import combinations_with_replacement
from math import gcd, lcm, prod
from random import Random
from typing import TypeAlias

from attnspec.ir.scalars import Scalar, ScalarError, evaluate

Monomial: TypeAlias = "tuple[int, ...]"
"""The variables that are multiplied, by number; () is 1."""


@dataclass(frozen=True)
class Polynomial:
    """The sum of monomials, each times its coefficient."""

    terms: tuple[tuple[Monomial, Fraction], ...]

    def at(self, point: Sequence[int]) -> Fraction:
        """The value at a point."""
        common, whole = self._whole
        return Fraction(sum(c * prod(point[i] for i in m) for m, c in whole), common)

    def has(self, value: int, point: Sequence[int]) -> bool:
        """Whether this is the value at a point."""
        common, whole = self._whole
        return sum(c * prod(point[i] for i in m) for m, c in whole) == value * common

    @cached_property
    def _whole(self) -> tuple[int, list[tuple[Monomial, int]]]:
        """The common denominator, and the coefficients times it: whole numbers are much quicker
        than fractions."""
        common = lcm(*(c.denominator for _, c in self.terms))
        return common, [(monomial, int(c * common)) for monomial, c in self.terms]

    @property
    def monomials(self) -> tuple[Monomial, ...]:
        """The monomials, () alone for the polynomial 0."""
        return tuple(monomial for monomial, _ in self.terms) or ((),)


@dataclass(frozen=True)
class Piece:
    """A count for n >= `start`, up to the next piece: a polynomial in `variables`, scalars of n
    alone; for each range `low <= variables[1] < high` another."""

    start: int
    variables: tuple[Scalar, ...]
    cases: tuple[tuple[int, float, Polynomial], ...]

    def point(self, n: int) -> tuple[int, ...] | None:
        """The variables at n, None where one has no whole value."""
        try:
            found = [evaluate(variable, {"n": n}) for variable in self.variables]
        except ScalarError:
            return None
        whole = tuple(value for value in found if isinstance(value, int))
        return whole if len(whole) == len(found) else None

    def at(self, n: int) -> int | None:
        """The count at n."""
        point = self.point(n)
        for low, high, polynomial in () if point is None else self.cases:
            if point is not None and (len(point) == 1 or low <= point[1] < high):
                value = polynomial.at(point)
                return int(value) if value.denominator == 1 else None
        return None


@dataclass(frozen=True)
class Formula:
    """The edges of a relation, piece by piece, ascending; below the first piece nothing is known.

    `proven`: it follows from how the relation is written that it holds for every n from the first
    piece on. Otherwise it holds at the `checked` lengths, of which the longest is `longest`.
    """

    pieces: tuple[Piece, ...]
    proven: bool
    checked: int
    longest: int

    @property
    def degree(self) -> int:
        """The power of n with which the count grows; residues are bounded."""
        cases = (case for _, _, case in self.pieces[-1].cases)
        return max(monomial.count(0) for case in cases for monomial in case.monomials)


def monomials(variables: int, degree: int) -> list[Monomial]:
    """All monomials up to a degree, those of low degree first."""
    return [
        chosen
        for total in range(degree + 1)
        for chosen in combinations_with_replacement(range(variables), total)
    ]


def fitted(
    points: Sequence[Sequence[int]], values: Sequence[int], basis: Sequence[Monomial]
) -> Polynomial | None:
    """The polynomial in a basis that has all of the values, or None where there is none.

    Monomials that the points do not tell from earlier ones are left out.
    """
    # of whole numbers, each row without common factors: fractions would take ten times as long
    rows: list[tuple[int, list[int]]] = []
    # points in a row often lie on a line, which tells nothing of the others: take them mixed
    mixed = list(zip(points, values, strict=True))
    Random(0).shuffle(mixed)
    for point, value in mixed:
        row = [*(prod(point[i] for i in monomial) for monomial in basis), value]
        for pivot, known in rows:
            row = _without(row, known, pivot)
        lead = next((i for i, a in enumerate(row[:-1]) if a), None)
        if lead is None:
            if row[-1]:
                return None
            continue
        rows = [(pivot, _without(known, row, lead)) for pivot, known in rows]
        rows.append((lead, row))
        if len(rows) == len(basis):
            break
    coefficients = ((basis[lead], Fraction(row[-1], row[lead])) for lead, row in sorted(rows))
    found = Polynomial(tuple((monomial, c) for monomial, c in coefficients if c))
    return found if all(map(found.has, values, points)) else None


def _without(row: list[int], other: list[int], place: int) -> list[int]:
    """A multiple of a row less one of another, so that 0 stands at a place."""
    factor, scale = row[place], other[place]
    if not factor:
        return row
    found = [scale * a - factor * b for a, b in zip(row, other, strict=True)]
    common = gcd(*found)
    return [a // common for a in found] if common > 1 else found
