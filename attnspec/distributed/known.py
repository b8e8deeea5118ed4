"""What is known of a graph before a call, or is soon known: at most these pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from attnspec.graphs.operators import Complement, Intersection, Shift, Transpose, Union
from attnspec.graphs.relation import (
    FULL,
    Elementwise,
    Progressions,
    Relation,
    Tiles,
    is_scattered,
)
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
    return _bound(relation, True, reads_data)


def without_draws(relation: Relation) -> Relation:
    """At least the pairs of a relation, without what is drawn position by position."""
    return _bound(relation, True, is_scattered)


def _bound(relation: Relation, most: bool, unknown: Callable[[Relation], bool]) -> Relation:
    if not unknown(relation):
        return relation
    match relation:
        case Union(terms) | Intersection(terms):
            return replace(relation, terms=tuple(_bound(term, most, unknown) for term in terms))
        case Complement(term):
            return Complement(_bound(term, not most, unknown))
        case Transpose(term) | Shift(term):
            return replace(relation, term=_bound(term, most, unknown))
        case _:
            return Anything() if most else Complement(Anything())
