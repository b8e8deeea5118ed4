"""From a graph to steps: a disjoint union of relations, each with the order that suits it.

A window is near the diagonal in the natural order. Residue classes, and the columns of a summary,
are near it once tokens are grouped by residue. A union of both is two steps: the second leaves out
the pairs that the first covers, and their results are merged by log-sum-exps. Orders are arithmetic
progressions: tiles of step s, class by class, so a residue order is not a table but a stride.
Equal labels of an input are close once tokens are sorted by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import chain, product
from math import lcm, prod
from typing import TypeAlias

import numpy as np

from attnspec.graphs.operators import Complement, Intersection, Union
from attnspec.graphs.relation import Relation, is_closed
from attnspec.limits import LIMITS

BOXES = (32, 64)
"""Cells of the boxes of queries on offer."""


@dataclass(frozen=True, eq=False)
class Listed:
    """Only these positions, int64, none twice: the tokens of a set, which stand first, or all of
    them sorted by their labels; compared by identity."""

    positions: np.ndarray


@dataclass(frozen=True)
class Boxed:
    """The cells of a grid of these extents, the first at the position `offset`, box by box, which
    have the sides `box`; other positions are left out."""

    extents: tuple[int, ...]
    offset: int
    box: tuple[int, ...]

    @property
    def size(self) -> int:
        """The cells of a whole box."""
        return prod(self.box)


Side: TypeAlias = int | Listed | Boxed
"""How queries or keys are ordered: grouped by residue modulo a step, 1 for natural; listed; or
in boxes of a grid."""


@dataclass(frozen=True)
class Order:
    """How the queries and the keys of a step are ordered."""

    q: Side = 1
    k: Side = 1

    def __str__(self) -> str:
        if self.q == self.k == 1:
            return "natural order"
        if self.q == self.k:
            return f"order of {f'residues mod {self.q}' if isinstance(self.q, int) else 'labels'}"
        parts = []
        for what, side in (("queries", self.q), ("keys", self.k)):
            if isinstance(side, Boxed):
                parts.append(f"{what} in boxes of {' x '.join(map(str, side.box))}")
            elif isinstance(side, Listed):
                parts.append(f"{len(side.positions):,} listed {what}")
            elif side > 1:
                parts.append(f"{what} mod {side}")
        return f"order of {', '.join(parts)}"


NATURAL = Order()


@lru_cache(maxsize=256)
def terms_of(relation: Relation) -> tuple[Relation, ...]:
    """The relation as a union of terms that need not be disjoint.

    Patterns that are unions themselves are taken apart, and `&` is pushed inward over `|`, as far
    as `LIMITS.parts` allows.
    """
    parts = relation.parts()
    if parts is not None:
        relation = Union(parts)
    if isinstance(relation, Union):
        terms = tuple(dict.fromkeys(t for term in relation.terms for t in terms_of(term)))
        return terms if len(terms) <= LIMITS.parts else (relation,)
    if isinstance(relation, Intersection):
        factors = [terms_of(term) for term in relation.terms]
        if 1 < prod(map(len, factors)) <= LIMITS.parts:
            return tuple(dict.fromkeys(_intersection(chosen) for chosen in product(*factors)))
    return (relation,)


def _intersection(terms: tuple[Relation, ...]) -> Relation:
    flat = (x.terms if isinstance(x, Intersection) else (x,) for x in terms)
    distinct = tuple(dict.fromkeys(chain.from_iterable(flat)))
    return distinct[0] if len(distinct) == 1 else Intersection(distinct)


def orders_of(term: Relation, n: int) -> tuple[Order, ...]:
    """The orders worth trying for a term of `terms_of`, the natural one first."""
    leaves = term.terms if isinstance(term, Intersection) else (term,)
    steps = [step for leaf in leaves for step in leaf.strides(n)]
    if steps:
        # an intersection of residues is a residue of the least common multiple
        queries, keys = zip(*steps, strict=True)
        steps = [(lcm(*queries), lcm(*keys)), *steps]
    orders = [NATURAL, *(Order(q, k) for q, k in steps if max(q, k) <= LIMITS.classes)]
    rows, columns = zip(*(leaf.listing(n) for leaf in leaves), strict=True)
    orders.append(Order(_listed(rows), _listed(columns)))
    by_label = _by_label(term, [known for leaf in leaves if (known := leaf.classes(n)) is not None])
    orders.append(Order(by_label, by_label))
    for grid in filter(None, (leaf.boxes() for leaf in leaves)):
        keys_of = Boxed(*grid, _box(grid[0], 2 ** len(grid[0])))
        orders += [Order(Boxed(*grid, _box(grid[0], cells)), keys_of) for cells in BOXES]
    return tuple(dict.fromkeys(orders))[: LIMITS.orders]


def _box(extents: tuple[int, ...], cells: int) -> tuple[int, ...]:
    """The sides of a box of about so many cells, as nearly equal as the grid allows."""
    box = [1] * len(extents)
    while prod(box) < cells:
        # the last axes first: their cells lie together
        free = [axis for axis in reversed(range(len(box))) if box[axis] < extents[axis]]
        if not free:
            break
        box[min(free, key=box.__getitem__)] *= 2
    return tuple(box)


def _listed(sets: Sequence[np.ndarray | None]) -> Side:
    """The positions that stand in all sets; natural order where these are many."""
    listed = [positions for positions in sets if positions is not None]
    if not listed:
        return 1
    common = reduce(np.intersect1d, listed)
    return 1 if len(common) > LIMITS.tokens_ordered else Listed(common)


def _by_label(term: Relation, labels: Sequence[np.ndarray]) -> Side:
    """All positions sorted by labels, those of equal ones in natural order; natural order where
    these follow one another anyway."""
    # a default cover would evaluate the pairs of whole spans
    if not labels or not is_closed(term):
        return 1
    order, each = np.lexsort(labels[::-1]), np.stack(labels, 1)
    runs = [int((x[1:] != x[:-1]).any(1).sum()) for x in (each, each[order])]
    return 1 if runs[0] == runs[1] else Listed(order)


def without(term: Relation, earlier: tuple[Relation, ...]) -> Relation:
    """The pairs of a term that none of the earlier ones has."""
    if not earlier:
        return term
    return _intersection((term, *(Complement(other) for other in earlier)))
