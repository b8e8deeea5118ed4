"""The key-value cache of generation: how long a key is needed, and how many are needed at once.

Query t needs the keys that it reads and those that later queries read. A key may go once the last
query that reads it has been answered, so that the cache at t holds the keys k <= t whose last
reader is t or later.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from attnspec.analysis.counting.conjunctions import require_listable
from attnspec.graphs.operators import Intersection, Union
from attnspec.graphs.relation import Relation
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import count_of

FEW = 4
"""Up to so many keys are named in a rule one by one."""


@dataclass(frozen=True, eq=False)
class KeyCache:
    """The cache of one head at n positions.

    `last_reader` int64 [n] is the last query that reads each key, -1 for none. `live` int64 [n] is
    how many keys are held while each query is answered.
    """

    last_reader: np.ndarray
    live: np.ndarray


@lru_cache(maxsize=8)
def cache_of(relation: Relation, n: int) -> KeyCache:
    """The cache of a graph that reads no later position; raises TooMuch."""
    last = last_readers(relation, n)
    position = np.arange(n)
    # a key is held from its own position on, and until its last reader is answered
    cached = last >= position
    change = np.zeros(n + 1, np.int64)
    change[:n] += cached
    np.subtract.at(change, last[cached] + 1, 1)
    return KeyCache(last, np.cumsum(change[:n]))


def last_readers(relation: Relation, n: int) -> np.ndarray:
    """The last query that reads each key, int64 [n], -1 for none; raises TooMuch."""
    turned = relation.transposed()
    last = None if turned is None else _last_keys(turned, n)
    if last is not None:
        return last
    if isinstance(relation, Union):
        parts = [last_readers(term, n) for term in relation.terms]
        return np.asarray(np.maximum.reduce(parts))
    if isinstance(relation, Intersection):
        for index, term in enumerate(relation.terms):
            if isinstance(term, Union):
                rest = relation.terms[:index] + relation.terms[index + 1 :]
                shared = [Intersection((part, *rest)) for part in term.terms]
                return last_readers(Union(tuple(shared)), n)
    last_at = np.full(n, -1)
    require_listable(relation, n)
    for first, end in relation.chunks(n):
        q, k = relation.rows(first, end, n)
        # ascending queries: the last assignment is the largest
        last_at[k] = q
    return last_at


def _last_keys(turned: Relation, n: int) -> np.ndarray | None:
    """The largest member of each row of the reversed relation."""
    last = np.full(n, -1)
    for first, part in turned.closed_rows(n, LIMITS.listed_at_once):
        if part is None:
            return None
        start, stop, step = part
        members = np.where(stop > start, start + (stop - 1 - start) // step * step, -1)
        last[first : first + len(members)] = members.max(axis=-1, initial=-1)
    return last


# --- rules in words -------------------------------------------------------------------------------


def rule_of(last: np.ndarray) -> str:
    """When a key may go, in words, by the last readers of n > 0 keys; exact for each of them."""
    n = len(last)
    position = np.arange(n)
    unread = last < position
    delay = last - position
    # what the last query still reads would stay for longer sequences too, or may go then
    stays = last == n - 1
    going = ~stays & ~unread
    parts = []
    if unread.any():
        verb = "is" if unread.sum() == 1 else "are"
        parts.append(f"{_keys(np.flatnonzero(unread))} {verb} never needed")
    others = "every key" if not parts else "every other key"
    if not going.any():
        return "; ".join([*parts, f"{others} stays to the end"])
    least = int(last[going].min())
    if n - least <= n // 8:
        return "; ".join([*parts, f"{others} stays until the last {n - least:,} queries"])
    limit = int(delay[going].max())
    # the end of the sequence cuts the wait of its last keys short
    whole = going & (position + limit < n)
    waits = np.unique(delay[whole])
    kept = np.flatnonzero(stays & (delay > limit))
    if len(kept):
        verb = "stays" if len(kept) == 1 else "stay"
        parts.append(f"{_keys(kept)} {verb} to the end")
    when = f"{count_of(limit, 'step')} after it was written"
    if len(waits) > 1:
        size = _block(last, going)
        when = f"at the end of its block of {size:,}" if size else f"{waits[0]:,} to {when}"
    return "; ".join([*parts, f"{'any other' if parts else 'a'} key can go {when}"])


def _block(last: np.ndarray, going: np.ndarray) -> int | None:
    """The size b where every key that goes is last read at the end of its block of b."""
    size = int(last[np.flatnonzero(going)[0]] + 1)
    position = np.arange(len(last))
    ends = position // size * size + size - 1
    return size if size > 1 and (last[going] == ends[going]).all() else None


def _keys(keys: np.ndarray) -> str:
    """`key 3`, `keys 0 to 3`, or `4,096 keys from 31 to 131,071`."""
    first, last = int(keys[0]), int(keys[-1])
    if len(keys) == 1:
        return f"key {first:,}"
    if last - first == len(keys) - 1:
        return f"keys {first:,} to {last:,}"
    if len(keys) <= FEW:
        return "keys " + ", ".join(f"{key:,}" for key in keys.tolist())
    return f"{len(keys):,} keys from {first:,} to {last:,}"
