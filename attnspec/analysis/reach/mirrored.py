"""Whether a relation is its own mirror image, at one length."""

from __future__ import annotations

import numpy as np

from attnspec.analysis.counting.degrees import degrees_of, readers_of
from attnspec.analysis.counting.progressions import grouped
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import TooMuch

FEW = 1 << 24
"""Up to so many edges they are compared one by one."""

CHUNK = 1 << 20
"""Progressions that are summed in one go."""


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
    sums = _sums(relation, n)
    if sums is None:
        raise TooMuch(f"so many pairs are not compared, n = {n:,}")
    return not np.array_equal(*sums), False


def _equal_edges(relation: Relation, n: int) -> bool:
    codes, turned = [], []
    for first, last in relation.chunks(n):
        q, k = relation.rows(first, last, n)
        codes.append(q * n + k)
        turned.append(k * n + q)
    none = np.zeros(0, np.int64)
    return np.array_equal(np.concatenate([*codes, none]), np.sort(np.concatenate([*turned, none])))


def _sums(relation: Relation, n: int) -> tuple[np.ndarray, np.ndarray] | None:
    """A random weight for each position, summed over the keys of each query and over the readers of
    each key: equal for symmetric relations, and for others hardly ever. None without closed form.
    """
    weights = np.random.default_rng(0).integers(0, 2**63, n, dtype=np.uint64)
    of_keys, of_readers = np.zeros(n, np.uint64), np.zeros(n, np.uint64)
    for first, part in relation.closed_rows(n, CHUNK):
        if part is None:
            return None
        for group in grouped(part, n):
            before = np.zeros(group.places + 1, np.uint64)
            np.cumsum(group.ordered(weights), out=before[1:])
            last = group.place + group.count
            np.add.at(of_keys, first + group.row, before[last] - before[group.place])
            change = np.zeros(group.places + 1, np.uint64)
            np.add.at(change, group.place, weights[first + group.row])
            np.subtract.at(change, last, weights[first + group.row])
            of_readers += group.natural(np.cumsum(change[:-1]))
    return of_keys, of_readers
