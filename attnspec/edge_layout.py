"""The edges of a relation one by one: rows of nearly equal length stand together.

Padding such rows to one length makes them a matrix, whose softmax needs no segments. A padded place
repeats the last key of its row, so that nothing is read that the row does not read anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnspec.drawn import Drawn, table_of
from attnspec.edge_count import edges_of
from attnspec.relations import Relation, sort_edges

SPARE = 0.125
"""Padding allowed for keeping all queries in one matrix and in natural order, per edge."""


_AT_ONCE = 1 << 18
"""Edges that are listed, and places that are filled, in one go: they stay in the cache."""

_LEAST = 16
"""Queries whose edges are listed in one go, however many keys they seem to have."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Queries `first:last` of the order, each with `width` places; `held` is bool
    [last - first, width], False in padded places, or None where there are none."""

    first: int
    last: int
    width: int
    held: np.ndarray | None


@dataclass(frozen=True, eq=False)
class EdgeLayout:
    """Places for the edges of the last `n_q` of `n_k` positions.

    `order` int64 [n_q] lists the queries as `rows` take them, those without keys last; None where
    that is the natural order. `keys` int32 [places] are the keys of each place, row after row, and
    `offsets` int32 [n_q + 1] says where rows start.
    """

    n_q: int
    n_k: int
    rows: tuple[Rows, ...]
    order: np.ndarray | None
    keys: np.ndarray
    offsets: np.ndarray

    def slice_of(self, rows: Rows) -> slice:
        """Where the places of some rows stand among all."""
        return slice(int(self.offsets[rows.first]), int(self.offsets[rows.last]))

    def queries_of(self, rows: Rows) -> np.ndarray:
        """The queries of some rows, counted among the last n_q positions, int32."""
        if self.order is None:
            return np.arange(rows.first, rows.last, dtype=np.int32)
        return self.order[rows.first : rows.last].astype(np.int32)

    @cached_property
    def queries(self) -> np.ndarray:
        """The query of each place, counted among the last n_q positions, int32."""
        order = np.arange(self.n_q) if self.order is None else self.order
        return np.repeat(order.astype(np.int32), np.diff(self.offsets))

    @cached_property
    def by_key(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The edges by key, int32: where each key starts [n_k + 1], and the query and the place of
        every edge."""
        places = [np.zeros(0, np.int32)]
        for rows in self.rows:
            here = self.slice_of(rows)
            at = np.arange(here.start, here.stop, dtype=np.int32)
            places.append(at if rows.held is None else at[rows.held.ravel()])
        place = np.concatenate(places)
        keys = self.keys[place]
        # places go up inside a key because the sort is stable
        found = place[np.argsort(keys, kind="stable")]
        starts = np.zeros(self.n_k + 1, np.int32)
        np.cumsum(np.bincount(keys, minlength=self.n_k), out=starts[1:])
        return starts, self.queries[found], found


def edge_layout(relation: Relation, n_q: int, n_k: int) -> EdgeLayout:
    """The places of all edges of a relation that reads no run-time input."""
    degrees, keys = listed_edges(relation, n_q, n_k)
    order, groups = _groups(degrees)
    natural = bool((order == np.arange(n_q)).all())
    rows, first = [], 0
    widths = np.zeros(n_q, np.int64)
    for group in groups:
        count = degrees[group]
        width = int(count.max())
        if width:
            held = None if (count == width).all() else np.arange(width) < count[:, None]
            rows.append(Rows(first, first + len(group), width, held))
            widths[first : first + len(group)] = width
        first += len(group)
    offsets = np.concatenate([[0], np.cumsum(widths)])
    if not natural or any(part.held is not None for part in rows):
        keys = _placed(keys, degrees, order, rows, offsets)
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"{offsets[-1]:,} places, and no more than 2**31 can be numbered")
    return EdgeLayout(
        n_q, n_k, tuple(rows), None if natural else order, keys, offsets.astype(np.int32)
    )


def _placed(
    keys: np.ndarray,
    degrees: np.ndarray,
    order: np.ndarray,
    rows: list[Rows],
    offsets: np.ndarray,
) -> np.ndarray:
    """The keys in the places of their rows; a place that is too many repeats the last one."""
    starts = np.cumsum(degrees) - degrees
    places = np.empty(int(offsets[-1]), np.int32)
    for part in rows:
        step = max(1, _AT_ONCE // part.width)
        within = np.arange(part.width)
        for low in range(part.first, part.last, step):
            high = min(low + step, part.last)
            here = order[low:high, None]
            at = starts[here] + np.minimum(within, degrees[here] - 1)
            places[offsets[low] : offsets[high]] = keys[at].ravel()
    return places


def listed_edges(relation: Relation, n_q: int, n_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The number of keys of each query, and all keys, int32."""
    degrees, keys = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
    degree = edges_of(relation, n_q, n_k) / max(1, n_q)
    step = max(_LEAST, int(_AT_ONCE / max(1.0, degree)))
    for first in range(n_k - n_q, n_k, step):
        counts, found = _listed(relation, first, min(first + step, n_k), n_k)
        degrees.append(counts)
        keys.append(found.astype(np.int32, copy=False))
    return np.concatenate(degrees), np.concatenate(keys)


def _listed(relation: Relation, first: int, last: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The number of keys of each query first <= q < last, and their keys one after the other,
    ascending in each query."""
    if isinstance(relation, Drawn):
        return table_of(relation, n).listed(first, last)
    closed = relation.progressions(np.arange(first, last), n)
    if closed is None:
        q, k = relation.rows(first, last, n)
        return np.bincount(q - first, minlength=last - first), k
    start, stop, step = np.broadcast_arrays(*closed)
    counts = np.maximum(0, -((start - stop) // step))
    each, ends = counts.ravel(), np.cumsum(counts)
    keys = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - each, each)
    if (step != 1).any():
        keys *= np.repeat(step.ravel(), each)
    keys += np.repeat(start.ravel(), each)
    degrees = counts.sum(axis=1)
    if counts.shape[1] > 1 and _falls(degrees, keys):
        keys = sort_edges(np.repeat(np.arange(len(degrees)), degrees), keys)[1]
    return degrees, keys


def _falls(degrees: np.ndarray, keys: np.ndarray) -> bool:
    """Whether the keys of a row are not ascending, for rows one after the other."""
    falls = keys[1:] < keys[:-1]
    starts = (np.cumsum(degrees) - degrees)[degrees > 0]
    falls[starts[1:] - 1] = False
    return bool(falls.any())


def _groups(degrees: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """An order of the queries, and its parts whose numbers of keys are nearly equal."""
    most = int(degrees.max(initial=0))
    if (degrees > 0).all() and most * len(degrees) <= (1 + SPARE) * degrees.sum():
        order = np.arange(len(degrees))
        return order, [order] if len(order) else []
    # four levels to the octave; those without keys come last
    level = np.ceil(4 * np.log2(np.maximum(degrees, 1))).astype(np.int64)
    level[degrees == 0] = np.iinfo(np.int64).max
    order = np.argsort(level, kind="stable")
    cuts = np.flatnonzero(np.diff(level[order])) + 1
    return order, [part for part in np.split(order, cuts) if len(part)]
