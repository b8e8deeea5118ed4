"""The edges of a relation one by one: rows of nearly equal length stand together.

Padding such rows to one length makes them a matrix, whose softmax needs no segments.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attnspec.graphs.edge_table import Drawn, table_of
from attnspec.graphs.predicates.listable import listable
from attnspec.graphs.relation import Edges, Relation, concatenated
from attnspec.layout.edge_count import edges_of
from attnspec.layout.tables import Batch, Tables
from attnspec.limits import LIMITS

SPARE = 0.125
"""Padding allowed for keeping all queries in one matrix and in natural order, per edge."""


def edge_tables(relation: Relation, n_q: int, n_k: int) -> Tables:
    """All edges of a relation that reads no run-time input: each query with keys is a block of
    these, int32, ascending, and one batch has those of nearly equally many, -1 behind the fewer."""
    relation = listable(relation, n_k)
    parts = [(np.zeros(0, np.int64), np.zeros(0, np.int32)), *_listed_parts(relation, n_q, n_k)]
    degrees, listed = concatenated(parts)
    starts, batches, groups = np.cumsum(degrees) - degrees, [], _groups(degrees)
    places = sum(len(order) * int(degrees[order].max()) for order in groups)
    if places > np.iinfo(np.int32).max:
        raise ValueError(f"{places:,} places, and no more than 2**31 can be numbered")
    for order in groups:
        place = np.arange(degrees[order].max())
        keys = np.empty((len(order), len(place)), np.int32)
        step = max(1, LIMITS.listed_at_once // len(place))
        for low in range(0, len(order), step):
            some = order[low : low + step, None]
            at = starts[some] + np.minimum(place, degrees[some] - 1)
            keys[low : low + step] = np.where(place < degrees[some], listed[at], -1)
        batches.append(Batch(order[:, None], keys, None))
    return Tables(tuple(batches), n_q, n_k)


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


def _groups(degrees: np.ndarray) -> list[np.ndarray]:
    """The queries with keys in parts whose numbers of keys are nearly equal."""
    some = np.flatnonzero(degrees)
    if len(some) * degrees.max(initial=0) <= (1 + SPARE) * degrees.sum():
        return [some] if len(some) else []
    # four levels to the octave
    level = np.ceil(4 * np.log2(degrees[some])).astype(np.int64)
    return [some[level == each] for each in np.unique(level)]
