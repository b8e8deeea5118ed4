"""Heads that share keys, work where it is done, what overlaps, and the table over the zoo."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from click.testing import CliRunner
from zoo import EXAMPLES

import attnspec
from attnspec.cli import main
from attnspec.distributed import partitions
from attnspec.distributed.planning import HEADS, ROWS, Tensors, plan
from attnspec.distributed.timing import Rates, estimate
from benchmarks import exchange as script
from benchmarks.readme_tables import exchange_table

FEW = Tensors(1, 8, 2, 128, 128, 2)


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
    assert [heads for each in layer.exchanges for _, heads in each.works] == [
        (h,) for h in range(8)
    ]
    assert len(layer.exchanges) == FEW.key_heads
    assert len(alike.layers[0].exchanges) == 1
    # of every rank at most its keys, however many heads read them
    assert max(apart.bytes_received) <= apart.bytes_gathered


def test_steps_take_the_longer_of_work_and_travel() -> None:
    there, back = np.array([[0, 8], [4, 0]]), np.array([[0, 2], [6, 0]])
    pairs = np.array([[3.0, 9.0], [1.0, 0.0], [5.0, 1.0]])
    found = estimate(there, back, pairs, 2.0, Rates(link=1.0, speed=2.0))
    # own keys: 3 or 4, 9 or 8; answers: 1; keys that came: 5 or 6, 1 or 2
    assert (found.computing, found.travelling, found.together) == (15.0, 14.0, 16.0)
    assert found.hidden == 13 / 14
    assert estimate(there, back, None, 2.0, Rates(1.0, 1.0)).together == 14.0


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
    assert "balance 1.000; with queries 22,020,096 and 1.684" in layer.why
    assert layer.balance is not None
    assert layer.balance < 1.001
    assert not any(rows.any() for each in layer.exchanges for rows in each.query_rows)


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
    assert rows["linformer, 8, 2048"]["rows"] is None
    for ranks in script.RANKS:
        row = rows[f"longformer, {ranks}, 2048"]
        assert row["bytes"] == row["rows"] <= row["keys_alone"] <= row["gathered"]
    table = exchange_table(figures)
    # one heading, and a row for each whose graph is known
    assert sum(line.startswith("| ") for line in table.splitlines()) == len(names)
    assert "decide the pairs together: sinkhorn." in table
    # what is there is not planned again
    rows["longformer, 8, 2048"]["bytes"] = -1
    out.write_text(json.dumps(figures))
    script.main(["-n", "2048", "--out", str(out), "--only", "longformer"])
    assert json.loads(out.read_text())["rows"]["longformer, 8, 2048"]["bytes"] == -1
