"""What the ranks send each other so that every pair of some graphs is computed exactly once.

Graphs of heads that read the same keys share an exchange: a key's row goes to a rank once for all
of them, and each has query rows of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from attnspec.distributed.blocks import EVERY, Blocks, blocks_between
from attnspec.distributed.cuts import FAR, MOST, Runs, count, least_cut, none, rows_of, runs_of
from attnspec.distributed.partitions import Partition
from attnspec.graphs.relation import Relation

Pair = tuple[int, int]
"""Two ranks: the one whose queries read, and the one whose keys are read."""


class Planes:
    """The rows of each rank parted by the sets that they are in: those of one plane are in the same
    ones and are counted by themselves, so that a run of some sets is a run in each of their
    planes. Rows of plane c stand c times `FAR` behind those of the first."""

    def __init__(self, partition: Partition, sets: Sequence[np.ndarray]) -> None:
        self.first = np.cumsum([0, *partition.lengths])
        self.count, self.plane = 1, np.zeros(partition.n, np.int64)
        self.inside = np.zeros((1, 0), bool)
        for each in sets:
            code = 2 * self.plane + each
            there = np.flatnonzero(np.bincount(code))
            self.plane, self.count = np.searchsorted(there, code), len(there)
            self.inside = np.concatenate([self.inside[there // 2], there[:, None] % 2 == 1], 1)

    def parted(self, ranks: np.ndarray, runs: Runs, sets: np.ndarray) -> tuple[Runs, np.ndarray]:
        """Runs of rows of some ranks, as far as they are in a set, by planes; and the number of the
        run that each is a part of."""
        if self.count == 1:
            return runs, np.arange(len(runs))
        found, of = [none()], [np.zeros(0, np.int64)]
        start = self.first[ranks]
        for plane in range(self.count):
            before = np.concatenate([[0], np.cumsum(self.plane == plane, dtype=np.int32)])
            some = np.flatnonzero((sets == EVERY) | self.inside[plane][sets])
            part = before[start[some, None] + runs[some]] - before[start[some], None]
            real = part[:, 0] < part[:, 1]
            found.append(part[real] + plane * FAR)
            of.append(some[real])
        return np.concatenate(found), np.concatenate(of)

    def rows(self, rank: int, runs: Runs) -> Runs:
        """Runs of planes as those of a rank's rows."""
        if self.count == 1:
            return runs
        mine, found = self.plane[self.first[rank] : self.first[rank + 1]], [np.zeros(0, np.int64)]
        for plane, some in _apart(runs):
            found.append(np.flatnonzero(mine == plane)[rows_of(some)])
        return runs_of(np.sort(np.concatenate(found)))


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
    rows of these blocks that weigh less would do. Runs are those of planes."""

    partition: Partition
    rows: tuple[Rows, ...]
    key_runs: dict[Pair, Runs]
    query_runs: tuple[dict[Pair, Runs], ...]
    key_planes: Planes
    query_planes: tuple[Planes, ...]
    pairs: tuple[Crossing, ...]
    flow: int

    def keys(self, reader: int, owner: int) -> Runs:
        """The owner's key rows that the reader is sent."""
        return self.key_planes.rows(owner, self.key_runs.get((reader, owner), none()))

    def queries(self, reader: int, owner: int, graph: int = 0) -> Runs:
        """The reader's query rows of one graph that the owner of the keys is sent."""
        found = self.query_runs[graph].get((reader, owner), none())
        return self.query_planes[graph].rows(reader, found)

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
    key_planes, far_keys, of_keys = _keys_apart(tuple(blocks), partition)
    query_planes, far_queries, of_queries = _queries_apart(tuple(blocks), partition)
    sizes = [
        np.bincount(of, runs[:, 1] - runs[:, 0], len(pair))
        for runs, of in ((far_queries, of_queries), (far_keys, of_keys))
    ]
    sides = (far_queries, of_queries), (far_keys, of_keys)
    twins = _alike(pair, weights, sides, (graphs * _most(query_planes), key_planes.count))
    moved, kept = np.zeros(len(pair), np.int64), np.zeros(len(pair), np.int64)
    key_runs: dict[Pair, Runs] = {}
    query_runs: list[dict[Pair, Runs]] = [{} for _ in blocks]
    flow = 0
    for mine, times in twins.solved():
        here = pair[mine], queries[mine], keys[mine]
        for part in _portions(*here, graphs, weights[mine], rows[0].key):
            some = mine[part]
            number = np.full(len(pair), -1)
            number[some] = np.arange(len(some))
            in_q, in_k = (number[of] >= 0 for of in (of_queries, of_keys))
            members = number[of_queries[in_q]], number[of_keys[in_k]]
            found = least_cut(
                far_queries[in_q], far_keys[in_k], rows[0].key, weights[some], members
            )
            moved[some], kept[some] = found.moved, found.kept
            flow += times * found.flow
            for code, runs in _apart(found.keys, key_planes.count):
                for twin in twins.of[code]:
                    key_runs[divmod(twin, ranks)] = runs
            for code, runs in _apart(found.queries, _most(query_planes)):
                for twin in twins.of[code // graphs]:
                    query_runs[code % graphs][divmod(twin, ranks)] = runs
    moved, kept = moved[twins.block], kept[twins.block]
    area, away = sizes[0] * sizes[1], moved.astype(np.float64) * kept
    crossings = [
        _crossing((pair[mine], full[mine], area[mine], away[mine]), ranks)
        for mine in (graph == of for of in range(graphs))
    ]
    return Exchange(
        partition,
        tuple(rows),
        key_runs,
        tuple(query_runs),
        key_planes,
        query_planes,
        tuple(crossings),
        flow,
    )


@lru_cache(maxsize=16)
def _keys_apart(
    blocks: tuple[Blocks, ...], partition: Partition
) -> tuple[Planes, Runs, np.ndarray]:
    """The keys of all blocks by planes, those of two ranks far from those of others, and the number
    of the block of each run."""
    planes = Planes(partition, [each for one in blocks for each in one.key_sets])
    sets, before = [np.zeros(0, np.int64)], 0
    for each in blocks:
        sets.append(np.where(each.of_keys == EVERY, EVERY, each.of_keys + before))
        before += len(each.key_sets)
    reader, owner, keys = (
        np.concatenate([getattr(each, name) for each in blocks])
        for name in ("reader", "owner", "keys")
    )
    runs, of = planes.parted(owner, keys, np.concatenate(sets))
    pair = reader * partition.ranks + owner
    return planes, runs + (pair[of] * planes.count * FAR)[:, None], of


@lru_cache(maxsize=16)
def _queries_apart(
    blocks: tuple[Blocks, ...], partition: Partition
) -> tuple[tuple[Planes, ...], Runs, np.ndarray]:
    """The same of queries, of which each graph has its own."""
    every = tuple(Planes(partition, each.query_sets) for each in blocks)
    most, graphs, before = _most(every), len(blocks), 0
    found, numbers = [none()], [np.zeros(0, np.int64)]
    for graph, (each, planes) in enumerate(zip(blocks, every, strict=True)):
        runs, of = planes.parted(each.reader, each.queries, each.of_queries)
        code = (each.reader * partition.ranks + each.owner) * graphs + graph
        found.append(runs + (code[of] * most * FAR)[:, None])
        numbers.append(of + before)
        before += len(each.reader)
    return every, np.concatenate(found), np.concatenate(numbers)


@dataclass(frozen=True, eq=False)
class _Twins:
    """Pairs of ranks whose blocks are alike but for where they stand: `of` has those that are like
    each that is solved, itself among them, and `block` of each block the one that is solved."""

    of: dict[int, list[int]]
    block: np.ndarray

    def solved(self) -> Iterator[tuple[np.ndarray, int]]:
        """The numbers of the blocks that are solved, those with as many twins together, and how
        many these are."""
        times = np.bincount(self.block, minlength=len(self.block))
        for twins in np.unique(times[times > 0]).tolist():
            yield np.flatnonzero(times == twins), twins


def _alike(
    pair: np.ndarray,
    weights: np.ndarray,
    sides: Sequence[tuple[Runs, np.ndarray]],
    apart: tuple[int, int],
) -> _Twins:
    """Which pairs of ranks have blocks that are alike; runs of two pairs stand `apart` times `FAR`
    from each other on each of the two sides."""
    order = np.argsort(pair, kind="stable")
    codes, first, many = np.unique(pair[order], return_index=True, return_counts=True)
    local = np.empty_like(pair)
    local[order] = np.arange(len(pair)) - np.repeat(first, many)
    signs: list[list[bytes]] = [[] for _ in codes]
    for (runs, of), far in zip(sides, apart, strict=True):
        whose = pair[of]
        low, high = (runs % (far * FAR)).T
        rows = np.stack([local[of], low, high, weights[of]], 1)
        rows = rows[np.lexsort((low, local[of], whose))]
        ends = np.searchsorted(np.sort(whose), np.append(codes, codes[-1:] + 1))
        for sign, begin, end in zip(signs, ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            sign.append(rows[begin:end].tobytes())
    seen: dict[tuple[bytes, ...], int] = {}
    of_first: dict[int, list[int]] = {}
    block = np.arange(len(pair))
    for at, sign in enumerate(signs):
        like = seen.setdefault(tuple(sign), at)
        of_first.setdefault(int(codes[like]), []).append(int(codes[at]))
        theirs, mine = (order[first[x] : first[x] + many[x]] for x in (like, at))
        block[mine] = theirs
    return _Twins(of_first, block)


def _most(planes: Sequence[Planes]) -> int:
    """The most planes of a graph's queries."""
    return max(each.count for each in planes)


def _crossing(blocks: tuple[np.ndarray, ...], ranks: int) -> Crossing:
    """The pairs of one graph's blocks: of each the pair of ranks, whether all of its pairs are
    there, how many it has room for, and how many of these are computed where the keys are."""
    pair, full, area, away = blocks
    sums = [
        np.bincount(pair[mine], each[mine], ranks * ranks).reshape(ranks, ranks)
        for mine in (full, ~full)
        for each in (area - away, away)
    ]
    return Crossing(*sums)


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


def _apart(runs: Runs, each: int = 1) -> Iterator[tuple[int, Runs]]:
    """Runs that stand far apart, by where they stand, counted in so many times `FAR`."""
    far = each * FAR
    code = runs[:, 0] // far
    codes, first = np.unique(code, return_index=True)
    ends = [*first.tolist(), len(runs)]
    for at, low, high in zip(codes.tolist(), ends, ends[1:], strict=False):
        yield at, runs[low:high] - at * far
