"""What the ranks send each other so that every pair of some graphs is computed exactly once.

Graphs of heads that read the same keys share an exchange: a key's row goes to a rank once for all
of them, and each has query rows of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnspec.distributed.blocks import Blocks, blocks_between
from attnspec.distributed.cuts import FAR, MOST, Runs, count, least_cut, none
from attnspec.distributed.partitions import Partition
from attnspec.graphs.relation import Relation

Pair = tuple[int, int]
"""Two ranks: the one whose queries read, and the one whose keys are read."""


@dataclass(frozen=True)
class Rows:
    """The bytes of one row on its way forward, all its heads and samples together: a key with its
    value, a query, and what is computed for it elsewhere; None where that cannot be merged.

    Backward the same rows go the other way as gradients, with as many bytes.
    """

    key: int
    query: int
    partial: int | None

    @property
    def remote(self) -> int:
        """A query that is computed elsewhere, 0 where it cannot be."""
        return 0 if self.partial is None else self.query + self.partial


@dataclass(frozen=True, eq=False)
class Crossing:
    """Pairs of one graph between ranks, float64 [reader, owner]: those that are known to be there,
    and all of blocks of which that is not known; each of them where the reader computes them, and
    where the owner does."""

    full: np.ndarray
    full_elsewhere: np.ndarray
    some: np.ndarray
    some_elsewhere: np.ndarray


@dataclass(frozen=True, eq=False)
class Exchange:
    """For each two ranks the key rows that go to the reader, and the query rows of each graph that
    go to the owner of the keys; every pair between them is in one of the two, and where in both,
    computed by the reader. `rows` has what a row of each graph weighs, and `flow` proves that no
    rows of these blocks that weigh less would do."""

    partition: Partition
    rows: tuple[Rows, ...]
    key_runs: dict[Pair, Runs]
    query_runs: tuple[dict[Pair, Runs], ...]
    pairs: tuple[Crossing, ...]
    flow: int

    def keys(self, reader: int, owner: int) -> Runs:
        """The owner's key rows that the reader is sent."""
        return self.key_runs.get((reader, owner), none())

    def queries(self, reader: int, owner: int, graph: int = 0) -> Runs:
        """The reader's query rows of one graph that the owner of the keys is sent."""
        return self.query_runs[graph].get((reader, owner), none())

    @cached_property
    def key_rows(self) -> np.ndarray:
        """How many keys travel, [reader, owner]."""
        return self._counted(self.key_runs)

    @cached_property
    def query_rows(self) -> tuple[np.ndarray, ...]:
        """How many queries of each graph travel, [reader, owner]."""
        return tuple(self._counted(runs) for runs in self.query_runs)

    def _counted(self, runs: dict[Pair, Runs]) -> np.ndarray:
        found = np.zeros((self.partition.ranks,) * 2, np.int64)
        for pair, each in runs.items():
            found[pair] = count(each)
        return found

    @cached_property
    def there(self) -> np.ndarray:
        """The bytes of keys with values and of queries from one rank to another, int64 [from, to],
        forward."""
        found = self.key_rows.T * self.rows[0].key
        for moved, rows in zip(self.query_rows, self.rows, strict=True):
            found = found + moved * rows.query
        return np.asarray(found)

    @cached_property
    def back(self) -> np.ndarray:
        """The bytes of what was computed for queries elsewhere, int64 [from, to], forward."""
        found = np.zeros((self.partition.ranks,) * 2, np.int64)
        for moved, rows in zip(self.query_rows, self.rows, strict=True):
            found += moved.T * (rows.partial or 0)
        return found

    @property
    def links(self) -> np.ndarray:
        """The bytes from one rank to another, forward, int64 [from, to]."""
        return np.asarray(self.there + self.back)


def exchange_of(relation: Relation, partition: Partition, rows: Rows) -> Exchange:
    """The cheapest exchange of one graph between the ranks of a partition."""
    return exchange_between([blocks_between(relation, partition)], partition, [rows])


def exchange_between(
    blocks: Sequence[Blocks], partition: Partition, rows: Sequence[Rows]
) -> Exchange:
    """The cheapest exchange of graphs whose heads read the same keys, by the blocks of each."""
    graphs, ranks = len(blocks), partition.ranks
    graph = np.repeat(np.arange(graphs), [len(each.reader) for each in blocks])
    reader, owner, queries, keys, full = (
        np.concatenate([getattr(each, name) for each in blocks])
        for name in ("reader", "owner", "queries", "keys", "full")
    )
    pair = reader * ranks + owner
    weights = np.array([each.remote for each in rows], np.int64)[graph]
    # what has nothing to do with each other stands far apart, and is solved together
    far_queries = queries + ((pair * graphs + graph) * FAR)[:, None]
    far_keys = keys + (pair * FAR)[:, None]
    moved, kept = np.zeros(len(pair), np.int64), np.zeros(len(pair), np.int64)
    key_runs: dict[Pair, Runs] = {}
    query_runs: list[dict[Pair, Runs]] = [{} for _ in blocks]
    flow = 0
    for some in _portions(pair, queries, keys, graphs, weights, rows[0].key):
        found = least_cut(far_queries[some], far_keys[some], rows[0].key, weights[some])
        moved[some], kept[some] = found.moved, found.kept
        flow += found.flow
        for code, runs in _apart(found.keys):
            key_runs[divmod(code, ranks)] = runs
        for code, runs in _apart(found.queries):
            query_runs[code % graphs][divmod(code // graphs, ranks)] = runs
    area = _sizes(queries) * _sizes(keys)
    away = moved.astype(np.float64) * kept

    def pairs_of(of: int) -> Crossing:
        sums = []
        for known in (True, False):
            mine = (graph == of) & (full == known)
            for each in (area - away, away):
                sums.append(np.bincount(pair[mine], each[mine], ranks * ranks))
        return Crossing(*(each.reshape(ranks, ranks) for each in sums))

    return Exchange(
        partition,
        tuple(rows),
        key_runs,
        tuple(query_runs),
        tuple(pairs_of(of) for of in range(graphs)),
        flow,
    )


def _sizes(runs: Runs) -> np.ndarray:
    return np.asarray(runs[:, 1] - runs[:, 0], np.float64)


def _portions(
    pair: np.ndarray,
    queries: Runs,
    keys: Runs,
    graphs: int,
    weights: np.ndarray,
    key_weight: int,
) -> Iterator[np.ndarray]:
    """The blocks of as many pairs of ranks together as a flow can count, as their numbers."""
    order = np.argsort(pair, kind="stable")
    pairs, first = np.unique(pair[order], return_index=True)
    if not len(pairs):
        return
    common = np.gcd.reduce(weights, initial=key_weight)
    each = np.zeros(len(pairs))
    for runs, weight in ((queries, weights.max() * graphs), (keys, key_weight)):
        low, high = runs[order, 0], runs[order, 1]
        rows = np.maximum.reduceat(high, first) - np.minimum.reduceat(low, first)
        each += rows * (weight / common)
    total = np.cumsum(each)
    ends, low = [*first[1:].tolist(), len(pair)], 0
    while low < len(pairs):
        before = total[low - 1] if low else 0.0
        high = max(low + 1, int(np.searchsorted(total, before + MOST - 1, "right")))
        yield order[first[low] : ends[high - 1]]
        low = high


def _apart(runs: Runs) -> Iterator[tuple[int, Runs]]:
    """Runs that stand far apart, by where they stand."""
    code = runs[:, 0] // FAR
    codes, first = np.unique(code, return_index=True)
    ends = [*first.tolist(), len(runs)]
    for at, low, high in zip(codes.tolist(), ends, ends[1:], strict=False):
        yield at, runs[low:high] - at * FAR
