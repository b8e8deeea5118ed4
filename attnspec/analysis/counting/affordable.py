"""Whether the pairs of a relation can be listed, and what that takes: the one answer to it."""

from __future__ import annotations

from attnspec.graphs.operators import Intersection, Shift, Transpose, Union
from attnspec.graphs.predicates.listable import lists_rows
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import TooMuch
from attnspec.limits import LIMITS


def to_list(relation: Relation, n: int) -> float:
    """About how many pairs are examined to list the rows of a relation."""
    match relation:
        case Union(terms):
            return sum(to_list(term, n) for term in terms)
        case Intersection(terms):
            # rows are those of the sparsest term, as far as the others have them
            return min(to_list(term, n) for term in terms)
        case Shift(term) | Transpose(term):
            return to_list(term, n)
        case _:
            return relation.typical_degree(n) * n if lists_rows(relation, n) else float(n * n)


def require_listable(relation: Relation, n: int) -> None:
    """Raise TooMuch where finding the rows of a relation means looking at too many pairs."""
    if n > LIMITS.positions_listed:
        raise TooMuch(f"it has too many pairs to list at n = {n:,}")
    if n * n <= LIMITS.pairs_evaluated or to_list(relation, n) <= LIMITS.pairs_listed:
        return
    if lists_rows(relation, n):
        raise TooMuch(f"it has too many pairs to list at n = {n:,}")
    raise TooMuch(f"its pairs have no closed form and are too many to list at n = {n:,}")
