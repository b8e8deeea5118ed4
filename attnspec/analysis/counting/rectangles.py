"""A relation as a union of terms, each a rectangle of positions and relations held or left out.

Conditions on the query alone, or on the key alone, are masks: R & (A x B) needs no closed form
beyond that of R. `~` is pushed down to the patterns, as are `transpose` and `shift`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from attnspec.graphs.operators import (
    Complement,
    Intersection,
    Shift,
    Transpose,
    Union,
    transpose_of,
)
from attnspec.graphs.relation import Relation
from attnspec.limits import LIMITS


@dataclass(frozen=True, eq=False)
class Term:
    """The pairs (q, k) with q in `rows`, k in `columns` (bool [n], None for all), that every
    relation of `held` has and none of `left_out`."""

    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    held: tuple[Relation, ...] = ()
    left_out: tuple[Relation, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether it is plain that there is no pair."""
        masks = (mask for mask in (self.rows, self.columns) if mask is not None)
        return any(not mask.any() for mask in masks) or bool(set(self.held) & set(self.left_out))

    @property
    def counted(self) -> Iterator[tuple[int, tuple[Relation, ...]]]:
        """What is held less what is left out, by inclusion and exclusion: relations that together
        hold the pairs that are counted, and the sign of these."""
        for size in range(len(self.left_out) + 1):
            for some in combinations(self.left_out, size):
                yield (-1) ** size, tuple(dict.fromkeys((*self.held, *some)))


@lru_cache(maxsize=16)
def terms_of(relation: Relation, n: int) -> tuple[Term, ...]:
    """Terms whose union is the relation."""
    split = _split(_pushed(relation, n), n, True)
    return (Term(held=(relation,)),) if split is None else tuple(split)


def _split(relation: Relation, n: int, wanted: bool) -> list[Term] | None:
    """The terms of a relation, or of its complement; None where they are too many."""
    if isinstance(relation, Complement):
        return _split(relation.term, n, not wanted)
    if isinstance(relation, Union | Intersection):
        split = [_split(term, n, wanted) for term in relation.terms]
        return _joined(split) if isinstance(relation, Union) == wanted else _crossed(split)
    box = _rectangle(relation, n)
    if box is not None:
        rows, columns = box
        if wanted:
            return _kept([Term(rows, columns)])
        outside = [Term(rows=~rows)] if rows is not None else []
        return _kept(outside + ([Term(columns=~columns)] if columns is not None else []))
    simpler = relation.taken_apart(n)
    if simpler is not None:
        return _split(simpler, n, wanted)
    parts = relation.parts()
    if parts is not None and any(_rectangle(part, n) is not None for part in parts):
        return _split(Union(parts), n, wanted)
    return [Term(held=(relation,)) if wanted else Term(left_out=(relation,))]


def _joined(parts: list[list[Term] | None]) -> list[Term] | None:
    answer: list[Term] = []
    for part in parts:
        if part is None or len(answer) + len(part) > LIMITS.terms:
            return None
        answer += part
    return answer


def _crossed(parts: list[list[Term] | None]) -> list[Term] | None:
    answer = [Term()]
    for part in parts:
        if part is None or len(answer) * len(part) > LIMITS.terms:
            return None
        answer = _kept([both(first, second) for first in answer for second in part])
    return answer


def both(first: Term, second: Term) -> Term:
    """The pairs that both terms have."""
    return Term(
        _masked(first.rows, second.rows),
        _masked(first.columns, second.columns),
        tuple(dict.fromkeys(first.held + second.held)),
        tuple(dict.fromkeys(first.left_out + second.left_out)),
    )


def _masked(first: np.ndarray | None, second: np.ndarray | None) -> np.ndarray | None:
    if first is None or second is None:
        return second if first is None else first
    return np.asarray(first & second)


def _kept(terms: list[Term]) -> list[Term]:
    return [term for term in terms if not term.empty]


# --- rectangles -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inside(Relation):
    """The pairs of positions low <= q, k < high."""

    low: int
    high: int


Box = tuple["np.ndarray | None", "np.ndarray | None"]


def _rectangle(relation: Relation, n: int) -> Box | None:
    """The queries and the keys of a relation that is a rectangle; None for all of them."""
    if isinstance(relation, Inside):
        inside = np.zeros(n, bool)
        inside[relation.low : relation.high] = True
        return inside, inside
    if isinstance(relation, Shift | Transpose):
        inner = _rectangle(relation.term, n)
        if inner is None:
            return None
        if isinstance(relation, Transpose):
            return inner[1], inner[0]
        low, high = max(0, relation.by), max(0, min(n, n + relation.by))
        rows, columns = (_moved(mask, low, high, relation.by, n) for mask in inner)
        return rows, columns
    if relation.sides == "qk":
        return None
    # the coordinates of a position outside the grid hold for no pair, and so on: `holds` knows
    one, every = np.zeros(1, np.int64), np.arange(n)
    if relation.sides == "k":
        return None, np.asarray(relation.holds(one, every, n), bool)
    rows = np.asarray(relation.holds(every, one, n), bool)
    return None if rows.all() else rows, None


def _moved(mask: np.ndarray | None, low: int, high: int, by: int, n: int) -> np.ndarray:
    moved = np.zeros(n, bool)
    if low < high:
        moved[low:high] = True if mask is None else mask[low - by : high - by]
    return moved


# --- transpose and shift --------------------------------------------------------------------------


def _pushed(relation: Relation, n: int) -> Relation:
    """The same pairs with `transpose` and `shift` around patterns only."""
    if isinstance(relation, Union | Intersection):
        return type(relation)(tuple(_pushed(term, n) for term in relation.terms))
    if isinstance(relation, Complement):
        return Complement(_pushed(relation.term, n))
    if not isinstance(relation, Shift | Transpose):
        return relation
    inner = _pushed(relation.term, n)

    def around(term: Relation) -> Relation:
        if isinstance(relation, Transpose):
            return _pushed(transpose_of(term), n) if term.transposed() else Transpose(term)
        return Shift(term, relation.by)

    if isinstance(inner, Union | Intersection):
        return type(inner)(tuple(_pushed(around(term), n) for term in inner.terms))
    if isinstance(inner, Complement):
        outside = Complement(_pushed(around(inner.term), n))
        if isinstance(relation, Transpose):
            return outside
        # what leaves the sequence is lost, and not in the complement either
        low, high = max(0, relation.by), max(0, min(n, n + relation.by))
        return Intersection((Inside(low, high), outside))
    parts = inner.parts()
    if parts is not None and any(_rectangle(part, n) is not None for part in parts):
        return Union(tuple(_pushed(around(part), n) for part in parts))
    return around(inner)
