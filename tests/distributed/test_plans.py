"""Plans over several devices on paper: every pair is somewhere, nothing travels needlessly."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from goldens import Golden
from local_ranks import cut
from population import population, spec_of
from scipy.sparse import coo_array
from scipy.sparse.csgraph import maximum_flow
from sweeps import few
from zoo import EXAMPLES, FILES

import attnspec
from attnspec.cli import main
from attnspec.distributed import Rates, Tensors, plan
from benchmarks import exchange as script
from benchmarks.readme_tables import exchange_table

MILLION = 1 << 20
LARGE = Tensors(1, 32, 8, 128, 128, 2)
FEW = Tensors(1, 8, 2, 128, 128, 2)
EVEN = Tensors(1, 8, 8, 64, 64, 2)


def planned(body: str, n: int, ranks: int, tensors: Tensors = LARGE, **more: Any) -> Any:
    return plan(spec_of(body).program, n, ranks, tensors, **more)


def layer_of(body: str, n: int, ranks: int, tensors: Tensors = LARGE, **more: Any) -> Any:
    (layer,) = planned(body, n, ranks, tensors, **more).layers
    return layer


@pytest.mark.parametrize("n", [0, 1, 3, 17, 101, 600])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "body",
    [
        "causal attend full",
        "attend residue(step = 12) | residue(step = 3)",
        "causal attend block(size = 7) & (columns(first(90)) | window(radius = 2))",
        # the ends together are not even either
        "attend where(k * n * n * n <= q * q * q * q)",
    ],
)
def test_each_position_has_one_place(body: str, n: int, ranks: int) -> None:
    for considered in planned(body, n, ranks, Tensors()).considered:
        partition, size = considered.partition, n / ranks
        held = [partition.positions(rank) for rank in range(ranks)]
        assert sorted(np.concatenate(held).tolist()) == list(range(n))
        assert tuple(map(len, held)) == partition.lengths
        values = np.arange(n) ** 2
        for each in (values, values % 3 == 1):
            assert partition.sums(each).tolist() == [each[at].sum() for at in held]
        ascends = bool((np.diff(partition.order) > 0).all())
        assert partition.in_order == (ascends and partition.step == 1)
        # nobody holds much more than others, whatever weighs least
        assert max(partition.lengths) <= 1.05 * size + 8
        if str(partition) == "head-tail":
            assert partition.sums(np.arange(n)) == pytest.approx(n * (n - 1) / 2 / ranks, abs=2 * n)
        if partition.step > 1:
            residues = [set((at % partition.step).tolist()) for at in held]
            assert sum(map(len, residues)) <= max(ranks, partition.step)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("attend full", {"contiguous"}),
        ("causal attend full", {"contiguous", "head-tail"}),
        ("attend residue(step = 6)", {"contiguous", "by residue modulo 6"}),
        # of several heads
        (
            "heads 2 attend residue(step = 6) head 1 { attend residue(step = 4) }",
            {"contiguous", *(f"by residue modulo {step}" for step in (2, 4, 6))},
        ),
        # neither whole classes nor equal parts of them
        ("attend residue(step = 3)", {"contiguous"}),
        ("attend window(radius = 3)", {"contiguous"}),
        ("causal attend block(size = 5) | columns(first(1))", {"contiguous"}),
    ],
)
def test_partitions_that_are_worth_a_plan(body: str, names: set[str]) -> None:
    found = planned(body, 60, 2, Tensors(heads=spec_of(body).heads or 1))
    assert {str(each.partition) for each in found.considered} == names
    alone = planned(body, 3, 2, Tensors(heads=spec_of(body).heads or 1))
    assert {str(each.partition) for each in alone.considered} == {"contiguous"}


@pytest.mark.parametrize(
    "body", ["attend full", "causal attend full", "input doc: ids attend same(doc)"]
)
@pytest.mark.parametrize("ranks", [1, 4])
def test_each_partition_is_considered_once_and_the_one_that_is_taken_first(
    body: str, ranks: int
) -> None:
    given = {"inputs": {"doc": np.arange(96) // 11}} if "doc" in body else {}
    found = planned(body, 96, ranks, Tensors(), **given)
    taken, *others = found.considered
    assert taken.partition == found.partition
    assert len({each.partition for each in found.considered}) == len(found.considered)
    for each in found.considered:
        alone = planned(body, 96, ranks, Tensors(), partition=each.partition, **given)
        assert [x.to_dict() for x in alone.considered] == [each.to_dict()]
        assert each.seconds == sum(len(layer.layers) * layer.seconds for layer in alone.layers)
        assert each.bytes == max(alone.bytes_received)
    assert all(each.seconds >= 0.9 * taken.seconds for each in others)


def test_documents_are_dealt_out_whole_and_evenly() -> None:
    n, ranks = 1 << 17, 8
    draw = np.random.default_rng(1)
    ids = np.repeat(np.arange(400), draw.integers(1, 1024, 400))[:n]
    program = attnspec.load(EXAMPLES / "packed_causal.attn").program
    known = plan(program, n, ranks, LARGE, inputs={"document": ids})
    assert str(known.partition) == "whole documents"
    assert sum(known.bytes_received) == 0
    # nobody knows of them before a call
    assert sum(plan(program, n, ranks, LARGE).bytes_received) > 0
    for lengths in ([n], [75000] + [1024] * ((n - 75000) // 1024) + [(n - 75000) % 1024]):
        ids = np.repeat(np.arange(len(lengths)), lengths)
        found = plan(program, n, ranks, FEW, inputs={"document": ids}).layers[0]
        assert found.balance is not None
        assert found.balance <= 1.05
    for size in (4, 5, 30):
        # those in the front are heavier
        body = f"causal attend block(size = {size}) & (columns(first(20)) | window(radius = 2))"
        for each in planned(body, 120, 3).considered:
            if str(each.partition) == "whole documents":
                assert each.bytes == 0
                assert max(each.partition.lengths) <= 1.05 * 120 / 3 + size


def cut_of(mask: np.ndarray, query: int, key: int) -> int:
    """The least weight of rows and columns that cover all pairs: for every pair the key's row
    travels to the query, or the query's row to the key and its result back. The rows that travel
    are a vertex cover of a bipartite graph, and the lightest weighs as much as a maximal flow
    (König 1931)."""
    q, k = np.nonzero(mask)
    if not len(q):
        return 0
    n_q, n_k = mask.shape
    ends = (
        np.r_[np.zeros(n_q, int), 1 + q, 1 + n_q + np.arange(n_k)],
        np.r_[1 + np.arange(n_q), 1 + n_q + k, np.full(n_k, 1 + n_q + n_k)],
    )
    room = np.r_[np.full(n_q, query), np.full(len(q), query + key), np.full(n_k, key)]
    graph = coo_array((room.astype(np.int32), ends), (n_q + n_k + 2,) * 2).tocsr()
    return int(maximum_flow(graph, 0, n_q + n_k + 1).flow_value)


def bytes_and_cut(spec: attnspec.Spec, n: int, ranks: int) -> tuple[int, int]:
    """The bytes of a first layer whose rows travel, and the least: key heads share rows."""
    heads = spec.program.heads or 8
    keys = 2 if heads % 2 == 0 else 1
    shape, where = Tensors(1, heads, keys, 16, 16, 2), cut("contiguous", n, ranks)
    (layer,) = plan(spec.program, n, ranks, shape, layer=0, partition=where).layers
    if layer.how != "rows" or layer.why:
        return 0, 0
    masks = np.stack([spec.mask(n, 0, head) for head in range(heads)])
    merges = all(x.normalize in ("softmax", "softmax1") for x in spec.program.attends)
    # a query and its partial result, which is float32, or never; a key with its value
    query, key = 16 * 2 + 17 * 4 if merges else MILLION, 2 * 16 * 2
    held = [where.positions(rank) for rank in range(ranks)]
    least = 0
    for a, b in product(range(ranks), repeat=2):
        if a != b:
            pairs = masks[:, held[a]][:, :, held[b]]
            shared = pairs.reshape(keys, -1, pairs.shape[-1])
            least += sum(cut_of(each, query, key) for each in shared)
    return int(layer.links.sum()), least


def static(spec: attnspec.Spec) -> bool:
    """Whether pairs alone are attended to, the same in every call."""
    return not spec.program.inputs and not any(x.mechanism for x in spec.program.attends)


@pytest.mark.parametrize(("ranks", "first"), few([(4, 0), (4, 1), (3, 0), (3, 1)], 4))
def test_bytes_are_near_the_cut(ranks: int, first: int) -> None:
    found = {
        name: bytes_and_cut(spec, spec.program.fixed_length or 65, ranks)
        for name, spec in [*population().items()][first::2]
        if static(spec) and not spec.program.heads
    }
    assert np.count_nonzero([some for some, _ in found.values()]) > 30
    assert all(some >= least for some, least in found.values())
    # of a block that two ranks share, the few queries of one may read many keys of the other
    assert {name: x for name, x in found.items() if x[0] > 1.25 * x[1]} == {}
    assert sum(some for some, _ in found.values()) <= 1.02 * sum(x for _, x in found.values())


ZOO = [
    path.stem for path in FILES if static(spec := attnspec.load(path)) and not spec.program.cross
]


@pytest.mark.parametrize("name", few(ZOO, 12))
def test_bytes_of_the_zoo_are_near_the_cut(name: str) -> None:
    spec = attnspec.zoo(name)
    some, least = bytes_and_cut(spec, spec.program.fixed_length or 256, 4)
    assert least <= some <= 1.05 * least


def test_rows_that_read_everything_travel_as_queries() -> None:
    """And nothing else does: two keys of every rank, and the window's rims."""
    n, ranks, shape = 1 << 16, 8, Tensors(1, 1, 1, 1, 1, 4)
    body, where = "attend window(radius = 9) | global(first(2))", cut("contiguous", n, ranks)
    layer = layer_of(body, n, ranks, shape, partition=where)
    own = np.abs(np.subtract.outer(np.arange(ranks), np.arange(ranks)))
    keys = 9 * (own == 1)
    keys[1:, 0] += 2
    # a key with its value is 8 bytes, a query 4, and its result 8
    wanted = 8 * keys.T
    wanted[0, 1:] += 2 * 4
    wanted[1:, 0] += 2 * 8
    assert layer.links.tolist() == wanted.tolist()


@pytest.mark.parametrize(
    "graph", ["window(radius = 40) | global(first(4))", "full", "causal & residue(step = 3)"]
)
def test_pairs_are_counted_where_they_are_computed(graph: str) -> None:
    spec, where = spec_of(f"attend {graph}"), cut("contiguous", 1024, 4)
    layer = layer_of(f"attend {graph}", 1024, 4, Tensors(1, 2, 1), partition=where)
    assert layer.pairs.sum() == pytest.approx(2 * spec.mask(1024).sum())
    assert layer.balance == layer.pairs.sum(0).max() / layer.pairs.sum(0).mean()


def test_a_key_row_is_sent_once_for_all_heads_that_read_it() -> None:
    text = "attend random_blocks(size = 8, blocks = 2, seed = 3{})"
    where = cut("contiguous", 512, 4)
    apart = planned(text.format(""), 512, 4, FEW, partition=where)
    alike = planned(text.format(", per_head = false"), 512, 4, FEW, partition=where)
    # of every rank at most its keys, however many heads read them
    assert max(alike.bytes_received) < max(apart.bytes_received) <= apart.bytes_gathered


EACH_WAY = {
    "rows": "attend window(radius = 9) | global(first(2))",
    "states": "attend linear()",
    "heads": "attend efficient()",
    "all": "attend topk(keys = 5, share = all)",
}


@pytest.mark.parametrize("way", EACH_WAY)
def test_samples_and_numbers_of_more_bytes_are_as_many_bytes_more(way: str) -> None:
    def links(batch: int, size: int) -> np.ndarray:
        where = cut("contiguous", 1 << 14, 4)
        tensors = Tensors(batch, 8, 8, 16, 16, size)
        found = layer_of(EACH_WAY[way], 1 << 14, 4, tensors, partition=where)
        assert found.how == way
        return np.stack([found.there, found.back])

    one = links(1, 4)
    assert one[0].sum() > 0
    assert not np.diagonal(one, axis1=1, axis2=2).any()
    assert (links(3, 4) == 3 * one).all()
    assert (links(1, 8) == 2 * one).all()


def test_the_table_on_paper() -> None:
    """Figures of one layer, 8 ranks, 32 heads of 128 with 8 of keys, two bytes."""
    for body, wanted in (
        ("attend window(before = 1023, after = 0)", 1023 * 4096),
        ("attend residue(step = 64)", 0),
        ("causal attend block(size = 8192)", 0),
        ("causal attend window(before = 1023, after = 0) | columns(first(4))", 1027 * 4096),
    ):
        found = planned(body, MILLION, 8)
        assert found.bytes_gathered == 3_758_096_384
        assert max(found.bytes_received) == wanted


def test_the_way_a_layer_goes_and_why(golden: Golden) -> None:
    def ask(call: str) -> tuple[str, str]:
        found = eval(f"planned({call})")
        (layer,) = found.layers
        return layer.how, f"{found.partition}: {layer.why or 'as rows'}"

    golden.calls(ask)


def test_queries_stay_where_their_numbers_of_each_pair_are() -> None:
    graph, near = "attend global(first(2))", "input near: pairs "
    moving, staying = (
        layer_of(body, 4096, 4) for body in (graph, f"{near}{graph} score s + near(q, k)")
    )
    assert moving.back.any()
    assert not staying.back.any()
    assert (
        staying.why == "keys alone for heads that read `near`, whose rows stay with their queries"
    )
    # who computes all of the heads gets all rows: one of two bytes for each head, query and key
    tensors = Tensors(1, 2, 2, 8, 8)
    chosen = layer_of(f"{near}attend topk(keys = 5) score s + near(q, k)", 64, 2, tensors)
    plain = layer_of("attend topk(keys = 5)", 64, 2, tensors)
    assert (chosen.links - plain.links).sum(0).tolist() == [2 * 2 * 32 * 64] * 2


def test_keys_alone_are_as_much_work_on_every_rank() -> None:
    layer = layer_of("causal attend full", 1 << 17, 8, Tensors())
    assert layer.balance < 1.001
    assert not layer.back.any()


def test_sums_are_a_frame_of_numbers_there_and_back() -> None:
    # 8 key heads of 128 x 129 float32 numbers, 63 of 64 parts of them there and back, and frames
    long = layer_of("causal attend linear()", MILLION, 64)
    assert long.most == 8 * 128 * 129 * 4 * 63 // 64 * 2 + 63 * 8 * 4
    few = layer_of("causal attend linear()", MILLION, 8)
    assert few.most < 2 * 8 * 128 * 129 * 4


def test_plans_share_their_number_only_if_they_say_the_same() -> None:
    """No row travels where there is one rank: what the layers say of it is the same."""
    body = "attend window(radius = 2)"
    lengths = [planned(body, n, 1) for n in (63, 64)]
    wide = planned(body, 64, 1, Tensors(1, 32, 8, 128, 64, 2))
    assert len({each.digest for each in (*lengths, wide)}) == 3
    assert planned(body, 64, 1).digest == lengths[1].digest


def test_transfer_and_computation_that_overlap_take_at_least_the_longer() -> None:
    layer = layer_of("attend window(radius = 9)", 1 << 14, 4)
    for link, speed in ((1e6, 2e14), (5e10, 1e6), (5e10, 2e14)):
        found = replace(layer, rates=Rates(link, speed))
        computing, travelling, together = found.times
        both = computing + travelling
        assert max(computing, travelling) <= together <= both
        assert together == found.seconds
        assert 0 <= found.hidden <= 1
    assert replace(layer, rates=Rates(1.0, 2e14)).times[1] == layer.most


def said(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["plan", *words, "--json"])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.output))


def test_the_command_draws_a_table_and_a_picture() -> None:
    spec = str(EXAMPLES / "longformer.attn")
    result = CliRunner().invoke(main, ["plan", spec, "-n", str(MILLION), "--devices", "64"])
    assert result.exit_code == 0
    rows = [line for line in result.output.splitlines() if line.startswith("|")]
    assert [len(row) for row in rows] == [66] * 64
    data = said(spec, "-n", "4096", "--devices", "4")
    assert data["bytes_received"] == np.array(data["links"]).sum(0).tolist()
    assert data["layers"][0]["bytes"] == np.array(data["links"]).sum()
    packed = str(EXAMPLES / "packed_causal.attn")
    words = packed, "-n", "4096", "--devices", "4"
    plain, slower = said(*words), said(*words, "--link", "5e9", "--speed", "1e12")
    assert (plain["link"], slower["link"], slower["speed"]) == (5e10, 5e9, 1e12)
    known = said(*words, "--input", "document=0*1024,1*1024,2*1024,3*1024")
    assert known["bytes_received"] == [0, 0, 0, 0]
    assert sum(plain["bytes_received"]) > 0


@pytest.mark.slow
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
    # one heading, and a row for each whose graph is known
    assert sum(line.startswith("| ") for line in exchange_table(figures).splitlines()) == len(names)
    # what is there is not planned again
    rows["longformer, 8, 2048"]["bytes"] = -1
    out.write_text(json.dumps(figures))
    script.main(["-n", "2048", "--out", str(out), "--only", "longformer"])
    assert json.loads(out.read_text())["rows"]["longformer, 8, 2048"]["bytes"] == -1
