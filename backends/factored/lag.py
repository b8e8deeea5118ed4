"""How far back the queries of a causal graph read without a gap: known without torch.

The sums over all keys but these latest ones are the causal sums over all keys, some positions
later: nothing has to be taken away from them again.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from attnspec.graphs.patterns.window import Window
from attnspec.graphs.relation import Relation, lengths
from attnspec.layout.orders import terms_of, without
from attnspec.lower.work import Work


@lru_cache(maxsize=64)
def lagged(work: Work) -> tuple[int, Relation | None]:
    """How many of the latest positions, its own among them, each query of a work that is causal
    reads, as far as there are so many, and the other pairs, None for none; 0 and all pairs where it
    is not causal. The sums over all keys but these are the causal sums some positions later."""
    lags = [_latest(term, work.n_q, work.n_k) for term in terms_of(work.relation) if work.causal]
    count, every = max(lags, default=(0, False))
    if not count:
        return 0, work.relation
    if every and len(lags) == 1:
        return count, None
    return count, without(work.relation, (Window(before=count - 1, after=0),))


def _latest(term: Relation, n_q: int, n_k: int) -> tuple[int, bool]:
    """The number for one term, 0 without a closed form, and whether it has no other pairs."""
    q = np.arange(n_k - n_q, n_k)
    closed = term.progressions(q, n_k)
    if closed is None:
        return 0, False
    start, stop, step = closed
    itself = (start <= q[:, None]) & (q[:, None] < stop) & (step == 1)
    first = np.where(itself, start, n_k).min(axis=1)
    # below 1 for a query that does not read itself
    count = max(0, int((q - first + 1)[first > 0].min(initial=n_k)))
    return count, bool((lengths(closed) == np.minimum(q + 1, count)).all())
