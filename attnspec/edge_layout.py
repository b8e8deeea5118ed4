"""The edges of a relation one by one: rows of nearly equal length stand together.

Padding such rows to one length makes them a matrix, whose softmax needs no segments. A padded place
repeats the last key of its row, so that nothing is read that the row does not read anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnspec.relations import Relation

SPARE = 0.125
"""Padding allowed for keeping all queries in one matrix and in natural order, per edge."""


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
    degrees, keys = _edges(relation, n_q, n_k)
    starts = np.cumsum(degrees) - degrees
    order, groups = _groups(degrees)
    places, rows, first = [np.zeros(0, np.int32)], [], 0
    for group in groups:
        count = degrees[group][:, None]
        width = int(count.max())
        if width:
            within = np.arange(width)
            places.append(keys[starts[group][:, None] + np.minimum(within, count - 1)].ravel())
            held = None if (count == width).all() else within < count
            rows.append(Rows(first, first + len(group), width, held))
        first += len(group)
    widths = np.zeros(n_q, np.int64)
    for part in rows:
        widths[part.first : part.last] = part.width
    offsets = np.concatenate([[0], np.cumsum(widths)]).astype(np.int32)
    natural = bool((order == np.arange(n_q)).all())
    return EdgeLayout(
        n_q, n_k, tuple(rows), None if natural else order, np.concatenate(places), offsets
    )


def _edges(relation: Relation, n_q: int, n_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The number of keys of each query, and all keys, int32."""
    degrees, keys = np.zeros(n_q, np.int64), [np.zeros(0, np.int32)]
    before = n_k - n_q
    for first, last in relation.chunks(n_k):
        if last > before:
            q, k = relation.rows(max(first, before), last, n_k)
            degrees += np.bincount(q - before, minlength=n_q)
            keys.append(k.astype(np.int32))
    return degrees, np.concatenate(keys)


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
