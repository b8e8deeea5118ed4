"""From a relation to the keys of its last few queries, and to the form of all pairs of a call.

A step of generation asks for one query at a length that was never seen before, so what is made here
must cost less than reading the keys does.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache, reduce
from typing import Any

import numpy as np

from attnspec.backends.common.labels import possible
from attnspec.graphs.operators import Complement, Intersection, Transpose, Union
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.relation import Relation, evaluate_pairs, lengths
from attnspec.limits import LIMITS
from attnspec.lower.work import Work


def row_keys(work: Work) -> tuple[np.ndarray, np.ndarray | None]:
    """The keys that a work's queries read, int64 [w], ascending, and which query reads which, bool
    [n_q, w]; None where every query reads every one of them, or where run-time inputs decide."""
    relation = possible(work.relation) if work.reads else work.relation
    return _row_keys(relation, work.n_q, work.n_k, bool(work.reads))


@lru_cache(maxsize=LIMITS.layouts_few)
def _row_keys(
    relation: Relation, n_q: int, n_k: int, reads: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    rows = np.stack([_row(relation, q, n_k) for q in range(n_k - n_q, n_k)])
    keys = np.flatnonzero(rows.any(0))
    mask = None if reads or n_q == 1 else rows[:, keys]
    return keys, None if mask is None or mask.all() else mask


def _row(relation: Relation, q: int, n: int) -> np.ndarray:
    """Which keys query q reads, bool [n]."""
    match relation:
        case Union(terms) | Intersection(terms):
            pairs: Any = relation.pairs
            return np.asarray(reduce(pairs, (_row(term, q, n) for term in terms)))
        case Complement(term):
            return ~_row(term, q, n)
    closed, mask = relation.progressions(np.array([q]), n), np.zeros(n, bool)
    if closed is not None:
        for start, stop, step in np.broadcast(*closed):
            if start < stop:
                mask[start:stop:step] = True
    elif type(relation).rows is Relation.rows or isinstance(relation, Transpose):
        return evaluate_pairs(relation, np.array([q]), np.arange(n), n)
    else:
        mask[relation.row_keys(q, q + 1, n)] = True
    return mask


def ranges_of(keys: np.ndarray) -> tuple[range, ...] | None:
    """Ascending keys as one progression or a few ranges, if they are that."""
    if not len(keys):
        return (range(0),)
    steps = np.diff(keys)
    if len(steps) and (steps == steps[0]).all():
        return (range(int(keys[0]), int(keys[-1]) + 1, int(steps[0])),)
    breaks = np.flatnonzero(steps != 1)
    if len(breaks) >= LIMITS.ranges_read:
        return None
    parts = np.split(keys, breaks + 1)
    return tuple(range(int(part[0]), int(part[-1]) + 1) for part in parts)


# --- of all queries -------------------------------------------------------------------------------


class Form(Enum):
    """How a call tells torch its pairs, in the words of a plan."""

    NOTHING = "every pair"
    CAUSAL = "`is_causal`"
    MASK = "a kept mask"


def form_of(work: Work) -> Form:
    """The least that must be said of a work's pairs; what is known at a call is a mask."""
    if work.reads or work.decided:
        return Form.MASK
    form = _form(work.relation, work.n_q, work.n_k)
    # torch multiplies the -inf of later keys with a scale, too
    negative = work.scale is not None and work.scale <= 0
    return Form.MASK if form is Form.CAUSAL and negative else form


@lru_cache(maxsize=256)
def _form(relation: Relation, n_q: int, n_k: int) -> Form:
    if n_q * n_k <= LIMITS.pairs_short:
        # by the definition, which raises RelationError where it has no value
        pairs = all_pairs(relation, n_q, n_k)
        if pairs.all():
            return Form.NOTHING
        causal = n_q == n_k and np.array_equal(pairs, np.tri(n_k, dtype=bool))
        return Form.CAUSAL if causal else Form.MASK
    # many, as far as keys are known as progressions; most graphs differ in the last row already
    end = relation.progressions(np.array([n_k - 1]), n_k)
    counts = None if end is None or (lengths(end) < n_k).any() else relation.counted(n_k)
    if counts is not None and (counts[n_k - n_q :] == n_k).all():
        return Form.NOTHING
    if counts is None or not n_q == n_k <= LIMITS.compared:
        return Form.MASK
    earlier = Intersection((relation, Causal())).counted(n_k)
    every = np.arange(1, n_k + 1)
    causal = all(x is not None and np.array_equal(x, every) for x in (counts, earlier))
    return Form.CAUSAL if causal else Form.MASK


def all_pairs(relation: Relation, n_q: int, n_k: int) -> np.ndarray:
    """The pairs of the last n_q of n_k positions by the definition, bool [n_q, n_k]."""
    q_at, k_at = np.arange(n_k - n_q, n_k)[:, None], np.arange(n_k)[None]
    return evaluate_pairs(relation, q_at, k_at, n_k)
