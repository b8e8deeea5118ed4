"""What is known of graphs that read inputs before these are seen, without torch: the most pairs
that they may have and the fewest, labels that pairs have in common, and static pairs, which are
laid out in steps, apart from a condition of the inputs, which a mask computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias, TypeVar

from attnspec.graphs.across import Across
from attnspec.graphs.gathered import Gathered
from attnspec.graphs.operators import Complement, Intersection, Shift, Transpose, Union
from attnspec.graphs.patterns.full import Full
from attnspec.graphs.patterns.same import Same
from attnspec.graphs.relation import Elementwise, Relation
from attnspec.graphs.token_sets import StandIn, reads_data

ALL, NONE = Full(), Complement(Full())
"""Every pair, and no pair."""

Moved: TypeAlias = Transpose | Shift | Across | Gathered
"""Operators that hold the pairs of a term at other positions."""

Nothing = TypeVar("Nothing", bound=Relation | None)


def joined(
    kind: type[Union | Intersection], terms: Iterable[Relation], nothing: Nothing
) -> Relation | Nothing:
    """Terms under an operator, each once; `nothing` where there are none."""
    distinct = tuple(dict.fromkeys(terms))
    if len(distinct) < 2:
        return distinct[0] if distinct else nothing
    return kind(distinct)


def labels_of(relation: Relation) -> tuple[str, ...] | None:
    """The inputs of which a pair has the same label; None where inputs are read in another way."""
    terms = relation.terms if isinstance(relation, Intersection) else (relation,)
    names = []
    for term in terms:
        if isinstance(term, Same) and isinstance(term.ids, StandIn):
            names.append(term.ids.name)
        elif reads_data(term):
            return None
    return tuple(names)


def possible(
    relation: Relation, unknown: Callable[[Relation], bool] = reads_data, most: bool = True
) -> Relation:
    """The pairs outside of which a relation has none, whatever its `unknown` parts have: static
    ones, where these are those that read inputs; not `most`, those that it has in any case."""
    if not unknown(relation):
        return relation
    match relation:
        case Union(terms) | Intersection(terms):
            decides, idle = (ALL, NONE) if isinstance(relation, Union) else (NONE, ALL)
            some = [bound for x in terms if (bound := possible(x, unknown, most)) != idle]
            return decides if decides in some else joined(type(relation), some, idle)
        case Complement(term):
            bound = possible(term, unknown, not most)
            return {ALL: NONE, NONE: ALL}.get(bound) or Complement(bound)
        case Transpose(term) | Shift(term) | Across(term):
            return replace(relation, term=possible(term, unknown, most))
        case _:
            return ALL if most else NONE


# --- in two ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part(Relation):
    """The pairs of a static graph, which are looked up in the table of this number."""

    number: int

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        raise ValueError("a part is looked up in a table")


@dataclass(frozen=True)
class Reading:
    """A graph as `static & condition`; in the condition stand, for the static graphs `parts`, as
    many of `Part`. None is a condition that always holds."""

    static: Relation
    condition: Relation | None
    parts: tuple[Relation, ...]


@lru_cache(maxsize=256)
def reading_of(relation: Relation) -> Reading:
    """A graph in two."""
    terms = relation.terms if isinstance(relation, Intersection) else (relation,)
    read = [term for term in terms if reads_data(term)]
    parts: list[Relation] = []
    conditions = tuple(_condition(term, (), parts) for term in read)
    static = joined(Intersection, (term for term in terms if term not in read), ALL)
    return Reading(static, joined(Intersection, conditions, None), tuple(parts))


def _condition(term: Relation, around: tuple[Moved, ...], parts: list[Relation]) -> Relation:
    """A term with static parts by their numbers; `around` it, the first outermost, stand operators
    that are brought to its leaves, so that every part is one of the sequence as it is."""
    match term:
        case _ if not reads_data(term):
            condition = _within(term, around)
            if condition not in parts:
                parts.append(condition)
            return Part(parts.index(condition))
        case Union(terms) | Intersection(terms):
            still = tuple(each for each in terms if not reads_data(each))
            mine = [_condition(each, around, parts) for each in terms if reads_data(each)]
            if still:
                mine.append(_condition(joined(type(term), still, ALL), around, parts))
            return replace(term, terms=tuple(mine))
        case Complement(inner):
            condition = Complement(_condition(inner, around, parts))
            if not around:
                return condition
            # what an operator puts nothing at is not in the complement either
            return Intersection((_condition(ALL, around, parts), condition))
        case Transpose(inner) | Shift(inner) | Across(inner) | Gathered(inner):
            return _condition(inner, (*around, term), parts)
        case _:
            return _within(term, around)


def _within(term: Relation, around: tuple[Moved, ...]) -> Relation:
    for operator in reversed(around):
        term = replace(operator, term=term)
    return term
