"""Whether a relation is its own mirror image, at one length."""

from __future__ import annotations

import numpy as np

from attnspec.analysis.counting.degrees import degrees_of, readers_of, weighted
from attnspec.graphs.operators import transpose_of
from attnspec.graphs.relation import Relation

FEW = 1 << 24
"""Up to so many edges they are compared one by one."""

DRAWS = 2
"""Random weights that must agree, each with a probability of at most 2 ** -31 where it should not.
"""


def asymmetry(relation: Relation, n: int) -> tuple[bool, bool]:
    """Whether some pair lacks its mirror image, and whether the answer is certain.

    Raises TooMuch where too many pairs would have to be listed.
    """
    if relation.transposed() == relation:
        return False, True
    degrees = degrees_of(relation, n)
    if not np.array_equal(degrees, readers_of(relation, n)):
        return True, True
    if int(degrees.sum()) <= FEW:
        return not _equal_edges(relation, n), True
    # random weights, summed over the keys of each query and over the readers of each key, are equal
    # for symmetric relations, and for others hardly ever
    for seed in range(DRAWS):
        weights = np.random.default_rng(seed).integers(0, 1 << 31, n)
        of_readers = weighted(transpose_of(relation), n, weights)
        if not np.array_equal(of_readers, weighted(relation, n, weights)):
            return True, False
    return False, False


def _equal_edges(relation: Relation, n: int) -> bool:
    codes, turned = [], []
    for first, last in relation.chunks(n):
        q, k = relation.rows(first, last, n)
        codes.append(q * n + k)
        turned.append(k * n + q)
    none = np.zeros(0, np.int64)
    return np.array_equal(np.concatenate([*codes, none]), np.sort(np.concatenate([*turned, none])))
