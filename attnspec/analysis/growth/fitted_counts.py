"""Counts of graphs whose sizes depend on n: a polynomial in the size, fitted exactly or not at all.

With s = the size at n, m = n // s and r = n mod s, patterns of stride or size s have polynomials in
(s, m, r) for their counts: a residue, for example, s m**2 + 2 r m + r. Numbers of summary cells c
cut in where r > s - c.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

from attnspec.analysis.growth.fitting import Formula, Piece, fitted, monomials
from attnspec.analysis.growth.growth import order_of
from attnspec.elaborate.names import type_of
from attnspec.ir.linear import N, asks_positions, combination
from attnspec.ir.program import Leaf, Term, TokenCompound, Tokens, leaves
from attnspec.ir.scalars import Apply, Scalar, Symbol, fold, symbols

LENGTHS = (*range(400, 730), *range(1601, 4000, 101), 10_007, 16_384, 30_011)
"""Where counts are fitted and held against the fit. Without gaps at first: of isqrt(n), for
example, n = s (s + 2) is a case of its own."""

FEW = LENGTHS[::7]
"""Those that are counted first: more than a polynomial in four variables has coefficients, and not
all alike modulo the sizes of blocks."""

DEGREE = 3
"""Of the polynomials: s m**2 is the highest term of a residue."""


def sizes_of(term: Term) -> list[Scalar]:
    """The distinct sizes of a term that depend on n; those that predicates add to positions are
    left out."""
    scalars = dict.fromkeys(scalar for leaf in leaves(term) for scalar in _sizes(leaf))
    scalars |= dict.fromkeys(_shifts(term))
    return [scalar for scalar in scalars if "n" in symbols(scalar)]


def operations_of(term: Term) -> set[str]:
    """The operators and functions in all scalars of a term, and in the orders of its patterns."""

    def within(scalar: Scalar | None) -> set[str]:
        if not isinstance(scalar, Apply):
            return set()
        return {scalar.op}.union(*(within(arg) for arg in scalar.args))

    scalars = [scalar for leaf in leaves(term) for scalar in (*_scalars(leaf), order_of(leaf))]
    return set().union(*(within(scalar) for scalar in (*scalars, *_shifts(term))))


def _sizes(leaf: Leaf) -> Iterator[Scalar]:
    if leaf.pattern != "where":
        yield from _scalars(leaf)
        return
    for scalar in _scalars(leaf):
        yield from _within(scalar)


def _within(scalar: Scalar) -> Iterator[Scalar]:
    """The largest parts of a predicate that ask for no position and are no sum of n and numbers."""
    if asks_positions(scalar):
        for arg in scalar.args if isinstance(scalar, Apply) else ():
            yield from _within(arg)
        return
    found = combination(scalar)
    if found is None or not isinstance(found.rest, int):
        yield scalar


def _scalars(value: object) -> Iterator[Scalar]:
    """The numbers and expressions in the arguments of a pattern."""
    match value:
        case Leaf():
            for _, argument in value.arguments:
                yield from _scalars(argument)
        case TokenCompound():
            for part in value.terms:
                yield from _scalars(part)
        case Tokens():
            yield from _scalars(value.values)
        case tuple():
            for part in value:
                yield from _scalars(part)
        case bool() | int() | float() | Symbol() | Apply():
            yield value


def fit_of(
    term: Term, sizes: list[Scalar], values: dict[str, int], count: Callable[[int], int]
) -> Formula | None:
    """The fit of a term's count, None where there is none; `values` are those of head and layer."""
    roots = sizes if len(sizes) == 1 else _roots(sizes)
    if len(roots) != 1 or type_of(roots[0]) == "boolean":
        # what a condition on n decides is no size
        return None
    size = fold(roots[0], values)
    rest = Apply("%", (N, size))
    counts: dict[int, int] = {}
    for cells in (None, *_constants(term)):
        variables: tuple[Scalar, ...] = size, Apply("//", (N, size)), rest
        if cells is not None:
            cut = Apply("+", (Apply("-", (rest, size)), cells))
            variables = *variables, Apply("max", (0, cut))
        piece = Piece(LENGTHS[0], variables, ())
        points = {n: point for n in LENGTHS if (point := piece.point(n)) is not None}
        if len(points) < len(LENGTHS):
            return None
        found, basis = None, monomials(len(variables), DEGREE)
        # what fits no polynomial at a few of the lengths fits none at all of them
        for lengths in (FEW, LENGTHS):
            counts |= {n: count(n) for n in lengths if n not in counts}
            found = fitted([points[n] for n in lengths], [counts[n] for n in lengths], basis)
            if found is None:
                break
        if found is not None and 2 * len(found.terms) < len(LENGTHS):
            piece = replace(piece, cases=((0, inf, found),))
            start = _start(piece, count)
            checked = len(LENGTHS) + LENGTHS[0] - start
            # of no position nothing is asked
            piece = replace(piece, start=0 if start == 1 else start)
            return Formula((piece,), False, checked, LENGTHS[-1])
    return None


def _start(piece: Piece, count: Callable[[int], int]) -> int:
    """The length from which on the fit holds, shorter ones being looked at one by one."""
    for n in range(LENGTHS[0] - 1, 0, -1):
        if piece.at(n) != count(n):
            return n + 1
    return 1


def _roots(sizes: list[Scalar]) -> list[Scalar]:
    """What the sizes are made from: the innermost functions of n."""
    found: dict[Scalar, None] = {}

    def visit(scalar: Scalar) -> None:
        if not isinstance(scalar, Apply) or "n" not in symbols(scalar):
            return
        inner = [arg for arg in scalar.args if isinstance(arg, Apply) and "n" in symbols(arg)]
        if scalar.op in ("isqrt", "//", "ceil", "floor") or not inner:
            found[scalar] = None
            return
        for arg in inner:
            visit(arg)

    for size in sizes:
        visit(size)
    return list(found)


def _shifts(term: Term) -> Iterator[Scalar]:
    if not isinstance(term, Leaf):
        if term.by is not None:
            yield term.by
        for child in term.terms:
            yield from _shifts(child)


def _constants(term: Term) -> list[int]:
    """The numbers of summary cells in a term."""
    return sorted(
        {
            value
            for leaf in leaves(term)
            for name, value in leaf.arguments
            if name == "cells" and isinstance(value, int)
        }
    )
