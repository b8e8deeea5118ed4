"""The same pairs in a form whose rows are listed without a look at pairs that do not hold."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from attnspec.graphs.operators import Complement, Intersection, Shift, Transpose, Union
from attnspec.graphs.relation import Relation


@lru_cache(maxsize=64)
def listable(relation: Relation, n: int) -> Relation:
    """The relation at n with predicates taken apart where that gives their rows."""
    match relation:
        case Union(terms) | Intersection(terms):
            return type(relation)(tuple(listable(term, n) for term in terms))
        case Complement(term):
            return Complement(listable(term, n))
    simpler = relation.taken_apart(n)
    if simpler is not None and lists_rows(rows := listable(simpler, n), n):
        return rows
    return relation


def lists_rows(relation: Relation, n: int) -> bool:
    """Whether the rows of a relation are listed without a look at all of their n keys."""
    match relation:
        case Union(terms):
            return all(lists_rows(term, n) for term in terms)
        case Intersection(terms):
            # rows are those of the sparsest term, as far as the others have them
            return any(lists_rows(term, n) for term in terms)
        case Shift(term) | Transpose(term):
            return lists_rows(term, n)
        case Complement():
            return False
        case _:
            rows = relation.progressions(np.zeros(1, np.int64), n)
            return rows is not None or type(relation).rows is not Relation.rows
