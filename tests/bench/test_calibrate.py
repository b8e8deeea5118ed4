"""Rates of the cost model: the file, its faults, the fit, and who says whose rates are used."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from click.testing import CliRunner, Result

from attnspec.backends import BACKENDS
from attnspec.backends.dense.backend import Dense
from attnspec.backends.tiles.backend import TILES
from attnspec.bench import calibrate, timing
from attnspec.bench.calibrate import fitted, trials
from attnspec.cli import calibrate_command, main
from attnspec.layout.steps import bands_of
from attnspec.lower import cost_model
from attnspec.lower.cost_model import (
    FORMAT,
    VARIABLE,
    Calibration,
    current,
    origin,
    rates_path,
    read,
)
from attnspec.lower.rates import Amounts, GpuRates, Rates
from attnspec.lower.work import Work
from attnspec.spec import parse

ROOT = Path(__file__).resolve().parents[2]

SPEC = "attention sample { attend strided(stride = 16) | global(first(4)) }\n"

NAMES = [entry.name for entry in dataclasses.fields(Rates)]

TWICE = Rates(**{name: 2 * getattr(Rates(), name) for name in NAMES})

GOOD = Calibration(TWICE, 3, "2.13.0", {"cores": 8, "architecture": "riscv64"})


@pytest.fixture(autouse=True)
def _no_file(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test reads, the next one reads anew."""
    cost_model.calibration.cache_clear()
    yield
    monkeypatch.undo()
    cost_model.calibration.cache_clear()
    bands_of.cache_clear()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the environment names; it is not there yet."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "deep" / "rates.json"))
    return tmp_path / "deep" / "rates.json"


def written(path: Path, data: object = None) -> Path:
    data = GOOD.data() if data is None else data
    path.parent.mkdir(exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def spawn(*arguments: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "attnspec", *arguments],
        input=SPEC,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        check=False,
    )


# --- rates ---------------------------------------------------------------------------------------


def test_every_rate_is_a_time_and_is_documented() -> None:
    source = (ROOT / "attnspec" / "lower" / "rates.py").read_text(encoding="utf-8")
    for rates in (Rates(), GpuRates()):
        for name, rate in dataclasses.asdict(rates).items():
            assert rate > 0
            after = source.partition(f"    {name}: float")[2].partition("\n")[2]
            assert after.startswith('    """')


def test_an_estimate_is_the_sum_of_amounts_times_rates() -> None:
    some = Rates(dense_call=3.0, dense_pair=0.5)
    assert some.seconds({"dense_call": 2, "dense_pair": 7}) == 9.5
    assert some.seconds({}) == 0
    with pytest.raises(AttributeError, match="no_such_rate"):
        some.seconds({"no_such_rate": 1})


def test_every_tile_size_has_a_rate() -> None:
    assert {f"tiles_pair_{tile}" for tile in TILES} <= set(NAMES)


def test_estimates_follow_the_rates(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    work = Work(parse(SPEC).relation(512), 512, 512)
    able = [backend for backend in BACKENDS if backend.refuses(work, "cpu") is None]
    before = [(backend.cost(work), backend.least) for backend in able]
    monkeypatch.setenv(VARIABLE, str(written(path)))
    cost_model.calibration.cache_clear()
    assert current() == TWICE
    after = [(backend.cost(work), backend.least) for backend in able]
    for (cost, least), (twice, twice_least) in zip(before, after, strict=True):
        assert twice == pytest.approx(2 * cost)
        assert twice_least == pytest.approx(2 * least)


def test_a_gpu_has_rates_of_its_own(path: Path) -> None:
    written(path)
    assert current("cuda") == GpuRates()
    assert "default rates (NVIDIA H200)" in origin("cuda")
    found = GpuRates(dense_pair=1e-12)
    measured = Calibration(found, 1, "2.13.0", {"accelerator": "a card"})
    written(path.with_name("rates-cuda.json"), measured.data())
    cost_model.calibration.cache_clear()
    assert (current("cuda"), current()) == (found, TWICE)
    assert origin("cuda") == "by this machine's rates (a card)"
    # a file for one is none for the other
    with pytest.raises(cost_model.RatesError, match="another version"):
        read(str(path.with_name("rates-cuda.json")))
    work = Work(parse(SPEC).relation(512), 512, 512)
    able = [backend for backend in BACKENDS if backend.refuses(work, "cuda") is None]
    on_gpu = dataclasses.replace(work, device="cuda")
    assert work == on_gpu
    assert all(backend.cost(on_gpu) < backend.cost(work) for backend in able)


# --- where the file is ---------------------------------------------------------------------------


def test_the_file_is_where_the_platform_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("APPDATA", str(tmp_path / "roaming"))
    for platform, folder in (
        ("linux", "config"),
        ("darwin", "Library/Application Support"),
        ("win32", "roaming"),
    ):
        monkeypatch.setattr(sys, "platform", platform)
        expected = tmp_path / folder / "attnspec" / "rates.json"
        if platform == "darwin":
            monkeypatch.delenv("XDG_CONFIG_HOME")
        assert rates_path() == str(expected)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert rates_path() == str(tmp_path / ".config" / "attnspec" / "rates.json")


def test_the_environment_names_another_file_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "here.json")
    assert rates_path() == "here.json"
    monkeypatch.setenv(VARIABLE, "")
    assert rates_path() is None
    assert current() == Rates()


def test_no_file_in_the_platforms_place_is_nothing_to_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert current() == Rates()


# --- what is in it -------------------------------------------------------------------------------


def test_what_is_written_is_read(path: Path) -> None:
    assert read(str(written(path))) == GOOD


def changed(**entries: object) -> dict[str, object]:
    return {**GOOD.data(), **entries}


def rate(value: object) -> dict[str, object]:
    found = GOOD.data()["rates"]
    assert isinstance(found, dict)
    return changed(rates={**found, "bands_row": value})


FAULTS = {
    "": "one JSON object is required",
    "{": "one JSON object is required",
    "[1]": "one JSON object is required",
    "[" * 100_000: "one JSON object is required",
    "{} " + " " * cost_model.LARGEST: "one JSON object is required",
    '{"format": 1}': "measured by another version",
    json.dumps(changed(format=99)): f"format {FORMAT} is required, found 99",
    json.dumps(changed(rates={"dense_call": 1.0})): "measured by another version",
    json.dumps(changed(rates=None)): "measured by another version",
    json.dumps(rate("fast")): "`bands_row` must be a number of seconds above 0, found 'fast'",
    json.dumps(rate(True)): "found True",
    json.dumps(rate(0)): "found 0",
    json.dumps(rate(-1e-9)): "found -1e-09",
    json.dumps(rate(float("nan"))): "found nan",
    json.dumps(rate(float("inf"))): "found inf",
    json.dumps(changed(threads="two")): "does not say where it was measured",
}


@pytest.mark.parametrize(("text", "said"), FAULTS.items(), ids=range(len(FAULTS)))
def test_a_damaged_file_is_warned_of_once_and_named(text: str, said: str, path: Path) -> None:
    written(path, text)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert [current(), current()] == [Rates(), Rates()]
    (message,) = (str(warning.message) for warning in found)
    assert said in message
    assert str(path) in message
    assert "attnspec calibrate --reset" in message


def test_a_file_that_is_named_and_not_there_is_warned_of(path: Path) -> None:
    with pytest.warns(UserWarning, match="it is not there") as told:
        assert cost_model.calibration("cpu") is None
    # the place of a warning is that of whoever asks for the rates
    assert told[0].filename == __file__
    assert current() == Rates()


def test_what_cannot_be_read_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, said in ((str(tmp_path), "is a directory"), ("a\ud800b", "surrogates")):
        monkeypatch.setattr(os, "environ", {VARIABLE: name})
        cost_model.calibration.cache_clear()
        with pytest.warns(UserWarning, match=said):
            assert current() == Rates()


# --- the fit -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def amounts() -> list[Amounts]:
    """What the trials take."""
    return [trial.amounts for trial in trials() if isinstance(trial, calibrate.Trial)]


def test_the_trials_take_some_of_everything(amounts: list[Amounts]) -> None:
    assert {name for taken in amounts for name, amount in taken.items() if amount} == set(NAMES)


def test_the_trials_of_a_gpu_take_some_of_everything() -> None:
    found = [amounts for *_, amounts in calibrate.gpu_works("cuda")]
    known = set(dataclasses.asdict(GpuRates()))
    taken = {name for amounts in found for name, amount in amounts.items() if amount}
    # no graph is best in tiles of 64
    missing = known - taken
    assert missing <= {"tiles_pair_32", "tiles_pair_64"}
    rates = fitted(found, [GpuRates().seconds(amounts) for amounts in found], GpuRates())
    assert rates.dense_pair == pytest.approx(GpuRates().dense_pair, rel=0.05)


@pytest.mark.parametrize("wrong", NAMES)
def test_a_rate_that_is_another_is_found(wrong: str, amounts: list[Amounts]) -> None:
    rate = getattr(Rates(), wrong)
    true = dataclasses.replace(Rates(), **{wrong: 3 * rate})
    found = fitted(amounts, [true.seconds(taken) for taken in amounts], Rates())
    for taken in amounts:
        assert found.seconds(taken) == pytest.approx(true.seconds(taken), rel=0.1)
    share = max(taken.get(wrong, 0.0) * rate / Rates().seconds(taken) for taken in amounts)
    moved = {name: getattr(found, name) / getattr(Rates(), name) for name in NAMES}
    # what is a small part of everything decides nothing, and is not decided
    if share > 0.2:
        assert max(moved, key=moved.__getitem__) == wrong
        assert 1.5 < moved[wrong] < 3.1


def test_a_machine_that_is_faster_scales_all_rates(amounts: list[Amounts]) -> None:
    found = fitted(amounts, [Rates().seconds(taken) / 5 for taken in amounts], Rates())
    for name in NAMES:
        assert getattr(found, name) == pytest.approx(getattr(Rates(), name) / 5, rel=0.01)


def test_rates_are_never_nothing() -> None:
    # times that fall as pairs are added would ask for negative rates
    amounts = [{"dense_call": 1.0, "dense_pair": pairs} for pairs in (1e3, 1e6, 1e9)]
    found = fitted(amounts, [3.0, 2.0, 1.0], Rates())
    assert all(getattr(found, name) > 0 for name in NAMES)


# --- the command ---------------------------------------------------------------------------------


def test_measuring_writes_a_file_that_plans_use(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "DENSE", (("full", 16), ("full", 64)))
    monkeypatch.setattr(calibrate, "SCATTERED", (("random(keys = 2, seed = 0)", 64),))
    monkeypatch.setattr(calibrate, "TILED", (("window(radius = 8)", 256),))
    monkeypatch.setattr(calibrate, "BANDED", (("residue(step = 2)", 256, 2),))
    monkeypatch.setattr(calibrate, "PACKED", 64)
    monkeypatch.setattr(calibrate, "SECONDS", 1e-9)
    monkeypatch.setattr(timing, "LEAST", 0.0)
    done = run("calibrate", "--json")
    assert done.exit_code == 0
    assert "half a minute" in done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is True
    assert found["file"] == str(path)
    assert {"name", "seconds", "median", "expected"} == set(found["trials"][0])
    assert json.loads(path.read_text()) == {
        key: found[key] for key in ("format", "threads", "torch", "machine", "rates")
    }
    assert list(path.parent.iterdir()) == [path]
    assert str(Path.home()) not in path.read_text()
    assert current() == read(str(path)).rates
    plan = parse(SPEC).plan(256)
    assert plan.rates == "by this machine's rates (1 CPU thread)"
    assert plan.rates in str(plan)


def test_show_and_reset(path: Path) -> None:
    done = run("calibrate", "--show")
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == NAMES
    assert done.stderr == f"these are the default rates: there is no {path}\n"
    written(path)
    done = run("calibrate", "--show")
    assert "3 threads of 8 riscv64 cores" in done.stdout
    assert done.stdout.count(" 2.00\n") == len(NAMES)
    assert done.stderr == f"read {path}\n"
    shown = json.loads(run("calibrate", "--show", "--json").stdout)
    assert (shown["calibrated"], shown["rates"]) == (True, GOOD.data()["rates"])
    assert run("calibrate", "--reset").stderr == f"removed {path}\n"
    assert not path.exists()
    assert json.loads(run("calibrate", "--reset", "--json").stdout)["removed"] is False
    shown = json.loads(run("calibrate", "--show", "--json").stdout)
    assert (shown["calibrated"], shown["rates"]["dense_pair"]) == (False, Rates().dense_pair)


def test_a_damaged_file_is_shown_as_such_and_can_be_reset(path: Path) -> None:
    written(path, "{")
    done = run("calibrate", "--show")
    assert (done.exit_code, done.stdout) == (3, "")
    assert f"error: {path}: it is damaged" in done.stderr
    assert json.loads(run("calibrate", "--show", "--json").stdout)["status"] == 3
    assert run("calibrate", "--reset").exit_code == 0
    assert not path.exists()


def test_wrong_usage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = run("calibrate", "--show", "--reset")
    assert (done.exit_code, "contradict" in done.stderr) == (2, True)
    monkeypatch.setenv(VARIABLE, "")
    for arguments in (["calibrate"], ["calibrate", "--reset"]):
        done = run(*arguments)
        assert (done.exit_code, f"{VARIABLE} is empty" in done.stderr) == (2, True)
    assert run("calibrate", "--show").exit_code == 0
    assert run("calibrate", "--show", "--device", "cuda").stdout.count("flex_") == 6
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "rates.json"))
    assert run("calibrate").exit_code == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpus_rates_are_measured_on_one(path: Path) -> None:
    done = run("calibrate", "--device", "cuda")
    assert done.exit_code == 2
    assert "torch finds no GPU here" in done.stderr
    assert not path.parent.exists()


def _gives_up(*calls: int) -> Callable[[], object]:
    """A trial that runs a product, and is out of memory at some of its calls."""
    made, x = itertools.count(), torch.ones(8, 8)

    def run() -> object:
        if next(made) in calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
        return x @ x

    return run


def test_a_trial_that_fails_is_said_and_left_out(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = [
        calibrate.Trial("well", {"dense_call": 1, "dense_pair": 1e6}, _gives_up()),
        calibrate.Failed("unbuilt", "CompilationError: at 3:7"),
        calibrate.Trial("at once", {"triton_call": 1}, _gives_up(0)),
        calibrate.Trial("later", {"flex_step": 1}, _gives_up(20)),
    ]
    monkeypatch.setattr(calibrate, "trials", lambda device: iter(each))
    monkeypatch.setattr(calibrate, "machine", lambda device: {"accelerator": "a stub"})
    monkeypatch.setattr(calibrate_command, "_require_gpu", lambda: None)
    monkeypatch.setattr(timing, "LEAST", 1e-3)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    done = run("calibrate", "--device", "cuda", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [one["name"] for one in found["trials"]] == ["well"]
    reasons = {one["name"]: one["reason"] for one in found["failed"]}
    assert reasons == {
        "unbuilt": "CompilationError: at 3:7",
        "at once": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.",
        "later": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.",
    }
    for name, reason in reasons.items():
        assert f"warning: left out, {name}: {reason}" in done.stderr
    mine = read(str(path.with_name("rates-cuda.json")), "cuda")
    assert isinstance(mine.rates, GpuRates)
    # what was left out decides nothing: the others are all as much slower or faster
    ratios = [mine.rates.triton_call / 4e-5, mine.rates.flex_step / 4e-5]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-3)
    path.with_name("rates-cuda.json").unlink()
    monkeypatch.setattr(calibrate, "trials", lambda device: iter(each[1:2]))
    done = run("calibrate", "--device", "cuda")
    assert done.exit_code == 1
    assert "no trial ran, and no rates are written: unbuilt: CompilationError" in done.stderr
    assert not path.with_name("rates-cuda.json").exists()


def test_what_cannot_be_built_on_a_device_is_a_failed_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(Dense):
        name = "broken"

        def build(self, *given: object) -> NoReturn:
            raise RuntimeError("ptxas ended\nwith much to say")

    work = Work(parse(SPEC).relation(64), 64, 64)
    each = [("some", work, kind, {"dense_call": 1.0}) for kind in (Broken(), Dense())]
    monkeypatch.setattr(calibrate, "gpu_works", lambda device: iter(each))
    failed, trial = calibrate.trials("meta")
    assert failed == calibrate.Failed("broken, some, n = 64", "RuntimeError: ptxas ended")
    assert isinstance(trial, calibrate.Trial)


def test_an_interruption_writes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(device: str) -> list[calibrate.Trial]:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "trials", interrupt)
    assert run("calibrate").exit_code == 130
    assert not path.exists()


# --- plans and modules ---------------------------------------------------------------------------


def test_plans_say_whose_rates_they_use(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(*more: str) -> Result:
        cost_model.calibration.cache_clear()
        return CliRunner().invoke(main, ["plan", "-", "-n", "256", *more], input=SPEC)

    monkeypatch.setenv(VARIABLE, "")
    done = planned()
    assert "by default rates (two CPU threads)" in done.stdout.splitlines()[0]
    assert done.stderr == ""
    monkeypatch.setenv(VARIABLE, str(written(path)))
    assert "by this machine's rates (3 CPU threads)" in planned().stdout.splitlines()[0]
    assert json.loads(planned("--json").stdout)["rates"] == (
        "by this machine's rates (3 CPU threads)"
    )
    written(path, "{")
    # what a process of its own says, where a warning is shown as Python shows it
    told = spawn("plan", "-", "-n", "256", env={VARIABLE: str(path)})
    assert told.returncode == 0
    assert "by default rates" in told.stdout
    assert told.stderr.startswith("warning: the default rates are used for estimates, not the file")
    assert told.stderr.count("\n") == 1


def test_modules_are_the_same_bytes_whatever_the_rates(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = {name: 1e3 * getattr(Rates(), name) if "bands" in name else 1e-9 for name in NAMES}
    written(path, changed(rates=slow))
    texts, chosen = [], []
    for named in ("", str(path)):
        monkeypatch.setenv(VARIABLE, named)
        cost_model.calibration.cache_clear()
        bands_of.cache_clear()
        spec = parse(SPEC)
        texts.append([spec.emit(standalone=standalone) for standalone in (False, True)])
        chosen.append([step.chosen.name for step in spec.plan(4096).steps])
    assert texts[0] == texts[1]
    # what runs it is decided when it runs, and is another backend now
    assert chosen[0] != chosen[1]


def test_reading_rates_loads_no_torch(path: Path) -> None:
    written(path)
    script = (
        "import sys; from attnspec.lower.cost_model import current, shipped; Rates = shipped;"
        " assert current() != Rates(); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, VARIABLE: str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
