"""`-m` on the command line: how many queries read the keys that `-n` counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from attnspec.cli import main

BAND = "attention band(w = 2) { cross attend where(abs(q * n - k * m) <= w * m) }\n"
ONE = "attention one { attend window(radius = 1) }\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "band.attn").write_text(BAND)
    (tmp_path / "one.attn").write_text(ONE)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def found(*arguments: str) -> dict[str, object]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    data: dict[str, object] = json.loads(done.stdout)
    return data


def test_every_command_that_takes_a_length_takes_both() -> None:
    for command in ("analyse", "plan", "verify"):
        data = found(command, "band.attn", "-m", "9", "-n", "20")
        assert (data["m"], data["n"]) == (9, 20)
    data = found("diff", "band.attn", "band.attn", "-m", "9", "-n", "20")
    assert (data["m"], data["n"], data["equal"]) == (9, 20, True)
    shown = run("show", "band.attn", "-m", "9", "-n", "20")
    assert "m = 9 · n = 20" in shown.stdout
    assert found("analyse", "band.attn", "-n", "20")["m"] == 20


def test_several_lengths_of_keys_make_a_table() -> None:
    done = run("analyse", "band.attn", "-m", "9", "-n", "20,30")
    assert "m = 9, n = 20" in done.stdout
    assert "m = 9, n = 30" in done.stdout


@pytest.mark.parametrize("command", ["analyse", "plan", "show", "verify"])
def test_one_sequence_has_no_m(command: str) -> None:
    done = run(command, "one.attn", "-m", "3", "-n", "5")
    assert done.exit_code == 2
    assert "`one` has one sequence, whose queries are its keys" in done.stderr


def test_two_sequences_and_one_are_not_compared() -> None:
    done = run("diff", "band.attn", "one.attn", "-n", "8")
    assert "so that they have no pairs in common" in done.stderr


def test_limits_and_nonsense() -> None:
    assert run("analyse", "band.attn", "-m", str(2**30), "-n", "5").exit_code == 4
    assert run("plan", "band.attn", "-m", str(2**30), "-n", "5").exit_code == 4
    assert run("verify", "band.attn", "-m", str(2**30), "-n", "5").exit_code == 4
    done = run("verify", "band.attn", "-m", "0", "-n", "5")
    assert (done.exit_code, "at m = 0" in done.stderr) == (2, True)
    assert "an integer from 0" in run("show", "band.attn", "-m", "x").stderr


def test_pictures_and_emitted_modules() -> None:
    for suffix in ("png", "svg", "html"):
        done = run("show", "band.attn", "-m", "9", "-n", "20", "-o", f"band.{suffix}")
        assert done.exit_code == 0, done.stderr
        assert Path(f"band.{suffix}").stat().st_size > 500
    assert run("compile", "band.attn").exit_code == 0
    data = found("verify", "band_attn.py", "-m", "9", "-n", "20")
    assert (data["ok"], data["m"]) == (True, 9)
    alone = run("compile", "band.attn", "--standalone", "-o", "alone.py")
    assert alone.exit_code == 0
    assert "chosen: nothing, a standalone file makes no plan" in alone.stderr
    assert found("verify", "alone.py", "-m", "9", "-n", "20")["ok"]
