"""How many keys each query reads, and how many queries read each key, without a list of edges.

Keys in closed form are progressions, which are counted by their ends. Counting is additive, so that
a union of terms is counted by inclusion and exclusion, and what a term leaves out is subtracted.
Only what has no closed form, drawn graphs above all, is counted from its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import combinations
from typing import Literal, TypeAlias

import numpy as np

from attnspec.analysis.counting.affordable import lists_rows, require_listable, to_list
from attnspec.analysis.counting.conjunctions import Conjunction, quickly_shared, shared
from attnspec.analysis.counting.progressions import grouped
from attnspec.analysis.counting.rectangles import Term, both, terms_of
from attnspec.graphs.operators import Intersection
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.patterns.full import Full
from attnspec.graphs.patterns.window import Window
from attnspec.graphs.relation import Relation, evaluate_pairs, lengths
from attnspec.graphs.stack import Bound, Stack

Side: TypeAlias = Literal["queries", "keys"]
"""Whose pairs are counted."""

SOON_LOOKED = 1 << 24
"""Pairs that are listed, or looked at, sooner than anything is thought about."""

MOST_SHARED = 64
"""The most conjunctions that are counted for one union by inclusion and exclusion."""

WIDE = 16
"""Progressions of a query from which on other ways of counting are looked for."""

CHUNK = 1 << 18
"""Progressions that are counted in one go: what stays in the cache."""


@dataclass(frozen=True, eq=False)
class Counts:
    """The pairs of one graph at n positions: `degrees` of queries, `readers` of keys, int64 [n]."""

    degrees: np.ndarray
    readers: np.ndarray

    @property
    def edges(self) -> int:
        """The number of pairs."""
        return int(self.degrees.sum())

    @property
    def empty_rows(self) -> np.ndarray:
        """The queries without a key, ascending."""
        return np.flatnonzero(self.degrees == 0)

    @property
    def unread_keys(self) -> np.ndarray:
        """The keys that no query reads, ascending."""
        return np.flatnonzero(self.readers == 0)


def counts_of(relation: Relation, n: int) -> Counts:
    """The pairs of a relation, exactly; raises TooMuch where that takes too long."""
    return Counts(degrees_of(relation, n), readers_of(relation, n))


@lru_cache(maxsize=32)
def degrees_of(relation: Relation, n: int) -> np.ndarray:
    """The number of keys of each query, int64 [n]; raises TooMuch."""
    return _tally(relation, n, "queries")


@lru_cache(maxsize=32)
def readers_of(relation: Relation, n: int) -> np.ndarray:
    """The number of queries that read each key, int64 [n]; raises TooMuch."""
    return _tally(relation, n, "keys")


def edges_of(relation: Relation, n: int) -> int:
    """The number of pairs of a relation; raises TooMuch."""
    relation = plainer(relation)
    if type(relation).edges is not Relation.edges:
        return relation.edges(n)
    return int(degrees_of(relation, n).sum())


def plainer(relation: Relation) -> Relation:
    """The same pairs as one pattern that knows its number of edges, where there is one."""
    if not isinstance(relation, Intersection) or Causal() not in relation.terms:
        return relation
    rest = [term for term in relation.terms if term not in (Causal(), Full())]
    if not rest:
        return Causal()
    if len(rest) == 1 and isinstance(rest[0], Window):
        return Window(before=rest[0].reach[0], after=0)
    return relation


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


def weighted(relation: Relation, n: int, side: Side, weights: np.ndarray) -> np.ndarray:
    """As `degrees_of` and `readers_of`, each pair counted with the weight (int64 [n], sums below
    2 ** 53) of its other end; raises TooMuch."""
    return _tally(relation, n, side, weights)


def _tally(relation: Relation, n: int, side: Side, weights: np.ndarray | None = None) -> np.ndarray:
    if n == 0:
        return np.zeros(0, np.int64)
    terms = terms_of(relation, n)
    wide = any(term.columns is not None for term in terms) and _is_wide(relation, n)
    # columns as a mask cost one pass, as progressions one for each of them
    found = None if wide else _from_closed(relation, n, side, weights)
    if found is None:
        found = _by_inclusion(terms, n, side, weights, quickly_shared)
    if found is None and wide:
        found = _from_closed(relation, n, side, weights)
    if found is not None:
        return found
    if to_list(relation, n) > SOON_LOOKED:
        # what two terms share may be soon listed where the whole is not
        found = _by_inclusion(terms, n, side, weights, shared)
        if found is not None:
            return found
    require_listable(relation, n)
    counted = _listed if lists_rows(relation, n) else _looked
    return counted(relation, n, side, weights)


def _is_wide(relation: Relation, n: int) -> bool:
    """Whether rows have many progressions."""
    sample = relation.progressions(np.zeros(1, np.int64), n)
    return sample is not None and np.broadcast(*sample).size > WIDE


def _from_closed(
    relation: Relation, n: int, side: Side, weights: np.ndarray | None
) -> np.ndarray | None:
    """The counts where every row is known as progressions, else None."""
    found = np.zeros(n, np.int64)
    # what is counted for keys costs a pass over all of them in each part
    for first, part in relation.closed_rows(n, CHUNK if side == "queries" else 8 * CHUNK):
        if part is None:
            return None
        if side == "queries" and weights is None:
            counts = lengths(part)
            found[first : first + len(counts)] = counts
            continue
        for group in grouped(part, n):
            group.row = group.row + first
            if side == "keys":
                found += group.tally(weights)
            elif weights is not None:
                found += np.bincount(group.row, group.sums(weights), n).astype(np.int64)
    return found


Sharing: TypeAlias = "Callable[[tuple[Relation, ...], int], Conjunction | None]"


def _by_inclusion(
    terms: list[Term], n: int, side: Side, weights: np.ndarray | None, sharing: Sharing
) -> np.ndarray | None:
    """The counts where it is known what the terms share, else None."""
    left_out = max((len(term.left_out) for term in terms), default=0)
    if (2 ** min(len(terms), 32) - 1) * 2 ** min(left_out, 32) > MOST_SHARED:
        return None
    every = np.ones(n, np.int64)
    weights = every if weights is None else weights
    found = np.zeros(n, np.int64)
    for size in range(1, len(terms) + 1):
        for chosen in combinations(terms, size):
            term = reduce(both, chosen)
            if term.empty:
                continue
            rows, columns = (every if m is None else m for m in (term.rows, term.columns))
            for sign, relations in term.counted:
                common = sharing(relations, n)
                if common is None:
                    return None
                if side == "queries":
                    part = common.sums(columns * weights) * rows
                else:
                    queries = np.flatnonzero(rows)
                    part = common.tally(queries, weights[queries]) * columns
                found += part if sign == size % 2 * 2 - 1 else -part
    return found


# --- what must be listed -------------------------------------------------------------------------


def _listed(relation: Relation, n: int, side: Side, weights: np.ndarray | None) -> np.ndarray:
    """The counts of a relation whose rows are listed without a look at all of their keys."""
    found = np.zeros(n, np.int64)
    for first, last in relation.chunks(n):
        q, k = relation.rows(first, last, n)
        here, there = (q, k) if side == "queries" else (k, q)
        each = None if weights is None else weights[there]
        found += np.bincount(here, each, n).astype(np.int64, copy=False)
    return found


def _looked(relation: Relation, n: int, side: Side, weights: np.ndarray | None) -> np.ndarray:
    """The counts by the definition, pair by pair."""
    found = np.zeros(n, np.int64)
    weights = np.ones(n, np.int64) if weights is None else weights
    keys = np.arange(n)[None]
    step = max(1, CHUNK // n)
    for first in range(0, n, step):
        last = min(n, first + step)
        held = evaluate_pairs(relation, np.arange(first, last)[:, None], keys, n)
        if side == "queries":
            found[first:last] = held @ weights
        else:
            found += weights[first:last] @ held
    return found
