"""How fast the edges of a stack grow with n: counted over doublings of n.

What is counted is an estimate. Where nothing can be counted, the bound is named that follows from
how the spec is written.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from attnspec.analysis.counting.degrees import total_edges
from attnspec.analysis.growth.growth import arguments_of, growth_of
from attnspec.analysis.growth.size_growth import CONSTANT, LINEAR, Growth, growth_text
from attnspec.analysis.quality import Figure
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.stack import Stack, TooMuch, patterns_in, unread_text
from attnspec.ir.mechanisms import BY_NAME as MECHANISMS
from attnspec.ir.program import inputs_of
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import AttnSpecError

if TYPE_CHECKING:
    from attnspec.elaborate import Elaborated

LONG = tuple(1 << power for power in range(14, 19))
"""Lengths at which the edges of graphs are counted whose rows have a closed form."""

LOOKED_INTO = tuple(1 << power for power in range(8, 13))
"""The same for graphs whose pairs must be examined."""

ENOUGH = 3
"""The fewest lengths from which a growth is measured."""

SHARE = 0.01
"""The part of the edges, at the longest length, that the growth must account for."""

ROOT: Growth = (Fraction(1, 2), Fraction(0))

NAMED: tuple[Growth, ...] = (
    *((Fraction(power, 2), Fraction(0)) for power in range(5)),
    *((Fraction(power), Fraction(1)) for power in (0, 1)),
)
"""The growths among which a measured one is chosen before any other power of n."""

OTHERS: tuple[Growth, ...] = tuple(
    (power, Fraction(0))
    for power in sorted({Fraction(p, q) for q in (3, 4, 5) for p in range(2 * q + 1)})
    if power.denominator > 2
)
"""The others."""

ROUNDED = 0.03
"""How far counts may be from the bound by form where sizes are rounded to whole numbers."""

CLEAR = 4
"""How many times nearer to the counts another growth must be than the bound by form, and another
power than every growth of `NAMED`."""


def order(stack: Stack, n: int, elaborated: Elaborated) -> Figure[str | None]:
    """How the edges of all layers and heads grow with n, constant factors left out.

    Mechanisms, and data-dependent patterns, count with the operations that they take, and
    graphs whose pairs depend on run-time inputs with all that they may have: an upper bound. On a
    grid all extents grow alike.
    """
    if stack.program.grid is not None:
        return _measured(stack, n, elaborated, None)
    most = growth_of(stack.program)
    # one sample of run-time inputs says nothing of other lengths
    reason = stack.unknown or unread_text(set().union(*map(inputs_of, stack.program.graphs)))
    if not reason:
        return _measured(stack, n, elaborated, most)
    notes = [f"at most: {reason}"]
    for attend in stack.program.attends:
        notes += [BY_NAME[leaf.pattern].factors(arguments_of(leaf)) for leaf in attend.leaves]
        if attend.mechanism is not None:
            notes.append(f"operations: {MECHANISMS[attend.mechanism.name].operations}")
    words = "; ".join(dict.fromkeys(filter(None, notes)))
    return Figure(growth_text(most), "bound", words)


def _measured(
    stack: Stack, n: int, elaborated: Elaborated, most: Growth | None
) -> Figure[str | None]:
    """The growth that counted edges are nearest to, `most` at most."""
    if stack.unknown is not None:
        return Figure(None, note=stack.unknown)
    counts = counted(stack) if stack.program.grid is None else _grown_grids(elaborated, n)
    if len(counts) < ENOUGH:
        return Figure(None, note="too few lengths can be counted")
    lengths = [length for length in sorted(counts) if counts[length]][-5:]
    note = f"measured from n = {min(lengths or counts):,} to {max(counts):,}"
    if stack.program.grid is not None:
        note += ", all extents of the grid grown alike"
        # on shorter grids than the spec's own, its sizes may be cut off by the borders
        longer = [length for length in lengths if length >= n]
        lengths = longer if len(longer) >= ENOUGH else lengths
    elif most is not None:
        note += f", at most {growth_text(most)} by its form"
    if not counts[max(counts)] or len(lengths) < ENOUGH:
        return Figure("0" if not counts[max(counts)] else None, "estimate", note)
    edges = np.array([counts[length] for length in lengths], float)
    drawn = any("seed" in arguments_of(leaf) for leaf in stack.program.leaves)
    noise = 2 / math.sqrt(edges.min()) if drawn else 0.0
    return Figure(growth_text(nearest(np.array(lengths), edges, most, noise)), "estimate", note)


def nearest(
    lengths: np.ndarray, edges: np.ndarray, most: Growth | None, noise: float = 0.0
) -> Growth:
    """The growth g for which counts at some lengths are nearest to a g(n) and slower terms: `most`,
    which none exceeds, or one of `NAMED`, unless another is much nearer; the slowest of which a
    multiple alone is as near as `noise`, by which counts of drawn pairs scatter."""
    for growth in sorted(NAMED):
        shares = edges / _values(growth, lengths)
        if (most is None or growth <= most) and np.ptp(shares) < noise * (2 * shares.min()):
            return growth

    def distance(growth: Growth) -> float:
        columns = [_values(growth, lengths)]
        for lower in (LINEAR, ROOT, CONSTANT):
            if lower < growth and len(lengths) > len(columns) + 2:
                columns.append(_values(lower, lengths))
        # relative errors: every length counts alike
        matrix = np.array(columns).T / edges[:, None]
        weights = np.linalg.lstsq(matrix, np.ones(len(lengths)), rcond=None)[0]
        share = weights[0] * matrix[-1, 0]
        away = float(np.abs(matrix @ weights - 1).max())
        return away if share > SHARE else math.inf

    # what fits alike within the noise of floating point is the slowest
    def best(growths: list[Growth]) -> tuple[float, Growth]:
        return min((round(distance(growth), 6), growth) for growth in growths)

    chosen = best([growth for growth in NAMED if most is None or growth <= most])
    other = best([growth for growth in OTHERS if most is None or growth < most] or [CONSTANT])
    chosen = other if CLEAR * other[0] < chosen[0] else chosen
    return most if most and distance(most) <= min(CLEAR * chosen[0], ROUNDED) else chosen[1]


def _values(growth: Growth, lengths: np.ndarray) -> np.ndarray:
    """n**a log(n)**b at some lengths."""
    power, logs = map(float, growth)
    terms: np.ndarray = lengths**power * np.log(lengths) ** logs
    return terms


def counted(stack: Stack) -> dict[int, int]:
    """The edges at long lengths, as far as rows have a closed form there, else at those where pairs
    are examined; raises TooMuch where counting takes too long at the shortest."""
    counts: dict[int, int] = {}
    for lengths in (LONG, LOOKED_INTO):
        for n in lengths:
            try:
                # all pairs of all graphs, for every pattern in them
                found = stack.bound(n).found
                graphs = (stack.program.attend(layer, head).graph for layer, head, _ in found)
                looks = n * n * sum(map(patterns_in, graphs))
                beyond = lengths is LONG or looks > LIMITS.looks_grown
                if not beyond or _is_quick(stack, n):
                    counts[n] = total_edges(stack, n)
            except TooMuch:
                if not counts and lengths is LOOKED_INTO:
                    raise
                break
            except AttnSpecError:
                continue
        if len(counts) >= ENOUGH:
            break
    return counts


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
    counts: dict[int, int] = {}
    for quarters in (1, 2, 4, 6, 8, 12, 16):
        if any(size * quarters % 4 for size in extents.values()):
            continue
        try:
            sizes = {name: size * quarters // 4 for name, size in extents.items()}
            grown = Stack(elaborated.resized(sizes).program)
            length = grown.program.fixed_length
            if length is None or length in counts:
                break
            if length > (LIMITS.cells_grown if _is_quick(grown, length) else LOOKED_INTO[-1]):
                break
            counts[length] = total_edges(grown, length)
        except AttnSpecError:
            continue
    return counts


def _is_extent(elaborated: Elaborated, name: str, size: int) -> bool:
    """Whether the grid grows with a parameter."""
    try:
        return elaborated.resized({name: size * 2}).program.grid != elaborated.program.grid
    except AttnSpecError:
        return False
