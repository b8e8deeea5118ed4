"""From a relation to the keys of its last few queries.

A step of generation asks for one query at a length that was never seen before, so what is made here
must cost less than reading the keys does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from attnspec.algebra import Intersection, Union
from attnspec.relations import Relation, evaluate_pairs
from attnspec.row_keys import Keys, count_of, known_keys, members, row_keys, union
from attnspec.target import Work, reads_data

FEW = 16
"""The most queries whose keys are looked up one by one: a step of generation has one, and one that
tries several tokens at once has a few more."""

PIECES = 8
"""The most ranges that are read one after the other; more are listed key by key."""

KEPT = 16
"""Layouts that are kept, so that the layers of a model share those of a step."""


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
    bound = static_bound(work.relation)
    if bound is None:
        return RowLayout([range(work.n_k)])
    return replace(_laid_out(bound, work.n_q, work.n_k), held=None)


def static_bound(relation: Relation) -> Relation | None:
    """A relation that reads no run-time input and has every pair of the given one; None where
    nothing less than all pairs is known to be one."""
    if not reads_data(relation):
        return relation
    if isinstance(relation, Intersection | Union):
        bounds = [static_bound(term) for term in relation.terms]
        known = tuple(bound for bound in bounds if bound is not None)
        if len(known) == len(bounds) or (known and isinstance(relation, Intersection)):
            return known[0] if len(known) == 1 else replace(relation, terms=known)
    return None


@lru_cache(maxsize=KEPT)
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
        return keys if len(keys) <= PIECES else np.sort(members(keys))
    if len(keys) and keys[-1] - keys[0] == len(keys) - 1:
        return [range(int(keys[0]), int(keys[-1]) + 1)]
    return keys
