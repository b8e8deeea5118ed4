"""From a relation to the keys of its last few queries.

A step of generation asks for one query at a length that was never seen before, so what is made here
must cost less than reading the keys does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from attnspec.backends.common.labels import ALL, possible
from attnspec.graphs.operators import Complement, Intersection, Shift, Transpose, Union
from attnspec.graphs.relation import Relation, evaluate_pairs
from attnspec.limits import LIMITS
from attnspec.lower.work import Work


@dataclass(frozen=True, eq=False)
class RowLayout:
    """The keys that some queries read, and which query reads which.

    `keys` are disjoint ranges, or listed one by one. `held` is bool [n_q, w], None where every
    query reads every one of the w keys, or where run-time inputs decide which it reads of them.
    """

    keys: Keys
    held: np.ndarray | None = None

    @property
    def count(self) -> int:
        """The number of keys."""
        return count_of(self.keys)

    @property
    def positions(self) -> np.ndarray:
        """The keys in the order in which they are read, int64 [w]."""
        return members(self.keys)


def row_layout(work: Work) -> RowLayout:
    """The keys of a work's queries."""
    if not work.reads:
        return _laid_out(work.relation, work.n_q, work.n_k)
    bound = possible(work.relation)
    if bound == ALL:
        return RowLayout([range(work.n_k)])
    return replace(_laid_out(bound, work.n_q, work.n_k), held=None)


@lru_cache(maxsize=LIMITS.layouts_few)
def _laid_out(relation: Relation, n_q: int, n_k: int) -> RowLayout:
    if n_q == 1:
        return RowLayout(_simple(row_keys(relation, n_k - 1, n_k)))
    rows = range(n_k - n_q, n_k)
    found = union([known_keys(relation, q, n_k) for q in rows])
    layout = RowLayout([range(n_k)] if found is None else _simple(found))
    positions = layout.positions
    held = evaluate_pairs(relation, np.array(rows)[:, None], positions[None], n_k)
    # a copy, because what is evaluated may be a view that cannot be written to
    return layout if held.all() else replace(layout, held=np.array(held))


def _simple(keys: Keys) -> Keys:
    """Few ranges, or a list that is none."""
    if isinstance(keys, list):
        return keys if len(keys) <= LIMITS.ranges_read else np.sort(members(keys))
    if len(keys) and keys[-1] - keys[0] == len(keys) - 1:
        return [range(int(keys[0]), int(keys[-1]) + 1)]
    return keys


Keys: TypeAlias = "list[range] | np.ndarray"
"""Disjoint ranges with positive steps, none of them empty, in order where all steps are 1; or the
keys one by one, int64, ascending."""


def row_keys(relation: Relation, q: int, n: int) -> Keys:
    """The keys of query q in a sequence of n positions."""
    found = known_keys(relation, q, n)
    return _held(relation, q, np.arange(n), n) if found is None else found


def known_keys(relation: Relation, q: int, n: int) -> Keys | None:
    """The keys of query q where they are known without looking at each of the n."""
    match relation:
        case Union(terms):
            return union([known_keys(term, q, n) for term in terms])
        case Intersection(terms):
            return _intersection(terms, q, n)
        case Complement(term):
            return _complement(known_keys(term, q, n), n)
        case Shift(term, by):
            return _shifted(term, by, q, n)
        case Transpose():
            return None
    closed = relation.progressions(np.array([q]), n)
    if closed is not None:
        return _merged([range(*map(int, ends)) for ends in np.broadcast(*closed)])
    if type(relation).rows is Relation.rows:
        return None
    return relation.row_keys(q, q + 1, n)


def count_of(keys: Keys) -> int:
    """The number of keys."""
    return len(keys) if isinstance(keys, np.ndarray) else sum(map(len, keys))


def members(keys: Keys) -> np.ndarray:
    """The keys one by one, int64, in the order of the ranges."""
    if isinstance(keys, np.ndarray):
        return keys
    arrays = [np.arange(part.start, part.stop, part.step) for part in keys]
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


def union(parts: Sequence[Keys | None]) -> Keys | None:
    """The keys of any of the parts; None where one is not known."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    ranges = [part for part in known if isinstance(part, list)]
    stepped = [part for part in ranges if not _unbroken(part)]
    if len(ranges) < len(known) or len(stepped) > 1:
        return np.unique(np.concatenate([members(part) for part in known]))
    whole = _merged([at for part in ranges if _unbroken(part) for at in part])
    if not stepped:
        return whole
    # the ranges of one part are disjoint, so they need cutting at the others alone
    rest, low = [], 0
    for at in [*whole, None]:
        high = None if at is None else at.start
        rest += [clip for each in stepped[0] if (clip := _clipped(each, low, high))]
        low = 0 if at is None else at.stop
    return _merged([*whole, *rest])


def _intersection(terms: Sequence[Relation], q: int, n: int) -> Keys | None:
    parts = [(term, known_keys(term, q, n)) for term in terms]
    known = [(term, part) for term, part in parts if part is not None]
    if not known:
        return None
    clips = [part for _, part in known if isinstance(part, list) and _unbroken(part)]
    others = [(term, part) for term, part in known if not any(part is clip for clip in clips)]
    # of the parts that are not plain ranges the smallest is looked into, the rest is asked
    others.sort(key=lambda each: count_of(each[1]))
    asked = [term for term, part in parts if part is None] + [term for term, _ in others[1:]]
    base: Keys = others[0][1] if others else [range(n)]
    for clip in clips:
        if isinstance(base, list):
            base = [kept for at in base for by in clip if (kept := _clipped(at, by.start, by.stop))]
        else:
            ends = np.searchsorted(base, [(by.start, by.stop) for by in clip]).reshape(-1, 2)
            base = np.concatenate([base[:0], *(base[low:high] for low, high in ends.tolist())])
    for term in asked:
        base = _held(term, q, np.sort(members(base)), n)
    return base


def _complement(keys: Keys | None, n: int) -> Keys | None:
    if keys is None or not isinstance(keys, list) or not _unbroken(keys):
        return None
    ends = [0, *(end for part in keys for end in (part.start, part.stop)), n]
    gaps = (range(low, high) for low, high in zip(ends[::2], ends[1::2], strict=True))
    return [gap for gap in gaps if gap]


def _shifted(term: Relation, by: int, q: int, n: int) -> Keys | None:
    low, high = max(0, by), min(n, n + by)
    if not low <= q < high:
        return []
    keys = known_keys(term, q - by, n)
    if keys is None:
        return None
    if isinstance(keys, list):
        moved = (range(part.start + by, part.stop + by, part.step) for part in keys)
        return [kept for part in moved if (kept := _clipped(part, low, high))]
    keys = keys + by
    return keys[(keys >= low) & (keys < high)]


def _held(relation: Relation, q: int, keys: np.ndarray, n: int) -> np.ndarray:
    """Those of the keys that the definition says query q reads."""
    return np.compress(evaluate_pairs(relation, np.array([q]), keys, n), keys)


def _unbroken(parts: Iterable[range]) -> bool:
    return all(part.step == 1 for part in parts)


def _clipped(part: range, low: int, high: int | None) -> range:
    """The members of a range from `low` on and below `high`."""
    first = part.start + max(0, -((part.start - low) // part.step)) * part.step
    last = part.stop if high is None else min(part.stop, high)
    return range(first, max(first, last), part.step)


def _merged(parts: Iterable[range]) -> list[range]:
    """Ranges without the empty ones, in order; those that touch are one where no step is wider."""
    # what has one member has no step
    kept = [part if len(part) > 1 else range(part[0], part[0] + 1) for part in parts if part]
    kept.sort(key=lambda part: part.start)
    if not _unbroken(kept):
        return kept
    joined: list[range] = []
    for part in kept:
        if joined and part.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, part.stop))
        else:
            joined.append(part)
    return joined
