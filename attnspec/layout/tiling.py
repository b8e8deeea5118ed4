"""Which pairs of tiles a relation fills, which it leaves empty, and which must be examined.

The cover of the relation decides tiles in closed form, coarse ones first, so that a window costs
its band and not n². A survey counts them for an estimate, from a sample where they are many; a
classification lists them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from attnspec.graphs.relation import (
    EMPTY,
    FULL,
    SOME,
    Relation,
    concatenated,
    in_runs,
    is_closed,
    is_scattered,
)
from attnspec.layout.axes import Axis, axis
from attnspec.layout.edge_count import drawn, edges_of, spread_out
from attnspec.layout.orders import Order
from attnspec.limits import LIMITS

_FANOUT = 4
"""A coarse tile is as long as this many tiles of the next finer level."""

_SEEN = 1 << 14
"""Pairs of tiles of which it is asked whether they follow one another, about."""


Axes: TypeAlias = "tuple[Axis, Axis]"
"""The tiles of queries, and of keys."""


@dataclass(frozen=True)
class Tiling:
    """The pairs of a relation between the last n_q of n_k positions, in an order, and in tiles of
    these sizes."""

    relation: Relation
    n_q: int
    n_k: int
    order: Order
    sizes: tuple[int, int]

    @property
    def axes(self) -> Axes:
        """The tiles of both sides."""
        first, n, (q, k) = self.n_k - self.n_q, self.n_k, self.sizes
        return axis(first, n, self.order.q, q), axis(0, n, self.order.k, k)

    @property
    def coarser(self) -> Tiling:
        """The next coarser level."""
        q, k = self.sizes
        return replace(self, sizes=(q * _FANOUT, k * _FANOUT))

    @property
    def is_coarsest(self) -> bool:
        """Whether tiles are few, or the relation not closed: each level would evaluate it again."""
        few = (
            each.count <= max(LIMITS.coarsest, each.side if isinstance(each.side, int) else 0)
            for each in self.axes
        )
        return not is_closed(self.relation) or all(few)


@dataclass(frozen=True, eq=False)
class Survey:
    """How many pairs of fine tiles are FULL and how many undecided: exact where there are few;
    else, `sampled`, an estimate from a sample of the coarse ones or of how edges spread.

    `gathered` are those of query tiles whose key tiles do not follow one another.
    """

    q: Axis
    k: Axis
    full: float
    undecided: float
    gathered: float
    sampled: bool = False

    @property
    def tiles(self) -> float:
        """Pairs of tiles that a layout lists at most."""
        return self.full + self.undecided

    @property
    def area(self) -> tuple[float, float]:
        """Pairs of positions in FULL tiles and in undecided ones."""
        size = self.q.size * self.k.size
        return self.full * size, self.undecided * size


class TooFine(ValueError):
    """More pairs of tiles would be listed than is worth it."""


Pairs: TypeAlias = tuple[np.ndarray, np.ndarray]
"""The numbers of tiles of queries, and of keys."""

Ranges: TypeAlias = "tuple[np.ndarray, np.ndarray, np.ndarray]"
"""Of tiles of queries their numbers, and the first of tiles of keys and the one behind the last."""


@dataclass(frozen=True, eq=False)
class _Level:
    """Pairs of tiles of one level and what the cover says of them; each stands for `weight`."""

    q: Axis
    k: Axis
    rows: np.ndarray
    columns: np.ndarray
    kinds: np.ndarray
    weight: float

    def of(self, kind: int) -> Pairs:
        """The pairs of tiles of which the cover says so."""
        chosen = self.kinds == kind
        return self.rows[chosen], self.columns[chosen]


def classify(tiling: Tiling) -> tuple[Pairs, Pairs]:
    """The pairs of tiles that the cover calls FULL, and those undecided; raises TooFine."""
    levels = _levels(tiling, exact=True)
    # the finer tiles inside FULL pairs of all levels
    parts = [_spread(level, FULL, tiling.axes) for level in levels]
    row, begin, end = concatenated(parts)
    counts = end - begin
    return (np.repeat(row, counts), in_runs(begin, counts)), levels[-1].of(SOME)


@lru_cache(maxsize=256)
def survey(tiling: Tiling) -> Survey:
    """About what `classify` would find, without listing more than some ten thousand pairs."""
    fine, relation = tiling.axes, tiling.relation
    if not is_closed(relation):
        every = float(fine[0].count * fine[1].count)
        return Survey(*fine, 0.0, every, 0.0)
    if is_scattered(relation):
        while not tiling.is_coarsest:
            tiling = tiling.coarser
    levels = _levels(tiling)
    level = levels[-1]
    parts = [*(_spread(each, FULL, fine) for each in levels), _spread(level, SOME, fine)]
    *counts, undecided = (
        each.weight * float((end - begin).sum())
        for each, (_, begin, end) in zip((*levels, level), parts, strict=True)
    )
    full = sum(counts)
    if level.q.size != fine[0].size and undecided:
        # only a table of all edges could say more; edges fall into tiles as balls into bins
        undecided *= -np.expm1(-edges_of(relation, tiling.n_q, tiling.n_k) / undecided)
        return Survey(*fine, full, undecided, full + undecided, sampled=True)
    if level.weight == 1:
        return Survey(*fine, full, undecided, _gathered(parts, fine))
    ends = _ends(level) * (full + undecided)
    scattered = full + undecided if ends > fine[0].count else 0.0
    return Survey(*fine, full, undecided, scattered, sampled=True)


def _spread(above: _Level, kind: int, below: Axes) -> Ranges:
    """The finer tiles in a level's pairs of a kind."""
    rows, columns = above.of(kind)
    begin, end = above.k.inside(below[1], columns)
    row = _finer(above.q, below[0], rows)
    begin, end, row = np.broadcast_arrays(begin[:, None], end[:, None], row)
    there = row >= 0
    return row[there], begin[there], end[there]


def _gathered(parts: list[Ranges], fine: Axes) -> float:
    """The pairs of tiles of those query tiles whose key tiles do not follow one another."""
    row, begin, end = concatenated(parts)
    count = np.bincount(row, end - begin, fine[0].count)
    first, last = np.full(fine[0].count, fine[1].count), np.zeros(fine[0].count, np.int64)
    np.minimum.at(first, row, begin)
    np.maximum.at(last, row, end)
    return float(count[last - first > count].sum())


def _ends(level: _Level) -> float:
    """The share of tiles whose right neighbour was examined, in some rows, and is empty."""
    some = drawn(level.q.count) < _SEEN / max(1, len(level.rows))
    chosen = np.flatnonzero(some[level.rows])
    code = level.rows[chosen] * (level.k.count + 1) + level.columns[chosen]
    order = np.argsort(code)
    code, taken = code[order], level.kinds[chosen[order]] != EMPTY
    # what was examined next to each other: coarser tiles are cut into whole ones of this level
    beside = taken[:-1] & (np.diff(code) == 1)
    return 1 - float(taken[1:][beside].mean()) if beside.any() else 1.0


@lru_cache(maxsize=16)
def _levels(tiling: Tiling, exact: bool = False) -> tuple[_Level, ...]:
    """The levels down to tiles of these sizes, of a sample where the pairs are many; where they
    must be `exact`, raises TooFine for too many."""
    if exact:
        surveyed = _levels(tiling)
        if surveyed[-1].weight == 1:
            return surveyed
    most = LIMITS.tile_pairs if exact else LIMITS.tile_pairs_surveyed
    q, k = tiling.axes
    levels: tuple[_Level, ...] = ()
    if tiling.is_coarsest:
        # queries are sampled with all their keys: classes that meet only themselves weigh alike
        chosen, weight = _thinned(q.count, max(1, most // max(1, k.count)), exact)
        rows, columns = chosen[:, None], np.arange(k.count)[None]
    else:
        levels = _levels(tiling.coarser, exact)
        above, (rows, columns) = levels[-1], levels[-1].of(SOME)
        chosen, weight = _thinned(len(rows), most // _FANOUT**2, exact)
        weight *= above.weight
        # what is known of one side alone is examined once for all tiles of the other
        rows = _finer(above.q, q, rows[chosen])[:, :, None]
        columns = _finer(above.k, k, columns[chosen])[:, None, :]
    there = (rows >= 0) & (columns >= 0)
    # a cover that evaluates every pair is left to the layout, which does so again
    kinds = np.full(there.shape, SOME, np.uint8)
    if is_closed(tiling.relation):
        kinds = _cover(tiling, np.maximum(rows, 0), np.maximum(columns, 0))
    rows, columns = np.broadcast_arrays(rows, columns)
    return *levels, _Level(q, k, rows[there], columns[there], kinds[there], weight)


def _thinned(count: int, most: int, exact: bool) -> tuple[np.ndarray, float]:
    """Which of `count` to take, and how many each stands for; raises TooFine if it must be all."""
    if count <= most:
        return np.arange(count), 1.0
    if exact:
        raise TooFine(f"more than {LIMITS.tile_pairs:,} pairs of tiles")
    return spread_out(count, most), count / most


def _cover(tiling: Tiling, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The cover of pairs of tiles whose numbers broadcast against each other."""
    q, k = (each.tiles for each in tiling.axes)
    shape = np.broadcast_shapes(rows.shape, columns.shape)
    kinds = np.empty(shape, np.uint8)
    step = max(1, LIMITS.listed_at_once // max(1, kinds[:1].size))
    for low in range(0, shape[0], step):
        part = np.s_[low : low + step]
        both = columns if len(columns) == 1 else columns[part]
        kinds[part] = tiling.relation.cover(q.take(rows[part]), k.take(both), tiling.n_k)
    return kinds


def _finer(above: Axis, below: Axis, index: np.ndarray) -> np.ndarray:
    """The tiles below each tile above, -1 where there are fewer."""
    first, last = above.inside(below, index)
    child = first[:, None] + np.arange(above.size // below.size)
    return np.where(child < last[:, None], child, -1)
