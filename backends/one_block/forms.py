"""Which of torch's calls has the pairs of a relation."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

import numpy as np

from attnspec.graphs.relation import Relation, evaluate_pairs, lengths
from attnspec.limits import LIMITS
from attnspec.lower.work import Work


class Form(Enum):
    """What is said of the pairs in a call, in the words of a plan."""

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
    if n_q * n_k > LIMITS.pairs_short:
        return _closed_form(relation, n_q, n_k)
    # by the definition, which raises RelationError where it has no value
    pairs = all_pairs(relation, n_q, n_k)
    if pairs.all():
        return Form.NOTHING
    causal = n_q == n_k and np.array_equal(pairs, np.tri(n_k, dtype=bool))
    return Form.CAUSAL if causal else Form.MASK


def _closed_form(relation: Relation, n_q: int, n_k: int) -> Form:
    """The form of many pairs, as far as the keys of queries are known as progressions."""
    # most graphs differ in the last row already
    end = relation.progressions(np.array([n_k - 1]), n_k)
    if end is None or (lengths(end) < n_k).any():
        return Form.MASK
    every, causal = True, n_q == n_k <= LIMITS.compared
    for first, closed in relation.closed_rows(n_k):
        if closed is None:
            return Form.MASK
        start, stop, step = closed
        counts, last = lengths(closed), start + (stop - 1 - start) // step * step
        q = np.arange(first, first + len(counts))
        every = every and bool((counts == n_k)[q >= n_k - n_q].all())
        before = np.where(stop > start, last, 0) <= q[:, None]
        causal = causal and bool((counts == q + 1).all() and before.all())
        if not (every or causal):
            return Form.MASK
    return Form.NOTHING if every else Form.CAUSAL


def all_pairs(relation: Relation, n_q: int, n_k: int) -> np.ndarray:
    """The pairs of the last n_q of n_k positions by the definition, bool [n_q, n_k]."""
    q_at, k_at = np.arange(n_k - n_q, n_k)[:, None], np.arange(n_k)[None]
    return evaluate_pairs(relation, q_at, k_at, n_k)
