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
    is_closed,
    is_scattered,
    lengths,
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
    count = min(n_q, LIMITS.queries_sampled // RUN if scattered else LIMITS.queries_sampled)
    sample = n_k - n_q + spread_out(n_q, count)
    if scattered:
        sample = np.minimum(sample, n_k - RUN)
        pairs = sum(len(relation.rows(int(q), int(q) + RUN, n_k)[0]) for q in sample)
        return pairs * n_q / (RUN * count)
    return _keys(relation, sample, n_k) * n_q / max(1, count)


def _keys(relation: Relation, queries: np.ndarray, n: int) -> float:
    """The number of keys of some queries together."""
    closed = relation.progressions(queries, n)
    if closed is not None:
        return float(lengths(closed).sum())
    if len(queries) * n <= LIMITS.pairs_counted:
        # one look at all of them is sooner done than a list of each
        return float(evaluate_pairs(relation, queries[:, None], np.arange(n)[None], n).sum())
    if not is_closed(relation):
        return float(sum(len(relation.row_keys(int(q), int(q) + 1, n)) for q in queries))
    return _covered(relation, queries, n)


def _covered(relation: Relation, queries: np.ndarray, n: int) -> float:
    """As `_keys`, by the cover of ranges of keys, coarse ones first; of a sample where many are
    undecided."""
    size = LIMITS.side
    while size * LIMITS.side < n:
        size *= LIMITS.fanout
    q = np.repeat(queries, -(-n // size))
    k = np.tile(np.arange(0, n, size), len(queries))
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
        k = (k[:, None] + size * np.arange(LIMITS.fanout)).ravel()
        q = np.repeat(q, LIMITS.fanout)
        q, k = q[k < n], k[k < n]


def spread_out(count: int, most: int) -> np.ndarray:
    """`most` of the numbers 0 <= i < count, ascending: one of each of equal ranges. At equal
    distances those of periodic patterns, and in blocks of a power of two, would stand alike."""
    return np.asarray(((np.arange(most) + drawn(most)) * count / max(1, most)).astype(int))


def drawn(count: int) -> np.ndarray:
    """Numbers 0 <= x < 1, always the same."""
    return np.random.Generator(np.random.PCG64(0)).random(count)
