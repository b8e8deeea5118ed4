"""What `benchmarks/` runs, end to end at lengths that mean nothing; no time is judged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import gpu, measuring, report
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
from benchmarks.gpu import TARGETS
from benchmarks.masks import predicate
from benchmarks.measuring import exponent, geometric_mean
from benchmarks.plots import draw
from benchmarks.readme_tables import bench_table, gpu_table

# one worker measures, once
pytestmark = [pytest.mark.xdist_group("benchmarks"), pytest.mark.filterwarnings("ignore")]

TINY = Settings(
    name="tiny",
    rounds=1,
    n=144,
    efficiency=("window(256)", "random(32)"),
    growth=(64, 128),
    growing=("window(256)", "random(32)", *(case.name for case in MECHANISMS)),
    shapes=(Shape(2, 2, 40),),
    first=(40,),
    first_zoo=2,
    changing=3,
)


@pytest.mark.slow
def test_every_part_runs_and_its_rows_stand_in_tables_and_plots(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    measure(TINY, path)
    figures: Any = json.loads(path.read_text(encoding="utf-8"))
    assert [*figures] == [*PARTS]
    assert all(part["versions"]["torch"] == torch.__version__ for part in figures.values())
    assert str(Path.home()) not in path.read_text()
    efficiency = figures["efficiency"]
    for row in efficiency["rows"]:
        mask = [CASES[row["name"]].spec(144).mask(144, head=head) for head in range(HEADS)]
        assert row["edges"] == np.mean([m.sum() for m in mask])
        for mode in ("forward", "both"):
            ratio = efficiency["dense"][mode]["median"] / row[mode]["median"]
            assert row[f"eta_{mode}"] == pytest.approx(row["edges"] / 144**2 * ratio)
    # scattered graphs are not in the mean
    (window,) = (row for row in efficiency["rows"] if not row["scattered"])
    assert efficiency["summary"]["mean_forward"] == pytest.approx(window["eta_forward"])
    page = report.tables(figures)
    drawn = {file.name: file.read_bytes() for file in draw(figures, tmp_path)}
    assert drawn == {file.name: file.read_bytes() for file in draw(figures, tmp_path)}
    for name, part in figures.items():
        # first calls are summed up by length
        rows = part["changing" if name == "lengths" else "rows"]
        assert [row["name"] for row in rows if f"| {row['name']} |" not in page] == []
    assert all(row["name"] in drawn["growth.svg"].decode() for row in figures["growth"]["rows"])
    tables = [text for text in page.split("\n\n") if text.startswith("|")]
    for table in (*tables, bench_table(figures).split("\n\n")[0]):
        assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1
    # a part measured anew leaves the others
    again = measure(replace(TINY, efficiency=("window(256)",)), path, ["efficiency"])
    assert {**again, "efficiency": efficiency} == figures


@pytest.mark.parametrize("name", [case.name for case in (*BANDED, *SCATTERED)])
def test_flex_is_given_the_same_pairs(name: str) -> None:
    n = 576
    q, k = torch.arange(n)[:, None], torch.arange(n)[None, :]
    for head in (0, HEADS - 1):
        mask = predicate(name, n)(torch.tensor(0), torch.tensor(head), q, k)
        assert np.array_equal(mask.numpy(), CASES[name].spec(n).mask(n, head=head))


def test_settings_name_what_exists_and_figures_are_numbers(tmp_path: Path) -> None:
    for settings in (FULL, QUICK):
        assert {*settings.efficiency, *settings.growing} <= CASES.keys()
    assert exponent([100, 200, 400], [7 * n**1.5 for n in (100, 200, 400)]) == pytest.approx(1.5)
    assert geometric_mean([2, 8]) == pytest.approx(4)
    with pytest.raises(ValueError, match="JSON"):
        measuring.write(tmp_path / "figures.json", {"seconds": float("nan")})
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_the_dry_run_of_the_gpu_goes_to_its_end_and_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--dry-run", "--results", str(tmp_path / "gpu.json")]
    assert gpu.main([*arguments, "--seconds", "0"]) == 0
    assert "the time is over" in capsys.readouterr().out
    assert gpu.main(arguments) == 0
    figures = json.loads((tmp_path / "gpu.json").read_text())
    assert figures["checks"]
    assert all(row["ok"] for row in figures["checks"].values())
    assert {name[:2] for name in figures["times"]} == set(TARGETS)
    # what needs a GPU or a package says so, and nothing else fails
    reasons = {row["reason"] for row in figures["times"].values() if "reason" in row}
    known = ("no GPU to wait for", "times nothing", "is not installed")
    assert all(any(word in reason for word in known) for reason in reasons), reasons
    assert gpu_table(figures).count("of") > 5
    assert gpu.main(["--dry-run"]) == 2
    assert torch.cuda.is_available() or gpu.main([]) == 2
