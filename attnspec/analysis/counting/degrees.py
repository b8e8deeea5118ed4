"""How many keys each query reads, and how many queries read each key, without a list of edges.

Keys in closed form are progressions, which are counted by their ends. Counting is additive, so that
a union of terms is counted by inclusion and exclusion, and what a term leaves out is subtracted.
Only what has no closed form, drawn graphs above all, is counted from its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Literal, TypeAlias

import numpy as np

from attnspec.analysis.counting.affordable import lists_rows, require_listable
from attnspec.analysis.counting.conjunctions import Banded, Conjunction, Ordered, shared
from attnspec.analysis.counting.progressions import grouped
from attnspec.analysis.counting.rectangles import Term, terms_of
from attnspec.graphs.edge_table import Drawn
from attnspec.graphs.operators import Complement, Intersection, Shift, Transpose, Union
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.patterns.full import Full
from attnspec.graphs.patterns.where import Where
from attnspec.graphs.patterns.window import Window
from attnspec.graphs.predicates.comparisons import Between
from attnspec.graphs.relation import Relation, evaluate_pairs
from attnspec.graphs.stack import Bound, Stack

Side: TypeAlias = Literal["queries", "keys"]
"""Whose pairs are counted."""

SOON_LOOKED = 1 << 24
"""Pairs that are looked at sooner than anything is thought about."""

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


def _tally(relation: Relation, n: int, side: Side) -> np.ndarray:
    if n == 0:
        return np.zeros(0, np.int64)
    if _is_wide(relation, n):
        # columns as a mask cost one pass, as progressions one for each of them
        masked = _by_inclusion(terms_of(relation, n), n, side, _quick)
        if masked is not None:
            return masked
    counted = _from_closed(relation, n, side)
    if counted is not None:
        return counted
    match relation:
        case Complement(term):
            return n - _tally(term, n, side)
        case Transpose(term):
            return _tally(term, n, "keys" if side == "queries" else "queries")
        case Union() | Intersection() | Shift() | Where():
            found = _by_inclusion(terms_of(relation, n), n, side, _quick)
            if found is not None:
                return found
    apart = _without_drawn(relation)
    if apart is not None:
        return sum((_tally(part, n, side) for part in apart), np.zeros(n, np.int64))
    if lists_rows(relation, n):
        return _listed(relation, n, side)
    if n * n > SOON_LOOKED:
        # what two terms share may be soon listed where the whole is not
        found = _by_inclusion(terms_of(relation, n), n, side, shared)
        if found is not None:
            return found
    looked = _looked(relation, n)
    return looked.degrees if side == "queries" else looked.readers


def _is_wide(relation: Relation, n: int) -> bool:
    """Whether rows have many progressions, and columns are among what they come from."""
    sample = relation.progressions(np.zeros(1, np.int64), n)
    if sample is None or np.broadcast(*sample).size <= WIDE:
        return False
    return any(term.columns is not None for term in terms_of(relation, n))


def _from_closed(relation: Relation, n: int, side: Side) -> np.ndarray | None:
    """The counts where every row is known as progressions, else None."""
    found = np.zeros(n, np.int64)
    # what is counted for keys costs a pass over all of them in each part
    for first, part in relation.closed_rows(n, CHUNK if side == "queries" else 8 * CHUNK):
        if part is None:
            return None
        if side == "keys":
            for group in grouped(part, n):
                found += group.tally()
            continue
        start, stop, step = part
        counts = np.maximum(0, -((start - stop) // step)).sum(axis=-1)
        found[first : first + len(counts)] = counts
    return found


def _without_drawn(relation: Relation) -> tuple[Relation, Relation] | None:
    """A union as what is not drawn, and the drawn pairs beyond it, which are few: no pair is in
    both."""
    if not isinstance(relation, Union):
        return None
    drawn = tuple(term for term in relation.terms if isinstance(term, Drawn))
    others = tuple(term for term in relation.terms if not isinstance(term, Drawn))
    if not drawn or not others:
        return None
    rest = others[0] if len(others) == 1 else Union(others)
    return rest, Intersection((drawn[0] if len(drawn) == 1 else Union(drawn), Complement(rest)))


def _conjunctions(terms: list[Term]) -> int:
    """How many conjunctions inclusion and exclusion of terms has, about."""
    most = max((len(term.left_out) for term in terms), default=0)
    return int((2 ** min(len(terms), 32) - 1) * 2 ** min(most, 32))


Sharing: TypeAlias = "Callable[[tuple[Relation, ...], int], Conjunction | None]"


def _quick(relations: tuple[Relation, ...], n: int) -> Conjunction | None:
    """What relations share where it has a closed form."""
    band = Banded(relations, n)
    if band.width:
        return band
    if len(relations) == 1 and isinstance(relations[0], Between):
        return Ordered(relations[0], n)
    return None


def _by_inclusion(terms: list[Term], n: int, side: Side, sharing: Sharing) -> np.ndarray | None:
    """The counts where it is known what the terms share, else None."""
    if _conjunctions(terms) > MOST_SHARED:
        return None
    found = np.zeros(n, np.int64)
    for size in range(1, len(terms) + 1):
        for chosen in combinations(terms, size):
            part = _term_tally(_joined(chosen), n, side, sharing)
            if part is None:
                return None
            found += part if size % 2 else -part
    return found


def _joined(terms: tuple[Term, ...]) -> Term:
    """The pairs that all of some terms have."""
    return Term(
        _masked([term.rows for term in terms]),
        _masked([term.columns for term in terms]),
        tuple(dict.fromkeys(relation for term in terms for relation in term.held)),
        tuple(dict.fromkeys(relation for term in terms for relation in term.left_out)),
    )


def _masked(masks: list[np.ndarray | None]) -> np.ndarray | None:
    known = [mask for mask in masks if mask is not None]
    return np.logical_and.reduce(known) if known else None


def _term_tally(term: Term, n: int, side: Side, sharing: Sharing) -> np.ndarray | None:
    found = np.zeros(n, np.int64)
    if term.empty:
        return found
    every = np.ones(n, bool)
    rows = every if term.rows is None else term.rows
    columns = every if term.columns is None else term.columns
    for size in range(len(term.left_out) + 1):
        for excluded in combinations(term.left_out, size):
            common = sharing(tuple(dict.fromkeys(term.held + excluded)), n)
            if common is None:
                return None
            if side == "queries":
                part = common.members(columns) * rows
            else:
                part = common.tally(np.flatnonzero(rows)) * columns
            found += -part if size % 2 else part
    return found


# --- what must be listed -------------------------------------------------------------------------


def _listed(relation: Relation, n: int, side: Side) -> np.ndarray:
    """The counts of a relation whose rows are listed without a look at all of their keys."""
    require_listable(relation, n)
    found = np.zeros(n, np.int64)
    for first, last in relation.chunks(n):
        q, k = relation.rows(first, last, n)
        found += np.bincount(q if side == "queries" else k, minlength=n)
    return found


@lru_cache(maxsize=8)
def _looked(relation: Relation, n: int) -> Counts:
    """The counts by the definition, pair by pair: each is looked at once for both sides."""
    require_listable(relation, n)
    found = Counts(np.zeros(n, np.int64), np.zeros(n, np.int64))
    keys = np.arange(n)[None]
    step = max(1, CHUNK // n)
    for first in range(0, n, step):
        last = min(n, first + step)
        held = evaluate_pairs(relation, np.arange(first, last)[:, None], keys, n)
        found.degrees[first:last] = held.sum(axis=1)
        found.readers[:] += held.sum(axis=0)
    return found
