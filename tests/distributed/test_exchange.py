"""Heads that share keys, work where it is done, what overlaps, and the table over the zoo."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from random_specs import spec_text
from zoo import EXAMPLES

import attnspec
from attnspec.cli import main
from attnspec.distributed import blocks, exchange, partitions
from attnspec.distributed.blocks import EVERY, Blocks, blocks_between
from attnspec.distributed.cuts import count, rows_of
from attnspec.distributed.exchange import Rows, exchange_between, exchange_of
from attnspec.distributed.planning import HEADS, ROWS, Tensors, exchanges, plan
from attnspec.distributed.timing import Pairs, Rates, estimate, pairs_of
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import Stack
from benchmarks import exchange as script
from benchmarks.readme_tables import exchange_table

FEW = Tensors(1, 8, 2, 128, 128, 2)


def held(relation: Relation, n: int) -> np.ndarray:
    at = np.arange(n)
    return np.broadcast_to(np.asarray(relation.holds(at[:, None], at, n), bool), (n, n))


def by_pairs(draw: np.random.Generator) -> tuple[np.ndarray, Blocks]:
    """Pairs of 4 queries of rank 0 with 3 keys of rank 1, each a block."""
    mask = draw.random((4, 3)) < 0.4
    q, k = (x[:, None] + np.array([0, 1]) for x in np.nonzero(mask))
    ranks = np.zeros(len(q), np.int64)
    return mask, Blocks.plain(ranks, ranks + 1, q, k, np.ones(len(q), bool))


def by_sets(draw: np.random.Generator) -> tuple[np.ndarray, Blocks]:
    """The same in two blocks of all rows that are in sets, or of all rows."""
    sets = draw.random((2, 2, 7)) < 0.4
    numbers = draw.integers(EVERY, 2, (2, 2))
    inside = np.concatenate([sets, np.ones((2, 1, 7), bool)], 1)
    # the last stands for EVERY
    (q, k), ranks = (inside[side][numbers[side]] for side in (0, 1)), np.zeros(2, np.int64)
    mask = (q[:, :4, None] & k[:, None, 4:]).any(0)
    rows, columns = (np.array([[0, size]] * 2) for size in (4, 3))
    full, (of_q, of_k), (q_sets, k_sets) = np.ones(2, bool), numbers, map(tuple, sets)
    return mask, Blocks(ranks, ranks + 1, rows, columns, full, of_q, of_k, q_sets, k_sets)


@pytest.mark.parametrize("drawn", [by_pairs, by_sets])
def test_what_travels_for_several_graphs_weighs_least(
    drawn: Callable[[np.random.Generator], tuple[np.ndarray, Blocks]],
) -> None:
    draw = np.random.default_rng(5)
    partition = partitions.contiguous(7, 2)
    for _ in range(8):
        masks, each = zip(*(drawn(draw) for _ in range(2)), strict=True)
        # the second graph may have queries that cannot travel
        last = int(draw.integers(1, 6)) if draw.random() < 0.7 else None
        rows = [Rows(int(draw.integers(1, 9)), 1, int(draw.integers(1, 4)))]
        rows.append(Rows(rows[0].key, 1, last))
        found = exchange_between(each, partition, rows)
        best = min(
            sum(keys) * rows[0].key
            + sum(sum(q) * row.remote for q, row in zip(qs, rows, strict=True))
            for keys in product((0, 1), repeat=3)
            for qs in product(*(product((0, 1) if row.remote else (0,), repeat=4) for row in rows))
            if not any(
                (mask & ~np.array(keys, bool) & ~np.array(q, bool)[:, None]).any()
                for mask, q in zip(masks, qs, strict=True)
            )
        )
        assert found.links.sum() == found.flow == best


def test_a_key_row_is_sent_once_for_all_heads_that_read_it() -> None:
    text = "attention a {{ attend random_blocks(size = 8, blocks = 2, seed = 3{}) }}"
    n, ranks = 512, 4
    apart, alike = (
        plan(
            attnspec.parse(text.format(more)).program,
            n,
            ranks,
            FEW,
            partition=partitions.contiguous(n, ranks),
        )
        for more in ("", ", per_head = false")
    )
    (layer,) = apart.layers
    assert [len(group.heads) for group in layer.groups] == [1] * 8
    assert len(exchanges(layer.groups)) == FEW.key_heads
    assert len(exchanges(alike.layers[0].groups)) == 1
    # of every rank at most its keys, however many heads read them
    assert max(apart.bytes_received) <= apart.bytes_gathered
    assert layer.proved == layer.links.sum()
    for group in layer.groups:
        mask = held(group.work.relation, n)
        assert group.exchange is not None
        for reader, owner in product(range(ranks), repeat=2):
            if reader != owner:
                q, k = (apart.partition.positions(r) for r in (reader, owner))
                left = mask[np.ix_(q, k)].copy()
                left[:, rows_of(group.exchange.keys(reader, owner))] = False
                left[rows_of(group.exchange.queries(reader, owner, group.graph))] = False
                assert not left.any()


@pytest.mark.parametrize("seed", range(6))
def test_pairs_are_counted_where_they_are_computed(seed: int) -> None:
    n, ranks = 41, 4
    relation = Stack(attnspec.parse(spec_text(seed)).program).relation(n)
    mask = held(relation, n)
    partition = partitions.contiguous(n, ranks)
    found = exchange_of(relation, partition, Rows(3, 1, 1))
    assert blocks_between(relation, partition).full.all()
    where = pairs_of(found, 0, 2, mask.sum(1), partition)
    home, answers, guests = np.zeros((3, ranks))
    for reader, owner in product(range(ranks), repeat=2):
        pairs = mask[np.ix_(partition.positions(reader), partition.positions(owner))]
        if reader == owner:
            home[reader] += 2 * pairs.sum()
            continue
        sent = np.isin(np.arange(pairs.shape[1]), rows_of(found.keys(reader, owner)))
        guests[reader] += 2 * pairs[:, sent].sum()
        answers[owner] += 2 * pairs[:, ~sent].sum()
    for counted, expected in ((where.home, home), (where.answers, answers), (where.guests, guests)):
        assert np.allclose(counted, expected)


def test_rows_that_are_listed_in_several_goes_are_all_there() -> None:
    # 2**18 rows are asked for at a time, and a block of queries begins there
    n, size, ranks = 3 << 17, 1 << 12, 2
    spec = attnspec.parse(f"attention a {{ attend block(size = {size}, before = 40) }}")
    partition = partitions.contiguous(n, ranks)
    found = blocks_between(Stack(spec.program).relation(n), partition)
    number = np.arange(n) // size
    first, last = np.maximum(number - 40, 0) * size, (number + 1) * size
    own = np.arange(n) // (n // ranks) * (n // ranks)
    inside = np.minimum(last, own + n // ranks) - np.maximum(first, own)
    pairs = np.diff(found.queries, axis=1) * np.diff(found.keys, axis=1)
    assert pairs.sum() == (last - first - inside).sum()


def test_steps_take_the_longer_of_work_and_travel() -> None:
    there, back = np.array([[0, 8], [4, 0]]), np.array([[0, 2], [6, 0]])
    pairs = Pairs(np.array([3.0, 9.0]), np.array([1.0, 0.0]), np.array([5.0, 1.0]))
    found = estimate(there, back, pairs, 2.0, Rates(link=1.0, speed=2.0))
    # own keys: 3 or 4, 9 or 8; answers: 1; keys that came: 5 or 6, 1 or 2
    assert (found.computing, found.travelling, found.together) == (15.0, 14.0, 16.0)
    assert found.hidden == 13 / 14
    assert estimate(there, back, None, 2.0, Rates(1.0, 1.0)).together == 14.0


def test_what_is_drawn_by_positions_is_any_pair_of_long_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "attention a { causal attend window(radius = 3) | random(keys = 2, seed = 1) }"
    n, ranks = 64, 4
    relation = Stack(attnspec.parse(text).program).relation(n)
    partition = partitions.contiguous(n, ranks)
    exact = exchange_of(relation, partition, Rows(1, 1, 1))
    blocks_between.cache_clear()
    monkeypatch.setattr(blocks, "DRAWN", 0)
    found = exchange_of(relation, partition, Rows(1, 1, 1))
    blocks_between.cache_clear()
    assert found.links.sum() > exact.links.sum()
    # what is causal is known without the draws
    assert not np.triu(found.key_rows, 1).any()
    assert (found.key_rows + found.query_rows[0])[np.tril_indices(ranks, -1)].min() == 16
    assert not found.pairs[0].full.any()


def test_causal_documents_come_out_even_over_eight_ranks() -> None:
    n = 1 << 17
    program = attnspec.load(EXAMPLES / "packed_causal.attn").program
    lengths: list[list[int]] = [
        [n],
        [40000, 12000, 31000, n - 83000],
        [75000] + [1024] * ((n - 75000) // 1024) + [(n - 75000) % 1024],
    ]
    for each in lengths:
        given = {"document": np.repeat(np.arange(len(each)), each)}
        for tensors in (FEW, Tensors(1, 32, 8, 128, 128, 2)):
            found = plan(program, n, 8, tensors, inputs=given)
            balance = found.layers[0].balance
            assert balance is not None
            assert balance <= 1.05, (each, tensors, str(found.partition))


def test_rows_and_heads_are_held_against_each_other_by_what_they_take() -> None:
    program = attnspec.parse("attention a { causal attend full }").program
    n, tensors = 4096, Tensors(1, 8, 8, 64, 64, 2)
    slow, fast = (plan(program, n, 4, tensors, rates=Rates(link, 2e14)) for link in (1e6, 5e10))
    assert slow.layers[0].how == fast.layers[0].how == HEADS
    # a window is less than what goes by heads, at any rate
    window = attnspec.parse("attention a { attend window(radius = 3) }").program
    assert plan(window, n, 4, tensors).layers[0].how == ROWS


def test_keys_alone_travel_where_work_is_more_even() -> None:
    program = attnspec.parse("attention a { causal attend full }").program
    found = plan(program, 1 << 17, 8, Tensors())
    (layer,) = found.layers
    assert str(found.partition) == "head-tail"
    assert "balance 1.000; with queries 22,020,096 and 1.875" in layer.why
    assert layer.balance is not None
    assert layer.balance < 1.001
    assert not sum(rows.sum() for each in exchanges(layer.groups) for rows in each.query_rows)


def test_rates_and_inputs_on_the_command_line(tmp_path: Path) -> None:
    spec = str(EXAMPLES / "packed_causal.attn")
    words = ["plan", spec, "-n", "4096", "--devices", "4", "--json"]

    def said(*more: str) -> dict[str, object]:
        result = CliRunner().invoke(main, [*words, *more])
        assert result.exit_code == 0, result.output
        return dict(json.loads(result.output))

    plain, slower = said(), said("--link", "5e9", "--speed", "1e12")
    assert (plain["link"], slower["link"], slower["speed"]) == (5e10, 5e9, 1e12)
    known = said("--input", "document=0*1024,1*1024,2*1024,3*1024")
    assert known["bytes_received"] == [0, 0, 0, 0]
    assert sum(plain["bytes_received"]) > 0  # type: ignore[call-overload]
    for wrong in (
        ["plan", spec, "--link", "5e9"],
        ["plan", spec, "--input", "document=0*4096"],
        [*words, "--link", "0"],
        [*words, "--input", "documents=0*4096"],
    ):
        assert CliRunner().invoke(main, wrong).exit_code == 2


def test_the_table_over_the_zoo(tmp_path: Path) -> None:
    out = tmp_path / "exchange.json"
    names = ["longformer", "linformer", "sinkhorn", script.SAME_DRAWS]
    script.main(["-n", "2048", "--out", str(out), "--only", *names])
    figures = json.loads(out.read_text())
    rows = figures["rows"]
    assert len(rows) == 2 * len(names)
    assert rows["linformer, 8, 2048"]["cut"] is None
    for ranks in script.RANKS:
        row = rows[f"longformer, {ranks}, 2048"]
        assert row["cut"] <= row["keys_alone"] <= row["gathered"]
        assert row["flow"] == row["all_links"]
    table = exchange_table(figures)
    # one heading, and a row for each whose graph is known
    assert sum(line.startswith("| ") for line in table.splitlines()) == len(names)
    assert "decide the pairs: sinkhorn." in table
    # what is there is not planned again
    rows["longformer, 8, 2048"]["bytes"] = -1
    out.write_text(json.dumps(figures))
    script.main(["-n", "2048", "--out", str(out), "--only", "longformer"])
    assert json.loads(out.read_text())["rows"]["longformer, 8, 2048"]["bytes"] == -1


@pytest.mark.parametrize("most", [1, 40, 100, 1000])
def test_portions_are_whole_pairs_of_ranks_and_as_many_as_fit(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MOST", most)
    draw = np.random.default_rng(most)
    for _ in range(30):
        many = int(draw.integers(0, 12))
        pair, graphs, key = draw.integers(0, 5, many), int(draw.integers(1, 3)), 6
        starts = draw.integers(0, 50, (2, many)) + 100
        queries, keys = (np.stack([x, x + draw.integers(1, 9, many)], 1) for x in starts)
        weights = draw.choice([0, 4, 10], many)
        found = [x.tolist() for x in exchange._portions(pair, queries, keys, graphs, weights, key)]
        # what a cut may count: rows of the hull of each side, in units of the common divisor
        common, wanted, total = math.gcd(key, *weights.tolist()), list[list[int]](), math.inf
        for each in np.unique(pair):
            mine = np.flatnonzero(pair == each)
            q, k = (x[mine, 1].max() - x[mine, 0].min() for x in (queries, keys))
            size = (q * weights.max() * graphs + k * key) / common
            total += size
            if total > most - 1:
                wanted.append([])
                total = size
            wanted[-1] += mine.tolist()
        assert found == wanted


def test_a_flow_counts_as_many_pairs_of_ranks_as_fit() -> None:
    """Ranks are solved together, and the answer is that of each two by themselves."""
    relation = Stack(attnspec.load(EXAMPLES / "bigbird.attn").program).relation(4096)
    partition = partitions.contiguous(4096, 8)
    rows = Rows(4096, 8192, 16512)
    found = exchange_of(relation, partition, rows)
    every = blocks_between(relation, partition)
    total = 0
    for reader, owner in product(range(8), repeat=2):
        part = every.take((every.reader == reader) & (every.owner == owner))
        alone = exchange_between([part], partition, [rows])
        total += alone.flow
        assert count(alone.keys(reader, owner)) == count(found.keys(reader, owner))
    assert total == found.flow == found.links.sum()
