"""What the ranks send each other so that every pair of a graph is computed exactly once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnspec.distributed.blocks import Blocks, blocks_between
from attnspec.distributed.cuts import Cut, Runs, count, least_cut, none
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
    def remote(self) -> int | None:
        """A query that is computed elsewhere."""
        return None if self.partial is None else self.query + self.partial


@dataclass(frozen=True, eq=False)
class Exchange:
    """For each two ranks the key rows that go to the reader, and the query rows that go to the
    owner of the keys; every pair between them is in one of the two, and where in both, computed by
    the reader."""

    partition: Partition
    rows: Rows
    cuts: dict[Pair, Cut]

    def keys(self, reader: int, owner: int) -> Runs:
        """The owner's key rows that the reader is sent."""
        cut = self.cuts.get((reader, owner))
        return none() if cut is None else cut.keys

    def queries(self, reader: int, owner: int) -> Runs:
        """The reader's query rows that the owner of the keys is sent."""
        cut = self.cuts.get((reader, owner))
        return none() if cut is None else cut.queries

    @cached_property
    def key_rows(self) -> np.ndarray:
        """How many keys travel, [reader, owner]."""
        return self._counted(lambda cut: cut.keys)

    @cached_property
    def query_rows(self) -> np.ndarray:
        """How many queries travel, [reader, owner]."""
        return self._counted(lambda cut: cut.queries)

    def _counted(self, side: Callable[[Cut], Runs]) -> np.ndarray:
        found = np.zeros((self.partition.ranks,) * 2, np.int64)
        for pair, cut in self.cuts.items():
            found[pair] = count(side(cut))
        return found

    @cached_property
    def links(self) -> np.ndarray:
        """The bytes from one rank to another, forward, int64 [from, to]."""
        found = self.key_rows.T * self.rows.key + self.query_rows * self.rows.query
        if self.rows.partial is not None:
            found += self.query_rows.T * self.rows.partial
        return np.asarray(found)

    @property
    def proved(self) -> int:
        """The flow: no rows of these blocks that weigh less would do."""
        return sum(cut.flow for cut in self.cuts.values())


def exchange_of(relation: Relation, partition: Partition, rows: Rows) -> Exchange:
    """The cheapest exchange between the ranks of a partition."""
    blocks = blocks_between(relation, partition)
    return Exchange(partition, rows, _cuts(blocks, partition, rows))


def _cuts(blocks: Blocks, partition: Partition, rows: Rows) -> dict[Pair, Cut]:
    code = blocks.reader * partition.ranks + blocks.owner
    order = np.argsort(code, kind="stable")
    blocks, code = blocks.take(order), code[order]
    pairs, first = np.unique(code, return_index=True)
    ends = [*first.tolist(), len(code)]
    found: dict[Pair, Cut] = {}
    # what several pairs of ranks have with each other alike is solved once
    solved: dict[bytes, Cut] = {}
    for pair, low, high in zip(pairs.tolist(), ends, ends[1:], strict=False):
        queries, keys = blocks.queries[low:high], blocks.keys[low:high]
        text = queries.tobytes() + keys.tobytes()
        if text not in solved:
            solved[text] = least_cut(queries, keys, rows.key, rows.remote)
        found[divmod(pair, partition.ranks)] = solved[text]
    return found
