"""Figures that claims and reports have in common: pairs, spectral gap, operations and bytes.

Those of pairs are counted for all graphs that are bound, or for those of some layers and heads.
"""

from __future__ import annotations

from collections.abc import Callable

from attnspec.analysis.counting.degrees import bound_edges, degrees_of
from attnspec.analysis.counting.head_counts import queries_of
from attnspec.graphs.stack import Bound, Stack, TooMuch
from attnspec.ir.program import Crossing


def density(bound: Bound, n: int, sides: Crossing | None = None) -> float:
    """The pairs as a part of n * n * layers * heads, or m * n between two sequences."""
    pairs = n * n if sides is None else sides.queries * sides.keys
    return bound_edges(bound, n) / (pairs * sum(map(len, bound.slots)))


def degree(bound: Bound, n: int) -> int:
    """The most keys of one query in one head."""
    return max(int(degrees_of(relation, n).max()) for _, _, relation in bound.found)


def min_degree(bound: Bound, n: int, sides: Crossing | None = None) -> int:
    """The fewest keys of one query in one head."""
    return min(
        int(degrees_of(relation, n)[queries_of(sides)].min()) for _, _, relation in bound.found
    )


PAIRS: dict[str, Callable[[Bound, int, Crossing | None], float]] = {
    "edges": lambda bound, n, sides: bound_edges(bound, n),
    "density": density,
    "degree": lambda bound, n, sides: degree(bound, n),
    "min_degree": min_degree,
}
"""What is counted of the pairs of graphs at n > 0 positions, which may hold two sequences; each
raises TooMuch."""


def _of_layer(name: str) -> Callable[[Stack, int], float]:
    """What one layer costs, all heads, forward, by the plan for the CPU."""

    def of(stack: Stack, n: int) -> float:
        # planning is loaded for the claims that need it
        from attnspec.analysis.cost.cost import NotBuilt, layer_cost

        try:
            figure: int = getattr(layer_cost(stack, n), name)
        except NotBuilt as error:
            raise TooMuch(str(error)) from None
        return figure

    return of


def spectral_gap(stack: Stack, n: int) -> float:
    """1 - |second eigenvalue| of the symmetrised, degree-normalised union of all heads; raises
    TooMuch where no more than a bound is found."""
    from attnspec.analysis.spectrum import spectrum

    gap = spectrum.spectral_gap(stack, n)
    if gap.quality == "bound":
        raise TooMuch(f"the spectral gap at n = {n:,} is not found in time: {gap.note}")
    return gap.value


def _counted(name: str) -> Callable[[Stack, int], float]:
    return lambda stack, n: PAIRS[name](stack.bound(n), n, stack.program.crossing)


COUNTS = ("edges", "degree", "density")
"""What claims compare of pairs: every layer and head has its own, and those of short sequences may
differ from those of all longer ones."""

COSTS = ("flops", "bytes")
"""What claims compare of costs, of which every layer has its own."""

FIGURES: dict[str, Callable[[Stack, int], float]] = {
    **{name: _counted(name) for name in COUNTS},
    "spectral_gap": spectral_gap,
    **{name: _of_layer(name) for name in COSTS},
}
"""The figures that claims compare."""
