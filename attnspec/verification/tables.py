"""The tables of a kernel held against the graph: each pair stands in them once, and no other.

Every pair is looked up in the definition where they can be listed; with the number of keys of each
query nothing is left to chance. Of more pairs those of some queries are.
"""

from __future__ import annotations

import numpy as np

from attnspec.analysis.counting.degrees import degrees_of
from attnspec.graphs.relation import Relation, evaluate_pairs
from attnspec.graphs.stack import TooMuch
from attnspec.layout.tables import Tables, mask_of
from attnspec.limits import LIMITS


def tables_fault(
    tables: Tables, place: int, n_q: int, relation: Relation, n: int, few: np.ndarray
) -> tuple[int, str | None]:
    """How many of the last `n_q` queries of n positions are examined, and the first pair of theirs
    that stands in the tables otherwise than in the graph, in words, or None.

    Tables of several heads have their rows one head after the other, and `place` says which is
    meant; `few` are the positions that are examined where there are too many pairs for all.
    """
    start, first = n - n_q, (place * n_q if tables.n_q > n_q else 0)
    rows = np.arange(start, n)
    try:
        degrees = degrees_of(relation, n)[start:]
    except TooMuch:
        degrees = None
    if degrees is None or sum(x.q.size * x.k.shape[1] for x in tables.batches) > LIMITS.edges_kept:
        rows, degrees = few, None
    # where each row of the tables stands, -1 for those that are not examined
    at = np.full(tables.n_q, -1)
    at[first + rows - start] = rows
    codes, times = np.unique(_codes(tables, at, n), return_counts=True)
    # with as many pairs as the graph has, none is missing where none is strange
    short = rows
    if degrees is not None:
        short = rows[np.bincount(codes // n - start, minlength=n_q) != degrees][:1]
    row, key = np.nonzero(held_rows(relation, short, n))
    most = times.max(initial=0)
    parts = np.array_split(codes, 1 + len(codes) // LIMITS.pairs_at_once)
    strange = [x[~evaluate_pairs(relation, x // n, x % n, n)] for x in parts]
    for wrong, words in (
        (np.setdiff1d(short[row] * n + key, codes), "no block holds the pair {}"),
        (np.concatenate(strange), "a block holds the pair {}, which is not an edge"),
        (codes[times >= max(2, most)], f"{most} blocks hold the pair {{}}"),
    ):
        if len(wrong):
            return len(rows), words.format(f"({wrong[0] // n}, {wrong[0] % n})")
    return len(rows), None


def _codes(tables: Tables, at: np.ndarray, n: int) -> np.ndarray:
    """The pairs of the queries that stand somewhere, query * n + key, int64 and as often as
    they stand there."""
    codes = [np.zeros(0, np.int64)]
    for batch in tables.batches:
        step = max(1, LIMITS.pairs_at_once // max(1, batch.q.shape[1] * batch.k.shape[1]))
        for low in range(0, len(batch.q), step):
            q = batch.q[low : low + step]
            position = np.where(q >= 0, at[q], -1)
            # one block may be tall, and few of its queries wanted
            some = np.flatnonzero((position >= 0).any(0))
            if len(some):
                position, k = position[:, some], batch.k[low : low + step]
                mask = mask_of(batch, low, low + step)[:, some] & (position >= 0)[:, :, None]
                block, row, column = np.nonzero(mask & (k >= 0)[:, None])
                codes.append(position[block, row] * n + k[block, column] % n)
    return np.concatenate(codes)


def held_rows(relation: Relation, rows: np.ndarray, n: int) -> np.ndarray:
    """The definition for all keys of some queries, bool [rows, n]."""
    parts = np.array_split(rows, 1 + len(rows) * n // LIMITS.pairs_at_once)
    return np.concatenate([evaluate_pairs(relation, x[:, None], np.arange(n), n) for x in parts])
