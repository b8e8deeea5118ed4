"""Which steps, orders and tile sizes a relation is computed in: the cheapest by estimate.

Terms that are best in natural order are one step together; each other term is a step in its own
order, and comes before them, because it leaves more of its tiles FULL when nothing is excluded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from attnspec.graphs.operators import Union
from attnspec.graphs.relation import Relation, heads_in, with_head
from attnspec.layout.from_rows import tables_of
from attnspec.layout.orders import NATURAL, Boxed, Listed, Order, Side, orders_of, terms_of, without
from attnspec.layout.tables import Tables
from attnspec.layout.tile_layout import StepLayout, step_layout
from attnspec.layout.tiling import Survey, Tiling, survey
from attnspec.limits import LIMITS
from attnspec.lower.costs import (
    Amounts,
    Units,
    dense_seconds,
    seconds_for,
    together,
    weighed,
    work_seconds,
)
from attnspec.lower.work import Work

LARGE = (256, 1024, 4096)
"""Tile sizes for graphs of which smaller ones would be more than `LIMITS.tiles`."""

READING = 0.1
"""What run-time inputs are taken to leave of the dense cost before they are seen: little, because
kernels compare again in the call, and take the definition where inputs leave more."""


@dataclass(frozen=True)
class Means:
    """What computes steps, as far as choosing them goes.

    `kind` are its weights on a type of device; `targets` and `large` are the tile sizes on offer,
    and `size` is that of the tiles of a side of so many positions then; `units` is what a step
    takes.
    """

    kind: str
    device: str
    targets: tuple[int, ...]
    large: tuple[int, ...]
    units: Callable[[Survey, Order], Units]
    size: Callable[[int, Side, int], int]


@dataclass(frozen=True)
class Banded(Tiling):
    """One step."""

    means: Means

    @cached_property
    def tiles(self) -> Survey:
        """About how many tiles there are of which kind."""
        return survey(self)

    @property
    def layout(self) -> StepLayout:
        """The tiles, every one of them decided; raises TooFine where they are too many."""
        return step_layout(self)

    @property
    def endless(self) -> bool:
        """Whether there are too many tiles to list."""
        return self.tiles.tiles > LIMITS.tiles

    @cached_property
    def units(self) -> Units:
        """What the step takes."""
        return {"pair": math.inf} if self.endless else self.means.units(self.tiles, self.order)

    @property
    def pairs(self) -> float:
        """The pairs of its tiles."""
        return self.units["pair"]

    def __str__(self) -> str:
        return f"{self.order}, tiles {self.sizes[0]} x {self.sizes[1]}"


def _of_bands(tiles: Survey, order: Order) -> Units:
    full, undecided = tiles.area
    return {
        "call": 1,
        "row": tiles.q.count,
        "query": tiles.q.count * tiles.q.size,
        "pair": full + undecided,
        "masked": undecided,
        "gather": tiles.gathered * tiles.k.size,
        "reorder": 0 if order.k == 1 else tiles.k.size * tiles.k.count,
    }


def equal(length: int, side: Side, target: int) -> int:
    """Equal tiles no longer than the target for lists and classes; in natural order tiles of the
    target's size, with which blocks begin mostly; whole boxes."""
    if isinstance(side, Boxed):
        return side.size
    members = len(side.positions) if isinstance(side, Listed) else -(-length // side)
    if side == 1 and members > target:
        return target
    return -(-members // max(1, -(-members // target))) or 1


def fixed(length: int, side: Side, target: int) -> int:
    """Tiles of the target's size, those of boxes as many whole ones as it holds."""
    if not isinstance(side, Boxed):
        return target
    return side.size << max(0, (target // side.size).bit_length() - 1)


BANDS = Means("tables", "cpu", LIMITS.tile_sizes, LARGE, _of_bands, equal)
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


@lru_cache(maxsize=256)
def bands_of(relation: Relation, n_q: int, n_k: int, means: Means = BANDS) -> tuple[Banded, ...]:
    """The disjoint steps of a relation, as they are computed; one choice if heads draw alike."""
    first, head = drawn_alike(relation)
    if head is not None:
        bands = bands_of(first, n_q, n_k, means)
        return tuple(replace(x, relation=with_head(x.relation, head)) for x in bands)
    whole = _best(relation, n_q, n_k, (NATURAL,), means)
    orders = {
        term: _best(term, n_q, n_k, orders_of(term, n_k), means).order
        for term in terms_of(relation)
    }
    parts = [term for term, order in orders.items() if order != NATURAL]
    if not parts:
        return (whole,)
    natural = tuple(term for term in orders if term not in parts)
    if natural:
        parts.append(natural[0] if len(natural) == 1 else Union(natural))
    steps = tuple(
        _best(without(part, tuple(parts[:index])), n_q, n_k, (orders.get(part, NATURAL),), means)
        for index, part in enumerate(parts)
    )
    return steps if seconds_of(steps) < seconds_of((whole,)) else (whole,)


def work_bands(work: Work) -> tuple[Banded, ...]:
    """The disjoint steps of the graph of a work."""
    return bands_of(work.relation, work.n_q, work.n_k)


def amounts_of(bands: Sequence[Banded], copies: int) -> Amounts:
    """What all steps and merging them take, for one of so many heads that share their calls."""
    means, merged = bands[0].means, bands[0].n_q * (len(bands) - 1)
    units = [*(band.units for band in bands), {"host": 1, "merge": merged}]
    return together(*(weighed(means.kind, each, means.device, copies) for each in units))


def seconds_of(bands: Sequence[Banded], copies: int = 1) -> float:
    """The estimate of all steps and of merging them, where so many heads share their calls."""
    return seconds_for(amounts_of(bands, copies), bands[0].means.device)


def reading_seconds(work: Work) -> float:
    """The estimate for a graph that reads run-time inputs, of which nothing is known before."""
    return work_seconds("tables", work, layout=1) + READING * dense_seconds(work)


def stepped_tables(bands: Sequence[Banded]) -> Tables:
    """The tables of steps, some in two parts; raises TooFine where they have too many tiles."""
    return tables_of([band.layout for band in bands], bands[0].n_q, bands[0].n_k)


def natural_tables(work: Work, tile: int) -> Tables:
    """The tables of one step in natural order, in square tiles of a size."""
    layout = step_layout(Tiling(work.relation, work.n_q, work.n_k, NATURAL, (tile, tile)))
    return tables_of([layout], work.n_q, work.n_k, math.inf)


def _best(
    relation: Relation, n_q: int, n_k: int, orders: tuple[Order, ...], means: Means
) -> Banded:
    """A relation as the one step that takes least."""
    best: list[Banded] = []
    for order in orders:
        for target in (*means.targets, *means.large):
            band = banded(relation, n_q, n_k, order, target, means)
            best.append(band)
            if target >= means.targets[-1] and not band.endless:
                break
    return min(best, key=lambda band: seconds_of((band,)))


def banded(
    relation: Relation, n_q: int, n_k: int, order: Order, target: int, means: Means = BANDS
) -> Banded:
    """A relation as one step in an order and in tiles of about a size."""
    targets = target, target
    if target > means.targets[-1] and order.q != order.k:
        # where only one side is natural, its tiles are long, or the masks of all offsets are many
        targets = (4 * target, target // 4) if order.q == 1 else (target // 4, 4 * target)
    sizes = means.size(n_q, order.q, targets[0]), means.size(n_k, order.k, targets[1])
    return Banded(relation, n_q, n_k, order, sizes, means)
