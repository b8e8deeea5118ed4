"""Which of torch's calls has the pairs of a relation."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

import numpy as np

from attnspec.graphs.relation import EMPTY, FULL, Relation, Tiles, evaluate_pairs, is_closed
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
    # `is_causal` multiplies the -inf of later keys with what scores are multiplied with, too
    negative = work.scale is not None and work.scale <= 0
    return Form.MASK if form is Form.CAUSAL and negative else form


@lru_cache(maxsize=256)
def _form(relation: Relation, n_q: int, n_k: int) -> Form:
    if n_q * n_k <= LIMITS.pairs_short:
        return _short_form(relation, n_q, n_k)
    if not is_closed(relation):
        return Form.MASK
    q, k = (Tiles(np.array([low]), np.array([n_k])) for low in (n_k - n_q, 0))
    if relation.cover(q, k, n_k)[0] == FULL:
        return Form.NOTHING
    if n_q == n_k <= LIMITS.compared and _is_causal(relation, n_k):
        return Form.CAUSAL
    return Form.MASK


def _short_form(relation: Relation, n_q: int, n_k: int) -> Form:
    """The form of few pairs, by the definition; raises RelationError where that has no value."""
    held = all_pairs(relation, n_q, n_k)
    if held.all():
        return Form.NOTHING
    causal = n_q == n_k and np.array_equal(held, np.tri(n_k, dtype=bool))
    return Form.CAUSAL if causal else Form.MASK


def all_pairs(relation: Relation, n_q: int, n_k: int) -> np.ndarray:
    """The pairs of the last n_q of n_k positions by the definition, bool [n_q, n_k]."""
    q_at, k_at = np.arange(n_k - n_q, n_k)[:, None], np.arange(n_k)[None]
    return evaluate_pairs(relation, q_at, k_at, n_k)


def _is_causal(relation: Relation, n: int) -> bool:
    """Whether the pairs are those with k <= q: in closed form for tiles off the diagonal, by the
    definition for those on it."""
    starts = np.arange(0, n, LIMITS.tile_compared)
    # most graphs differ in the last row already
    for rows in (starts[-1:], starts[:-1]):
        q = Tiles(rows[:, None], np.minimum(rows + LIMITS.tile_compared, n)[:, None])
        k = Tiles(starts[None], np.minimum(starts + LIMITS.tile_compared, n)[None])
        found = relation.cover(q, k, n)
        below, above = starts < rows[:, None], starts > rows[:, None]
        if (found[below] != FULL).any() or (found[above] != EMPTY).any():
            return False
    inside = np.arange(LIMITS.tile_compared)
    q_at, k_at = starts[:, None, None] + inside[:, None], starts[:, None, None] + inside
    held = evaluate_pairs(relation, np.minimum(q_at, n - 1), np.minimum(k_at, n - 1), n)
    return bool((held == (np.minimum(k_at, n - 1) <= np.minimum(q_at, n - 1))).all())
