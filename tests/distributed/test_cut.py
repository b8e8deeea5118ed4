"""Bytes between ranks, compared with the fewest that rows can have: a cut by maximal flow.

For every pair (q, k) between two ranks the key's row travels to the query, or the query's row to
the key and its partial result back. The rows that travel are a vertex cover of a bipartite graph,
and the cheapest one weighs as much as a maximal flow (König 1931).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from random_specs import spec_text
from relation_checks import definition
from scipy.sparse import coo_array
from scipy.sparse.csgraph import maximum_flow
from zoo import every_attention, sample, smaller

import attnspec
from attnspec.distributed import partitions
from attnspec.distributed.exchange import Exchange, Reading, Rows, exchange_of
from attnspec.distributed.partitions import Partition
from attnspec.distributed.planning import Planner, Tensors, is_graph
from attnspec.distributed.timing import pairs_of

SHAPE = Tensors(1, 8, 2, 16, 16, 2)
N = 300
RANKS = (2, 3, 4)
WITHIN = 1.05


def cut_of(masks: Sequence[np.ndarray], weights: Sequence[int | None], key: int) -> int:
    """The least weight of rows that cover all pairs of some graphs, each a mask [queries, keys]
    with the weight of its query rows, None where these must stay."""
    never = 1 << 20
    rows = np.concatenate(masks)
    each = np.concatenate(
        [np.full(len(m), never if w is None else w) for m, w in zip(masks, weights, strict=True)]
    )
    # rows, and columns, that are alike are one node
    alike, of = np.unique(np.column_stack([each, rows]), axis=0, return_inverse=True)
    queries = np.bincount(of.ravel()) * alike[:, 0]
    same, of = np.unique(alike[:, 1:], axis=1, return_inverse=True)
    keys = np.bincount(of.ravel()) * key
    q, k = np.nonzero(same)
    if not len(q):
        return 0
    sink = 1 + len(queries) + len(keys)
    tails = [0 * queries, 1 + q, 1 + len(queries) + np.arange(len(keys))]
    heads = [1 + np.arange(len(queries)), 1 + len(queries) + k, 0 * keys + sink]
    room = np.concatenate([queries, 0 * q + keys.sum() + 1, keys]).astype(np.int32)
    ends = np.concatenate(tails), np.concatenate(heads)
    return int(maximum_flow(coo_array((room, ends), (sink + 1,) * 2).tocsr(), 0, sink).flow_value)


def least(exchange: Exchange, masks: Sequence[np.ndarray]) -> int:
    """The least bytes between all ranks for the graphs of an exchange, by their masks [n, n]."""
    partition, total = exchange.partition, 0
    unit = int(np.gcd.reduce([x for r in exchange.rows for x in (r.key, r.query, r.partial or 0)]))
    moved = [None if r.partial is None else (r.query + r.partial) // unit for r in exchange.rows]
    for reader, owner in product(range(partition.ranks), repeat=2):
        if reader != owner:
            at = np.ix_(partition.positions(reader), partition.positions(owner))
            total += unit * cut_of([m[at] for m in masks], moved, exchange.rows[0].key // unit)
    return total


def test_the_cut_is_the_lightest_cover() -> None:
    draw = np.random.default_rng(5)
    for _ in range(40):
        masks = [draw.random((4, 3)) < 0.4 for _ in range(2)]
        # the second graph may have queries that cannot travel
        weights = [int(draw.integers(1, 5)), int(draw.integers(1, 5)) if draw.random() < 0.7 else 0]
        key = int(draw.integers(1, 9))
        best = min(
            sum(keys) * key + sum(sum(q) * w for q, w in zip(qs, weights, strict=True))
            for keys in product((0, 1), repeat=3)
            for qs in product(*(product((0, 1) if w else (0,), repeat=4) for w in weights))
            if not any(
                (m & ~np.array(keys, bool) & ~np.array(q, bool)[:, None]).any()
                for m, q in zip(masks, qs, strict=True)
            )
        )
        assert cut_of(masks, [w or None for w in weights], key) == best


MORE = {("swin", 4): 1.15, ("block_causal", 4): 1.06}
"""Attentions of the zoo that are further from the cut, and how far: of a block that two ranks
share, the few queries of one read many keys of the other."""


@pytest.mark.parametrize(
    "ranks", [4, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 3, 8))]
)
@every_attention
def test_bytes_over_the_zoo_are_near_the_cut(path: Path, name: str, ranks: int) -> None:
    spec = smaller(path, name)
    program = spec.program
    if program.cross or any(attend.mechanism is not None for attend in program.attends):
        pytest.skip("no graph of one sequence")
    n, heads = program.fixed_length or N, program.heads or SHAPE.heads
    shape = Tensors(1, heads, 2 if heads % 2 == 0 else 1, 16, 16, 2)
    planner = Planner(program, n, shape, sample(spec, n))
    partition, bytes_sent, cut = partitions.contiguous(n, ranks), 0, 0
    for numbers, works in planner.kinds(range(program.layers or 1)):
        if not all(is_graph(work) for work, _ in works):
            pytest.skip("the data decide the pairs")
        found = planner.by_rows(numbers, works, partition)
        bytes_sent += len(numbers) * int(found.links.sum())
        for exchange in found.exchanges:
            masks = [definition(reading.relation, n) for reading in exchange.readings]
            cut += len(numbers) * least(exchange, masks)
    assert cut <= bytes_sent <= MORE.get((name, ranks), WITHIN) * cut


def every_partition(n: int, ranks: int) -> list[Partition]:
    found = [partitions.contiguous(n, ranks), partitions.head_tail(n, ranks)]
    found += [each for s in (ranks, 8) if (each := partitions.by_residue(n, ranks, s)) is not None]
    return [*found, partitions.in_chunks(n, ranks, np.arange(n) % 7 + 1)]


@pytest.mark.parametrize("seed", range(12))
def test_every_pair_between_ranks_is_computed_once(seed: int) -> None:
    """By the reader where the key travels, else by the owner of the key."""
    n, ranks = 41, 4
    relations = [attnspec.parse(spec_text(seed + more)).relation(n) for more in (0, 100)]
    masks = [definition(relation, n) for relation in relations]
    readings = [Reading(relation, n) for relation in relations]
    weights = [Rows(3, 1, 1), Rows(3, 1, None if seed % 2 else 2)]
    for partition, queries in product(every_partition(n, ranks), (True, False)):
        found = exchange_of(readings, partition, weights, queries)
        links = np.zeros((ranks, ranks), np.int64)
        for reader, owner in product(range(ranks), repeat=2):
            if reader == owner:
                continue
            at = np.ix_(partition.positions(reader), partition.positions(owner))
            keys = found.sent_keys(reader, owner)
            links[owner, reader] += 3 * len(keys)
            for graph, (mask, weight) in enumerate(zip(masks, weights, strict=True)):
                moved = found.sent_queries(reader, owner, graph)
                assert queries or not len(moved)
                links[reader, owner] += weight.query * len(moved)
                links[owner, reader] += (weight.partial or 0) * len(moved)
                left = mask[at].copy()
                left[:, keys] = False
                left[moved] = False
                assert not left.any()
        assert (found.there + found.back == links).all()


@pytest.mark.parametrize("seed", range(12))
def test_readers_are_those_of_the_definition(seed: int) -> None:
    n = 41
    relation = attnspec.parse(spec_text(seed)).relation(n)
    mask, draw = definition(relation, n), np.random.default_rng(seed)
    for count in (0, 1, 5, n):
        keys = draw.choice(n, count, replace=False)
        assert (Reading(relation, n).readers(keys) == mask[:, keys].any(1)).all()


def test_rows_that_read_everything_travel_as_queries() -> None:
    """And nothing else does: two keys of every rank, and the window's rims."""
    n, ranks = 1 << 16, 8
    relation = attnspec.parse("attention a { attend window(radius = 9) | global(first(2)) }")
    found = exchange_of(
        [Reading(relation.relation(n), n)], partitions.contiguous(n, ranks), [Rows(2, 2, 2)]
    )
    (moved,) = found.query_rows
    assert moved[0].tolist() == [0, *[2] * (ranks - 1)]
    assert not moved[1:].any()
    own = np.abs(np.subtract.outer(np.arange(ranks), np.arange(ranks)))
    wanted = 9 * (own == 1)
    wanted[1:, 0] += 2
    assert found.key_rows.tolist() == wanted.tolist()


def test_pairs_drawn_one_by_one_are_any_pair_of_long_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "attention a { causal attend window(radius = 3) | random(keys = 2, seed = 1) }"
    n, ranks = 64, 4
    relation = attnspec.parse(text).relation(n)
    partition, rows = partitions.contiguous(n, ranks), [Rows(1, 1, 1)]
    exact = exchange_of([Reading(relation, n)], partition, rows)
    monkeypatch.setattr("attnspec.distributed.exchange.LISTED", 0)
    found = exchange_of([Reading(relation, n)], partition, rows)
    assert found.there.sum() > exact.there.sum()
    # causal pairs are known without the draws
    assert found.key_rows.tolist() == np.tril(np.full((ranks, ranks), 16), -1).tolist()


@pytest.mark.parametrize(
    "graph", ["window(radius = 40) | global(first(4))", "full", "causal & residue(step = 3)"]
)
def test_pairs_are_counted_where_they_are_computed(graph: str) -> None:
    n, ranks = 1024, 4
    relation = attnspec.parse(f"attention a {{ attend {graph} }}").relation(n)
    mask, partition = definition(relation, n), partitions.contiguous(n, ranks)
    found = exchange_of([Reading(relation, n)], partition, [Rows(4, 5, 6)])
    wanted = np.zeros((3, ranks))
    for reader, owner in product(range(ranks), repeat=2):
        pairs = mask[np.ix_(partition.positions(reader), partition.positions(owner))]
        if reader == owner:
            wanted[0, reader] += 2 * pairs.sum()
            continue
        sent = np.isin(np.arange(pairs.shape[1]), found.sent_keys(reader, owner))
        wanted[2, reader] += 2 * pairs[:, sent].sum()
        wanted[1, owner] += 2 * pairs[:, ~sent].sum()
    counted = pairs_of(found, 0, 2)
    assert counted is not None
    assert counted.sum() == pytest.approx(2 * mask.sum())
    # which of a rank's pairs are with own keys is judged from a few queries
    assert np.abs(counted - wanted).max() <= 0.05 * wanted.sum() / ranks
