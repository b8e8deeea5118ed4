"""Plans over several devices on paper: every pair is somewhere, nothing travels needlessly."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner
from zoo import EXAMPLES

import attnspec
from attnspec.cli import main
from attnspec.distributed import partitions
from attnspec.distributed.partitions import Partition
from attnspec.distributed.planning import ALL, HEADS, ROWS, WORTH, Tensors, plan
from attnspec.text.diagnostics import AttnSpecError

MILLION = 1 << 20
LARGE = Tensors(1, 32, 8, 128, 128, 2)


def every_partition(n: int, ranks: int) -> list[Partition]:
    found = [partitions.contiguous(n, ranks), partitions.head_tail(n, ranks)]
    found += [each for s in (ranks, 8) if (each := partitions.by_residue(n, ranks, s)) is not None]
    work = np.arange(n) % 7 + 1
    found.append(partitions.in_chunks(n, ranks, work))
    parts = partitions.in_parts(n, ranks, work, np.arange(2, n, 2)) if n else None
    return found if parts is None else [*found, parts]


@pytest.mark.parametrize("n", [0, 1, 3, 17, 64, 101])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_each_position_has_one_place(n: int, ranks: int) -> None:
    for partition in every_partition(n, ranks):
        held = [partition.positions(rank) for rank in range(ranks)]
        assert sorted(np.concatenate(held).tolist()) == list(range(n))
        assert tuple(map(len, held)) == partition.lengths
        values = np.arange(n) ** 2
        assert np.allclose(partition.sums(values), [values[at].sum() for at in held])
        assert partition.counts(values % 3 == 1).tolist() == [sum(at**2 % 3 == 1) for at in held]


def test_plans_share_their_number_only_if_they_say_the_same() -> None:
    """No row travels where there is one rank: what the layers say of it is the same."""
    program = attnspec.parse("attention a { attend window(radius = 2) }").program
    lengths = [plan(program, n, 1, LARGE) for n in (63, 64)]
    wide = plan(program, 64, 1, Tensors(1, 32, 8, 128, 64, 2))
    assert len({each.digest for each in (*lengths, wide)}) == 3
    assert plan(program, 64, 1, LARGE).digest == lengths[1].digest


@pytest.mark.parametrize(
    "body", ["attend full", "causal attend full", "attend residue(step = 8)", "attend same(doc)"]
)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_each_partition_is_considered_once_and_the_one_that_is_taken_first(
    body: str, ranks: int
) -> None:
    declared = "input doc: ids" if "doc" in body else ""
    program = attnspec.parse(f"attention a {{ {declared} {body} }}").program
    given = {"doc": np.arange(96) // 11} if declared else None
    found = plan(program, 96, ranks, inputs=given)
    taken, *others = found.considered
    assert taken.partition == found.partition
    names = [each.partition for each in found.considered]
    assert len(set(names)) == len(names)
    assert len(names) > (body.startswith("causal") and ranks > 1)
    for each in found.considered:
        alone = plan(program, 96, ranks, inputs=given, partition=each.partition)
        assert alone.considered == (each,)
        assert each.seconds == sum(
            len(layer.layers) * layer.estimate(alone.tensors, alone.rates).together
            for layer in alone.layers
        )
        assert each.bytes == max(alone.bytes_received)
    assert all(each.seconds >= WORTH * taken.seconds for each in others)


def test_the_table_on_paper() -> None:
    """Figures of one layer, 8 ranks, 32 heads of 128 with 8 of keys, two bytes."""

    def found(text: str) -> int:
        each = plan(attnspec.parse(text).program, MILLION, 8, LARGE)
        assert each.bytes_gathered == 3_758_096_384
        return max(each.bytes_received)

    assert found("attention a { attend window(before = 1023, after = 0) }") == 1023 * 4096
    assert found("attention a { attend residue(step = 64) }") == 0
    assert found("attention a { causal attend block(size = 8192) }") == 0
    sinks = "attention a { causal attend window(before = 1023, after = 0) | columns(first(4)) }"
    assert found(sinks) == 1027 * 4096


def test_documents_are_dealt_out_whole_and_evenly() -> None:
    n, ranks = 1 << 17, 8
    draw = np.random.default_rng(1)
    ids = np.repeat(np.arange(400), draw.integers(1, 1024, 400))[:n]
    assert len(ids) == n
    program = attnspec.load(EXAMPLES / "packed_causal.attn").program
    known = plan(program, n, ranks, LARGE, inputs={"document": ids})
    assert str(known.partition) == "whole documents"
    assert sum(known.bytes_received) == 0
    assert known.layers[0].balance is not None
    assert known.layers[0].balance <= 1.05
    # nobody knows of them before a call
    unknown = plan(program, n, ranks, LARGE)
    assert sum(unknown.bytes_received) > 0


def test_heads_travel_where_rows_would_be_more() -> None:
    full = attnspec.parse("attention a { attend full }").program
    few, many = (plan(full, 4096, ranks, LARGE).layers[0] for ranks in (8, 16))
    assert (few.how, many.how) == ("heads", ROWS)
    assert "as rows" in few.why


def test_pairs_that_a_call_decides_go_by_heads() -> None:
    """Unless heads decide together, or inputs with them."""
    body = "{{ attend topk(keys = 8, share = {}) }}"
    ways = [(body.format("group"), HEADS), (body.format("all"), ALL)]
    ways += [("{ input x: choices attend chosen(x) | window(radius = 3) }", HEADS)]
    ways += [("{ input x: choices attend chosen(x) | topk(keys = 3) }", HEADS)]
    ways += [("{ input x: ids attend topk(keys = 3) & same(x) }", ALL)]
    for text, how in ways:
        (layer,) = plan(attnspec.parse(f"attention a {text}").program, 4096, 8, LARGE).layers
        assert layer.how == how, text
        who = "inputs" if "attend chosen" in text else "queries and keys"
        assert layer.why.startswith(f"{who} decide the pairs of `"), layer.why
        assert (" bytes would reach a rank as all" in layer.why) == (how == HEADS)


def test_the_command_draws_a_table_and_a_picture() -> None:
    spec = str(EXAMPLES / "longformer.attn")
    result = CliRunner().invoke(main, ["plan", spec, "-n", str(MILLION), "--devices", "64"])
    assert result.exit_code == 0
    rows = [line for line in result.output.splitlines() if line.startswith("|")]
    assert [len(row) for row in rows] == [66] * 64
    plain = CliRunner().invoke(main, ["plan", spec, "-n", "4096", "--devices", "4", "--json"])
    data = json.loads(plain.output)
    assert data["bytes_received"] == np.array(data["links"]).sum(0).tolist()
    assert data["layers"][0]["bytes"] == np.array(data["links"]).sum()
    for options, code in (
        (["--devices", "300"], 4),
        (["--key-heads", "3"], 2),
        (["--devices", "4", "--heads", "4", "--key-heads", "3"], 2),
    ):
        assert CliRunner().invoke(main, ["plan", spec, *options]).exit_code == code


def test_what_is_not_planned_is_refused() -> None:
    program = attnspec.parse("attention a { attend full }").program
    with pytest.raises(AttnSpecError, match="1 to 256 devices, got 0"):
        plan(program, 8, 0)
    with pytest.raises(AttnSpecError, match="one of 9 positions over 2 ranks"):
        plan(program, 8, 2, partition=partitions.contiguous(9, 2))


def test_two_sequences_are_not_cut() -> None:
    spec = attnspec.parse("attention a { cross attend where(q >= k) }")
    with pytest.raises(AttnSpecError, match="joins two sequences"):
        spec.distribute(100, 4)
