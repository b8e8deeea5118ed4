"""How many pairs of a relation fall into each cell of a coarse grid, without an n x n mask."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnspec.algebra import Complement, Intersection, Shift, Union
from attnspec.relations import Relation

SHORT = 4096
"""Up to this length every pair is looked at, however the relation is made."""

FEW_EDGES = 1 << 23
"""Up to so many edges they are written out: a few hundred megabytes at the most, in parts."""

SAMPLED_ROWS = 8
"""Queries that stand for a row of cells where counting them all would take too long."""

_CHUNK = 1 << 21


@dataclass(frozen=True)
class Tally:
    """The pairs of one relation, counted in square cells of `side` positions.

    `density` [cells, cells]: the share of a cell's pairs that the relation has, among those with
    k <= q where `causal`; 0 where there are none. `later` [cells, cells]: cells whose pairs all
    have k > q, where `causal`. `edges`, `least` and `most` (keys of one query) are exact unless
    `sampled`, then estimates from that many rows.
    """

    n: int
    side: int
    density: npt.NDArray[np.float64]
    later: npt.NDArray[np.bool_]
    edges: int
    least: int
    most: int
    sampled: int = 0

    @property
    def cells(self) -> int:
        """Cells along one side."""
        return len(self.density)


def tally(relation: Relation, n: int, side: int, causal: bool) -> Tally:
    """Count the pairs of a relation at n positions in cells of side x side positions.

    `causal` says that pairs with k > q are ruled out from the start.
    """
    cells = -(-n // side)
    starts = np.arange(cells, dtype=np.int64) * side
    stops = np.minimum(starts + side, n)
    sampled = 0
    if n == 0:
        counts, degrees = np.zeros((0, 0), np.int64), np.zeros(0, np.int64)
    elif relation.progressions(np.zeros(1, np.int64), n) is not None:
        counts, degrees = _closed(relation, n, starts, stops)
    elif n <= SHORT or (_lists_rows(relation, n) and relation.typical_degree(n) * n <= FEW_EDGES):
        counts, degrees = _written(relation, n, side, cells)
    else:
        counts, degrees, sampled = _sampled(relation, n, side, starts, stops)
    allowed = _allowed(starts, stops, causal)
    density = np.divide(counts, allowed, out=np.zeros(counts.shape), where=allowed > 0)
    edges = int(degrees.sum()) if not sampled else round(float(degrees.mean()) * n)
    return Tally(
        n=n,
        side=side,
        density=np.minimum(density, 1.0),
        later=allowed == 0,
        edges=edges,
        least=int(degrees.min(initial=n)),
        most=int(degrees.max(initial=0)),
        sampled=sampled,
    )


def _closed(
    relation: Relation, n: int, starts: np.ndarray, stops: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Counts from the progressions of each row: the members below each border, subtracted."""
    counts = np.zeros((len(starts), len(starts)), np.int64)
    degrees = np.zeros(n, np.int64)
    borders = np.append(starts, n)
    row = 0
    while row < len(starts):
        first = int(starts[row])
        closed = relation.progressions(np.arange(first, first + 1), n)
        width = 1 if closed is None else np.shape(closed[0])[-1]
        each = max(1, int(width) * len(borders) * int(stops[0]))
        last_row = min(len(starts), row + max(1, _CHUNK // each))
        last = int(stops[last_row - 1])
        closed = relation.progressions(np.arange(first, last), n)
        if closed is None:
            raise ValueError("a relation has progressions for some rows only")
        start, stop, step = (a[..., None] for a in np.broadcast_arrays(*closed))
        total = np.maximum(0, -((start - stop) // step))
        below = np.clip(-((start - borders) // step), 0, total).sum(axis=1)
        inside = np.diff(below, axis=-1)
        degrees[first:last] = inside.sum(axis=-1)
        counts[row:last_row] = np.add.reduceat(inside, starts[row:last_row] - first, axis=0)
        row = last_row
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
    relation: Relation, n: int, side: int, starts: np.ndarray, stops: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """Counts estimated from a few rows of each row of cells, drawn at random so that no period of
    the pattern can meet a period of the sample; always the same ones."""
    cells = len(starts)
    counts = np.zeros((cells, cells))
    degrees = []
    generator = np.random.default_rng(0)
    for row, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        height = stop - start
        chosen = start + np.sort(
            generator.choice(height, size=min(SAMPLED_ROWS, height), replace=False)
        )
        for query in chosen.tolist():
            _, k = relation.rows(query, query + 1, n)
            counts[row] += np.bincount(k // side, minlength=cells)
            degrees.append(len(k))
        counts[row] *= height / len(chosen)
    return counts, np.array(degrees), len(degrees)


def _allowed(starts: np.ndarray, stops: np.ndarray, causal: bool) -> np.ndarray:
    """How many pairs of each cell there can be: all, or those with k <= q."""
    heights = (stops - starts)[:, None]
    full = heights * heights.T
    if not causal:
        return np.asarray(full)
    triangle = heights * (heights + 1) // 2
    index = np.arange(len(starts))
    order = index[:, None] - index[None, :]
    return np.asarray(np.where(order > 0, full, np.where(order == 0, triangle, 0)))


def _lists_rows(relation: Relation, n: int) -> bool:
    """Whether the rows of a relation are listed without a look at all of their n keys."""
    match relation:
        case Union(terms):
            return all(_lists_rows(term, n) for term in terms)
        case Intersection(terms):
            return any(_lists_rows(term, n) for term in terms)
        case Shift(term):
            return _lists_rows(term, n)
        case Complement():
            return False
        case _:
            closed = relation.progressions(np.zeros(1, np.int64), n)
            return closed is not None or type(relation).rows is not Relation.rows
