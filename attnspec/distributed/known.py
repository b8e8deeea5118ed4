"""What is known of a graph before a call: at most these pairs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from attnspec.graphs.operators import Complement, Intersection, Shift, Transpose, Union
from attnspec.graphs.relation import FULL, Elementwise, Progressions, Relation, Tiles
from attnspec.graphs.token_sets import reads_data


@dataclass(frozen=True)
class Anything(Relation):
    """Every pair, in place of what nobody knows yet."""

    name: ClassVar = "anything"

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return (q == q) & (k == k)

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        return np.full(np.broadcast_shapes(q.start.shape, k.start.shape), FULL, np.uint8)

    def progressions(self, q: np.ndarray, n: int) -> Progressions:
        return np.zeros((len(q), 1), np.int64), np.full((len(q), 1), n), 1


def widest(relation: Relation) -> Relation:
    """At least the pairs of a relation whatever a call brings, without what waits for it."""
    return _bound(relation, True)


def _bound(relation: Relation, most: bool) -> Relation:
    if not reads_data(relation):
        return relation
    match relation:
        case Union(terms) | Intersection(terms):
            return replace(relation, terms=tuple(_bound(term, most) for term in terms))
        case Complement(term):
            return Complement(_bound(term, not most))
        case Transpose(term) | Shift(term):
            return replace(relation, term=_bound(term, most))
        case _:
            return Anything() if most else Complement(Anything())
