"""What a set of queries reads, in O(n) for structured patterns, in the number of edges for others.

Each term of a relation reads through its masks. What a term leaves out is counted: a key is read
where more queries have it in the common part than have it in what is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnspec.analysis.counting.conjunctions import Conjunction, Listed, shared
from attnspec.analysis.counting.progressions import Ends
from attnspec.analysis.counting.rectangles import Term, terms_of
from attnspec.graphs.operators import Complement, Intersection
from attnspec.graphs.relation import Relation
from attnspec.limits import LIMITS


@dataclass(frozen=True, eq=False)
class Reading:
    """One term: through the masks, what the conjunctions hold, each counted with its sign.

    `pairs` are those of the term before the masks, None for all.
    """

    n: int
    rows: np.ndarray | None
    columns: np.ndarray | None
    counted: tuple[tuple[int, Conjunction], ...]
    pairs: Relation | None

    @property
    def plain(self) -> Conjunction | None:
        """The one conjunction of a term that leaves nothing out."""
        return self.counted[0][1] if len(self.counted) == 1 else None

    def mark(self, queries: np.ndarray, into: np.ndarray) -> Ends:
        """As `Conjunction.mark`, through the masks."""
        if self.rows is not None:
            queries = queries[self.rows[queries]]
        if len(queries) == 0:
            return self.n, 0
        if self.columns is None and self.plain is not None:
            return self.plain.mark(queries, into)
        if self.plain is not None:
            marked = np.zeros(self.n, bool)
            self.plain.mark(queries, marked)
        else:
            tallies = [sign * part.tally(queries) for sign, part in self.counted]
            marked = np.sum(tallies, axis=0) > 0
        into |= marked if self.columns is None else marked & self.columns
        return 0, self.n


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The pairs of one or more relations at one length."""

    n: int
    readings: tuple[Reading, ...]

    def mark(self, queries: np.ndarray, into: np.ndarray) -> Ends:
        """Set `into`, bool [n], at every key that one of the queries reads (ascending, int64); all
        of these lie between the ends that are returned."""
        low, high = self.n, 0
        for reading in self.readings:
            first, last = reading.mark(queries, into)
            low, high = min(low, first), max(high, last)
        return low, high

    def read(self, frontier: np.ndarray) -> np.ndarray:
        """The keys, bool [n], that a set of queries (bool [n]) reads."""
        reached = np.zeros(self.n, bool)
        self.mark(np.flatnonzero(frontier), reached)
        return reached


def neighbours(relations: Sequence[Relation], n: int) -> Neighbours:
    """The union of relations; raises TooMuch where one has no closed form and too many pairs."""
    terms = (term for relation in relations for term in terms_of(relation, n))
    # heads and layers that differ in one term often share the others
    different = {_identity(term): term for term in terms}
    return Neighbours(n, tuple(_reading(t, n) for t in different.values()))


def _identity(term: Term) -> tuple[object, ...]:
    masks = (None if mask is None else mask.tobytes() for mask in (term.rows, term.columns))
    return (*masks, frozenset(term.held), frozenset(term.left_out))


def _reading(term: Term, n: int) -> Reading:
    parts = (*term.held, *(Complement(relation) for relation in term.left_out))
    pairs = Intersection(parts) if len(parts) > 1 else next(iter(parts), None)
    if pairs is not None and len(term.left_out) > LIMITS.left_out:
        counted: list[tuple[int, Conjunction]] = [(1, Listed(pairs, n))]
    else:
        counted = [(sign, shared(together, n)) for sign, together in term.counted]
    return Reading(n, term.rows, term.columns, tuple(counted), pairs)
