"""How many edges a relation has: exactly where it knows, else about, without listing them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from attnspec.graphs.operators import Union
from attnspec.graphs.relation import (
    FULL,
    SOME,
    Relation,
    Tiles,
    evaluate_pairs,
    finer_ranges,
    is_closed,
    is_scattered,
    lengths,
    with_ranges,
)
from attnspec.limits import LIMITS

RUN = 4
"""Queries that follow one another in a sample of a scattered graph: what is drawn is drawn for all
of them at once."""


@lru_cache(maxsize=256)
def edges_of(relation: Relation, n_q: int, n_k: int) -> float:
    """The edges of the last n_q of n_k positions: exact where the relation knows it without listing
    them and for few queries, else an estimate from a sample."""
    if relation.scattered:
        return relation.typical_degree(n_k) * n_q
    if n_q == n_k and type(relation).edges is not Relation.edges:
        return relation.edges(n_k)
    scattered = is_scattered(relation)
    if isinstance(relation, Union) and scattered:
        # what is drawn seldom meets the rest, and drawing it takes long
        return min(n_q * n_k, sum(edges_of(term, n_q, n_k) for term in relation.terms))
    if scattered and n_q <= LIMITS.rows_written:
        return len(relation.rows(n_k - n_q, n_k, n_k)[0])
    run = RUN if scattered else 1
    count = min(n_q, LIMITS.queries_sampled // run)
    sample = np.minimum(n_k - n_q + spread_out(n_q, count), n_k - run)
    closed = None if scattered else relation.progressions(sample, n_k)
    if closed is not None:
        pairs = float(lengths(closed).sum())
    elif not scattered and count * n_k <= LIMITS.pairs_counted:
        # one look at all of them is sooner done than a list of each
        pairs = float(evaluate_pairs(relation, sample[:, None], np.arange(n_k)[None], n_k).sum())
    elif not scattered and is_closed(relation):
        pairs = _covered(relation, sample, n_k)
    else:
        pairs = sum(len(relation.rows(int(q), int(q) + run, n_k)[0]) for q in sample)
    return pairs * n_q / max(1, run * count)


def _covered(relation: Relation, queries: np.ndarray, n: int) -> float:
    """The number of keys of some queries together, by the cover of ranges of keys, coarse ones
    first; of a sample where many are undecided."""
    size = LIMITS.side
    while size * LIMITS.side < n:
        size *= LIMITS.fanout
    q, k = with_ranges(queries, size, n)
    pairs, weight = 0.0, 1.0
    most = LIMITS.tiles_followed
    while True:
        if len(q) > most:
            chosen = spread_out(len(q), most)
            weight *= len(q) / most
            q, k = q[chosen], k[chosen]
        stop = np.minimum(k + size, n)
        kinds = relation.cover(Tiles(q, q + 1), Tiles(k, stop), n)
        pairs += weight * float((stop - k)[kinds == FULL].sum())
        q, k = q[kinds == SOME], k[kinds == SOME]
        if size == LIMITS.side:
            at = k[:, None] + np.arange(size)
            mask = evaluate_pairs(relation, q[:, None], np.minimum(at, n - 1), n) & (at < n)
            return pairs + weight * float(mask.sum())
        size //= LIMITS.fanout
        q, k = finer_ranges(q, k, size, n)


def spread_out(count: int, most: int) -> np.ndarray:
    """`most` of the numbers 0 <= i < count, ascending: one of each of equal ranges. At equal
    distances those of periodic patterns, and in blocks of a power of two, would stand alike."""
    return np.asarray(((np.arange(most) + drawn(most)) * count / max(1, most)).astype(int))


def drawn(count: int) -> np.ndarray:
    """Numbers 0 <= x < 1, always the same."""
    return np.random.Generator(np.random.PCG64(0)).random(count)
