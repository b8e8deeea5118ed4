"""A graph as disjoint slices of queries and keys, each cut by at most two diagonals: what
MagiAttention takes.

A slice of queries q0 … q1 - 1 and keys k0 … k1 - 1 holds, by its type,
    FULL         every pair
    CAUSAL       k - k1 <= q - q1: its last query reads its last key
    INV_CAUSAL   k - k0 >= q - q0: its first query reads its first key
    BI_CAUSAL    both
Source: MagiAttention, 2025 (AttnMaskType).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import TooMuch

MOST_SLICES = 4096
"""Slices of one head at most: each is a piece of work for its kernel."""

TYPES = ("FULL", "CAUSAL", "INV_CAUSAL", "BI_CAUSAL")
"""The types of slices by their numbers: bit 0 where the end of a row's keys moves along with the
query, bit 1 where the start does."""


@dataclass(frozen=True)
class Ranges:
    """The slices of one head: ranges [first, end) of queries and of keys, and the types.

    There are `n` keys, and `queries` queries: as many, but between two sequences.
    """

    n: int
    q_ranges: tuple[tuple[int, int], ...]
    k_ranges: tuple[tuple[int, int], ...]
    types: tuple[str, ...]
    queries: int

    @property
    def type_map(self) -> tuple[int, ...]:
        """The types as their numbers: 0 FULL, 1 CAUSAL, 2 INV_CAUSAL, 3 BI_CAUSAL."""
        return tuple(map(TYPES.index, self.types))

    def dense(self) -> np.ndarray:
        """The same pairs, bool [queries, n], by the definition of the types; ValueError where two
        slices hold one pair."""
        times = np.zeros((self.queries, self.n), np.int32)
        for (q0, q1), (k0, k1), kind in zip(
            self.q_ranges, self.k_ranges, self.type_map, strict=True
        ):
            q, k = np.arange(q0, q1)[:, None], np.arange(k0, k1)[None]
            held = np.ones((q1 - q0, k1 - k0), bool)
            if kind & 1:
                held &= k - k1 <= q - q1
            if kind & 2:
                held &= k - k0 >= q - q0
            times[q0:q1, k0:k1] += held
        if times.max(initial=0) > 1:
            raise ValueError("two slices hold one pair")
        return times > 0


@dataclass
class _Slice:
    """A slice that grows query by query; `moves` is None while it has one row."""

    first: int
    start: int
    low: int
    high: int
    moves: tuple[int, int] | None = None
    rows: int = field(default=1)

    def next_ends(self) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """The runs of keys that the next row may have, with how its ends would move."""
        for moves in ((0, 0), (1, 1), (0, 1), (1, 0)) if self.moves is None else (self.moves,):
            yield moves, (self.low + moves[0], self.high + moves[1])


def ranges_of(relation: Relation, n: int, m: int | None = None) -> Ranges:
    """The slices of a relation of n keys and m queries, n where it is None, found query by query.

    Raises TooMuch above `MOST_SLICES`.
    """
    done: list[_Slice] = []
    open_slices: list[_Slice] = []
    for query, runs in enumerate(_runs(relation, n if m is None else max(m, n))):
        left = dict.fromkeys(runs)
        kept = []
        # those that have a direction come first: a new one may take whatever is left
        for each in sorted(open_slices, key=lambda one: one.moves is None):
            for moves, ends in each.next_ends():
                if ends in left:
                    del left[ends]
                    each.low, each.high = ends
                    each.moves, each.rows = moves, each.rows + 1
                    kept.append(each)
                    break
            else:
                done.append(each)
        kept += [_Slice(query, low, low, high) for low, high in left]
        open_slices = kept
        if len(done) + len(kept) > MOST_SLICES:
            raise TooMuch(
                f"the pairs take more than {MOST_SLICES:,} slices by query {query:,} of {n:,}:"
                " they are no few ranges of keys"
            )
    found = sorted(done + open_slices, key=lambda one: (one.first, one.start))
    return Ranges(
        n,
        tuple((each.first, each.first + each.rows) for each in found),
        tuple((each.start, each.high) for each in found),
        tuple(_type(each) for each in found),
        n if m is None else m,
    )


def _type(each: _Slice) -> str:
    low, high = each.moves or (0, 0)
    return TYPES[high + 2 * low]


def _runs(relation: Relation, n: int) -> Iterator[list[tuple[int, int]]]:
    """The runs of keys of each query, [first, end)."""
    for first, last in relation.chunks(n) if n else ():
        q, k = relation.rows(first, last, n)
        breaks = np.flatnonzero((np.diff(q) != 0) | (np.diff(k) != 1)) + 1
        starts = np.concatenate(([0], breaks)).astype(np.int64)[: len(q)]
        ends = np.concatenate((breaks, [len(q)])).astype(np.int64)[: len(starts)]
        bounds = np.searchsorted(q[starts], np.arange(first, last + 1))
        low, high = k[starts], k[ends - 1] + 1
        for row in range(last - first):
            own = slice(bounds[row], bounds[row + 1])
            yield list(zip(low[own].tolist(), high[own].tolist(), strict=True))
