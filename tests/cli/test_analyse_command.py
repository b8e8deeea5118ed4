"""`attnspec analyse` as its users meet it."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from attnspec.analysis.report.report import Report
from attnspec.cli import console, main
from attnspec.limits import LIMITS

GOOD = "attention good(r = 3) { causal attend window(before = r, after = 0) }\n"
WIDE = "attention wide { attend full }\n"
READS = "attention reads { input marked: tokens attend global(marked) | self }\n"
GRID = "attention cells { sequence grid(3, 4) attend axial }\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a few specs, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    texts = {"good": GOOD, "wide": WIDE, "reads": READS, "cells": GRID, "two": GOOD + WIDE}
    for name, text in texts.items():
        (tmp_path / f"{name}.attn").write_text(text)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def figures(*arguments: str) -> dict[str, object]:
    done = run("analyse", *arguments, "--json")
    assert done.exit_code == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["ok"] is True
    return {name: figure["value"] for name, figure in data["figures"].items()}


def test_the_page() -> None:
    done = run("analyse", "good.attn", "-n", "64")
    assert done.exit_code == 0
    assert done.stderr == ""
    first, *rest = done.stdout.splitlines()
    assert first == "good  n = 64, one head for all, size 64"
    lines = [" ".join(line.split()) for line in rest]
    assert "pairs 250 exact" in lines
    assert "keys of a query 1 to 4, mean 3.906 exact" in lines
    order = "order n estimate measured from n = 16,384 to 262,144, at most n by its form"
    assert order in lines
    assert "rule a key can go 3 steps after it was written exact" in lines


def test_both_spellings() -> None:
    assert (
        run("analyze", "good.attn", "-n", "9").stdout
        == run("analyse", "good.attn", "-n", "9").stdout
    )
    assert "analyze" not in run("--help").output
    assert "analyse" in run("--help").output


def test_json() -> None:
    found = figures("good.attn", "-n", "64")
    assert found["edges"] == 250
    assert found["order"] == "n"
    assert found["causal"] is True


def test_parameters_names_and_head_sizes() -> None:
    assert figures("good.attn", "-n", "64", "--set", "r=0")["edges"] == 64
    assert figures("two.attn", "--name", "wide", "-n", "5")["edges"] == 25
    narrow = figures("wide.attn", "-n", "8", "--head-size", "16")
    assert narrow["flops"] == 4 * 16 * 64


def test_chosen_figures() -> None:
    assert figures("wide.attn", "-n", "8", "--only", "edges, depth") == {"edges": 64, "depth": 1}
    done = run("analyse", "wide.attn", "-n", "8", "--only", "edges")
    assert [line.split() for line in done.stdout.splitlines()[2:]] == [
        ["What", "it", "reads"],
        ["pairs", "64", "exact"],
    ]


def test_lengths() -> None:
    assert json.loads(run("analyse", "wide.attn", "--json", "--only", "edges").stdout)["n"] == 4096
    assert json.loads(run("analyse", "cells.attn", "--json", "--only", "edges").stdout)["n"] == 12
    done = run("analyse", "wide.attn", "-n", "8,16", "-n", "32", "-n", "8", "--only", "edges")
    assert [line.split() for line in done.stdout.splitlines()[:2]] == [
        ["n", "=", "8", "n", "=", "16", "n", "=", "32"],
        ["pairs", "64", "256", "1,024"],
    ]


def test_specs_side_by_side() -> None:
    done = run("analyse", "good.attn", "wide.attn", "-n", "8", "--only", "edges,causal,order")
    assert done.exit_code == 0
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0] == ["good", "wide"]
    assert ["pairs", "26", "64"] in rows
    assert ["causal", "yes", "no"] in rows
    data = json.loads(
        run("analyse", "good.attn", "wide.attn", "-n", "8", "--json", "--only", "edges").stdout
    )
    assert [report["figures"]["edges"]["value"] for report in data["reports"]] == [26, 64]


def test_no_two_figures_have_one_title(tmp_path: Path) -> None:
    titles = [entry.title for entry in Report.entries.values()]
    assert len(set(titles)) == len(titles)
    mixed = tmp_path / "mixed.attn"
    mixed.write_text("attention mixed { heads 2 attend self head 1 { attend linear() } }\n")
    done = run("analyse", str(mixed), str(mixed), "-n", "8")
    rows = [line for line in done.stdout.splitlines() if line.startswith("keys of a query")]
    starts = [row.split("  ")[0] for row in rows]
    assert "keys of a query there, most" in starts
    assert len(set(starts)) == len(starts)


def test_inputs() -> None:
    unknown = run("analyse", "reads.attn", "-n", "8", "--only", "edges")
    assert unknown.exit_code == 0
    assert "not known: its pairs depend on run-time inputs" in unknown.stdout
    assert "for example --input marked=0,5,9" in unknown.stderr
    known = figures("reads.attn", "-n", "8", "--input", "marked=0,5", "--only", "edges")
    assert known == {"edges": 2 * 8 + 2 * 6 + 6}
    wrong = run("analyse", "reads.attn", "-n", "8", "--input", "marks=0")
    assert wrong.exit_code == 2
    assert "declares no input `marks`" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("good.attn", "-n", "4k"), 2, "write 4096 or 4000"),
        (("good.attn", "-n", "8,"), 2, "an integer from 0"),
        (("cells.attn", "-n", "11"), 2, "12 cells, got n = 11"),
        (("good.attn", "--only", "edgs"), 2, "did you mean `edges`?"),
        (("good.attn", "--only", ","), 2, "the figures are edges"),
        (("good.attn", "--only", "pairs"), 2, "did you mean `edges`?"),
        (
            ("good.attn", "--head-size", "0"),
            2,
            "an integer from 1 to 2**31 - 1 is required, got '0'",
        ),
        (("good.attn", "--head-size", "no"), 2, "an integer from 1 to"),
        (("good.attn", "-n", str(LIMITS.positions + 1)), 4, "are analysed"),
        (("good.attn", "-n", ",".join(map(str, range(17)))), 2, "up to 16 columns"),
        (("gone.attn",), 3, "gone.attn"),
        ((), 2, "SPEC"),
    ],
)
def test_what_goes_wrong(arguments: tuple[str, ...], status: int, message: str) -> None:
    done = run("analyse", *arguments)
    assert done.exit_code == status, done.output
    assert message in done.stderr
    assert done.stdout == ""


def test_a_wrong_spec_is_said_as_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "wrong.attn").write_text("attention wrong { attend windw(radius = 3) }\n")
    done = run("analyse", "wrong.attn", "--json")
    assert done.exit_code == 1
    data = json.loads(done.stdout)
    assert data["ok"] is False
    assert data["diagnostics"][0]["line"] == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_takes_long_is_said_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, after, said in (
        (Terminal(), 0.0, "counting depth (Ctrl-C ends it)\n"),
        (Terminal(), 60.0, ""),
        (io.StringIO(), 0.0, ""),
    ):
        monkeypatch.setattr("sys.stderr", stream)
        with console.patience("counting depth", after):
            while len(stream.getvalue()) < len(said):
                time.sleep(0.001)
        assert stream.getvalue() == said


def test_analyse_counts_where_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[str] = []

    @contextmanager
    def patience(doing: str) -> Iterator[None]:
        inside.append(doing)
        yield

    monkeypatch.setattr(console, "patience", patience)
    assert run("analyse", "good.attn", "-n", "64", "--only", "depth,edges").exit_code == 0
    assert run("analyse", "good.attn", "-n", "64", "--json").exit_code == 0
    assert inside == ["counting depth, edges", "counting every figure, `--only` asks for fewer"]
