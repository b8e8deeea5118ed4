"""After how many positions a causal graph repeats itself.

Where (q, k) -> (q + p, k + p) maps every layer's pairs onto pairs, as far as they stay inside the
sequence, hops from q to k are those from q + p to k + p. In general the two ends of the sequence
spoil this: a path may run past the end that the moved one cannot reach. With k <= q in every
layer it cannot, because every position on a path from q to k lies between k and q. So for causal
specs, and for them alone, the queries of the last period stand for all.
"""

from __future__ import annotations

from math import lcm

from attnspec.analysis.reach.chain import Chain
from attnspec.graphs.forms.prelude import predicate_of
from attnspec.graphs.operators import Complement, Intersection, Transpose, Union
from attnspec.graphs.predicates.periods import comparisons, period_of
from attnspec.graphs.relation import Relation
from attnspec.ir.scalars import Scalar, fold, symbols


def period(chain: Chain) -> int | None:
    """The least known p for which moving a pair by p positions changes nothing, or None."""
    if not chain.causal:
        return None
    periods = [_period(relation, chain.n) for relations in chain.layers for relation in relations]
    known = [one for one in periods if one is not None]
    return lcm(*known) if len(known) == len(periods) else None


def _period(relation: Relation, n: int) -> int | None:
    if isinstance(relation, Complement | Transpose):
        return _period(relation.term, n)
    if isinstance(relation, Union | Intersection):
        parts = [_period(term, n) for term in relation.terms]
        known = [part for part in parts if part is not None]
        return lcm(*known) if len(known) == len(parts) else None
    predicate = predicate_of(relation)
    if predicate is None:
        return relation.moves_by
    return _of_predicate(fold(predicate, {"n": n}))


def _of_predicate(predicate: Scalar) -> int | None:
    if not set(symbols(predicate)) <= {"q", "k"}:
        # a grid has rows and columns, and so no such period
        return None
    found = [period_of(each).both for each in comparisons(predicate)]
    return lcm(*found) if all(found) else None
