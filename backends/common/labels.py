"""What is known of graphs that read inputs before these are seen, without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attnspec.graphs.across import Across
from attnspec.graphs.operators import Complement, Intersection, Shift, Transpose, Union
from attnspec.graphs.patterns.full import Full
from attnspec.graphs.patterns.same import Same
from attnspec.graphs.relation import Relation
from attnspec.graphs.token_sets import StandIn, reads_data

ALL, NONE = Full(), Complement(Full())
"""Every pair, and no pair."""


def labels_of(relation: Relation) -> tuple[tuple[str, ...], Relation] | None:
    """The inputs of which a pair has the same label, and the static pairs that remain; None where
    inputs are read in another way."""
    terms = relation.terms if isinstance(relation, Intersection) else (relation,)
    same = [term for term in terms if isinstance(term, Same) and isinstance(term.ids, StandIn)]
    others = tuple(term for term in terms if term not in same)
    if any(reads_data(term) for term in others):
        return None
    names = tuple(term.ids.name for term in same if isinstance(term.ids, StandIn))
    if not others:
        return names, ALL
    return names, others[0] if len(others) == 1 else Intersection(others)


def possible(relation: Relation, unknown: Callable[[Relation], bool] = reads_data) -> Relation:
    """The pairs outside of which a relation has none, whatever its `unknown` parts have: static
    ones, where these are those that read inputs."""
    return _bound(relation, True, unknown)


def certain(relation: Relation) -> Relation:
    """The static pairs that are held whatever the inputs are."""
    return _bound(relation, False, reads_data)


def _bound(relation: Relation, most: bool, unknown: Callable[[Relation], bool]) -> Relation:
    """The most pairs that a relation may hold, or the fewest."""
    if not unknown(relation):
        return relation
    match relation:
        case Union(terms):
            return _joined(relation, [_bound(x, most, unknown) for x in terms], (ALL, NONE))
        case Intersection(terms):
            return _joined(relation, [_bound(x, most, unknown) for x in terms], (NONE, ALL))
        case Complement(term):
            found = _bound(term, not most, unknown)
            return {ALL: NONE, NONE: ALL}.get(found) or Complement(found)
        case Transpose(term) | Shift(term) | Across(term):
            return replace(relation, term=_bound(term, most, unknown))
        case _:
            return ALL if most else NONE


def _joined(
    relation: Union | Intersection, terms: list[Relation], ends: tuple[Relation, Relation]
) -> Relation:
    """Terms under an operator; `ends` are the one that decides alone, and the one that says
    nothing beside others."""
    some = tuple(dict.fromkeys(term for term in terms if term != ends[1]))
    if ends[0] in some:
        return ends[0]
    if len(some) < 2:
        return some[0] if some else ends[1]
    return replace(relation, terms=some)
