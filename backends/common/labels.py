"""Graphs whose pairs are static ones with equal labels, known without torch."""

from __future__ import annotations

from attnspec.graphs.operators import Intersection
from attnspec.graphs.patterns.full import Full
from attnspec.graphs.patterns.same import Same
from attnspec.graphs.relation import Relation
from attnspec.graphs.token_sets import StandIn, reads_data


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
        return names, Full()
    return names, others[0] if len(others) == 1 else Intersection(others)
