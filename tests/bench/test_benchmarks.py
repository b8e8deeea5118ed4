"""The benchmark suite end to end at lengths that mean nothing; no time is judged."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from attnspec.bench.timing import MOST_CALLS, alternate
from attnspec.spec import parse
from benchmarks import block_plans, flex, fresh, fused, measuring, packages, report
from benchmarks.__main__ import PARTS, measure
from benchmarks.answers import checks
from benchmarks.cases import (
    BANDED,
    CASES,
    FULL,
    HEADS,
    MECHANISMS,
    QUICK,
    SCATTERED,
    SIZE,
    WORKS,
    Settings,
    Shape,
    Tiles,
)
from benchmarks.fresh import in_this_process
from benchmarks.masks import predicate
from benchmarks.measuring import Json, exponent, geometric_mean
from benchmarks.plots import draw
from benchmarks.random_specs import random_text
from benchmarks.readme_tables import bench_table

TINY = Settings(
    name="tiny",
    rounds=1,
    n=144,
    efficiency=("window(256)", "random(32)"),
    untuned_n=256,
    flex_n=128,
    flex=("strided(128)",),
    compiled=False,
    packages_n=512,
    packages=tuple(work.name for work in WORKS),
    plan_n=4096,
    reach_n=64,
    block_mask_n=256,
    block_mask=("window(256)",),
    zoo=1,
    growth=(64, 128),
    growing=("window(256)", "strided(√n)", "random(32)", *(case.name for case in MECHANISMS)),
    memory=(600,),
    choices_n=200,
    choices=("window(256)",),
    zoo_choices=1,
    random_choices=2,
    shapes=(Shape(2, 2, 40),),
    neighbour_n=100,
    neighbour=("window(256)",),
    neighbour_shapes=(Shape(1, 2, 40),),
    first=(40,),
    first_zoo=2,
    changing=3,
    fused=(Tiles(5, 6, 7),),
    types_n=64,
    types=("window(256)",),
)

LISTED = tuple(case.name for case in (*BANDED, *SCATTERED))


# one worker measures, once
pytestmark = pytest.mark.xdist_group("benchmarks")


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Json]:
    """What a run of all parts wrote, read back strictly."""
    path = tmp_path_factory.mktemp("results") / "tiny.json"
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.filterwarnings("ignore", message="flex_attention called without")
        # what the packages say of themselves where they are installed
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        # nothing is compared here, so that nobody waits for the neighbour to be busy
        patch.setattr("benchmarks.neighbour.sleep", lambda seconds: None)
        made = measure(TINY, path, run=in_this_process)

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert found == json.loads(json.dumps(made))
    assert list(path.parent.iterdir()) == [path]
    assert isinstance(found, dict)
    return found


def part_of(figures: dict[str, Json], name: str) -> dict[str, Json]:
    part = figures[name]
    assert isinstance(part, dict)
    return part


def rows_of(figures: dict[str, Json], name: str, key: str = "rows") -> list[dict[str, Json]]:
    rows = part_of(figures, name)[key]
    assert isinstance(rows, list)
    assert rows
    return [row for row in rows if isinstance(row, dict)]


def number(value: Json) -> float:
    assert isinstance(value, int | float)
    return value


def test_products_with_a_softmax_between_them_are_attention(figures: dict[str, Json]) -> None:
    (row,) = rows_of(figures, "fused")
    assert row["name"] == "5 × 6 × 7"
    assert number(row["error"]) < 1e-5
    # in several chunks, too
    subjects = fused.subjects_of(Tiles(20, 160, 130))
    products = subjects["products"]
    assert isinstance(products, fused.Products)
    assert 1 < products.together < 20
    torch.testing.assert_close(products(), subjects["flash"](), atol=1e-5, rtol=1e-5)
    q, k, _ = fused.drawn(Tiles(20, 160, 130))
    lse = (q @ k.mT / SIZE**0.5).logsumexp(2)
    torch.testing.assert_close(products.lse[..., 0], lse, atol=1e-5, rtol=1e-5)


def test_every_part_says_where_it_was_measured(figures: dict[str, Json]) -> None:
    assert list(figures) == list(PARTS)
    for name in PARTS:
        part = part_of(figures, name)
        where, what = part["machine"], part["versions"]
        assert isinstance(where, dict)
        assert isinstance(what, dict)
        assert set(where) == {
            "architecture",
            "system",
            "cores",
            "threads",
            "vector_instructions",
        }
        assert what["torch"] == torch.__version__


def test_nothing_names_the_machine(figures: dict[str, Json]) -> None:
    text = json.dumps(figures)
    assert str(Path.home()) not in text
    assert str(fresh.ROOT) not in text


def test_eta_is_the_share_of_pairs_times_the_ratio_of_times(figures: dict[str, Json]) -> None:
    part = part_of(figures, "efficiency")
    dense = part["dense"]
    assert isinstance(dense, dict)
    for row in rows_of(figures, "efficiency"):
        name = row["name"]
        assert isinstance(name, str)
        mask = [CASES[name].spec(144).mask(144, head=head) for head in range(HEADS)]
        assert row["edges"] == np.mean([m.sum() for m in mask])
        for mode in ("forward", "both"):
            theirs, ours = dense[mode], row[mode]
            assert isinstance(theirs, dict)
            assert isinstance(ours, dict)
            share = number(row["edges"]) / 144**2
            ratio = number(theirs["median"]) / number(ours["median"])
            assert row[f"eta_{mode}"] == pytest.approx(share * ratio)
            assert number(ours["least"]) <= number(ours["median"]) <= number(ours["most"])


def test_scattered_graphs_are_not_in_the_mean(figures: dict[str, Json]) -> None:
    summary = part_of(figures, "efficiency")["summary"]
    assert isinstance(summary, dict)
    window = next(row for row in rows_of(figures, "efficiency") if not row["scattered"])
    assert summary["mean_forward"] == pytest.approx(window["eta_forward"])


def test_what_is_not_built_has_a_reason_and_no_figures(figures: dict[str, Json]) -> None:
    rows = {row["name"]: row for row in rows_of(figures, "packages")}
    assert list(rows) == [work.name for work in WORKS]
    for row in rows.values():
        assert ("reason" in row) != ("ratio" in row)
        assert row.get("reason") != ""


def test_a_ratio_is_theirs_over_ours(figures: dict[str, Json]) -> None:
    (row,) = rows_of(figures, "flex")
    ours, theirs = row["ours"], row["flex"]
    assert isinstance(ours, dict)
    assert isinstance(theirs, dict)
    assert row["ratio"] == number(theirs["median"]) / number(ours["median"])
    assert row["target"] == 10
    (beside,) = rows_of(figures, "plans", "block_mask")
    assert beside["ratio"] == number(beside["block_mask_seconds"]) / number(beside["seconds"])


def test_the_choice_is_never_faster_than_the_best(figures: dict[str, Json]) -> None:
    for row in rows_of(figures, "choices"):
        if "reason" not in row:
            seconds = row["seconds"]
            assert isinstance(seconds, dict)
            assert seconds[str(row["best"])] == min(number(found) for found in seconds.values())
            assert number(row["ratio"]) >= 1


def test_choices_are_summed_up_by_kind(figures: dict[str, Json]) -> None:
    summary = part_of(figures, "choices")["summary"]
    assert isinstance(summary, dict)
    ratios: dict[str, list[float]] = {"listed": [], "zoo": [], "random": [], "all": []}
    for row in rows_of(figures, "choices"):
        if "reason" not in row:
            ratios[str(row["kind"])].append(number(row["ratio"]))
            ratios["all"].append(number(row["ratio"]))
    assert set(ratios) >= set(summary) >= {"random", "all"}
    for kind, found in summary.items():
        assert found == {
            "count": len(ratios[kind]),
            "median": pytest.approx(np.median(ratios[kind])),
            "worst": max(ratios[kind]),
        }


def test_answers_are_those_of_the_masks(figures: dict[str, Json]) -> None:
    part = part_of(figures, "answers")
    targets = part["targets"]
    assert isinstance(targets, dict)
    zoo = dict(block_plans.static_zoo())
    for row in rows_of(figures, "answers"):
        name, n, answers = row["name"], row["n"], row["answers"]
        assert isinstance(name, str)
        assert isinstance(n, int)
        assert isinstance(answers, dict)
        spec = zoo[name]
        masks = [
            spec.mask(n, layer, head) for layer, head in np.ndindex(spec.layers, spec.heads or 1)
        ]
        assert answers["edges"] == sum(mask.sum() for mask in masks)
        assert answers["degree"] == max(mask.sum(axis=1).max() for mask in masks)
        for asked in targets.keys() - {"check"}:
            assert number(row[asked]) > 0
    checked = rows_of(figures, "answers", "check")
    assert len(checked) == TINY.zoo
    assert all(number(row["seconds"]) > 0 for row in checked)


def test_a_check_that_fails_is_not_timed(tmp_path: Path) -> None:
    path = tmp_path / "wrong.attn"
    path.write_text("attention a { attend nothing }")
    with pytest.raises(RuntimeError, match="ended with status 1"):
        checks((path,), 1)


def test_random_specs_are_specs() -> None:
    texts = [random_text(seed) for seed in range(FULL.random_choices)]
    assert len(set(texts)) == len(texts)
    assert [random_text(seed) for seed in range(FULL.random_choices)] == texts
    for text in texts:
        assert parse(text).plan(64).steps


def test_tables_hold_every_row(figures: dict[str, Json]) -> None:
    page = report.tables(figures)
    for name in PARTS:
        # first calls are summed up by length
        for row in rows_of(figures, name, "changing" if name == "lengths" else "rows"):
            assert f"| {row['name']} |" in page


def test_tables_have_as_many_cells_as_heads(figures: dict[str, Json]) -> None:
    blocks = [block for block in report.tables(figures).split("\n\n") if block.startswith("|")]
    blocks.append(bench_table(figures).split("\n\n")[0])
    assert len(blocks) > len(PARTS)
    for block in blocks:
        assert len({line.replace("\\|", "").count("|") for line in block.splitlines()}) == 1


def test_a_part_measured_anew_leaves_the_others(figures: dict[str, Json], tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    measuring.write(path, figures)
    more = replace(TINY, fused=(Tiles(5, 6, 7), Tiles(2, 3, 4)))
    again = measure(more, path, ["fused"], run=in_this_process)
    assert {name: part for name, part in again.items() if name != "fused"} == {
        name: part for name, part in figures.items() if name != "fused"
    }
    assert len(rows_of(again, "fused")) == 2 * len(rows_of(figures, "fused"))


def test_plots_are_the_same_bytes_again(figures: dict[str, Json], tmp_path: Path) -> None:
    drawn = {path.name: path.read_bytes() for path in draw(figures, tmp_path)}
    assert sorted(drawn) == ["efficiency.svg", "growth.svg"]
    assert drawn == {path.name: path.read_bytes() for path in draw(figures, tmp_path)}
    for row in rows_of(figures, "growth"):
        assert str(row["name"]) in drawn["growth.svg"].decode()


def test_pairs_are_counted_where_there_are_pairs_alone(figures: dict[str, Json]) -> None:
    rows = {str(row["name"]): row for row in rows_of(figures, "growth")}
    assert list(rows) == list(TINY.growing)
    for case in (CASES[name] for name in TINY.growing):
        counted = [] if case in MECHANISMS else [case.edges(n) for n in TINY.growth]
        assert rows[case.name]["edges"] == counted
        assert (rows[case.name]["exponent_edges"] is None) is (case in MECHANISMS)
        assert rows[case.name]["target"] == case.slowest
        assert (rows[case.name]["exponent_gathered"] is None) is (case not in SCATTERED)


def test_memory_is_that_of_a_step_of_every_mechanism(figures: dict[str, Json]) -> None:
    rows = {str(row["name"]): row for row in rows_of(figures, "memory")}
    assert {case.name for case in MECHANISMS} - set(rows) == {"FNet"}
    for row in rows.values():
        assert number(row["ratio"]) == number(row["extra_bytes"]) / number(row["held_bytes"])


def test_a_projection_is_as_long_as_the_sequence() -> None:
    for n in (64, 1000):
        module = CASES["Linformer 256"].spec(n).compile()
        assert module.get_parameter("linformer_keys").shape[-1] == n


# --- the parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("n", [512, 576])
def test_flex_is_given_the_same_pairs(name: str, n: int) -> None:
    kept = predicate(name, n)
    q, k = torch.arange(n)[:, None], torch.arange(n)[None, :]
    for head in (0, HEADS - 1):
        held = kept(torch.tensor(0), torch.tensor(head), q, k)
        assert np.array_equal(held.numpy(), CASES[name].spec(n).mask(n, head=head))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_another_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(name: str, n: int) -> Callable[..., torch.Tensor]:
        return lambda b, h, q, k: (q - k).abs() <= 2

    monkeypatch.setattr(flex, "predicate", narrow)
    arguments: fresh.Arguments = {"name": "window(256)", "n": 128, "rounds": 1, "compiled": False}
    with pytest.raises(ValueError, match="the results must be the same"):
        in_this_process("flex", arguments)


@pytest.mark.parametrize(
    "name", ["Longformer 256 + 64", "window(256)", "Linformer 256", "Nyström 64"]
)
def test_packages_do_the_same_work(name: str) -> None:
    make, same = packages.RIVALS[name]
    work = next(work for work in WORKS if work.name == name)
    pytest.importorskip(work.package.replace("-", "_"))
    q, k, v = measuring.tensors(1024)
    ours = work.case.spec(1024).compile()
    with torch.no_grad():
        theirs, found = make(ours, q, k, v)(), ours(q, k, v)
    assert theirs.shape == found.shape
    # what starts its inverse from another norm is not the same to the last digit
    assert torch.allclose(theirs, found, atol=1e-5) is same


def test_a_package_that_is_absent_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*tensors: torch.Tensor) -> packages.Attend:
        raise ImportError("no such package")

    monkeypatch.setitem(packages.RIVALS, "window(256)", (absent, True))
    found = packages.measure(replace(TINY, packages=("window(256)",)))
    assert found["rows"] == [{"name": "window(256)", "reason": "local-attention is not installed"}]


def test_the_zoo_is_spread_out_evenly() -> None:
    zoo = block_plans.static_zoo()
    assert len(zoo) > 30
    assert block_plans.spread(zoo, None) == zoo
    assert [name for name, _ in block_plans.spread(zoo, 2)] == [
        zoo[0][0],
        zoo[len(zoo) // 2][0],
    ]


@pytest.mark.parametrize("settings", [FULL, QUICK])
def test_settings_name_what_exists(settings: Settings) -> None:
    named = {
        *settings.efficiency,
        *settings.flex,
        *settings.block_mask,
        *settings.growing,
        *settings.choices,
    }
    assert named <= set(CASES)
    assert set(settings.packages) <= {work.name for work in WORKS}
    assert all(CASES[name].slowest is not None for name in settings.growing)


# --- the means of measuring ----------------------------------------------------------------------


def test_subjects_take_turns() -> None:
    calls: list[str] = []
    timed = alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2)
    often = MOST_CALLS
    assert calls == ["a", "a", "b", "b", *(["a"] * often + ["b"] * often) * 2]
    assert timed["a"].calls == 2 * often


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="one round at least is needed, got 0"):
        alternate({}, rounds=0)


def test_exponents_and_means_of_known_numbers() -> None:
    assert exponent([100, 200, 400], [7 * n**1.5 for n in (100, 200, 400)]) == pytest.approx(1.5)
    assert geometric_mean([2, 8]) == pytest.approx(4)


def test_a_number_that_json_does_not_have_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    with pytest.raises(ValueError, match="JSON"):
        measuring.write(path, {"seconds": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_page_without_markers_is_refused() -> None:
    assert report.filled("a <!-- bench --> b <!-- /bench --> c", "new") == (
        "a <!-- bench -->\nnew\n<!-- /bench --> c"
    )
    for text in ("", "<!-- /bench --><!-- bench -->", "<!-- bench -->" * 2 + "<!-- /bench -->"):
        with pytest.raises(ValueError, match="each once"):
            report.filled(text, "new")


def test_a_process_that_fails_is_a_reason() -> None:
    found = fresh.in_fresh_process("plan", {"text": "attention", "n": 1, "threads": 1})
    assert list(found) == ["reason"]
    assert str(found["reason"]).startswith("SpecError: ")


def test_peaks_grow_with_what_is_held() -> None:
    # from here on: else as much as a whole worker ever held would have to be held again
    forget = Path("/proc/self/clear_refs")
    if forget.exists():
        forget.write_text("5")
    before = fresh.peak()
    held = torch.ones((0 if forget.exists() else before // 4) + (64 << 20))
    assert fresh.peak() >= before + held.nbytes // 2
