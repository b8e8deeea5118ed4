"""The benchmark suite end to end at lengths that mean nothing; no time is judged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from attnspec.bench.timing import MOST_CALLS, alternate
from benchmarks import lengths, measuring, report
from benchmarks.__main__ import PARTS, measure
from benchmarks.cases import (
    BANDED,
    CASES,
    FULL,
    HEADS,
    MECHANISMS,
    QUICK,
    SCATTERED,
    Settings,
    Shape,
)
from benchmarks.masks import predicate
from benchmarks.measuring import Json, exponent, geometric_mean
from benchmarks.plots import draw
from benchmarks.readme_tables import bench_table

TINY = Settings(
    name="tiny",
    rounds=1,
    n=144,
    efficiency=("window(256)", "random(32)"),
    growth=(64, 128),
    growing=("window(256)", "strided(√n)", "random(32)", *(case.name for case in MECHANISMS)),
    shapes=(Shape(2, 2, 40),),
    neighbour_n=100,
    neighbour=("window(256)",),
    neighbour_shapes=(Shape(1, 2, 40),),
    first=(40,),
    first_zoo=2,
    changing=3,
)

LISTED = tuple(case.name for case in (*BANDED, *SCATTERED))


# one worker measures, once
pytestmark = pytest.mark.xdist_group("benchmarks")


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Json]:
    """What a run of all parts wrote, read back strictly."""
    path = tmp_path_factory.mktemp("results") / "tiny.json"
    with pytest.MonkeyPatch.context() as patch:
        # nothing is compared here, so that nobody waits for the neighbour to be busy
        patch.setattr("benchmarks.neighbour.sleep", lambda seconds: None)
        made = measure(TINY, path)

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
    assert str(Path.cwd()) not in text


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
    more = replace(TINY, efficiency=("window(256)",))
    again = measure(more, path, ["efficiency"])
    assert {name: part for name, part in again.items() if name != "efficiency"} == {
        name: part for name, part in figures.items() if name != "efficiency"
    }
    assert len(rows_of(again, "efficiency")) == 1


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


def test_the_zoo_is_spread_out_evenly() -> None:
    zoo = lengths.static_zoo()
    assert len(zoo) > 30
    assert lengths.spread(zoo, None) == zoo
    assert [name for name, _ in lengths.spread(zoo, 2)] == [
        zoo[0][0],
        zoo[len(zoo) // 2][0],
    ]


@pytest.mark.parametrize("settings", [FULL, QUICK])
def test_settings_name_what_exists(settings: Settings) -> None:
    named = {
        *settings.efficiency,
        *settings.growing,
    }
    assert named <= set(CASES)
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
