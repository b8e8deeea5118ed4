"""What attnspec means, in plain numpy: a pattern's pairs, their reach, and attention over them.

A *graph* says which keys each query reads: a function of the positions q and k and the length n.
Everything else follows from it. The package does the same for long sequences, many heads and GPUs;
here nothing is fast, and everything can be read.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Graph = Callable[[int, int, int], bool]
"""Whether query q reads key k in a sequence of n positions."""


# --- patterns: what the words of a spec mean ------------------------------------------------------


def window(before: int, after: int) -> Graph:
    return lambda q, k, n: q - before <= k <= q + after


def residue(step: int) -> Graph:
    return lambda q, k, n: (q - k) % step == 0


def block(size: int) -> Graph:
    return lambda q, k, n: q // size == k // size


def global_(tokens: set[int]) -> Graph:
    return lambda q, k, n: q in tokens or k in tokens


# --- operators ------------------------------------------------------------------------------------


def union(*graphs: Graph) -> Graph:
    return lambda q, k, n: any(holds(q, k, n) for holds in graphs)


def intersection(*graphs: Graph) -> Graph:
    return lambda q, k, n: all(holds(q, k, n) for holds in graphs)


def difference(graph: Graph, other: Graph) -> Graph:
    return lambda q, k, n: graph(q, k, n) and not other(q, k, n)


def transpose(graph: Graph) -> Graph:
    return lambda q, k, n: graph(k, q, n)


def causal(graph: Graph) -> Graph:
    return lambda q, k, n: k <= q and graph(q, k, n)


# --- what follows ---------------------------------------------------------------------------------


def mask(graph: Graph, n: int) -> np.ndarray:
    """bool [n, n]: row q has the keys that query q reads."""
    return np.array([[graph(q, k, n) for k in range(n)] for q in range(n)]).reshape(n, n)


def reach(pairs: np.ndarray, layers: int) -> np.ndarray:
    """bool [n, n]: whether information at k reaches q within that many layers. A position keeps
    what it has: between two layers there is a residual connection."""
    known = np.eye(len(pairs), dtype=bool)
    for _ in range(layers):
        known = known | (pairs.astype(int) @ known > 0)
    return known


def depth(pairs: np.ndarray) -> int | None:
    """The fewest layers after which every position has seen every other, None if it never does."""
    layers = 0
    while (reach(pairs, layers) != reach(pairs, layers + 1)).any():
        layers += 1
    return layers if reach(pairs, layers).all() else None


def attend(pairs: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Softmax attention over the pairs: q and k [n, d], v [n, e]; a query without a key gets 0."""
    scores = np.where(pairs, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    top = np.where(pairs.any(1), scores.max(1, initial=-np.inf), 0.0)
    weights = np.exp(scores - top[:, None])
    total = weights.sum(1, keepdims=True)
    return np.asarray((weights @ v) / np.where(total > 0, total, 1.0))


if __name__ == "__main__":
    pairs = mask(union(window(before=3, after=3), global_({0})), 24)
    print("\n".join("".join("█" if held else "·" for held in row) for row in pairs))
    print(
        f"{pairs.sum()} pairs of {pairs.size}; every position has seen every other after", end=" "
    )
    print(f"{depth(pairs)} layers")
