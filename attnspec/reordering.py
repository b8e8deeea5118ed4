"""An order for graphs that no formula describes: reverse Cuthill-McKee.

Positions are numbered breadth first, from one that lies far from others, so that neighbours get
near numbers and the edges fill a band. What a predicate hides, such as a window behind a
multiplication modulo n, comes to light; a random graph has no band to be found.
Source: Cuthill and McKee 1969; George 1971, who turned the order round.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from attnspec.algebra import Intersection
from attnspec.edge_layout import listed_edges
from attnspec.relations import Relation
from attnspec.steps import Order, Permuted

ROOTS = 256
"""Components that are numbered one by one; a graph of more has no band worth finding."""

SEARCHES = 2
"""How often a position that lies farther out is looked for."""


def is_irregular(term: Relation) -> bool:
    """Whether only a list of its edges can show an order in which a term's pairs come together."""
    leaves = term.terms if isinstance(term, Intersection) else (term,)
    return any(leaf.irregular for leaf in leaves)


@lru_cache(maxsize=16)
def reordered(relation: Relation, n_q: int, n_k: int) -> Order | None:
    """The order of reverse Cuthill-McKee for the last n_q of n_k queries and their keys; None where
    the graph falls apart into too many pieces."""
    degrees, keys = listed_edges(relation, n_q, n_k)
    queries = np.repeat(np.arange(n_k - n_q, n_k), degrees)
    positions = reverse_cuthill_mckee(queries, keys, n_k)
    if positions is None:
        return None
    side = Permuted(positions, queries, keys)
    return Order(side, side)


def reverse_cuthill_mckee(q: np.ndarray, k: np.ndarray, n: int) -> np.ndarray | None:
    """All of n positions in an order in which those that edges (q, k) join are near one another;
    None for a graph of more than ROOTS components with an edge."""
    apart = q != k
    ends = np.concatenate([q[apart], k[apart]]), np.concatenate([k[apart], q[apart]])
    degree = np.bincount(ends[0], minlength=n)
    order = np.lexsort((degree[ends[1]], ends[0]))
    neighbours = ends[1][order]
    starts = np.concatenate([[0], np.cumsum(degree)])
    visited = degree == 0
    found = [np.flatnonzero(visited)]
    by_degree = np.argsort(degree, kind="stable")
    for _ in range(ROOTS):
        left = by_degree[~visited[by_degree]]
        if not len(left):
            return np.concatenate(found)[::-1]
        root = int(left[0])
        for _ in range(SEARCHES):
            last = _levels(root, starts, neighbours, visited.copy())[-1]
            root = int(last[degree[last].argmin()])
        found.extend(_levels(root, starts, neighbours, visited))
    return None if not visited.all() else np.concatenate(found)[::-1]


def _levels(
    root: int, starts: np.ndarray, neighbours: np.ndarray, visited: np.ndarray
) -> list[np.ndarray]:
    """The positions that can be reached from a root, level by level, each level in the order of the
    one before; they become `visited`."""
    level = np.array([root])
    visited[root] = True
    found = []
    while len(level):
        found.append(level)
        counts = starts[level + 1] - starts[level]
        first = np.repeat(starts[level] - (np.cumsum(counts) - counts), counts)
        reached = neighbours[first + np.arange(len(first))]
        reached = reached[~visited[reached]]
        _, once = np.unique(reached, return_index=True)
        level = reached[np.sort(once)]
        visited[level] = True
    return found
