"""Figures of a stack of layers, counted: edges, degree, distances, what is reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from attnspec.stack import Stack

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_WORDS = 1 << 22
"""Words gathered in one go: 32 mebibytes."""


def allowed(stack: Stack, n: int) -> np.ndarray:
    """bool [n, n]: the keys that each query may read, all or those up to it."""
    every = np.ones((n, n), bool)
    return np.tril(every) if stack.program.causal else every


def reached(stack: Stack, n: int, layers: int) -> Iterator[np.ndarray]:
    """What each query has read after 0, 1, … layers, itself included, in bits as `packed` has them.

    Ends early where no further layer adds anything.
    """
    read = packed(np.eye(n, dtype=bool))
    yield read
    graph = None
    for layer in range(layers):
        # a spec with fewer layers repeats its last
        if layer < stack.spec.layers:
            graph = stack.layer(n, layer)
        if graph is None:
            return
        grown = _passed_on(graph, read)
        if layer >= stack.spec.layers and (grown == read).all():
            return
        read = grown
        yield read


def packed(pairs: np.ndarray) -> np.ndarray:
    """bool [m, n] as bits, uint64 [m, ceil(n / 64)]."""
    padding = -pairs.shape[1] % 64
    return np.packbits(np.pad(pairs, ((0, 0), (0, padding))), axis=1).view(np.uint64)


def unread(stack: Stack, n: int, layers: int) -> np.ndarray:
    """bool [n, n]: the allowed keys that a query has not read after the first layers."""
    *_, read = reached(stack, n, layers)
    bits = np.unpackbits(read.view(np.uint8), axis=1, count=n).astype(bool)
    return np.asarray(allowed(stack, n) & ~bits)


def _passed_on(graph: csr_array, read: np.ndarray) -> np.ndarray:
    """What each query has read after one more layer with the edges of `graph`."""
    grown = read.copy()
    pointers, keys = graph.indptr, graph.indices
    first, rows = 0, len(read)
    while first < rows:
        # as many rows as have about _WORDS words to gather, but one at least
        most = int(pointers[first]) + max(1, _WORDS // read.shape[1])
        last = max(first + 1, int(np.searchsorted(pointers, most, side="right")) - 1)
        begin, end = pointers[first], pointers[last]
        with_keys = np.flatnonzero(np.diff(pointers[first : last + 1]))
        if len(with_keys):
            starts = pointers[first:last][with_keys] - begin
            gathered = np.bitwise_or.reduceat(read[keys[begin:end]], starts, axis=0)
            grown[first + with_keys] |= gathered
        first = last
    return grown


def total_edges(stack: Stack, n: int) -> int:
    """The pairs of all layers and heads together."""
    return sum(count * relation.edges(n) for count, relation in stack.counted(n))


def density(stack: Stack, n: int) -> float:
    """The pairs as a part of n * n * layers * heads."""
    return total_edges(stack, n) / (n * n * (stack.spec.heads or 1) * stack.spec.layers)


def degree(stack: Stack, n: int) -> int:
    """The most keys of one query in one head."""
    return max(int(relation.degrees(n).max()) for _, _, relation in stack.relations(n))


def depth(stack: Stack, n: int) -> int | None:
    """The least number of layers after which all allowed pairs are joined, None if never."""
    wanted = packed(allowed(stack, n))
    for layers, read in enumerate(reached(stack, n, n + stack.spec.layers)):
        if not (wanted & ~read).any():
            return layers
    return None


def distances(stack: Stack, n: int) -> np.ndarray:
    """Shortest paths between allowed pairs in the union of all layers and heads; inf = none."""
    from scipy.sparse.csgraph import shortest_path

    distances = np.asarray(shortest_path(stack.union(n).astype(np.float64), unweighted=True))
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
    total = stack.union(n)
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
