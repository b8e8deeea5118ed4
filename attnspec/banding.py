"""Which steps, orders and tile sizes a relation is computed in: the cheapest by estimate.

Terms that are best in natural order are one step together; each other term is a step in its own
order, and comes before them, because it leaves more of its tiles FULL when nothing is excluded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from attnspec.algebra import Union
from attnspec.ordered import Classified, StepLayout, TooFine, classify, step_layout
from attnspec.relations import Relation
from attnspec.steps import (
    NATURAL,
    Listed,
    Order,
    OrderedRelation,
    Side,
    orders_of,
    terms_of,
    without,
)

TARGETS = (64, 128, 256)
"""Tile sizes on offer; a residue class is cut into equal tiles of about this size."""

PAIR = {64: 2.6e-9, 128: 2.2e-9, 256: 2.0e-9}
"""Seconds per pair of a tile: one head of size 64, forward, on two CPU cores."""

UNDECIDED = 0.4e-9
"""Seconds more per pair of a tile with a mask."""

STEP = 6e-5
"""Seconds per step and head: its calls."""

TILE_ROW = 1.5e-6
"""Seconds per query tile and step."""

REORDER = 6e-8
"""Seconds per position that is put in order: queries, keys, values and the result."""

MERGE = 4e-8
"""Seconds per query for every step after the first."""


@dataclass(frozen=True)
class Banded:
    """One step as chosen: what it covers, in which order, in which tiles, and its estimate."""

    step: OrderedRelation
    sizes: tuple[int, int]
    seconds: float

    def __str__(self) -> str:
        return f"{self.step.order}, tiles {self.sizes[0]} x {self.sizes[1]}"


@lru_cache(maxsize=64)
def bands_of(relation: Relation, n_q: int, n_k: int) -> tuple[Banded, ...]:
    """The steps of a relation, disjoint, in the order in which they are computed."""
    whole = _best(relation, n_q, n_k, (NATURAL,))
    terms = terms_of(relation)
    if len(terms) == 1 and len(orders_of(terms[0], n_k)) == 1:
        return (whole,)
    apart: list[tuple[Relation, Order]] = []
    together: list[Relation] = []
    for term in terms:
        best = _best(term, n_q, n_k, orders_of(term, n_k))
        if best.step.order == NATURAL:
            together.append(term)
        else:
            apart.append((term, best.step.order))
    if not apart:
        return (whole,)
    found: list[Banded] = []
    earlier: tuple[Relation, ...] = ()
    for term, order in apart:
        found.append(_best(without(term, earlier), n_q, n_k, (order,)))
        earlier = (*earlier, term)
    if together:
        rest = together[0] if len(together) == 1 else Union(tuple(together))
        found.append(_best(without(rest, earlier), n_q, n_k, (NATURAL,)))
    return tuple(found) if seconds_of(found, n_q) < whole.seconds else (whole,)


def seconds_of(bands: list[Banded] | tuple[Banded, ...], n_q: int) -> float:
    """The estimate of all steps and of merging them."""
    return sum(band.seconds for band in bands) + MERGE * n_q * (len(bands) - 1)


def layouts_of(bands: tuple[Banded, ...], n_q: int, n_k: int) -> list[StepLayout]:
    """The tiles of every step."""
    return [
        step_layout(
            classify(band.step.relation, n_q, n_k, band.step.order, band.sizes),
            band.step.relation,
            n_k,
        )
        for band in bands
    ]


def _best(relation: Relation, n_q: int, n_k: int, orders: tuple[Order, ...]) -> Banded:
    found: list[Banded] = []
    for order in orders:
        for target in TARGETS:
            sizes = _size(n_q, order.q, target), _size(n_k, order.k, target)
            try:
                tiles = classify(relation, n_q, n_k, order, sizes)
            except TooFine:
                continue
            seconds = _seconds(tiles, order, n_q, n_k, target)
            found.append(Banded(OrderedRelation(relation, order), sizes, seconds))
    if not found:
        sizes = _size(n_q, 1, TARGETS[-1]), _size(n_k, 1, TARGETS[-1])
        return Banded(OrderedRelation(relation, NATURAL), sizes, float("inf"))
    return min(found, key=lambda band: band.seconds)


def _size(length: int, side: Side, target: int) -> int:
    """Equal tiles of about the target's size for lists, or classes of about length / step."""
    members = len(side.positions) if isinstance(side, Listed) else -(-length // side)
    members = max(1, members)
    return -(-members // max(1, round(members / target)))


def _seconds(tiles: Classified, order: Order, n_q: int, n_k: int, target: int) -> float:
    full, undecided = tiles.area
    moved = sum(
        2 * axis.size * axis.count
        for axis, side in ((tiles.q, order.q), (tiles.k, order.k))
        if side != 1
    )
    return (
        STEP
        + TILE_ROW * tiles.q.count
        + PAIR[target] * full
        + (PAIR[target] + UNDECIDED) * undecided
        + REORDER * moved
    )
