"""An order for graphs that no formula describes: reverse Cuthill-McKee.

Positions are numbered breadth first, from one that lies far from others, so that neighbours get
near numbers and the edges fill a band. What a predicate hides, such as a window behind a
multiplication modulo n, comes to light; a random graph has no band to be found.
Source: Cuthill and McKee 1969; George 1971, who turned the order round.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from attnspec.graphs.operators import Intersection
from attnspec.graphs.relation import Relation
from attnspec.layout.edge_list import listed_edges
from attnspec.layout.orders import Order, Permuted

ROOTS = 256
"""Components of more than one position; a graph of more has no band worth finding."""


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
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components
    from scipy.sparse.csgraph import reverse_cuthill_mckee as ordered

    if not n:
        return np.zeros(0, np.int64)
    ends = np.concatenate([q, k]), np.concatenate([k, q])
    joined = csr_array((np.ones(2 * len(q), np.int8), ends), shape=(n, n))
    _, names = connected_components(joined, directed=False)
    if int((np.bincount(names) > 1).sum()) > ROOTS:
        return None
    return np.asarray(ordered(joined, symmetric_mode=True), np.int64)
