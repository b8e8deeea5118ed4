"""Which rows ranks send each other so that every pair of some graphs is computed exactly once.

A key with its value travels to each rank whose queries read it, once for all graphs that share an
exchange. Queries with at least so many keys, a bar that is chosen by the bytes for each two ranks,
travel instead, and their partial results come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from attnspec.analysis.counting.degrees import degrees_of
from attnspec.analysis.counting.neighbours import Neighbours, neighbours
from attnspec.backends.common.labels import possible
from attnspec.distributed.partitions import Partition
from attnspec.graphs.operators import transpose_of
from attnspec.graphs.relation import Relation, is_scattered
from attnspec.graphs.stack import TooMuch
from attnspec.lower.work import MERGED, Works
from attnspec.text.diagnostics import AttnSpecError

LISTED = 1 << 17
"""Positions up to which pairs that are drawn one by one are listed: of longer sequences nearly
every shard reads nearly every key."""

BARS = 6
"""The most numbers of keys that are tried as a bar."""


@dataclass(frozen=True)
class Tensors:
    """The tensors of a call over all ranks: q [batch, heads, n, head_dim], k with `key_heads`, v
    with heads of `value_dim`, numbers of `element` bytes; `pairs` are the bytes that inputs of kind
    `pairs` have for each query and key of a sample.

    Bytes are those of a row of one head forward; backward as many go the other way.
    """

    batch: int = 1
    heads: int = 1
    key_heads: int = 1
    head_dim: int = 64
    value_dim: int = 64
    element: int = 2
    pairs: int = 0

    def __post_init__(self) -> None:
        if self.key_heads < 1 or self.heads % self.key_heads:
            raise AttnSpecError(
                f"the heads of keys must divide the {self.heads} heads of queries, got"
                f" {self.key_heads}"
            )

    @property
    def ratio(self) -> int:
        """The query heads that read each key head."""
        return self.heads // self.key_heads

    @property
    def key_bytes(self) -> int:
        """The bytes of a key with its value."""
        return self.batch * (self.head_dim + self.value_dim) * self.element

    @property
    def query_bytes(self) -> int:
        """The bytes of a query."""
        return self.batch * self.head_dim * self.element

    @property
    def partial_bytes(self) -> int:
        """The bytes of its partial result: log-sum-exps and outputs are float32 at least."""
        return self.batch * (self.value_dim + 1) * max(4, self.element)


class Reading:
    """What the queries of one graph read at n positions; of run-time inputs any that may come."""

    def __init__(self, relation: Relation, n: int) -> None:
        self.n, self.relation = n, possible(relation)

    @cached_property
    def degrees(self) -> np.ndarray | None:
        """The number of keys of each query, int64 [n]; None where counting them is too much."""
        try:
            return degrees_of(self.relation, self.n)
        except TooMuch:
            return None

    @cached_property
    def _joined(self) -> tuple[Neighbours | None, Neighbours | None]:
        """The keys of queries, and the queries of keys; None where listing them is too much."""
        relation = self.relation
        if self.n > LISTED and is_scattered(relation):
            relation = possible(relation, is_scattered)

        def listed(each: Relation) -> Neighbours | None:
            try:
                return neighbours([each], self.n)
            except TooMuch:
                return None

        return listed(relation), listed(transpose_of(relation))

    def read(self, positions: np.ndarray, readers: bool = False) -> np.ndarray:
        """The keys, bool [n], that queries at some positions read, or the `readers` of keys there;
        all where listing them is too much."""
        some, pairs = np.zeros(self.n, bool), self._joined[readers]
        some[positions] = True
        return np.full(self.n, some.any()) if pairs is None else pairs.read(some)


class Exchange:
    """The rows that travel between each two ranks, with the fewest bytes, for the graphs of
    `works`, whose heads read the same `key_heads`, so many; `readings` are these graphs. Without
    `queries` keys alone travel.

    Queries of `reader` with at least `bars[reader, owner]` keys travel to `owner`, and the keys of
    `owner` that its other queries read travel to `reader`, which computes all pairs with these.
    `there` are the bytes forward, int64 [from, to], of keys with values and of queries, `back`
    those of partial results. `pairs` are those that each rank computes, float64 [3, ranks]: of its
    own queries and keys, of queries that came, and of its own queries with keys that came, the
    share of own keys by the keys that are read; None where nobody counted the keys of queries.
    """

    def __init__(
        self,
        partition: Partition,
        tensors: Tensors,
        works: Works,
        readings: Sequence[Reading],
        key_heads: int,
        queries: bool,
    ) -> None:
        self.partition, self.tensors, self.works = partition, tensors, works
        self.readings, n, ranks = readings, partition.n, partition.ranks
        bars, counts = [n + 1], [self._moved(n + 1)]
        # numbers of keys above which few enough queries lie to be worth a try
        for bar in (n >> halvings for halvings in range(1, n.bit_length() - 1) if queries):
            moved = self._moved(bar)
            if moved.sum() > counts[-1].sum():
                bars.append(bar)
                counts.append(moved)
            if len(bars) > BARS or 2 * moved.sum() > n * len(works):
                break
        # the keys that stay or travel, [bar, reader, owner]
        keys = np.zeros((len(bars), ranks, ranks), np.int64)
        for at, reader in np.ndindex(keys.shape[:2]):
            if at and (counts[at][reader] == counts[at - 1][reader]).all():
                keys[at, reader] = keys[at - 1, reader]
            else:
                keys[at, reader] = partition.sums(self._read(reader, bars[at]))
        heads, key = np.array([len(of) for _, of in works]), key_heads * tensors.key_bytes
        there, back = (heads * each for each in (tensors.query_bytes, tensors.partial_bytes))
        counted = np.array(counts)
        best = np.argmin(key * keys + (counted @ (there + back))[:, :, None], 0)
        # own keys stay, whatever travels
        np.fill_diagonal(best, 0)
        rank = np.arange(ranks)[:, None]
        keys, moving = keys[best, rank, rank.T], counted[best, rank]
        self.bars = np.array(bars)[best]
        self.there, self.back = between(key * keys.T) + moving @ there, (moving @ back).T
        self.pairs: np.ndarray | None = None
        degrees = [each.degrees for each in readings if each.degrees is not None]
        if len(degrees) == len(works):
            away = np.zeros((len(bars), ranks))
            for at in np.unique(best).tolist():
                some = [self.moves(graph, bars[at]) * each for graph, each in enumerate(degrees)]
                away[at] = heads @ [partition.sums(each) for each in some]
            away = away[best, rank] * (np.array(partition.lengths) / max(1, n))
            here = heads @ [partition.sums(each) for each in degrees] - away.sum(1)
            local = keys.diagonal() / np.maximum(1, keys.sum(1))
            self.pairs = np.stack([here * local, away.sum(0), here * (1 - local)])

    def sent(self, reader: int, owner: int, graph: int) -> tuple[np.ndarray, np.ndarray]:
        """The numbers, ascending, of the owner's rows that the reader is sent as keys, and of the
        reader's rows that the owner is sent as queries of one graph."""
        bar, there = int(self.bars[reader, owner]), self.partition.positions
        marks = (_read(self, reader, bar), owner), (self.moves(graph, bar), reader)
        keys, queries = (np.flatnonzero(some[there(rank)]) for some, rank in marks)
        return keys, queries

    def moves(self, graph: int, bar: int) -> np.ndarray:
        """The queries of a graph, bool [n], that have at least so many keys and may travel."""
        degrees, work = self.readings[graph].degrees, self.works[graph][0]
        if degrees is None or work.normalize not in MERGED or work.changes.pairs:
            return np.zeros(self.partition.n, bool)
        return degrees >= bar

    def _moved(self, bar: int) -> np.ndarray:
        """How many queries of each rank and graph these are, int64 [ranks, graphs]."""
        moves = (self.moves(graph, bar) for graph in range(len(self.works)))
        return np.stack([self.partition.sums(each) for each in moves], 1).astype(np.int64)

    def _read(self, reader: int, bar: int) -> np.ndarray:
        """The keys, bool [n], that queries of a rank below the bar read."""
        local, marks = self.partition.positions(reader), np.zeros(self.partition.n, bool)
        for graph, reading in enumerate(self.readings):
            marks |= reading.read(local[~self.moves(graph, bar)[local]])
        return marks


_read = lru_cache(maxsize=4)(Exchange._read)


def between(links: np.ndarray) -> np.ndarray:
    """Links without those of a rank with itself."""
    return links * (1 - np.eye(len(links), dtype=np.int64))
