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
from attnspec.lower.work import MERGED, Work
from attnspec.text.diagnostics import AttnSpecError

LISTED = 1 << 17
"""Positions up to which pairs that are drawn one by one are listed: of longer sequences nearly
every shard reads nearly every key."""

BARS = 6
"""The most numbers of keys that are tried as a bar."""


Works = Sequence[tuple[Work, tuple[int, ...]]]
"""What groups of heads compute, and which heads they are."""


@dataclass(frozen=True)
class Tensors:
    """The tensors of a call over all ranks: q [batch, heads, n, head_dim], k with `key_heads`, v
    with heads of `value_dim`, numbers of `element` bytes; `pairs` are the bytes that inputs of kind
    `pairs` have for each query and key of a sample.

    Bytes are those of a row forward; backward the same rows go the other way as gradients, with as
    many bytes.
    """

    batch: int = 1
    heads: int = 1
    key_heads: int = 1
    head_dim: int = 64
    value_dim: int = 64
    element: int = 2
    pairs: int = 0

    @classmethod
    def of(cls, batch: int, heads: int, key_heads: int, head_dim: int) -> Tensors:
        """Tensors of half types; raises AttnSpecError unless key heads divide the heads."""
        if key_heads < 1 or heads % key_heads:
            raise AttnSpecError(
                f"the heads of keys must divide the {heads} heads of queries, got {key_heads}"
            )
        return cls(batch, heads, key_heads, head_dim, head_dim)

    @property
    def ratio(self) -> int:
        """The query heads that read each key head."""
        return self.heads // self.key_heads

    def key_bytes(self, heads: int) -> int:
        """The bytes of one position's keys and values, of so many key heads."""
        return self.batch * heads * (self.head_dim + self.value_dim) * self.element

    def query_bytes(self, heads: int) -> int:
        """The bytes of one query of so many heads."""
        return self.batch * heads * self.head_dim * self.element

    def partial_bytes(self, heads: int) -> int:
        """The bytes of its partial result: log-sum-exps and outputs are float32 at least."""
        return self.batch * heads * (self.value_dim + 1) * max(4, self.element)


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

    def mark(self, some: np.ndarray, into: np.ndarray, readers: bool = False) -> None:
        """Set `into`, bool [n], at the keys of some queries, ascending, or `readers` of keys."""
        pairs = self._joined[readers]
        if pairs is not None:
            pairs.mark(some, into)
        elif len(some):
            into[:] = True

    def readers(self, keys: np.ndarray) -> np.ndarray:
        """The queries, bool [n], that read one of some keys, at least."""
        readers = np.zeros(self.n, bool)
        self.mark(np.sort(keys), readers, readers=True)
        return readers


@dataclass(frozen=True, eq=False)
class Exchange:
    """The rows that travel between each two ranks for the graphs of `works`, whose heads read the
    same `key_heads`, so many; `readings` are these graphs.

    Queries of `reader` with at least `bars[reader, owner]` keys travel to `owner`, and the keys of
    `owner` that its other queries read travel to `reader`, which computes all pairs with these;
    `keys` counts the keys that stay or travel so, int64 [reader, owner], own ones on the diagonal.
    """

    partition: Partition
    tensors: Tensors
    works: Works
    readings: tuple[Reading, ...]
    key_heads: int
    bars: np.ndarray
    keys: np.ndarray

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
        degrees, work = self.readings[graph].degrees, self.works[graph][0]
        if degrees is None or work.normalize not in MERGED or work.changes.pairs:
            return np.zeros(self.partition.n, bool)
        return np.asarray(degrees >= bar)

    def marked(self, reader: int, bar: int) -> np.ndarray:
        """The keys, bool [n], that queries of a rank below the bar read."""
        local = np.sort(self.partition.positions(reader))
        marks = np.zeros(self.partition.n, bool)
        for graph, reading in enumerate(self.readings):
            reading.mark(local[~self.moves(graph, bar)[local]], marks)
        return marks

    @cached_property
    def links(self) -> tuple[np.ndarray, np.ndarray]:
        """The bytes forward, int64 [from, to]: of keys with values and of queries, and of partial
        results that come back."""
        travel = 1 - np.eye(len(self.keys), dtype=np.int64)
        there = (self.keys * travel).T * self.tensors.key_bytes(self.key_heads)
        back = np.zeros_like(self.keys)
        for bar in np.unique(self.bars).tolist():
            for graph, (_, heads) in enumerate(self.works):
                moved = self.moved(graph, bar)[:, None] * (self.bars == bar)
                there = there + moved * self.tensors.query_bytes(len(heads))
                back = back + moved.T * self.tensors.partial_bytes(len(heads))
        return there, back

    def moved(self, graph: int, bar: int) -> np.ndarray:
        """How many queries of each rank `moves` has, int64 [ranks]."""
        return self.partition.sums(self.moves(graph, bar)).astype(np.int64)

    def pairs(self, graph: int) -> np.ndarray | None:
        """The pairs of the heads of a graph that each rank computes, float64 [3, ranks]: of its
        own queries and keys, of queries that came, and of its own queries with keys that came, the
        share of own keys by the keys that are read; None where nobody counted its keys."""
        degrees, partition = self.readings[graph].degrees, self.partition
        if degrees is None:
            return None
        away, lengths = np.zeros(self.keys.shape), np.array(partition.lengths, np.float64)
        for bar in np.unique(self.bars).tolist():
            sums = partition.sums(degrees * self.moves(graph, bar))
            away += sums[:, None] * (lengths / max(1, partition.n)) * (self.bars == bar)
        here = partition.sums(degrees) - away.sum(1)
        local = self.keys.diagonal() / np.maximum(1, self.keys.sum(1))
        heads = len(self.works[graph][1])
        return heads * np.stack([here * local, away.sum(0), here * (1 - local)])


_marked = lru_cache(maxsize=4)(Exchange.marked)


def exchange_of(
    works: Works,
    readings: Sequence[Reading],
    key_heads: int,
    partition: Partition,
    tensors: Tensors,
    queries: bool,
) -> Exchange:
    """The exchange of graphs whose heads read the same key heads, so many, with the fewest bytes
    between each two ranks; without `queries` keys alone travel."""
    ranks, nobody = range(partition.ranks), partition.n + 1
    stay = np.full((len(ranks),) * 2, nobody)
    exchange = Exchange(
        partition, tensors, works, tuple(readings), key_heads, stay, np.zeros_like(stay)
    )
    bars = np.array([nobody, *(_bars(exchange) if queries else ())])
    # the bytes of queries to one rank, [bar, reader], and the keys, [bar, reader, owner]
    moved = np.zeros((len(bars), len(ranks)), np.int64)
    keys = np.zeros((len(bars), len(ranks), len(ranks)), np.int64)
    for number, bar in enumerate(bars.tolist()):
        for graph, (_, heads) in enumerate(works):
            both = tensors.query_bytes(len(heads)) + tensors.partial_bytes(len(heads))
            moved[number] += both * exchange.moved(graph, bar)
        for reader in ranks:
            if number and moved[number, reader] == moved[number - 1, reader]:
                keys[number, reader] = keys[number - 1, reader]
            else:
                keys[number, reader] = partition.sums(exchange.marked(reader, bar))
    best = np.argmin(keys * tensors.key_bytes(key_heads) + moved[:, :, None], 0)
    # own keys stay, whatever travels
    np.fill_diagonal(best, 0)
    return replace(exchange, bars=bars[best], keys=np.take_along_axis(keys, best[None], 0)[0])


def _bars(exchange: Exchange) -> list[int]:
    """Numbers of keys above which few enough queries lie to be worth a try, the largest first."""
    n, bars, before = exchange.partition.n, list[int](), 0
    graphs = range(len(exchange.works))
    for bar in (n >> halvings for halvings in range(1, n.bit_length() - 1)):
        above = sum(int(np.count_nonzero(exchange.moves(graph, bar))) for graph in graphs)
        if above > before:
            bars.append(bar)
        before = above
        if len(bars) == BARS or 2 * above > n * len(graphs):
            break
    return bars
