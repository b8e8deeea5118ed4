"""The edges of a relation one by one: rows of nearly equal length stand together.

Padding such rows to one length makes them a matrix, whose softmax needs no segments. A padded place
repeats the last key of its row, so that nothing is read that the row does not read anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from attnspec.graphs.edge_table import Drawn, table_of
from attnspec.graphs.predicates.listable import listable
from attnspec.graphs.relation import Edges, Relation
from attnspec.layout.edge_count import edges_of
from attnspec.layout.tables import Batch, Tables
from attnspec.limits import LIMITS

SPARE = 0.125
"""Padding allowed for keeping all queries in one matrix and in natural order, per edge."""


@dataclass(frozen=True, eq=False)
class EdgeLayout:
    """Places for the edges of the last `n_q` of `n_k` positions.

    `order` int64 [n_q] lists the queries, those without keys last; None where that is the natural
    order. `rows` are ranges of it whose queries have equally many places. `keys` int32 [places] are
    the keys of each place, row after row, and `offsets` int32 [n_q + 1] says where rows start.
    """

    n_q: int
    n_k: int
    rows: tuple[slice, ...]
    order: np.ndarray | None
    keys: np.ndarray
    offsets: np.ndarray

    def slice_of(self, rows: slice) -> slice:
        """Where the places of some rows stand among all."""
        return slice(int(self.offsets[rows.start]), int(self.offsets[rows.stop]))

    @property
    def tables(self) -> Tables[np.ndarray]:
        """The same as tables, in which each query is a block with its keys."""
        each, keys = self._in_order[:, None], np.where(self._edges, self.keys, -1)
        batches = (
            Batch(each[x], keys[self.slice_of(x)].reshape(x.stop - x.start, -1), None)
            for x in self.rows
        )
        return Tables(tuple(batches), self.n_q, self.n_k)

    @cached_property
    def _in_order(self) -> np.ndarray:
        """The queries, counted among the last n_q positions, int32."""
        order = np.arange(self.n_q) if self.order is None else self.order
        return order.astype(np.int32)

    @cached_property
    def queries(self) -> np.ndarray:
        """The query of each place, counted among the last n_q positions, int32."""
        return np.repeat(self._in_order, np.diff(self.offsets))

    @cached_property
    def _edges(self) -> np.ndarray:
        """Which places are edges: a padded one has the key of the one before it, in its row."""
        keys, queries = (np.diff(x, prepend=np.int32(-1)) != 0 for x in (self.keys, self.queries))
        return np.asarray(keys | queries)

    @cached_property
    def by_key(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The edges by key, int32: where keys start [n_k + 1], and each edge's query and place."""
        place = np.flatnonzero(self._edges).astype(np.int32)
        # places go up inside a key because the sort is stable
        order = place[np.argsort(self.keys[place], kind="stable")]
        starts = np.searchsorted(self.keys[order], np.arange(self.n_k + 1)).astype(np.int32)
        return starts, self.queries[order], order


def edge_layout(relation: Relation, n_q: int, n_k: int) -> EdgeLayout:
    """The places of all edges of a relation that reads no run-time input."""
    relation = listable(relation, n_k)
    parts = [(np.zeros(0, np.int64), np.zeros(0, np.int32)), *_listed_parts(relation, n_q, n_k)]
    degrees, listed = (np.concatenate(each) for each in zip(*parts, strict=True))
    order, cuts = _groups(degrees)
    widths = [int(degrees[order[first:last]].max()) for first, last in pairwise(cuts)]
    offsets = np.concatenate([[0], np.cumsum(np.repeat(widths, np.diff(cuts)))])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"{offsets[-1]:,} places, and no more than 2**31 can be numbered")
    rows = tuple(slice(*cut) for cut, width in zip(pairwise(cuts), widths, strict=True) if width)
    keys, starts = np.empty(int(offsets[-1]), np.int32), np.cumsum(degrees) - degrees
    for each in rows:
        width = int(offsets[each.start + 1] - offsets[each.start])
        step = max(1, LIMITS.listed_at_once // width)
        for low in range(each.start, each.stop, step):
            high = min(low + step, each.stop)
            some = order[low:high, None]
            # a place that is too many repeats the last key
            at = starts[some] + np.minimum(np.arange(width), degrees[some] - 1)
            keys[offsets[low] : offsets[high]] = listed[at].ravel()
    natural = None if (order == np.arange(n_q)).all() else order
    return EdgeLayout(n_q, n_k, rows, natural, keys, offsets.astype(np.int32))


def _listed_parts(relation: Relation, n_q: int, n_k: int) -> Iterator[Edges]:
    """Numbers of keys of ranges of queries, and these keys, int32, ascending in each query."""
    degree = edges_of(relation, n_q, n_k) / max(1, n_q)
    step = max(LIMITS.rows_least, int(LIMITS.listed_at_once / max(1.0, degree)))
    for first in range(n_k - n_q, n_k, step):
        last = min(first + step, n_k)
        if isinstance(relation, Drawn):
            counts, keys = table_of(relation, n_k).listed(first, last)
        else:
            q, keys = relation.rows(first, last, n_k)
            counts = np.bincount(q - first, minlength=last - first)
        yield counts, keys.astype(np.int32, copy=False)


def _groups(degrees: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """An order of the queries, and the ends of its parts whose numbers of keys are nearly equal."""
    most = int(degrees.max(initial=0))
    order, ends = np.arange(len(degrees)), [0, len(degrees)]
    if not (degrees > 0).all() or most * len(degrees) > (1 + SPARE) * degrees.sum():
        # four levels to the octave; those without keys come last
        level = np.ceil(4 * np.log2(np.maximum(degrees, 1))).astype(np.int64)
        level[degrees == 0] = np.iinfo(np.int64).max
        order = np.argsort(level, kind="stable")
        ends = [0, *(1 + np.flatnonzero(np.diff(level[order]))).tolist(), len(degrees)]
    return order, sorted({*ends})
