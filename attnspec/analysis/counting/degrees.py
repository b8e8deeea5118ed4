"""How many keys each query reads, and how many queries read each key, without a list of edges.

Keys in closed form are progressions, which are counted by their ends. Counting is additive, so that
a union of terms is counted by inclusion and exclusion, and what a term leaves out is subtracted.
Only what has no closed form, drawn graphs above all, is counted from its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from itertools import combinations
from typing import TypeAlias

import numpy as np

from attnspec.analysis.counting.conjunctions import (
    Conjunction,
    quickly_shared,
    require_listable,
    shared,
    to_list,
)
from attnspec.analysis.counting.progressions import grouped
from attnspec.analysis.counting.rectangles import both, terms_of
from attnspec.graphs.operators import Complement, Intersection, Transpose, Union, transpose_of
from attnspec.graphs.predicates.listable import lists_rows
from attnspec.graphs.relation import DataDependent, Relation, evaluate_pairs, lengths
from attnspec.graphs.stack import Bound, Stack, TooMuch
from attnspec.graphs.token_sets import reads_data
from attnspec.limits import LIMITS


@lru_cache(maxsize=32)
def degrees_of(relation: Relation, n: int) -> np.ndarray:
    """The number of keys of each query, int64 [n]; raises TooMuch."""
    return weighted(relation, n, None)


def readers_of(relation: Relation, n: int) -> np.ndarray:
    """The number of queries that read each key, int64 [n]; raises TooMuch."""
    return degrees_of(transpose_of(relation), n)


def edges_of(relation: Relation, n: int) -> int:
    """The number of pairs of a relation; raises TooMuch."""
    if type(relation).edges is not Relation.edges:
        return relation.edges(n)
    return int(degrees_of(relation, n).sum())


def total_edges(stack: Stack, n: int) -> int:
    """The pairs of all layers and heads together; raises TooMuch."""
    return bound_edges(stack.bound(n), n)


def bound_edges(bound: Bound, n: int) -> int:
    """The pairs of the layers and heads that are bound at n positions; raises TooMuch."""
    return sum(
        sum(row.get(index, 0) for row in bound.rows) * edges_of(relation, n)
        for index, (_, _, relation) in enumerate(bound.found)
    )


# --- counting ------------------------------------------------------------------------------------


def weighted(relation: Relation, n: int, weights: np.ndarray | None) -> np.ndarray:
    """As `degrees_of`, each key counted with its weight (int64 [n], sums below 2 ** 53)."""
    if n == 0:
        return np.zeros(0, np.int64)
    for way in _ways(relation, n):
        with suppress(TooMuch):
            sums = way(relation, n, weights)
            if sums is not None:
                return sums
    require_listable(relation, n)
    return (_listed if lists_rows(relation, n) else _looked)(relation, n, weights)


def _ways(relation: Relation, n: int) -> Iterator[Counting]:
    """How keys may be counted, the soonest first."""
    # columns as a mask cost one pass, as progressions one for each of them
    wide = _is_wide(relation, n) and any(t.columns is not None for t in terms_of(relation, n))
    yield _by_inclusion if wide else _from_closed
    yield _from_closed if wide else _by_inclusion
    if to_list(relation, n) > LIMITS.soon:
        # what two terms share may be soon listed where the whole is not
        yield partial(_by_inclusion, sharing=shared)


def _is_wide(relation: Relation, n: int) -> bool:
    """Whether rows have many progressions; of a short sequence all of them are few."""
    if n <= LIMITS.wide * LIMITS.wide:
        return False
    sample = relation.progressions(np.zeros(1, np.int64), n)
    return sample is not None and np.broadcast(*sample).size > LIMITS.wide


def _from_closed(relation: Relation, n: int, weights: np.ndarray | None) -> np.ndarray | None:
    """The counts where all rows, or all columns, are progressions, else None."""
    sums = np.zeros(n, np.int64)
    turned = isinstance(relation, Transpose)
    closed = relation.term if isinstance(relation, Transpose) else relation
    # what is counted for keys costs a pass over all of them in each part
    at_once = LIMITS.listed_at_once * (8 if turned else 1)
    for first, part in closed.closed_rows(n, at_once):
        if part is None:
            return None
        if weights is None and not turned:
            counts = lengths(part)
            sums[first : first + len(counts)] = counts
            continue
        for group in grouped(part, n):
            group.row = group.row + first
            if turned:
                sums += group.tally(weights)
            elif weights is not None:
                sums += np.bincount(group.row, group.sums(weights), n).astype(np.int64)
    return sums


Counting: TypeAlias = "Callable[[Relation, int, np.ndarray | None], np.ndarray | None]"
Sharing: TypeAlias = "Callable[[tuple[Relation, ...], int], Conjunction | None]"


def _by_inclusion(
    relation: Relation, n: int, weights: np.ndarray | None, sharing: Sharing = quickly_shared
) -> np.ndarray | None:
    """The counts where it is known what the terms share, else None."""
    terms = terms_of(relation, n)
    left_out = max((len(term.left_out) for term in terms), default=0)
    if (2 ** min(len(terms), 32) - 1) * 2 ** min(left_out, 32) > LIMITS.terms:
        return None
    # what is counted is linear in the values of keys: what reads alike is counted once
    counted: dict[tuple[tuple[Relation, ...], int], _Counted] = {}
    for size in range(1, len(terms) + 1):
        for chosen in combinations(terms, size):
            term = reduce(both, chosen)
            if term.empty:
                continue
            for sign, relations in term.counted:
                place = relations, id(term.rows)
                if place not in counted:
                    common = sharing(relations, n)
                    if common is None:
                        return None
                    counted[place] = _Counted(common, term.rows)
                counted[place].add(term.columns, (-1) ** (size + 1) * sign)
    totals = np.zeros(n, np.int64)
    for part in counted.values():
        sums = part.common.sums(part.values(n, weights))
        totals += sums if part.rows is None else sums * part.rows
    return totals


@dataclass
class _Counted:
    """Pairs of some queries (bool [n], None for all), and how often each of their keys counts:
    `times` everywhere, and `more` [n] beside that."""

    common: Conjunction
    rows: np.ndarray | None
    times: int = 0
    more: np.ndarray | int = 0

    def add(self, columns: np.ndarray | None, times: int) -> None:
        """Count the keys in `columns` (bool [n], None for all) so many times more."""
        if columns is None:
            self.times += times
        else:
            self.more = self.more + columns * np.int64(times)

    def values(self, n: int, weights: np.ndarray | None) -> np.ndarray:
        """What each key counts, int64 [n], with its weight."""
        counts = np.full(n, self.times) + self.more
        return counts if weights is None else counts * weights


# --- what must be listed -------------------------------------------------------------------------


def _listed(relation: Relation, n: int, weights: np.ndarray | None) -> np.ndarray:
    """The counts of a relation whose rows are listed without a look at all of their keys."""
    turned = isinstance(relation, Transpose)
    whole = relation.term if isinstance(relation, Transpose) else relation
    closed, listed = _parted(whole, n)
    sums = np.zeros(n, np.int64)
    if closed is not None:
        sums += weighted(Transpose(closed) if turned else closed, n, weights)
        listed = Intersection((listed, Complement(closed)))
    for first, last in listed.chunks(n):
        q, k = listed.rows(first, last, n)[:: -1 if turned else 1]
        each = None if weights is None else weights[k]
        sums += np.bincount(q, each, n).astype(np.int64, copy=False)
    return sums


def _parted(relation: Relation, n: int) -> tuple[Relation | None, Relation]:
    """The terms of a union that are known as progressions, None where these are none or all of
    them, and the others; an intersection with a union is one."""
    parts: tuple[Relation, ...] = relation.terms if isinstance(relation, Union) else ()
    if isinstance(relation, Intersection):
        unions = [term for term in relation.terms if isinstance(term, Union)]
        if len(unions) == 1:
            others = tuple(term for term in relation.terms if term is not unions[0])
            parts = tuple(Intersection((*others, term)) for term in unions[0].terms)
    progressive = [part.progressions(np.zeros(1, np.int64), n) is not None for part in parts]
    if all(progressive) or not any(progressive):
        return None, relation
    pairs = list(zip(parts, progressive, strict=True))
    closed, listed = (
        Union(tuple(part for part, is_known in pairs if is_known == wanted))
        for wanted in (True, False)
    )
    return closed, listed


def _looked(relation: Relation, n: int, weights: np.ndarray | None) -> np.ndarray:
    """The counts by the definition, pair by pair."""
    sums = np.zeros(n, np.int64)
    weights = np.ones(n, np.int64) if weights is None else weights
    step = max(1, LIMITS.listed_at_once // n)
    for first in range(0, n, step):
        rows = np.arange(first, min(n, first + step))
        sums[rows] = evaluate_pairs(relation, rows[:, None], np.arange(n)[None], n) @ weights
    return sums


def most_keys(relation: Relation, n: int) -> np.ndarray:
    """The keys of each query at most, int64 [n]."""
    if isinstance(relation, DataDependent):
        return np.full(n, min(n, relation.most_keys(n)), np.int64)
    if isinstance(relation, Union | Intersection):
        parts = np.stack([most_keys(term, n) for term in relation.terms])
        most = np.minimum(n, parts.sum(0)) if isinstance(relation, Union) else parts.min(0)
        return np.asarray(most)
    return np.full(n, n, np.int64) if reads_data(relation) else degrees_of(relation, n)
