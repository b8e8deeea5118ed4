"""Figures of a stack of layers: edges, degree, density, spectral gap, operations and bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attnspec.analysis.edges import degrees_of, total_edges
from attnspec.stack import Stack, TooMuch

if TYPE_CHECKING:
    from attnspec.analysis.cost import LayerCost


def density(stack: Stack, n: int) -> float:
    """The pairs as a part of n * n * layers * heads."""
    return total_edges(stack, n) / (n * n * (stack.spec.heads or 1) * stack.spec.layers)


def degree(stack: Stack, n: int) -> int:
    """The most keys of one query in one head."""
    return max(int(degrees_of(relation, n).max()) for _, _, relation in stack.bound(n).found)


def flops(stack: Stack, n: int) -> int:
    """The operations of one layer, all heads, forward."""
    return _layer_cost(stack, n).flops


def moved_bytes(stack: Stack, n: int) -> int:
    """The bytes that one layer reads and writes, forward."""
    return _layer_cost(stack, n).bytes


def _layer_cost(stack: Stack, n: int) -> LayerCost:
    """By the plan for the CPU."""
    # planning is loaded for the claims that need it
    from attnspec.analysis.cost import NotBuilt, layer_cost

    try:
        return layer_cost(stack, n)
    except NotBuilt as error:
        raise TooMuch(str(error)) from None


def spectral_gap(stack: Stack, n: int) -> float:
    """1 - |second eigenvalue| of the symmetrised, degree-normalised union of all heads; raises
    TooMuch where no more than a bound is found."""
    from attnspec.analysis.spectrum import spectrum

    found = spectrum(stack, n)
    if found.quality == "bound":
        raise TooMuch(f"the spectral gap at n = {n:,} is not found in time: {found.note}")
    return found.gap


FIGURES: dict[str, Callable[[Stack, int], float]] = {
    "edges": total_edges,
    "degree": degree,
    "density": density,
    "spectral_gap": spectral_gap,
    "flops": flops,
    "bytes": moved_bytes,
}
