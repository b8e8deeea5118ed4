"""From a relation to the keys of its last few queries.

A step of generation asks for one query at a length that was never seen before, so what is made here
must cost less than reading the keys does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import and_, or_

import numpy as np

from attnspec.backends.common.labels import possible
from attnspec.graphs.operators import Complement, Intersection, Shift, Transpose, Union
from attnspec.graphs.relation import Relation, evaluate_pairs
from attnspec.limits import LIMITS
from attnspec.lower.work import Work


@dataclass(frozen=True, eq=False)
class RowKeys:
    """The keys that some queries read, int64 [w], ascending, and which query reads which.

    `ranges` are the same as a few ranges, None where they are none. `held` is bool [n_q, w], None
    where every query reads every one of the keys, or where run-time inputs decide which it reads.
    """

    positions: np.ndarray
    ranges: tuple[range, ...] | None
    held: np.ndarray | None = None


def row_keys(work: Work) -> RowKeys:
    """The keys of a work's queries."""
    relation = possible(work.relation) if work.reads else work.relation
    return _row_keys(relation, work.n_q, work.n_k, bool(work.reads))


@lru_cache(maxsize=LIMITS.layouts_few)
def _row_keys(relation: Relation, n_q: int, n_k: int, reads: bool) -> RowKeys:
    rows = np.stack([_row(relation, q, n_k) for q in range(n_k - n_q, n_k)])
    keys = np.flatnonzero(rows.any(0))
    mask = None if reads or n_q == 1 else rows[:, keys]
    return RowKeys(keys, _ranges(keys), None if mask is None or mask.all() else mask)


def _row(relation: Relation, q: int, n: int) -> np.ndarray:
    """Which keys query q reads, bool [n]."""
    match relation:
        case Union(terms):
            return np.asarray(reduce(or_, (_row(term, q, n) for term in terms)))
        case Intersection(terms):
            return np.asarray(reduce(and_, (_row(term, q, n) for term in terms)))
        case Complement(term):
            return ~_row(term, q, n)
        case Shift(term, by):
            mask, low, high = np.zeros(n, bool), max(0, by), min(n, n + by)
            if low <= q < high:
                mask[low:high] = _row(term, q - by, n)[low - by : high - by]
            return mask
    closed = relation.progressions(np.array([q]), n)
    listed = type(relation).rows is not Relation.rows and not isinstance(relation, Transpose)
    if closed is None and not listed:
        return evaluate_pairs(relation, np.array([q]), np.arange(n), n)
    mask = np.zeros(n, bool)
    if closed is None:
        mask[relation.row_keys(q, q + 1, n)] = True
        return mask
    for start, stop, step in np.broadcast(*closed):
        if start < stop:
            mask[start:stop:step] = True
    return mask


def _ranges(keys: np.ndarray) -> tuple[range, ...] | None:
    """Ascending keys as one progression or a few ranges, if they are that."""
    if not len(keys):
        return (range(0),)
    steps = np.diff(keys)
    if len(steps) and (steps == steps[0]).all():
        return (range(int(keys[0]), int(keys[-1]) + 1, int(steps[0])),)
    breaks = np.flatnonzero(steps != 1)
    if len(breaks) >= LIMITS.ranges_read:
        return None
    first, last = keys[[0, *(breaks + 1)]], keys[[*breaks, -1]]
    return tuple(
        range(low, high + 1) for low, high in zip(first.tolist(), last.tolist(), strict=True)
    )
