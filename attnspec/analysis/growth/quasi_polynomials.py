"""The edges of one graph as a function of n: quasi-polynomials, found by interpolation.

A pattern whose sizes do not depend on n is made of comparisons of q - k, q, k and n - q, n - k with
constants, and of residues. The numbers of pairs with given residues modulo the period P are then
numbers of integer points of polygons whose sides are parallel to two axes and a diagonal; their
corners are integral, so that from `settled` on the count is a polynomial of degree two in n on each
residue class of n modulo P. Three lengths in each class determine it (Ehrhart's theorem; see
Beck, Robins, "Computing the Continuous Discretely", chapter 3). Shorter lengths are looked at one
by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf

import numpy as np

from attnspec.analysis.counting.degrees import degrees_of, edges_of
from attnspec.analysis.growth.fitting import Formula, Piece, Polynomial, fitted, monomials
from attnspec.analysis.growth.shapes import Shape, grows_by_rows, shape_of
from attnspec.graphs.operators import Intersection, Union
from attnspec.graphs.patterns.where import Where
from attnspec.graphs.predicates.listable import lists_rows
from attnspec.graphs.predicates.periods import comparisons
from attnspec.graphs.relation import Relation
from attnspec.ir.linear import N
from attnspec.ir.scalars import Apply, Scalar

BUDGET = 6000.0
"""The most that all counts for a part of one formula may cost, half a second; see `Counter`."""

DEAR = 1 << 14
"""Positions that cost as much to count as everything else about a count."""

OPEN = 40.0
"""What counting without a closed form costs more."""

RANKED = 4
"""What counting by a comparison costs more than by a pattern."""

LOOKED = 1 << 14
"""Pairs looked at one by one that cost as much as everything else about a count."""

MOST_CLASSES = 1 << 15
"""Lengths at which a whole period is counted."""

LONGEST = 1 << 17
"""The longest sequence that is counted for a formula."""

SAMPLED = 24
"""Residue classes that are looked at where there are too many."""

MOST_PIECES = 4
"""The most cases that a formula may have."""


@lru_cache(maxsize=256)
def formula_of(relation: Relation) -> Formula | None:
    """The formula of a relation whose sizes do not depend on n; None where none is found."""
    shape = shape_of(relation)
    if shape is None:
        return None
    period = shape.period
    base = -(-shape.settled // period) * period
    # a whole period, or some of it, and one length more in each class than it takes
    longest = base + 4 * period
    if longest > LONGEST:
        return None
    count = Counter(relation, longest)
    whole = 4 * period <= MOST_CLASSES and 4 * period * count.price(longest) <= BUDGET
    classes: Sequence[int] = range(period)
    if not whole:
        step = max(1, period // SAMPLED)
        classes = sorted({*range(0, period, step), 1, 2, 3, period - 2, period - 1} & {*classes})
    lengths = [base + r + period * turn for turn in range(4) for r in classes]
    if len(lengths) * count.price(longest) > BUDGET:
        return None
    counts = {n: count(n) for n in lengths}
    main = _piece(base, shape, counts, period if whole else 0)
    if main is None:
        return None
    pieces, every = _below(count, main, shape, counts)
    return Formula(pieces, shape.proven and whole and every, len(counts), max(counts))


def _piece(start: int, shape: Shape, counts: dict[int, int], period: int) -> Piece | None:
    """One polynomial in n and residues for all counts; else one for each of a few ranges of n
    modulo the period, where the counts hold all of it (0: they do not)."""
    lengths = sorted(counts)
    moduli = tuple(sorted(shape.moduli, reverse=True))[:3]
    for used in ((), moduli[:1], moduli):
        points = [(n, *(n % modulus for modulus in used)) for n in lengths]
        basis = monomials(1 + len(used), 2)
        found = fitted(points, [counts[n] for n in lengths], basis)
        if found is not None:
            return Piece(start, _residues(used), ((0, inf, found),))
    return _by_ranges(start, counts, period) if period else None


def _by_ranges(start: int, counts: dict[int, int], period: int) -> Piece | None:
    basis = monomials(2, 2)
    cases: list[tuple[int, int, Polynomial]] = []
    low = 0
    while low < period:
        if len(cases) == MOST_PIECES:
            return None
        high, found = low, None
        size = 1
        # doubling, then halving: the widest range from `low` on that one polynomial fits
        while size:
            wider = min(period, high + size)
            fit = _over(counts, period, low, wider, basis) if wider > high else None
            if fit is not None:
                high, found = wider, fit
                size *= 2
            elif size > 1 and found is not None:
                size //= 2
                while size and _over(counts, period, low, min(period, high + size), basis) is None:
                    size //= 2
            else:
                size = 0
            if high == period:
                break
        if found is None or high == low:
            return None
        cases.append((low, high, found))
        low = high
    return Piece(start, _residues((period,)), tuple(cases))


def _residues(moduli: tuple[int, ...]) -> tuple[Scalar, ...]:
    """n, and what it is modulo these."""
    return N, *(Apply("%", (N, modulus)) for modulus in moduli)


def _over(
    counts: dict[int, int], period: int, low: int, high: int, basis: list[tuple[int, ...]]
) -> Polynomial | None:
    lengths = [n for n in sorted(counts) if low <= n % period < high]
    points = [(n, n % period) for n in lengths]
    return fitted(points, [counts[n] for n in lengths], basis)


class Counter:
    """Counts the edges of a relation at lengths up to `longest`.

    In a causal graph a longer sequence only adds rows, so that the degrees at the longest length
    hold the counts at all others.
    """

    def __init__(self, relation: Relation, longest: int) -> None:
        self.relation = relation
        self.table: np.ndarray | None = None
        if grows_by_rows(relation) and _is_closed(relation):
            self.table = np.concatenate([[0], np.cumsum(degrees_of(relation, longest))])

    def __call__(self, n: int) -> int:
        """The edges at n positions."""
        return edges_of(self.relation, n) if self.table is None else int(self.table[n])

    def price(self, n: int) -> float:
        """What a count costs, in units of a small one: a tenth of a millisecond."""
        if self.table is not None or type(self.relation).edges is not Relation.edges:
            return 0.05
        if _is_closed(self.relation):
            return _leaves(self.relation) * (1 + n / DEAR)
        looked = 0 if lists_rows(self.relation, n) else n * n / LOOKED
        return OPEN * (1 + n / DEAR) + looked


def _is_closed(relation: Relation) -> bool:
    return relation.progressions(np.zeros(1, np.int64), 1) is not None


def _leaves(relation: Relation) -> int:
    if isinstance(relation, Union | Intersection):
        return sum(_leaves(term) for term in relation.terms)
    if isinstance(relation, Where):
        # every comparison ranks the keys anew at each length
        return RANKED * len([*comparisons(relation.predicate)])
    return 1


def _below(
    count: Counter, main: Piece, shape: Shape, counts: dict[int, int]
) -> tuple[tuple[Piece, ...], bool]:
    """The pieces for lengths below the main one, and whether all lengths were looked at."""
    price = count.price(main.start)
    every = main.start * price <= BUDGET
    lengths = range(main.start) if every else sorted({*_spread(main.start, BUDGET / price)})
    small = {n: count(n) for n in reversed(lengths)}
    counts |= small
    rest = list(small)
    pieces = [main]
    while True:
        piece, start = pieces[0], pieces[0].start
        while rest and piece.at(rest[0]) == small[rest[0]]:
            start = rest.pop(0)
        if rest and not every:
            start = _boundary(count, piece, rest[0], start)
        pieces[0] = replace(piece, start=start)
        lower = _widest(rest, small, shape) if rest and len(pieces) < MOST_PIECES else None
        if lower is None:
            return tuple(pieces), every
        pieces.insert(0, lower)


def _boundary(count: Counter, piece: Piece, low: int, high: int) -> int:
    """Where a piece begins that is wrong at one length and right at a longer one."""
    while high - low > 1:
        middle = (low + high) // 2
        if piece.at(middle) == count(middle):
            high = middle
        else:
            low = middle
    return high


def _spread(stop: int, most: float) -> Iterator[int]:
    """About that many lengths below a length, denser towards zero."""
    n, growth = 0, max(8, int(most) // 16)
    while n < stop:
        yield n
        n += 1 + n // growth
    yield stop - 1


def _widest(rest: list[int], small: dict[int, int], shape: Shape) -> Piece | None:
    """A piece for the longest lengths of the rest (descending, without gaps): of all of them, or
    of as many as one polynomial fits."""

    def over(taken: int) -> Piece | None:
        return _piece(rest[taken - 1], shape, {n: small[n] for n in rest[:taken]}, 0)

    most = len(rest)
    found = over(most)
    if found is None:
        # what fits some lengths fits fewer of them: halved, until the next length is one too many
        least, beyond = 0, most
        while beyond - least > 1:
            middle = (least + beyond) // 2
            if over(middle) is None:
                beyond = middle
            else:
                least = middle
        # a polynomial through no more lengths than it has coefficients says nothing
        most, found = least, over(least) if least else None
        while found is not None and most <= 2 * _size(found):
            most -= 1
            found = over(most) if most else None
    return found


def _size(piece: Piece) -> int:
    return len(monomials(len(piece.variables), 2))
