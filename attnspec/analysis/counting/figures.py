"""Figures that claims and reports have in common: pairs, spectral gap, operations and bytes.

Those of pairs are counted for all graphs that are bound, or for those of some layers and heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attnspec.analysis.counting.degrees import bound_edges, degrees_of, readers_of
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import Bound, Stack, TooMuch
from attnspec.ir.program import Crossing


def density(bound: Bound, n: int, sides: Crossing | None = None) -> float:
    """The pairs as a part of n * n * layers * heads, or m * n between two sequences."""
    pairs = n * n if sides is None else sides.queries * sides.keys
    return bound_edges(bound, n) / (pairs * sum(map(len, bound.slots)))


def degree(bound: Bound, n: int) -> int:
    """The most keys of one query in one head."""
    return max(int(degrees_of(relation, n).max()) for _, _, relation in bound.found)


PAIRS: dict[str, Callable[[Bound, int, Crossing | None], float]] = {
    "edges": lambda bound, n, sides: bound_edges(bound, n),
    "density": density,
    "degree": lambda bound, n, sides: degree(bound, n),
    "min_degree": lambda bound, n, sides: min(
        int(degrees_of(x, n)[queries_of(sides)].min()) for _, _, x in bound.found
    ),
}
"""What is counted of the pairs of graphs at n > 0 positions, which may hold two sequences; each
raises TooMuch."""


def _of_layer(name: str) -> Callable[[Stack, int], float]:
    """What one layer costs, all heads, forward, by the plan for the CPU."""

    def of(stack: Stack, n: int) -> float:
        # planning is loaded for the claims that need it
        from attnspec.analysis.cost.cost import NotBuilt, layer_cost, steps_of

        try:
            figure: int = getattr(layer_cost(stack, n, steps_of(stack, n)), name)
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


# --- one head -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadCounts:
    """The pairs of one head of one layer, exactly.

    `degree`, `min_degree`, `mean_degree`: keys of one query; `readers`, `min_readers`: queries that
    read one key; `empty_rows` queries have no key, `unread_keys` no reader.
    """

    edges: int
    density: float
    degree: int
    min_degree: int
    mean_degree: float
    readers: int
    min_readers: int
    empty_rows: int
    unread_keys: int


def queries_of(sides: Crossing | None) -> slice:
    """Which positions are queries: all, or the first where they hold two sequences."""
    return slice(None if sides is None else sides.queries)


def head_counts(relation: Relation, n: int, sides: Crossing | None = None) -> HeadCounts:
    """The counts of a head at some positions, perhaps of two sequences; raises TooMuch."""
    degrees = degrees_of(relation, n)[queries_of(sides)]
    readers = readers_of(relation, n)[: n if sides is None else sides.keys]
    edges = int(degrees.sum())
    return HeadCounts(
        edges=edges,
        density=edges / (len(degrees) * len(readers)),
        degree=int(degrees.max()),
        min_degree=int(degrees.min()),
        mean_degree=edges / len(degrees),
        readers=int(readers.max()),
        min_readers=int(readers.min()),
        empty_rows=int((degrees == 0).sum()),
        unread_keys=int((readers == 0).sum()),
    )
