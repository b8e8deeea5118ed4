"""Small-world figures: clustering, BigBird's star, keys that only they themselves read.

Clustering is that of the union of all layers and heads, pairs taken both ways and loops left out,
the mean over all positions of the part of the pairs of neighbours that are neighbours themselves;
positions with fewer than two neighbours count as 0 (Watts and Strogatz 1998).
"""

from __future__ import annotations

import numpy as np

from attnspec.algebra import Union
from attnspec.analysis.chain import layers_of, union_of
from attnspec.analysis.edges import degrees_of, readers_of
from attnspec.analysis.quality import Figure
from attnspec.analysis.undirected import (
    MOST_EDGES,
    both_ways,
    degrees_both_ways,
    edges_both_ways,
    own,
)
from attnspec.relations import Relation, evaluate_pairs
from attnspec.stack import Stack

MOST_PATHS = 1 << 27
"""Paths of two pairs that are followed for the exact clustering."""

SAMPLED = 256
"""Positions that stand for all where there are more paths."""

MOST_PAIRS = 1 << 14
"""Pairs of neighbours that are looked at for one sampled position."""


def clustering(stack: Stack, n: int) -> Figure[float]:
    """The mean clustering coefficient at n > 0 positions; raises TooMuch."""
    degrees = degrees_both_ways(stack, n)
    # of no more than these: with a hub in a graph, its own alone are n * n
    paths = int((degrees.astype(float) ** 2).sum())
    if paths <= MOST_PATHS and int(degrees.sum()) <= MOST_EDGES:
        return Figure(_counted(stack, n))
    return _sampled(stack, n)


def _counted(stack: Stack, n: int) -> float:
    from scipy.sparse import csr_array

    edges = csr_array(edges_both_ways(stack, n))
    edges.setdiag(0)
    edges.eliminate_zeros()
    degrees = np.diff(edges.indptr)
    closed = np.zeros(n)
    paths = np.cumsum(edges @ degrees)
    # rows whose paths together fill a few hundred megabytes
    ends = np.unique(np.searchsorted(paths, np.arange(1, paths[-1] // (1 << 24) + 2) * (1 << 24)))
    first = 0
    for last in (*(np.minimum(ends + 1, n)).tolist(), n):
        part = edges[first:last]
        closed[first:last] = (part @ edges).multiply(part).sum(axis=1)
        first = last
    pairs = degrees * (degrees - 1.0)
    return float(np.divide(closed, pairs, out=np.zeros(n), where=pairs > 0).mean())


def _sampled(stack: Stack, n: int) -> Figure[float]:
    both = both_ways(stack, n)
    draws = np.random.Generator(np.random.PCG64(n))
    positions = np.sort(draws.choice(n, min(n, SAMPLED), replace=False))
    found = np.array([_around(stack, both, int(position), n, draws) for position in positions])
    error = float(found.std(ddof=1) / np.sqrt(len(found)))
    note = f"{len(found)} positions were looked at; standard error {error:.2g}"
    return Figure(float(found.mean()), "estimate", note)


def _around(
    stack: Stack, both: Relation, position: int, n: int, draws: np.random.Generator
) -> float:
    near = _near(stack, position, n)
    if len(near) < 2:
        return 0.0
    if len(near) ** 2 <= MOST_PAIRS:
        held = evaluate_pairs(both, near[:, None], near[None], n)
        others = ~np.eye(len(near), dtype=bool)
        return float(held[others].mean())
    first = draws.integers(len(near), size=MOST_PAIRS)
    second = (first + draws.integers(1, len(near), size=MOST_PAIRS)) % len(near)
    return float(evaluate_pairs(both, near[first], near[second], n).mean())


def _near(stack: Stack, position: int, n: int) -> np.ndarray:
    """The neighbours of a position but itself, ascending."""
    both = both_ways(stack, n)
    if both.progressions(np.array([position]), n) is not None:
        near = both.rows(position, position + 1, n)[1]
    elif int(degrees_both_ways(stack, n).sum()) <= MOST_EDGES:
        edges = edges_both_ways(stack, n)
        near = edges.indices[edges.indptr[position] : edges.indptr[position + 1]].astype(np.int64)
    else:
        graph = union_of(stack, n).graph(0)
        marked = np.zeros(n, bool)
        graph.mark(np.array([position]), marked)
        graph.reversed().mark(np.array([position]), marked)
        near = np.flatnonzero(marked)
    return np.asarray(near[near != position])


# --- star -----------------------------------------------------------------------------------------


def star(stack: Stack, n: int) -> Figure[bool]:
    """Whether every layer has a position that reads all and that all read, at n > 0 positions.

    With every position reading itself, too, the sparse graph is a universal approximator (Zaheer et
    al. 2020, "Big Bird", theorem 1): the note says where that is not so. Raises TooMuch.
    """
    chain = layers_of(stack, n)
    hubs = []
    for layer in range(chain.distinct):
        heads = Union(tuple(sorted(chain.at(layer), key=repr)))
        rows, columns = degrees_of(heads, n) == n, readers_of(heads, n) == n
        both = np.flatnonzero(rows & columns)
        where = "" if chain.distinct == 1 else f"layer {layer}: "
        if not len(both):
            what = "reads all" if not rows.any() else "is read by all"
            if rows.any() and columns.any():
                what = "reads all and is read by all"
            return Figure(False, note=f"{where}no position {what}")
        alone = ~own(heads, n)
        if alone.any():
            hubs.append(f"{where}position {both[0]:,}; {alone.argmax():,} does not read itself")
        else:
            hubs.append(f"{where}position {both[0]:,}")
    return Figure(True, note="; ".join(dict.fromkeys(hubs)))


# --- unread ---------------------------------------------------------------------------------------


def unread_share(stack: Stack, n: int) -> Figure[float]:
    """The part of the keys that no other position reads, in the head that leaves most of them; for
    drawn graphs with what is expected. n > 0; raises TooMuch."""
    worst, drawn, degree = 0.0, False, 0.0
    for _, _, relation in stack.bound(n).found:
        others = readers_of(relation, n) - own(relation, n)
        share = float((others == 0).mean())
        if share >= worst:
            worst, drawn = share, _is_drawn(relation)
            degree = float((degrees_of(relation, n) - own(relation, n)).mean())
    if not drawn:
        return Figure(worst)
    return Figure(worst, note=f"{np.exp(-degree):.3g} is expected of as many random keys a query")


def _is_drawn(relation: Relation) -> bool:
    from attnspec.drawn import Drawn

    return isinstance(relation, Drawn) or (
        isinstance(relation, Union) and any(isinstance(term, Drawn) for term in relation.terms)
    )
