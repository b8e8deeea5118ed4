"""Which steps, orders and tile sizes a relation is computed in: the cheapest by estimate.

Terms that are best in natural order are one step together; each other term is a step in its own
order, and comes before them, because it leaves more of its tiles FULL when nothing is excluded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from attnspec.graphs.operators import Union
from attnspec.graphs.relation import Relation, heads_in, with_head
from attnspec.layout.from_rows import tables_of
from attnspec.layout.orders import (
    NATURAL,
    Boxed,
    Listed,
    Order,
    OrderedRelation,
    Side,
    orders_of,
    terms_of,
    without,
)
from attnspec.layout.tables import Tables
from attnspec.layout.tile_layout import StepLayout, parted, step_layout
from attnspec.layout.tiling import Survey, TooFine, classify, survey
from attnspec.limits import LIMITS
from attnspec.lower.cost_model import current, dense_seconds
from attnspec.lower.rates import Amounts
from attnspec.lower.work import Work

LARGE = (512, 1024, 2048, 4096)
"""Tile sizes for graphs of which smaller ones would be more than `LIMITS.tiles`."""

READING = 0.5
"""What run-time inputs are taken to leave of the dense cost before they are seen."""


@dataclass(frozen=True)
class Means:
    """What computes steps, as far as choosing them goes.

    `name` begins its rates on a type of device; `targets` and `large` are the tile sizes on offer,
    and `size` is that of the tiles of a side of so many positions then; `amounts` is what a step
    takes.
    """

    name: str
    device: str
    targets: tuple[int, ...]
    large: tuple[int, ...]
    amounts: Callable[[Survey, Order], Amounts]
    size: Callable[[int, Side, int], int]


@dataclass(frozen=True)
class Banded:
    """One step as chosen: what it covers of which term, in which order, in which tiles at which
    lengths, and what that takes; `endless` where there are too many tiles of any size."""

    step: OrderedRelation
    term: Relation
    lengths: tuple[int, int]
    sizes: tuple[int, int]
    means: Means
    endless: bool = False

    @cached_property
    def tiles(self) -> Survey:
        """About how many tiles there are of which kind."""
        return survey(self.step.relation, *self.lengths, self.step.order, self.sizes)

    @cached_property
    def amounts(self) -> Amounts:
        """What the step takes."""
        if self.endless:
            return {f"{self.means.name}_pair": math.inf}
        return self.means.amounts(self.tiles, self.step.order)

    @property
    def seconds(self) -> float:
        """The estimate."""
        return current(self.means.device).seconds(self.amounts)

    @property
    def pairs(self) -> float:
        """The pairs of its tiles."""
        return self.amounts.get(f"{self.means.name}_pair", math.inf)

    def __str__(self) -> str:
        return f"{self.step.order}, tiles {self.sizes[0]} x {self.sizes[1]}"


def _of_bands(tiles: Survey, order: Order) -> Amounts:
    full, undecided = tiles.area
    moved = 0 if order.k == 1 else tiles.k.size * tiles.k.count
    return {
        "bands_step": 1,
        "bands_row": tiles.q.count,
        "bands_query": tiles.q.count * tiles.q.size,
        "bands_pair": full + undecided,
        "bands_masked": undecided,
        "bands_gather": tiles.gathered * tiles.k.size,
        "bands_reorder": moved,
    }


def about(length: int, side: Side, target: int) -> int:
    """Equal tiles of about the target's size for lists, or classes of about length / step; whole
    boxes."""
    if isinstance(side, Boxed):
        return side.size
    members = members_of(length, side)
    return -(-members // max(1, round(members / target)))


def fixed(length: int, side: Side, target: int) -> int:
    """Tiles of the target's size, those of boxes as many whole ones as it holds."""
    if not isinstance(side, Boxed):
        return target
    size = side.size
    while 2 * size <= target:
        size *= 2
    return size


def members_of(length: int, side: Side) -> int:
    """The positions of a list, or about those of a residue class."""
    if isinstance(side, Listed):
        return max(1, len(side.positions))
    return max(1, -(-length // (side if isinstance(side, int) else 1)))


BANDS = Means("bands", "cpu", LIMITS.tile_sizes, LARGE, _of_bands, about)
"""The flash kernel of the CPU."""


@lru_cache(maxsize=256)
def drawn_alike(relation: Relation) -> tuple[Relation, int | None]:
    """The relation of which heads that differ in what they draw share a plan, that of the first
    one, and whose draws these are, None for its own."""
    head = max(heads_in(relation), default=0)
    if not head:
        return relation, None
    first = with_head(relation, 0)
    return (first, head) if with_head(first, head) == relation else (relation, None)


@lru_cache(maxsize=64)
def bands_of(relation: Relation, n_q: int, n_k: int, means: Means = BANDS) -> tuple[Banded, ...]:
    """The steps of a relation, disjoint, in the order in which they are computed; chosen once for
    all heads that draw alike."""
    first, head = drawn_alike(relation)
    found = chosen_at(first, n_q, n_k, means)
    if head is None:
        return found
    return tuple(
        replace(
            band,
            step=replace(band.step, relation=with_head(band.step.relation, head)),
            term=with_head(band.term, head),
        )
        for band in found
    )


@lru_cache(maxsize=256)
def chosen_at(relation: Relation, n_q: int, n_k: int, means: Means = BANDS) -> tuple[Banded, ...]:
    """The steps of a relation as chosen for these lengths alone."""
    whole = _best(relation, n_q, n_k, (NATURAL,), means)
    terms = terms_of(relation)
    if len(terms) == 1 and len(orders_of(terms[0], n_k)) == 1:
        return (whole,)
    apart: list[tuple[Relation, Order]] = []
    together: list[Relation] = []
    for term in terms:
        best = _best(term, n_q, n_k, orders_of(term, n_k), means)
        if best.step.order == NATURAL:
            together.append(term)
        else:
            apart.append((term, best.step.order))
    if not apart:
        return (whole,)
    found: list[Banded] = []
    earlier: tuple[Relation, ...] = ()
    for term, order in apart:
        found.append(_best(without(term, earlier), n_q, n_k, (order,), means, term))
        earlier = (*earlier, term)
    if together:
        rest = together[0] if len(together) == 1 else Union(tuple(together))
        found.append(_best(without(rest, earlier), n_q, n_k, (NATURAL,), means))
    return tuple(found) if seconds_of(found, n_q) < whole.seconds else (whole,)


def amounts_of(bands: Sequence[Banded], n_q: int) -> Amounts:
    """What all steps and merging them take."""
    total = {f"{bands[0].means.name}_merge": n_q * (len(bands) - 1.0)}
    for band in bands:
        for name, amount in band.amounts.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def seconds_of(bands: Sequence[Banded], n_q: int, copies: int = 1) -> float:
    """The estimate of all steps and of merging them, where so many share their calls."""
    return current(bands[0].means.device).seconds(amounts_of(bands, n_q), copies)


def reading_seconds(work: Work) -> float:
    """The estimate for a graph that reads run-time inputs, of which nothing is known before they
    are seen."""
    return current().bands_layout + READING * dense_seconds(work)


def layouts_of(bands: tuple[Banded, ...], n_q: int, n_k: int) -> list[StepLayout]:
    """The tiles of every step, some in two parts; raises TooFine where they are too many."""
    return [
        layout
        for band in bands
        for layout in _layouts(band.step.relation, n_q, n_k, band.step.order, band.sizes)
    ]


def whole_layouts_of(bands: tuple[Banded, ...], n_q: int, n_k: int) -> list[StepLayout]:
    """The tiles of every step, each in one part: where a mask is looked up tile by tile, those of
    long rows are no larger than those of short ones."""
    return [_whole(band.step.relation, n_q, n_k, band.step.order, band.sizes) for band in bands]


def natural_tables(relation: Relation, n_q: int, n_k: int, tile: int) -> Tables[np.ndarray]:
    """The tables of one step in natural order, in square tiles of a size."""
    return tables_of([natural_layout(relation, n_q, n_k, tile)], n_q, n_k)


def natural_layout(relation: Relation, n_q: int, n_k: int, tile: int) -> StepLayout:
    """The square tiles of a size in natural order."""
    return _whole(relation, n_q, n_k, NATURAL, (tile, tile))


@lru_cache(maxsize=64)
def _layouts(
    relation: Relation, n_q: int, n_k: int, order: Order, sizes: tuple[int, int]
) -> tuple[StepLayout, ...]:
    # layers of one graph share what is laid out
    return tuple(parted(_whole(relation, n_q, n_k, order, sizes)))


@lru_cache(maxsize=16)
def _whole(
    relation: Relation, n_q: int, n_k: int, order: Order, sizes: tuple[int, int]
) -> StepLayout:
    return step_layout(classify(relation, n_q, n_k, order, sizes), relation, n_k)


def _best(
    relation: Relation,
    n_q: int,
    n_k: int,
    orders: tuple[Order, ...],
    means: Means,
    term: Relation | None = None,
) -> Banded:
    found: list[Banded] = []
    for order in orders:
        for target in (*means.targets, *means.large):
            try:
                found.append(banded(relation, n_q, n_k, order, target, means, term))
            except TooFine:
                continue
            if target >= means.targets[-1]:
                break
    if not found:
        last = means.targets[-1]
        sizes = means.size(n_q, 1, last), means.size(n_k, 1, last)
        step = OrderedRelation(relation, NATURAL)
        return Banded(step, relation, (n_q, n_k), sizes, means, endless=True)
    return min(found, key=lambda band: band.seconds)


def banded(
    relation: Relation,
    n_q: int,
    n_k: int,
    order: Order,
    target: int,
    means: Means = BANDS,
    term: Relation | None = None,
) -> Banded:
    """A relation, what is left of a term if one is given, as one step in an order and in tiles of
    about a size; raises TooFine."""
    targets = target, target
    if target > means.targets[-1] and order.q != order.k:
        # where only one side is natural, its tiles are long, or the masks of all offsets are many
        targets = (4 * target, target // 4) if order.q == 1 else (target // 4, 4 * target)
    sizes = means.size(n_q, order.q, targets[0]), means.size(n_k, order.k, targets[1])
    step = OrderedRelation(relation, order)
    band = Banded(step, relation if term is None else term, (n_q, n_k), sizes, means)
    if band.tiles.tiles > LIMITS.tiles:
        raise TooFine(f"about {band.tiles.tiles:,.0f} tiles, at most {LIMITS.tiles:,} are listed")
    return band
