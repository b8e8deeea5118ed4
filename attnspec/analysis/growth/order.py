"""The edges of a stack as an expression in n, and how fast they grow.

The formula of a graph whose sizes are constants follows from how it is written (see `quasi`). Where
a size depends on n, a polynomial in it is fitted to counts, and said to be fitted (see `sizes`).
The order is that of the formula, or derived from the terms of the spec; where these leave a gap it
is measured.
"""

from __future__ import annotations

import math
from dataclasses import fields
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from attnspec.analysis.counting.degrees import edges_of, total_edges
from attnspec.analysis.growth.fitted_counts import fit_of, operations_of, sizes_of
from attnspec.analysis.growth.fitting import Formula
from attnspec.analysis.growth.growth import BEHIND, arguments_of, attend_growth
from attnspec.analysis.growth.quasi_polynomials import formula_of
from attnspec.analysis.growth.size_growth import CONSTANT, LINEAR, Growth, Range
from attnspec.analysis.quality import Figure
from attnspec.graphs.forms.prelude import predicate_of
from attnspec.graphs.operators import Intersection
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import Stack, TooMuch, patterns_in
from attnspec.ir.mechanisms import BY_NAME as MECHANISMS
from attnspec.ir.program import Attend, Leaf, Program, Term, inputs_of, leaves
from attnspec.ir.scalars import ScalarError
from attnspec.text.diagnostics import AttnSpecError

if TYPE_CHECKING:
    import sympy

    from attnspec.elaborate import Elaborated

MEASURED = tuple(1 << power for power in range(8, 19))
"""Lengths at which growth is measured, as far as counting goes."""

MOST_CELLS = 1 << 15
"""The largest grid that is looked at to see how counts grow."""

LOOKED_INTO = 4096
"""The longest of them for graphs whose rows have no closed form."""

MOST_LOOKS = 1 << 27
"""The most pairs that are looked at there for one length, counted for every pattern."""

ENOUGH = 3
"""The fewest lengths from which a growth is measured."""

SHARE = 1e-3
"""The part of the edges, at the longest length, that the growth must account for."""

ROOT: Growth = (Fraction(1, 2), Fraction(0))

CANDIDATES: tuple[Growth, ...] = (
    *((Fraction(power, 2), Fraction(logs)) for power in range(4) for logs in (0, 1)),
    (Fraction(2), Fraction(0)),
)
"""The growths among which a measured one is chosen."""


def edges_formula(stack: Stack, n: int) -> Figure[sympy.Expr | None]:
    """The edges of all layers and heads as an expression in n, in cases where minima and maxima
    bite; None, with the reason, where none is known. `n` is a length that the spec has."""
    from attnspec.analysis.growth import sympy_text

    reason = stack.unknown or _reads(stack)
    if reason:
        return Figure(None, note=reason)
    if stack.program.grid is not None:
        return Figure(None, note="positions on a grid have one length")
    formulas: list[tuple[int, Formula]] = []
    parts: list[sympy.Expr] = []
    notes: dict[str, None] = {}
    try:
        bound = stack.bound(n)
        for index, (layer, head, relation) in enumerate(bound.found):
            times = sum(row.get(index, 0) for row in bound.rows)
            term = stack.program.attend(layer, head).graph
            if term is None:
                return Figure(None, note="nothing is attended")
            sizes = sizes_of(term)
            known = None if sizes else _known(relation)
            if known is not None:
                parts.append(times * known)
                continue
            if sizes and _meets_draws(term):
                return Figure(None, note="no formula was found: its pairs are drawn at random")
            formula = _fit(stack.program, term, layer, head) if sizes else formula_of(relation)
            if formula is None:
                why = ": sizes depend on n" if sizes else ""
                return Figure(None, note=f"no formula was found{why}")
            formulas.append((times, formula))
            if not formula.proven:
                right = f"right at {formula.checked:,} lengths up to {formula.longest:,}"
                notes[f"fitted, and {right}"] = None
    except TooMuch as error:
        return Figure(None, note=str(error))
    if formulas:
        parts.append(sympy_text.of_formulas(formulas))
    total = sympy_text.total(parts)
    if notes and sympy_text.value(total, n) != total_edges(stack, n):
        # a fit must be right where it is asked for
        return Figure(None, note="no formula was found")
    return Figure(total, "estimate" if notes else "exact", "; ".join(notes))


def _meets_draws(term: Term) -> bool:
    """Whether how many pairs there are depends on draws: of a pattern alone that has a formula they
    are as many whichever are drawn; otherwise a short block, or another graph, may have some."""
    names = {entry.name for leaf in leaves(term) for entry in fields(BY_NAME[leaf.pattern])}  # type: ignore[arg-type]
    alone = isinstance(term, Leaf) and BY_NAME[term.pattern].formula is not Relation.formula
    return "seed" in names and not alone


def _known(relation: Relation) -> sympy.Expr | None:
    """What a pattern knows of its edges that is no quasi-polynomial."""
    terms = relation.terms if isinstance(relation, Intersection) else (relation,)
    rest = [term for term in terms if predicate_of(term) != BEHIND]
    return rest[0].formula(causal=len(rest) < len(terms)) if len(rest) == 1 else None


@lru_cache(maxsize=256)
def _fit(program: Program, term: Term, layer: int, head: int) -> Formula | None:
    """The formula of the term of a head, with sizes that depend on n."""
    stack = Stack(program)
    values = {"layer": layer, "head": head, "layers": program.layer_count}
    if program.heads is not None:
        values["heads"] = program.heads

    def count(n: int) -> int:
        return edges_of(stack.relation(n, layer, head), n)

    try:
        return fit_of(term, sizes_of(term), values, count)
    except (AttnSpecError, ScalarError):
        return None


# --- order ----------------------------------------------------------------------------------------


def order(stack: Stack, n: int, elaborated: Elaborated) -> Figure[sympy.Expr | None]:
    """How the edges of all layers and heads grow with n, constant factors left out.

    Derived from how the spec is written, or measured and then an estimate. Mechanisms, and patterns
    that the data decide, count with the operations that they take. Of graphs whose pairs depend on
    run-time inputs it is an upper bound. On a grid all extents grow alike.
    """
    from attnspec.analysis.growth import sympy_text

    if stack.program.grid is not None:
        return _measured(stack, n, elaborated)
    found = growth_range(stack)
    notes = list(
        dict.fromkeys(
            note
            for attend in stack.program.attends
            for note in (*_factors(attend.graph), *_mechanism_factors(attend))
        )
    )
    if found.low == found.high:
        return Figure(sympy_text.order_expression(found.high), "exact", "; ".join(notes))
    reason = stack.unknown or _reads(stack)
    if reason:
        words = "; ".join([f"at most: {reason}", *notes])
        return Figure(sympy_text.order_expression(found.high), "bound", words)
    formula = _by_formula(stack, n)
    if formula is not None:
        return Figure(sympy_text.order_expression(formula))
    every = edges_formula(stack, n)
    if every.value == 0 and every.quality == "exact":
        return Figure(sympy_text.order_expression(CONSTANT))
    return _measured(stack, n, elaborated)


def _reads(stack: Stack) -> str:
    """That run-time inputs decide: one sample of them says nothing of other lengths."""
    graphs = (attend.graph for attend in stack.program.attends if attend.graph is not None)
    return "its pairs depend on run-time inputs" if any(map(inputs_of, graphs)) else ""


def growth_range(stack: Stack) -> Range:
    """What is known of the growth from how the spec is written."""
    program = stack.program
    used = {index for row in program.slots for index in row}
    parts = [attend_growth(program.attends[index], program.causal) for index in sorted(used)]
    return Range(max(part.low for part in parts), max(part.high for part in parts))


def _by_formula(stack: Stack, n: int) -> Growth | None:
    """The degree of the formula where it is proven."""
    degrees = []
    for layer, head, relation in stack.bound(n).found:
        term = stack.program.attend(layer, head).graph
        formula = None if term is None or sizes_of(term) else formula_of(relation)
        if formula is None or not formula.proven:
            return None
        degrees.append(formula.degree)
    return Fraction(max(degrees)), Fraction(0)


def _factors(term: Term | None) -> list[str]:
    """What is left out of the order of patterns that the data decide."""
    every = () if term is None else leaves(term)
    found = (BY_NAME[leaf.pattern].factors(arguments_of(leaf)) for leaf in every)
    return [words for words in found if words]


def _mechanism_factors(attend: Attend) -> list[str]:
    mechanism = attend.mechanism
    return [] if mechanism is None else [f"operations: {MECHANISMS[mechanism.name].operations}"]


def _measured(stack: Stack, n: int, elaborated: Elaborated) -> Figure[sympy.Expr | None]:
    """The growth g for which counts are nearest to a g(n) + b n + c sqrt(n) + d."""
    from attnspec.analysis.growth import sympy_text

    if stack.unknown is not None:
        return Figure(None, note=stack.unknown)
    counts = _counts(stack) if stack.program.grid is None else _grown_grids(elaborated, n)
    lengths = sorted(counts)[-5:]
    if stack.program.grid is not None:
        # on shorter grids than the spec's own, its sizes may be cut off by the borders
        longer = [length for length in lengths if length >= n]
        lengths = longer if len(longer) >= ENOUGH else lengths
    if len(lengths) < ENOUGH:
        return Figure(None, note="too few lengths can be counted")
    values = np.array([counts[n] for n in lengths], float)

    def distance(growth: Growth) -> float:
        columns = [[sympy_text.growth_value(growth, n) for n in lengths]]
        for lower in (LINEAR, ROOT):
            if lower < growth and len(lengths) > len(columns) + 1:
                columns.append([sympy_text.growth_value(lower, n) for n in lengths])
        if len(lengths) > len(columns) + 1:
            columns.append([1.0] * len(lengths))
        # relative errors: every length counts alike
        matrix = np.array(columns).T / values[:, None]
        found = np.linalg.lstsq(matrix, np.ones(len(lengths)), rcond=None)[0]
        share = found[0] * matrix[-1, 0]
        away = float(np.abs(matrix @ found - 1).max())
        return away if share > SHARE else math.inf

    # what fits alike within the noise of floating point is the slowest
    candidates = [growth for growth in CANDIDATES if not growth[1] or _has_logarithms(stack)]
    best = min(candidates, key=lambda growth: (round(distance(growth), 6), growth))
    note = f"measured from n = {lengths[0]:,} to {lengths[-1]:,}"
    if stack.program.grid is not None:
        note += ", all extents of the grid grown alike"
    return Figure(sympy_text.order_expression(best), "estimate", note)


def _has_logarithms(stack: Stack) -> bool:
    """Whether the spec says anything from which a logarithm of n may come."""
    graphs = [attend.graph for attend in stack.program.attends if attend.graph is not None]
    return any("log2" in operations_of(graph) for graph in graphs)


def _counts(stack: Stack) -> dict[int, int]:
    """The edges at growing lengths, up to where counting takes too long."""
    found: dict[int, int] = {}
    for n in MEASURED:
        try:
            if not _is_quick(stack, n) and (n > LOOKED_INTO or _looks(stack, n) > MOST_LOOKS):
                break
            found[n] = total_edges(stack, n)
        except TooMuch:
            break
        except AttnSpecError:
            continue
    return {n: count for n, count in found.items() if count}


def _looks(stack: Stack, n: int) -> int:
    """All pairs of all graphs, for every pattern in them."""
    graphs = (stack.program.attend(layer, head).graph for layer, head, _ in stack.bound(n).found)
    return n * n * sum(map(patterns_in, graphs))


def _is_quick(stack: Stack, n: int) -> bool:
    """Whether all rows have a closed form."""
    sample = np.array([0, n // 2, n - 1])
    relations = (relation for _, _, relation in stack.bound(n).found)
    return all(relation.progressions(sample, n) is not None for relation in relations)


def _grown_grids(elaborated: Elaborated, n: int) -> dict[int, int]:
    """The edges on grids whose extents, as far as they are parameters, are shorter and longer."""
    extents = {
        name: size
        for name, size in elaborated.parameters.items()
        if isinstance(size, int) and _is_extent(elaborated, name, size)
    }
    found: dict[int, int] = {}
    for quarters in (1, 2, 4, 6, 8, 12, 16):
        if any(size * quarters % 4 for size in extents.values()):
            continue
        try:
            sizes = {name: size * quarters // 4 for name, size in extents.items()}
            grown = Stack(elaborated.resized(sizes).program)
            length = grown.program.fixed_length
            if length is None or length in found:
                break
            if length > (MOST_CELLS if _is_quick(grown, length) else LOOKED_INTO):
                break
            found[length] = total_edges(grown, length)
        except AttnSpecError:
            continue
    return {n: count for n, count in found.items() if count}


def _is_extent(elaborated: Elaborated, name: str, size: int) -> bool:
    """Whether the grid grows with a parameter."""
    try:
        return elaborated.resized({name: size * 2}).program.grid != elaborated.program.grid
    except AttnSpecError:
        return False
