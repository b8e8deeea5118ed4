"""`attnspec calibrate`: rates of the cost model, their file and its faults, and who uses them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from attnspec import parse
from attnspec.bench import calibrate
from attnspec.bench.calibrate import Trial, fitted, trials
from attnspec.cli import main
from attnspec.layout.steps import bands_of
from attnspec.lower.costs import (
    LARGEST,
    VARIABLE,
    Amounts,
    Calibration,
    Rates,
    calibration,
    rates_path,
    shipped,
)

SPEC = "attention sample { attend strided(stride = 16) | global(first(4)) }\n"
NAMES = [entry.name for entry in fields(Rates)]
USUAL = shipped()
TWICE = Rates(**{name: 2 * getattr(USUAL, name) for name in NAMES})
GOOD = Calibration(TWICE, 3, "2.13.0", {"cores": 8, "architecture": "riscv64"}).data()


@contextmanager
def rates(file: Path | str) -> Iterator[CliRunner]:
    """The rates of this file are those of the machine, whatever was read before."""
    runner = CliRunner(env={VARIABLE: str(file)})
    for cached in (calibration, bands_of):
        cached.cache_clear()
    with runner.isolation():
        yield runner
    for cached in (calibration, bands_of):
        cached.cache_clear()


def run(file: Path | str, *arguments: str) -> Result:
    with rates(file) as runner:
        return runner.invoke(main, list(arguments), input=SPEC)


def written(file: Path, data: object = GOOD) -> Path:
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return file


@pytest.fixture(scope="module")
def amounts() -> list[Amounts]:
    return [trial.amounts for trial in trials()]


@pytest.mark.slow
def test_the_trials_decide_every_rate(amounts: list[Amounts]) -> None:
    assert {name for each in amounts for name, amount in each.items() if amount} == set(NAMES)
    assert max(map(USUAL.seconds, amounts)) <= calibrate.DEAREST
    faster = fitted(amounts, [USUAL.seconds(each) / 5 for each in amounts], USUAL)
    for name in NAMES:
        assert getattr(faster, name) == pytest.approx(getattr(USUAL, name) / 5, rel=0.01)
        true = replace(USUAL, **{name: 3 * getattr(USUAL, name)})
        found = fitted(amounts, [true.seconds(each) for each in amounts], USUAL)
        for each in amounts:
            assert found.seconds(each) == pytest.approx(true.seconds(each), rel=0.1)
    of_gpu = [each for *_, each in calibrate.gpu_works("cuda")]
    assert all(any(each[name] for each in of_gpu) for name in NAMES)
    # times that fall as pairs are added would ask for negative rates
    some = [{"call": 1.0, "pair": pairs} for pairs in (1e3, 1e6, 1e9)]
    assert all(rate > 0 for rate in asdict(fitted(some, [3.0, 2.0, 1.0], USUAL)).values())


def changed(**entries: object) -> str:
    return json.dumps({**GOOD, **entries})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "one JSON object is required"),
        ("[1]", "one JSON object is required"),
        ("[" * 100_000, "one JSON object is required"),
        ("{} " + " " * LARGEST, "one JSON object is required"),
        # as versions with some forty rates wrote it
        ('{"format": 1, "rates": {"dense_call": 1.0}}', "format 2 is required, found 1"),
        ('{"format": 2}', "measured by another version"),
        (changed(rates={"call": 1.0}), "measured by another version"),
        (changed(rates={**asdict(TWICE), "pair": True}), "found True"),
        (changed(rates={**asdict(TWICE), "pair": 0}), "seconds above 0, found 0"),
        (changed(rates={**asdict(TWICE), "pair": float("nan")}), "found nan"),
        (changed(threads="two"), "does not say where it was measured"),
        (None, "ATTNSPEC_RATES names this file, which does not exist"),
    ],
)
def test_a_damaged_file_is_named_and_the_default_rates_are_used(
    text: str | None, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "rates.json"
    if text is not None:
        written(file, text)
        shown = run(file, "calibrate", "--show")
        assert (shown.exit_code, shown.stdout) == (3, "")
        assert f"error: {file}: " in shown.stderr
    with rates(file), pytest.warns(UserWarning, match=reason) as warned:
        plan = parse(SPEC).plan(256)
    assert len(warned) == 1
    assert str(file) in str(warned[0].message)
    assert "attnspec calibrate --reset" in str(warned[0].message)
    assert plan.rates == "by default rates (two CPU threads)"
    assert run(file, "calibrate", "--reset").exit_code == 0
    assert not file.exists()


def test_rates_are_shown_used_and_reset(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    shown = run(file, "calibrate", "--show")
    assert [line.split()[0] for line in shown.stdout.splitlines()[1:]] == NAMES
    assert shown.stderr == f"these are the default rates: there is no {file}\n"
    before = json.loads(run("", "plan", "-", "-n", "256", "--json").stdout)
    written(file)
    shown = run(file, "calibrate", "--show")
    assert "3 threads of 8 riscv64 cores" in shown.stdout
    assert shown.stdout.count(" 2.00\n") == len(NAMES)
    after = json.loads(run(file, "plan", "-", "-n", "256", "--json").stdout)
    assert after["rates"] == "by this machine's rates (3 CPU threads)"
    seconds = [[c["seconds"] for c in x["steps"][0]["candidates"]] for x in (before, after)]
    assert seconds[1][0] == pytest.approx(2 * seconds[0][0])
    # a GPU has rates of its own, in a file beside it
    assert "NVIDIA H200" in run(file, "plan", "-", "-n", "256", "--device", "cuda").stdout
    assert run(file, "calibrate", "--show", "--device", "cuda").stdout.count("e-1") == 2
    assert run(file, "calibrate", "--reset").stderr == f"removed {file}\n"
    assert json.loads(run(file, "calibrate", "--reset", "--json").stdout)["removed"] is False


def test_modules_are_the_same_bytes_whatever_the_rates(tmp_path: Path) -> None:
    slow = {**asdict(USUAL), "pair": 1e3 * USUAL.pair}
    texts, chosen = [], []
    for file in ("", written(tmp_path / "rates.json", changed(rates=slow))):
        with rates(file):
            spec = parse(SPEC)
            texts.append([spec.emit(standalone=standalone) for standalone in (False, True)])
            chosen.append([step.chosen.name for step in spec.plan(4096).steps])
    assert texts[0] == texts[1]
    # what runs it is decided when it runs, and is another backend now
    assert chosen[0] != chosen[1]


def test_the_file_is_where_the_platform_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {"HOME": "", "XDG_CONFIG_HOME": "config", "APPDATA": "roaming"}
    for platform, changes, folder in (
        ("linux", {}, "config"),
        ("linux", {"XDG_CONFIG_HOME": None}, ".config"),
        ("darwin", {"XDG_CONFIG_HOME": None}, "Library/Application Support"),
        ("win32", {}, "roaming"),
    ):
        monkeypatch.setattr("sys.platform", platform)
        paths = {name: str(tmp_path / at) for name, at in folders.items()}
        with CliRunner(env={VARIABLE: None, **paths, **changes}).isolation():
            assert rates_path() == str(tmp_path / folder / "attnspec" / "rates.json")


def test_measuring_writes_rates_and_leaves_out_what_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def product() -> object:
        return torch.ones(8, 8) @ torch.ones(8, 8)

    calls = iter([product] * 12)
    few = [
        Trial("well", {"call": 1, "pair": 1e6}, product),
        Trial("unbuilt", {}, product, "CompilationError: at 3:7"),
        # fails after some calls
        Trial("later", {"call": 1}, lambda: next(calls)()),
    ]
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file" / "rates.json", "calibrate").exit_code == 3
    if not torch.cuda.is_available():
        done = run("x", "calibrate", "--device", "cuda")
        assert (done.exit_code, "finds no GPU" in done.stderr) == (2, True)
    file = tmp_path / "deep" / "rates.json"
    monkeypatch.setattr(calibrate, "trials", lambda device: iter(few))
    data = json.loads(run(file, "calibrate", "--json").stdout)
    assert data["ok"] is True
    assert [one["name"] for one in data["trials"]] == ["well"]
    reasons = {one["name"]: one["reason"] for one in data["failed"]}
    assert reasons == {"unbuilt": "CompilationError: at 3:7", "later": "StopIteration: "}
    kept = ("format", "threads", "torch", "machine", "rates")
    assert json.loads(file.read_text()) == {key: data[key] for key in kept}
    assert [*file.parent.iterdir()] == [file]
    assert "by this machine's rates (1 CPU thread)" in run(file, "plan", "-", "-n256").stdout
    file.unlink()

    def interrupted(device: str) -> list[Trial]:
        raise KeyboardInterrupt

    for each, status in ((lambda device: few[1:2], 1), (interrupted, 130)):
        monkeypatch.setattr(calibrate, "trials", each)
        assert run(file, "calibrate").exit_code == status
        assert not file.exists()
