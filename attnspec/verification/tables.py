"""The tables of a kernel held against the graph: each pair stands in them once, and no other.

Every pair is looked up in the definition where they can be listed; with the number of keys of each
query nothing is left to chance. Of more pairs those of some queries are.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attnspec.analysis.counting.degrees import degrees_of
from attnspec.graphs.relation import Relation, evaluate_pairs
from attnspec.graphs.stack import TooMuch
from attnspec.layout.tables import Batch, Tables, mask_of
from attnspec.limits import LIMITS
from attnspec.verification.meaning import held_rows


def tables_fault(
    tables: Tables[np.ndarray], place: int, n_q: int, relation: Relation, n: int, few: np.ndarray
) -> tuple[int, str | None]:
    """How many of the last `n_q` queries of n positions are examined, and the first pair of theirs
    that stands in the tables otherwise than in the graph, in words, or None.

    Tables of several heads have their rows one head after the other, and `place` says which is
    meant; `few` are the positions that are examined where there are too many pairs for all.
    """
    start, first = n - n_q, (place * n_q if tables.n_q > n_q else 0)
    # where each row of the tables stands, -1 for those of other heads
    at = np.full(tables.n_q, -1)
    at[first : first + n_q] = np.arange(start, n)
    counts = np.zeros(n, np.int64)
    for batch in tables.batches:
        _count(batch, at, counts)
    try:
        wrong = np.flatnonzero(counts[start:] != degrees_of(relation, n)[start:])
    except TooMuch:
        return len(few), _row_fault(tables, at, few, relation, n)
    if len(wrong):
        return n_q, _row_fault(tables, at, start + wrong[:1], relation, n)
    if counts.sum() > LIMITS.edges_kept:
        return len(few), _row_fault(tables, at, few, relation, n)
    return n_q, _pairs_fault(_codes(tables, at, n), relation, n)


def _row_fault(
    tables: Tables[np.ndarray], at: np.ndarray, rows: np.ndarray, relation: Relation, n: int
) -> str | None:
    """What is wrong with the pairs of some queries."""
    place, key = np.nonzero(held_rows(relation, rows, n))
    codes = _codes(tables, np.where(np.isin(at, rows), at, -1), n)
    missing = np.setdiff1d(rows[place] * n + key, codes)
    if len(missing):
        return f"no block holds the pair {_words(missing[0], n)}"
    return _pairs_fault(codes, relation, n)


def _pairs_fault(codes: np.ndarray, relation: Relation, n: int) -> str | None:
    """The first of some pairs, ascending, that is not an edge, or is there twice."""
    for low in range(0, len(codes), LIMITS.pairs_at_once):
        some = codes[low : low + LIMITS.pairs_at_once]
        strange = ~evaluate_pairs(relation, some // n, some % n, n)
        if strange.any():
            return f"a block holds the pair {_words(some[strange][0], n)}, which is not an edge"
    twice = codes[1:][codes[1:] == codes[:-1]]
    if not len(twice):
        return None
    return f"{(codes == twice[0]).sum()} blocks hold the pair {_words(twice[0], n)}"


def _words(code: int, n: int) -> str:
    return f"({code // n}, {code % n})"


def _chunks(batch: Batch[np.ndarray]) -> Iterator[tuple[int, int]]:
    """Ranges of blocks with about `LIMITS.pairs_at_once` pairs each."""
    step = max(1, LIMITS.pairs_at_once // max(1, batch.q.shape[1] * batch.k.shape[1]))
    for low in range(0, len(batch.q), step):
        yield low, min(low + step, len(batch.q))


def _count(batch: Batch[np.ndarray], at: np.ndarray, into: np.ndarray) -> None:
    """Add the number of keys of each query to `into` [n]."""
    for low, high in _chunks(batch):
        q, k = batch.q[low:high], batch.k[low:high]
        plain = batch.mask is None
        count = (k >= 0).sum(-1)[:, None] if plain else mask_of(batch, low, high).sum(-1)
        position = np.where(q >= 0, at[q], -1)
        mine = position >= 0
        np.add.at(into, position[mine], np.broadcast_to(count, q.shape)[mine])


def _codes(tables: Tables[np.ndarray], at: np.ndarray, n: int) -> np.ndarray:
    """The pairs of the queries that stand somewhere, query * n + key, ascending, int64."""
    codes = [np.zeros(0, np.int64)]
    for batch in tables.batches:
        for low, high in _chunks(batch):
            position = np.where(batch.q[low:high] >= 0, at[batch.q[low:high]], -1)
            # one block may be tall, and few of its queries wanted
            some = np.flatnonzero((position >= 0).any(0))
            if len(some):
                position, k = position[:, some], batch.k[low:high]
                mask = mask_of(batch, low, high)[:, some] & (position >= 0)[:, :, None]
                block, row, column = np.nonzero(mask & (k >= 0)[:, None])
                codes.append(position[block, row] * n + k[block, column] % n)
    return np.sort(np.concatenate(codes))
