"""How many pairs of a relation fall into each cell of a coarse grid, without an n x n mask."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from attnspec.graphs.predicates.listable import lists_rows
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import TooMuch
from attnspec.ir.program import Crossing
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import InternalError

LONGEST = 1 << 23
"""The longest sequence; random patterns draw for every position, also where few are examined."""

SAMPLED_ROWS = 8
"""Queries that stand for those of a row of cells where counting them all would take too long."""


@dataclass(frozen=True)
class Tally:
    """The pairs of one relation, of `queries` and n keys, counted in square cells of `side`
    positions.

    `density` [rows, cells]: the share of a cell's pairs that the relation has, among those with
    k <= q where `causal`; 0 where there are none. `allowed` [rows, cells]: how many those are.
    `edges`, `least` and `most` (keys of one query) are exact unless `sampled`, then estimates from
    that many rows.
    """

    n: int
    queries: int
    side: int
    density: npt.NDArray[np.float64]
    allowed: npt.NDArray[np.int64]
    edges: int
    least: int
    most: int
    sampled: int = 0

    @property
    def rows(self) -> int:
        """Cells from the first query to the last."""
        return int(self.density.shape[0])

    @property
    def cells(self) -> int:
        """Cells from the first key to the last."""
        return int(self.density.shape[1])

    @cached_property
    def later(self) -> npt.NDArray[np.bool_]:
        """bool [rows, cells]: cells whose pairs all have k > q, where `causal`."""
        return np.asarray(self.allowed == 0)


def side_for(n: int, room: int) -> int:
    """Positions in a cell so that n of them fit into `room` columns: 2^i, 3 * 2^i or 5 * 2^i."""
    least = -(-n // max(1, room))
    power = 1 << max(0, least.bit_length() - 1)
    choices = [power, power * 5 // 4, power * 3 // 2, power * 2]
    return next(side for side in choices if side >= least)


def room_for(n: int, width: int) -> int:
    """How many columns of a terminal are left for cells beside labels and frame."""
    return max(4, width - len(str(max(0, n - 1))) - 3)


def tick_step(tally: Tally, period: int | None, least: float, *, even: bool = False) -> int:
    """Cells between two ticks: at least `least`, so that labels stay apart, in round numbers."""
    if period and tally.side == 1:
        return period * math.ceil(least / period)
    binary = tally.side > 1 or tally.n % 8 == 0
    decimal = [m * int(10**i) for i in range(10) for m in (1, 2, 5)]
    steps = [1 << i for i in range(32)] if binary else decimal
    return next(step for step in steps if step >= least and not (even and step % 2))


def tally(
    relation: Relation, n: int, side: int, causal: bool, crossing: Crossing | None = None
) -> Tally:
    """Count the pairs of a relation at n positions in cells of side x side positions; with
    `crossing`, those of the two sequences that the positions hold.

    `causal` says that pairs with k > q are ruled out from the start.
    """
    sides = crossing or Crossing(n, n)
    cells = -(-n // side)
    starts = np.arange(cells, dtype=np.int64) * side
    stops = np.minimum(starts + side, n)
    sampled = 0
    if sides.empty:
        counts, degrees = np.zeros((cells, cells), np.int64), np.zeros(n, np.int64)
    else:
        width = _progressions(relation, n) if n <= LONGEST else None
        most = LIMITS.planned if width is None and n <= LONGEST else LONGEST
        if n > most:
            raise TooMuch(f"this pattern is drawn up to n = {most:,}, got {n:,}")
        listed = lists_rows(relation, n)
        if listed and relation.typical_degree(n) * n <= LIMITS.pairs_tallied:
            counts, degrees = _written(relation, n, side, cells)
        elif width is not None and n * width * cells <= LIMITS.tally_work:
            counts, degrees = _closed(relation, n, starts, stops)
        elif n <= LIMITS.every_pair:
            counts, degrees = _written(relation, n, side, cells)
        else:
            counts, degrees = _sampled(relation, n, starts, np.minimum(stops, sides.queries))
            sampled = len(degrees)
    if not sampled:
        degrees = degrees[: sides.queries]
    part = np.s_[: -(-sides.queries // side), : -(-sides.keys // side)]
    counts = counts[part]
    allowed = _allowed(starts, stops, sides, causal)[part]
    density = np.divide(counts, allowed, out=np.zeros(counts.shape), where=allowed > 0)
    return Tally(
        n=sides.keys,
        queries=sides.queries,
        side=side,
        density=np.minimum(density, 1.0),
        allowed=allowed,
        edges=round(float(counts.sum())) if sampled else int(degrees.sum()),
        least=int(degrees.min(initial=sides.keys)),
        most=int(degrees.max(initial=0)),
        sampled=sampled,
    )


def _progressions(relation: Relation, n: int) -> int | None:
    """How many progressions a row has, None where rows have no closed form."""
    closed = relation.progressions(np.zeros(1, np.int64), n)
    return None if closed is None else int(np.shape(closed[0])[-1])


def _inside(relation: Relation, q: np.ndarray, n: int, borders: np.ndarray) -> np.ndarray | None:
    """The keys of each query between one border and the next, int64 [queries, cells]: the members
    of its progressions below each border, subtracted. None where rows have no closed form."""
    closed = relation.progressions(q, n)
    if closed is None:
        return None
    start, stop, step = (a[..., None] for a in np.broadcast_arrays(*closed))
    total = np.maximum(0, -((start - stop) // step))
    below = np.clip(-((start - borders) // step), 0, total).sum(axis=1)
    return np.asarray(np.diff(below, axis=-1))


def _closed(
    relation: Relation, n: int, starts: np.ndarray, stops: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Counts from the progressions of every row."""
    cells = len(starts)
    counts = np.zeros((cells, cells), np.int64)
    degrees = np.zeros(n, np.int64)
    borders = np.append(starts, n)
    each = max(1, (_progressions(relation, n) or 1) * len(borders))
    for row, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        for first in range(start, stop, max(1, LIMITS.listed_at_once // each)):
            last = min(stop, first + max(1, LIMITS.listed_at_once // each))
            inside = _inside(relation, np.arange(first, last), n, borders)
            if inside is None:
                raise InternalError("a relation has progressions for some of its rows only")
            degrees[first:last] = inside.sum(axis=-1)
            counts[row] += inside.sum(axis=0)
    return counts, degrees


def _written(relation: Relation, n: int, side: int, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts from the edges themselves."""
    counts = np.zeros(cells * cells, np.int64)
    degrees = np.zeros(n, np.int64)
    for first, last in relation.chunks(n):
        q, k = relation.rows(first, last, n)
        counts += np.bincount(q // side * cells + k // side, minlength=cells * cells)
        degrees[first:last] = np.bincount(q - first, minlength=last - first)
    return counts.reshape(cells, cells), degrees


def _sampled(
    relation: Relation, n: int, starts: np.ndarray, stops: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Counts estimated from a few rows of each row of cells, and the keys of those rows.

    The first and the last row stand for themselves: there patterns do what they do nowhere else.
    Those between are drawn at random, always the same ones, so that no period of the pattern can
    meet a period of the sample.
    """
    cells = len(starts)
    counts = np.zeros((cells, cells))
    degrees = []
    borders = np.append(starts, n)
    generator = np.random.default_rng(0)
    for row, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        if start >= stop:
            break
        between = max(0, stop - start - 2)
        few = min(SAMPLED_ROWS, between)
        drawn = start + 1 + np.sort(generator.choice(between, size=few, replace=False))
        edge = np.unique([start, stop - 1])
        chosen = np.concatenate([edge, drawn])
        weights = np.concatenate([np.ones(len(edge)), np.full(few, between / max(1, few))])
        inside = _inside(relation, chosen, n, borders)
        if inside is None:
            keys = [relation.rows(query, query + 1, n)[1] for query in chosen.tolist()]
            inside = np.stack([np.diff(np.searchsorted(row_keys, borders)) for row_keys in keys])
        counts[row] = weights @ inside
        degrees.append(inside.sum(axis=-1))
    return counts, np.concatenate(degrees)


def _allowed(starts: np.ndarray, stops: np.ndarray, sides: Crossing, causal: bool) -> np.ndarray:
    """How many pairs of each cell there can be: all, or those with k <= q."""
    heights = np.maximum(0, np.minimum(stops, sides.queries) - starts)[:, None]
    full = heights * np.maximum(0, np.minimum(stops, sides.keys) - starts)
    if not causal:
        return np.asarray(full)
    triangle = heights * (heights + 1) // 2
    return np.asarray(np.tril(full, -1) + np.diag(triangle.ravel()))
