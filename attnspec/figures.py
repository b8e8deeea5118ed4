"""Figures of a stack of layers, counted: edges, degree, distances, what is reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from attnspec.relations import Relation
from attnspec.stack import Stack


def allowed(stack: Stack, n: int) -> np.ndarray:
    """bool [n, n]: the keys that each query may read, all or those up to it."""
    every = np.ones((n, n), bool)
    return np.tril(every) if stack.program.causal else every


def reached(stack: Stack, n: int, layers: int) -> Iterator[np.ndarray]:
    """bool [n, n] after 0, 1, … layers: what each query has read, itself included."""
    read = np.eye(n, dtype=bool)
    yield read
    graph = None
    for layer in range(layers):
        # a spec with fewer layers repeats its last
        if layer < stack.spec.layers:
            graph = stack.layer(n, layer).astype(np.float32)
        if graph is None:
            return
        grown = read | (graph @ read.astype(np.float32) > 0)
        if layer >= stack.spec.layers and (grown == read).all():
            return
        read = grown
        yield read


def total_edges(stack: Stack, n: int) -> int:
    """The pairs of all layers and heads together."""
    heads = stack.spec.heads or 1
    counts: dict[Relation, int] = {}
    total = 0
    for layer in range(stack.spec.layers):
        for head in range(heads):
            relation = stack.spec.relation(n, layer, head)
            if relation not in counts:
                counts[relation] = relation.edges(n)
            total += counts[relation]
    return total


def density(stack: Stack, n: int) -> float:
    """The pairs as a part of n * n * layers * heads."""
    return total_edges(stack, n) / (n * n * (stack.spec.heads or 1) * stack.spec.layers)


def degree(stack: Stack, n: int) -> int:
    """The most keys of one query in one head."""
    return max(int(relation.degrees(n).max()) for _, _, relation in stack.relations(n))


def depth(stack: Stack, n: int) -> int | None:
    """The least number of layers after which all allowed pairs are joined, None if never."""
    wanted = allowed(stack, n)
    for layers, read in enumerate(reached(stack, n, n + stack.spec.layers)):
        if not (wanted & ~read).any():
            return layers
    return None


def distances(stack: Stack, n: int) -> np.ndarray:
    """Shortest paths between allowed pairs in the union of all layers and heads; inf = none."""
    from scipy.sparse.csgraph import shortest_path

    total = stack.layer(n, 0)
    for layer in range(1, stack.spec.layers):
        total = (total + stack.layer(n, layer)).minimum(1)
    distances = np.asarray(shortest_path(total.astype(np.float64), unweighted=True))
    return np.asarray(distances[allowed(stack, n)])


def diameter(stack: Stack, n: int) -> int | None:
    """The longest of the shortest paths between allowed pairs, None if some pair has none."""
    longest = float(distances(stack, n).max())
    return int(longest) if np.isfinite(longest) else None


def path_length(stack: Stack, n: int) -> float | None:
    """The mean of the shortest paths between allowed pairs of different positions."""
    found = distances(stack, n)
    mean = float(found.sum() / max(1, len(found) - n))
    return mean if np.isfinite(mean) else None


def spectral_gap(stack: Stack, n: int) -> float:
    """1 - |second eigenvalue| of the symmetrised, degree-normalised union of all heads."""
    total = stack.layer(n, 0)
    for layer in range(1, stack.spec.layers):
        total = (total + stack.layer(n, layer)).minimum(1)
    either = total.maximum(total.T).toarray().astype(float)
    degrees = np.maximum(either.sum(axis=1), 1)
    eigenvalues = np.linalg.eigvalsh(either / np.sqrt(degrees[:, None] * degrees[None]))
    magnitudes = np.sort(np.abs(eigenvalues))
    return float(1 - magnitudes[-2]) if n > 1 else 1.0


FIGURES: dict[str, Callable[[Stack, int], float | None]] = {
    "edges": total_edges,
    "degree": degree,
    "density": density,
    "depth": depth,
    "diameter": diameter,
    "path_length": path_length,
    "spectral_gap": spectral_gap,
}
