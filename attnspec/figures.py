"""Figures of a stack of layers: edges, degree, density, spectral gap, operations and bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attnspec.analysis.cost import layer_cost
from attnspec.analysis.edges import degrees_of, total_edges
from attnspec.stack import Stack


def density(stack: Stack, n: int) -> float:
    """The pairs as a part of n * n * layers * heads."""
    return total_edges(stack, n) / (n * n * (stack.spec.heads or 1) * stack.spec.layers)


def degree(stack: Stack, n: int) -> int:
    """The most keys of one query in one head."""
    return max(int(degrees_of(relation, n).max()) for _, _, relation in stack.bound(n).found)


def flops(stack: Stack, n: int) -> int:
    """The operations of one layer, all heads, forward, as planned for the CPU: see `layer_cost`."""
    return layer_cost(stack, n).flops


def moved_bytes(stack: Stack, n: int) -> int:
    """The bytes that one layer reads and writes, forward."""
    return layer_cost(stack, n).bytes


def spectral_gap(stack: Stack, n: int) -> float:
    """1 - |second eigenvalue| of the symmetrised, degree-normalised union of all heads."""
    total = stack.union(n)
    either = total.maximum(total.T).toarray().astype(float)
    degrees = np.maximum(either.sum(axis=1), 1)
    eigenvalues = np.linalg.eigvalsh(either / np.sqrt(degrees[:, None] * degrees[None]))
    magnitudes = np.sort(np.abs(eigenvalues))
    return float(1 - magnitudes[-2]) if n > 1 else 1.0


FIGURES: dict[str, Callable[[Stack, int], float]] = {
    "edges": total_edges,
    "degree": degree,
    "density": density,
    "spectral_gap": spectral_gap,
    "flops": flops,
    "bytes": moved_bytes,
}
