"""Whether a relation is its own mirror image, at one length."""

from __future__ import annotations

import numpy as np

from attnspec.analysis.counting.degrees import degrees_of, readers_of, weighted
from attnspec.graphs.operators import transpose_of
from attnspec.graphs.relation import Relation, evaluate_pairs
from attnspec.limits import LIMITS

DRAWS = 2
"""Random weights that must agree, each with a probability of at most 2 ** -31 where it should not.
"""


def asymmetry(relation: Relation, n: int) -> tuple[int | None, bool]:
    """A position whose keys are not its readers, and whether None, for no such one, is certain.

    Raises TooMuch where too many pairs would have to be listed.
    """
    if relation.transposed() == relation:
        return None, True
    degrees, readers = degrees_of(relation, n), readers_of(relation, n)
    different = _first(degrees, readers)
    if different is not None:
        return different, True
    if int(degrees.sum()) <= LIMITS.soon:
        return _by_edges(relation, n), True
    # random weights, summed over the keys of each query and over the readers of each key, are equal
    # for symmetric relations, and for others hardly ever
    for seed in range(DRAWS):
        weights = np.random.default_rng(seed).integers(0, 1 << 31, n)
        of_readers = weighted(transpose_of(relation), n, weights)
        different = _first(of_readers, weighted(relation, n, weights))
        if different is not None:
            return different, True
    return None, False


def one_way(relation: Relation, n: int, position: int) -> tuple[int, int]:
    """A pair (q, k) whose mirror image is missing, of a position whose keys are not its readers."""
    everywhere, here = np.arange(n), np.full(1, position)
    keys = evaluate_pairs(relation, here, everywhere, n)
    other = _first(keys, evaluate_pairs(relation, everywhere, here, n)) or 0
    return (position, other) if keys[other] else (other, position)


def _first(one: np.ndarray, other: np.ndarray) -> int | None:
    """The first place where two arrays differ."""
    different = one != other
    return int(different.argmax()) if different.any() else None


def _by_edges(relation: Relation, n: int) -> int | None:
    codes, turned = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for first, last in relation.chunks(n):
        q, k = relation.rows(first, last, n)
        codes.append(q * n + k)
        turned.append(k * n + q)
    edges, mirrored = np.concatenate(codes), np.sort(np.concatenate(turned))
    place = _first(edges, mirrored)
    # whichever comes first is missing among the others
    return None if place is None else int(min(edges[place], mirrored[place])) // n
