"""`attnspec calibrate`: the rates of the cost model, measured on this machine."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnspec.cli import console, options
from attnspec.cli.console import progress_bar
from attnspec.cli.failures import WRONG_FILE
from attnspec.cli.files import replace_file
from attnspec.cli.specs import shown_path
from attnspec.lower.costs import (
    SHIPPED,
    VARIABLE,
    Calibration,
    RatesError,
    calibration,
    cures,
    rates_path,
    read,
    shipped,
)

if TYPE_CHECKING:
    from attnspec.bench.calibrate import Trial


class DamagedRates(click.ClickException):
    """A file of rates that cannot be shown."""

    exit_code = WRONG_FILE


@click.command("calibrate")
@click.option(
    "--device",
    type=click.Choice([*SHIPPED]),
    default="cpu",
    show_default=True,
    help="The type of device to measure.",
)
@click.option("--show", "shows", is_flag=True, help="Show the rates in use, and measure nothing.")
@click.option("--reset", "resets", is_flag=True, help="Remove what was measured.")
@options.json_option
def command(device: str, shows: bool, resets: bool, as_json: bool) -> None:
    """Measure the speed of this machine for the planner.

    Run it once per machine; it takes about half a minute. The planner estimates times by default
    rates, or by the rates that this command writes to attnspec/rates.json in your configuration
    folder (~/.config on Linux). The variable ATTNSPEC_RATES names another file; if the variable is
    empty, the default rates are used. The rates of a GPU go to a second file in the same folder.
    Rates change which backend runs, and so results by rounding alone. They do not change the text
    of a module.

    Example: attnspec calibrate
    """
    if shows and resets:
        raise click.UsageError("--show and --reset contradict each other")
    path = rates_path(device)
    if shows:
        _show(path, device, as_json)
        return
    if path is None:
        why = f"{VARIABLE} is empty" if VARIABLE in os.environ else "there is no home folder"
        raise click.UsageError(f"no file can hold rates, since {why}: set {VARIABLE} to a path")
    if resets:
        _reset(path, as_json)
        return
    _measure(path, device, as_json)


BUSY = 1.5
"""How many times as long as at best a trial may take in the median, before others are suspected."""


def _measure(path: str, device: str, as_json: bool) -> None:
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise click.UsageError(
                "torch finds no GPU here (torch.cuda.is_available() is False), and rates are"
                " measured where they are used; until then plans for cuda use default rates"
                " (NVIDIA H200)"
            )
    # a folder that cannot be made is better known before half a minute has passed
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    from attnspec.bench.calibrate import calibrate

    console.say("measuring takes about half a minute; leave the machine alone as far as you can")
    try:
        with progress_bar() as show:
            fitted, measured, failed = calibrate(device, show=show)
    except RatesError as error:
        raise click.ClickException(f"no trial ran, and no rates are written: {error}") from error
    for one in failed:
        console.say(f"warning: left out, {one.name}: {one.reason}")
    replace_file(Path(path), json.dumps(fitted.data(), indent=2) + "\n")
    calibration.cache_clear()
    if as_json:
        kept = ("name", "seconds", "median", "expected")
        trials = [{name: getattr(one, name) for name in kept} for one in measured]
        left_out = [{"name": one.name, "reason": one.reason} for one in failed]
        data = {"ok": True, "file": shown_path(path), **fitted.data()}
        console.result_json({**data, "trials": trials, "failed": left_out})
        return
    console.result(table(fitted, device))
    console.say(f"{fit(measured)}\nwrote {shown_path(path)}")
    spread = statistics.median(one.median / one.seconds for one in measured)
    if spread > BUSY:
        console.say(
            f"warning: the machine was busy, its times vary by a factor of {spread:.1f}:"
            " these rates are rough, measure again when it is idle"
        )


def _show(path: str | None, device: str, as_json: bool) -> None:
    calibration = None
    if path is not None:
        try:
            calibration = read(path)
        except FileNotFoundError:
            pass
        except RatesError as error:
            raise DamagedRates(f"{shown_path(path)}: {error}; {cures(device)}") from None
    if as_json:
        rates = shipped(device) if calibration is None else calibration.rates
        data = {"rates": asdict(rates)} if calibration is None else calibration.data()
        file = None if path is None else shown_path(path)
        facts = {"ok": True, "file": file, "calibrated": calibration is not None}
        console.result_json({**facts, **data})
        return
    console.result(table(calibration, device))
    if calibration is None:
        where = "no file is read" if path is None else f"there is no {shown_path(path)}"
        console.say(f"these are the default rates: {where}")
    else:
        console.say(f"read {shown_path(path or '')}")


def _reset(path: str, as_json: bool) -> None:
    removed = os.path.lexists(path)
    if removed:
        os.remove(path)
    if as_json:
        console.result_json({"ok": True, "file": shown_path(path), "removed": removed})
    else:
        console.say(f"removed {shown_path(path)}" if removed else f"there is no {shown_path(path)}")


def table(found: Calibration | None, device: str) -> str:
    """The default rates of a type of device, and beside them those of this machine."""
    default = asdict(shipped(device))
    head = f"{'seconds for one head of size 64':<32}  {'default':>10}"
    if found is None:
        return "\n".join([head, *(f"{name:<32}  {_shown(x)}" for name, x in default.items())])
    where = found.machine
    title = (
        f"{found.threads} thread{'s' * (found.threads != 1)} of {where.get('cores')}"
        f" {where.get('architecture')} cores with {where.get('vector_instructions')},"
        f" {where.get('system')}, torch {found.torch}"
    )
    if "accelerator" in where:
        title = f"{where['accelerator']}, {title}"
    lines = [title, f"{head}  {'here':>10}  ratio"]
    for name, x in asdict(found.rates).items():
        ratio = x / default[name]
        lines.append(f"{name:<32}  {_shown(default[name])}  {_shown(x)}  {ratio:5.2f}")
    return "\n".join(lines)


def _shown(rate: float) -> str:
    """A rate, in ten places."""
    return f"{rate:>10.3g}"


def fit(measured: Sequence[Trial]) -> str:
    """How far the estimates are from what was measured."""
    factors = {
        one.name: max(one.expected / one.seconds, one.seconds / one.expected) for one in measured
    }
    worst = max(factors, key=factors.__getitem__)
    return (
        f"estimates of {len(factors)} trials are off by {statistics.median(factors.values()):.2f}×"
        f" in the median, {factors[worst]:.2f}× at worst ({worst})"
    )
