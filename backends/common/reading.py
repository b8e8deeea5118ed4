"""Graphs that read run-time inputs in two: static pairs, which are laid out in steps, and a
condition of the inputs, which a mask computes; known without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from attnspec.graphs.across import Across
from attnspec.graphs.gathered import Gathered
from attnspec.graphs.operators import Complement, Intersection, Shift, Transpose, Union
from attnspec.graphs.patterns.full import Full
from attnspec.graphs.relation import Elementwise, Relation, takes_tensors
from attnspec.graphs.token_sets import reads_data


class GatheredError(ValueError):
    """What reads inputs in the numbering of other sequences."""


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
    """A graph in two. Raises GatheredError for what is numbered anew."""
    terms = relation.terms if isinstance(relation, Intersection) else (relation,)
    read = [term for term in terms if reads_data(term)]
    parts: list[Relation] = []
    found = tuple(_condition(term, (), parts) for term in read)
    static = _joined(Intersection, tuple(term for term in terms if term not in read))
    return Reading(static, _joined(Intersection, found) if found else None, tuple(parts))


def is_askable(relation: Relation) -> bool:
    """Whether the condition of a graph is answered for tensors of positions."""
    try:
        condition = reading_of(relation).condition
    except GatheredError:
        return False
    return condition is None or takes_tensors(condition)


def _joined(kind: type[Union] | type[Intersection], terms: tuple[Relation, ...]) -> Relation:
    if not terms:
        return Full()
    return terms[0] if len(terms) == 1 else kind(terms)


def _condition(
    term: Relation, around: tuple[Transpose | Shift | Across, ...], parts: list[Relation]
) -> Relation:
    """A term with static parts by their numbers; `around` it, the first outermost, stand operators
    that are brought to its leaves, so that every part is one of the sequence as it is."""
    match term:
        case _ if not reads_data(term):
            found = _within(term, around)
            if found not in parts:
                parts.append(found)
            return Part(parts.index(found))
        case Union(terms) | Intersection(terms):
            still = tuple(each for each in terms if not reads_data(each))
            mine = [_condition(each, around, parts) for each in terms if reads_data(each)]
            if still:
                mine.append(_condition(_joined(type(term), still), around, parts))
            return replace(term, terms=tuple(mine))
        case Complement(inner):
            found = Complement(_condition(inner, around, parts))
            if not around:
                return found
            # what an operator puts nothing at is not in the complement either
            return Intersection((_condition(Full(), around, parts), found))
        case Transpose(inner) | Shift(inner) | Across(inner):
            return _condition(inner, (*around, term), parts)
        case Gathered():
            raise GatheredError("it reads inputs in the numbering of another sequence")
        case _:
            return _within(term, around)


def _within(term: Relation, around: tuple[Transpose | Shift | Across, ...]) -> Relation:
    for operator in reversed(around):
        term = replace(operator, term=term)
    return term
