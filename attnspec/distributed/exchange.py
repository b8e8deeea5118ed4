"""Which rows ranks send each other so that every pair of some graphs is computed exactly once.

A key with its value travels to each rank whose queries read it. Queries that read nearly everything
travel instead, and their partial results come back: for each two ranks those with at least so many
keys, a bar that is chosen by the bytes. Graphs of heads that read the same keys share an exchange,
in which a key's row goes to a rank once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from attnspec.analysis.counting.degrees import degrees_of
from attnspec.analysis.counting.neighbours import Neighbours, neighbours
from attnspec.backends.common.labels import possible
from attnspec.distributed.partitions import Partition
from attnspec.graphs.operators import transpose_of
from attnspec.graphs.relation import Relation, is_scattered
from attnspec.graphs.stack import TooMuch
from attnspec.lower.work import Work

LISTED = 1 << 17
"""Positions up to which pairs that are drawn one by one are listed: of longer sequences nearly
every shard reads nearly every key."""

BARS = 6
"""The most numbers of keys that are tried as a bar."""


Works = Sequence[tuple[Work, tuple[int, ...]]]
"""What groups of heads compute, and which heads they are."""


@dataclass(frozen=True)
class Rows:
    """The bytes of one row forward, all its heads and samples together: a key with its value, a
    query, and its partial result; None where partial results cannot be merged.

    Backward the same rows go the other way as gradients, with as many bytes.
    """

    key: int
    query: int
    partial: int | None


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
    def _keys(self) -> Neighbours | None:
        return self._neighbours(transposed=False)

    @cached_property
    def _queries(self) -> Neighbours | None:
        return self._neighbours(transposed=True)

    def _neighbours(self, transposed: bool) -> Neighbours | None:
        relation = self.relation
        if self.n > LISTED and is_scattered(relation):
            relation = possible(relation, is_scattered)
        try:
            return neighbours([transpose_of(relation) if transposed else relation], self.n)
        except TooMuch:
            return None

    def mark_keys(self, queries: np.ndarray, into: np.ndarray) -> None:
        """Set `into`, bool [n], at the keys of some queries (ascending), at least."""
        _mark(self._keys, queries, into)

    def readers(self, keys: np.ndarray) -> np.ndarray:
        """The queries, bool [n], that read one of some keys, at least."""
        found = np.zeros(self.n, bool)
        _mark(self._queries, np.sort(keys), found)
        return found


def _mark(pairs: Neighbours | None, some: np.ndarray, into: np.ndarray) -> None:
    """Marks what some positions are joined with: all positions where that is not known."""
    if pairs is not None:
        pairs.mark(some, into)
    elif len(some):
        into[:] = True


@dataclass(frozen=True, eq=False)
class Exchange:
    """The rows that travel between each two ranks; `rows` has what a row of each graph weighs, and
    `works` which heads these are.

    Queries of `reader` with at least `bars[reader, owner]` keys travel to `owner`, and the keys of
    `owner` that its other queries read travel to `reader`, which computes all pairs with these;
    `keys` counts the keys that stay or travel so, int64 [reader, owner], own ones on the diagonal.
    """

    partition: Partition
    readings: tuple[Reading, ...]
    rows: tuple[Rows, ...]
    bars: np.ndarray
    keys: np.ndarray
    works: Works = ()

    def sent_keys(self, reader: int, owner: int) -> np.ndarray:
        """The numbers of the owner's rows that the reader is sent as keys, ascending."""
        marks = _marked(self, reader, int(self.bars[reader, owner]))
        return np.flatnonzero(marks[self.partition.positions(owner)])

    def sent_queries(self, reader: int, owner: int, graph: int) -> np.ndarray:
        """The numbers of the reader's rows that the owner is sent as queries of one graph."""
        moves = self.moves(graph, int(self.bars[reader, owner]))
        return np.flatnonzero(moves[self.partition.positions(reader)])

    def moves(self, graph: int, bar: int) -> np.ndarray:
        """The queries of a graph, bool [n], that have at least so many keys and may travel."""
        degrees = self.readings[graph].degrees
        if degrees is None or self.rows[graph].partial is None:
            return np.zeros(self.partition.n, bool)
        return np.asarray(degrees >= bar)

    def marked(self, reader: int, bar: int) -> np.ndarray:
        """The keys, bool [n], that queries of a rank below the bar read."""
        own = np.sort(self.partition.positions(reader))
        found = np.zeros(self.partition.n, bool)
        for graph, reading in enumerate(self.readings):
            reading.mark_keys(own[~self.moves(graph, bar)[own]], found)
        return found

    @cached_property
    def key_rows(self) -> np.ndarray:
        """How many keys travel, int64 [reader, owner]."""
        return np.asarray(self.keys * (1 - np.eye(len(self.keys), dtype=np.int64)))

    @cached_property
    def query_rows(self) -> tuple[np.ndarray, ...]:
        """How many queries of each graph travel, int64 [reader, owner]."""
        found = tuple(np.zeros_like(self.keys) for _ in self.rows)
        for bar in np.unique(self.bars).tolist():
            for graph, moved in enumerate(found):
                counts = self.partition.counts(self.moves(graph, bar))
                moved += counts[:, None] * (self.bars == bar)
        return found

    @cached_property
    def there(self) -> np.ndarray:
        """The bytes of keys with values and of queries forward, int64 [from, to]."""
        found = self.key_rows.T * self.rows[0].key
        for moved, rows in zip(self.query_rows, self.rows, strict=True):
            found = found + moved * rows.query
        return np.asarray(found)

    @cached_property
    def back(self) -> np.ndarray:
        """The bytes of partial results forward, int64 [from, to]."""
        found = np.zeros_like(self.keys)
        for moved, rows in zip(self.query_rows, self.rows, strict=True):
            found += moved.T * (rows.partial or 0)
        return found


@lru_cache(maxsize=4)
def _marked(exchange: Exchange, reader: int, bar: int) -> np.ndarray:
    return exchange.marked(reader, bar)


def exchange_of(
    readings: Sequence[Reading],
    partition: Partition,
    rows: Sequence[Rows],
    queries: bool = True,
    works: Works = (),
) -> Exchange:
    """The exchange of graphs whose heads read the same keys, with the fewest bytes between each two
    ranks; without `queries` keys alone travel."""
    ranks, nobody = range(partition.ranks), partition.n + 1
    stay = np.full((len(ranks),) * 2, nobody)
    found = Exchange(partition, tuple(readings), tuple(rows), stay, np.zeros_like(stay), works)
    bars = np.array([nobody, *(_bars(found) if queries else ())])
    # the bytes of queries to one rank, [bar, reader], and the keys, [bar, reader, owner]
    moved = np.zeros((len(bars), len(ranks)), np.int64)
    keys = np.zeros((len(bars), len(ranks), len(ranks)), np.int64)
    for number, bar in enumerate(bars.tolist()):
        for graph, each in enumerate(rows):
            weight = each.query + (each.partial or 0)
            moved[number] += weight * partition.counts(found.moves(graph, bar))
        for reader in ranks:
            if number and moved[number, reader] == moved[number - 1, reader]:
                keys[number, reader] = keys[number - 1, reader]
            else:
                keys[number, reader] = partition.counts(found.marked(reader, bar))
    best = np.argmin(keys * rows[0].key + moved[:, :, None], 0)
    # own keys stay, whatever travels
    np.fill_diagonal(best, 0)
    return replace(found, bars=bars[best], keys=np.take_along_axis(keys, best[None], 0)[0])


def _bars(exchange: Exchange) -> list[int]:
    """Numbers of keys above which few enough queries lie to be worth a try, the largest first."""
    n, found, before = exchange.partition.n, list[int](), 0
    for bar in (n >> halvings for halvings in range(1, n.bit_length() - 1)):
        graphs = range(len(exchange.rows))
        above = sum(int(np.count_nonzero(exchange.moves(graph, bar))) for graph in graphs)
        if above > before:
            found.append(bar)
        before = above
        if len(found) == BARS or 2 * above > n * len(exchange.rows):
            break
    return found
