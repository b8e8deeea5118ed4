"""The command for a GPU, from end to end on the CPU; no time is judged."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from attnspec.backends.planner import AUTO
from benchmarks import gpu
from benchmarks.gpu_checks import checks
from benchmarks.gpu_times import TARGETS
from benchmarks.measuring import Json
from benchmarks.readme_tables import NOT_MEASURED, gpu_table

pytestmark = [
    pytest.mark.xdist_group("benchmarks"),
    pytest.mark.filterwarnings("ignore"),
]


def test_the_dry_run_goes_to_its_end_and_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.json"
    arguments = ["--dry-run", "--results", str(path)]
    assert gpu.main([*arguments, "--seconds", "0"]) == 0
    assert "the time is over" in capsys.readouterr().out
    assert json.loads(path.read_text())["checks"] == {}
    assert gpu.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "NO  " not in printed.partition("G0")[0]
    figures = json.loads(path.read_text())
    assert figures["checks"]
    assert all(row["ok"] for row in figures["checks"].values())
    assert {name[:2] for name in figures["times"]} == set(TARGETS)
    # what needs a GPU or a package says so, and nothing else fails
    reasons = {row["reason"] for row in figures["times"].values() if "reason" in row}
    known = ("no GPU to wait for", "times nothing", "is not installed")
    assert all(any(word in reason for word in known) for reason in reasons), reasons
    assert gpu.main(arguments) == 0
    assert "G7" not in capsys.readouterr().out
    assert gpu_table(figures).count("of") > 5


def test_a_row_that_ends_the_process_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, tried = tmp_path / "gpu.json", []

    def ends() -> NoReturn:
        tried.append("ends")
        raise SystemExit

    def endless() -> dict[str, Json]:
        while True:
            pass

    each = [("times", "G0, a", ends), ("times", "G0, b", endless)]
    monkeypatch.setattr(gpu, "rows", lambda dry: iter(each))
    monkeypatch.setattr(gpu, "LONGEST", 0.1)
    for _ in range(2):
        with contextlib.suppress(SystemExit):
            gpu.run(path, True, 60.0, None, False)
    assert tried == ["ends"]
    rows = json.loads(path.read_text())["times"]
    assert rows["G0, a"] == {"reason": gpu.UNENDED}
    assert rows["G0, b"] == {"reason": "TimeoutError: it took more than 0.1 s"}


CHILD = """
import json, os, sys, time

path = sys.argv[1]
rows = {}
if "--again" not in sys.argv and os.path.exists(path):
    rows = json.load(open(path))["times"]

def write(**more):
    rows.update(more)
    with open(path, "w") as file:
        json.dump({"times": rows}, file)

if "b" not in rows:
    write(a={}, b={"reason": "unended"})
    time.sleep(600)
if "c" not in rows:
    write(c={"reason": "unended"})
    os.kill(os.getpid(), 9)
if "d" not in rows:
    write(d={"reason": "lost"})
    sys.exit(3)
write(e={})
"""


def test_a_process_that_hangs_is_ended_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, asked = tmp_path / "gpu.json", []

    def command(options: Sequence[str]) -> list[str]:
        asked.append(list(options))
        return [sys.executable, "-I", "-S", "-c", CHILD, str(path), *options]

    monkeypatch.setattr(gpu, "_command", command)
    # longer than so bare a process takes to begin on a busy machine
    monkeypatch.setattr(gpu, "LONGEST", 1)
    monkeypatch.setattr(gpu, "GRACE", 2)
    assert gpu.attended(path, 300.0, ["--only", "times", "--again"]) == 0
    assert [*json.loads(path.read_text())["times"]] == ["a", "b", "c", "d", "e"]
    assert ["--again" in each for each in asked] == [True, False, False, False]
    left = [float(each[-1]) for each in asked]
    assert left == sorted(left, reverse=True)
    printed = capfd.readouterr().out
    assert printed.count("on behind the row") == 3
    assert printed.count("nothing was written for too long") == 1


def test_a_process_that_gets_no_further_is_not_begun_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def command(options: Sequence[str]) -> list[str]:
        begun.append(options)
        return [sys.executable, "-I", "-S", "-c", "import sys; sys.exit(9)"]

    monkeypatch.setattr(gpu, "_command", command)
    # looked after ten times as often
    monkeypatch.setattr(gpu, "LONGEST", 1)
    assert gpu.attended(tmp_path / "gpu.json", 300.0, []) == 9
    assert len(begun) == 2
    assert gpu.attended(tmp_path / "gpu.json", 0.0, []) == gpu.LOST


def test_what_is_chosen_is_checked_first() -> None:
    order = list(checks(replace(gpu.DRY[0], dtypes=gpu.HALF)))
    first = [check.n for check in order].index(33)
    chosen = [check.backend == AUTO for check in order[:first]]
    # of what is chosen, and then of the others, one type after the other
    kinds = [gpu.HALF.index(check.dtype) for check in order[:first]]
    assert chosen == sorted(chosen, reverse=True)
    both = list(zip(chosen, kinds, strict=True))
    assert both == sorted(both, key=lambda each: (not each[0], each[1]))


def test_what_was_not_measured_says_so() -> None:
    lines = gpu_table({}).splitlines()
    assert len(lines) == 3 + len(TARGETS)
    assert all(NOT_MEASURED in line for line in lines[2:])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "--dry-run goes through it on the CPU" in capsys.readouterr().err
    assert gpu.main(["--dry-run"]) == 2


def test_a_process_that_cannot_be_ended_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []

    class Stuck:
        def __init__(self, command: list[str]) -> None:
            started.append(command)

        def poll(self) -> None:
            return None

        def kill(self) -> None:
            pass

        def wait(self, timeout: float) -> int:
            raise subprocess.TimeoutExpired(started[0], timeout)

    monkeypatch.setattr("subprocess.Popen", Stuck)
    monkeypatch.setattr(gpu, "LONGEST", 0)
    monkeypatch.setattr(gpu, "GRACE", 0)
    assert gpu.attended(tmp_path / "gpu.json", 300.0, []) == gpu.LOST
    assert len(started) == 1
    assert "the driver holds it" in capsys.readouterr().out
