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
from attnspec.lower.cost_model import (
    VARIABLE,
    Calibration,
    Rates,
    RatesError,
    calibration,
    rates_path,
    read,
)

if TYPE_CHECKING:
    from attnspec.bench.calibrate import Measured


class DamagedRates(click.ClickException):
    """A file of rates that cannot be shown."""

    exit_code = WRONG_FILE


@click.command("calibrate")
@click.option("--show", "shows", is_flag=True, help="Show the rates in use, and measure nothing.")
@click.option("--reset", "resets", is_flag=True, help="Remove what was measured.")
@options.json_option
def command(shows: bool, resets: bool, as_json: bool) -> None:
    """Measure how fast this machine computes attention, once.

    The planner's estimates are made with default rates, or with those that this command measures in
    about half a minute and writes to a file of yours. ATTNSPEC_RATES names another file; where it
    is empty, the default rates are used. Rates decide which backend runs, never what is computed,
    nor the text of a module.

    Example: attnspec calibrate
    """
    if shows and resets:
        raise click.UsageError("--show and --reset contradict each other")
    path = rates_path()
    if shows:
        _show(path, as_json)
        return
    if path is None:
        why = f"{VARIABLE} is empty" if VARIABLE in os.environ else "there is no home folder"
        raise click.UsageError(f"there is no file for this machine's rates: {why}")
    if resets:
        _reset(path, as_json)
        return
    _measure(path, as_json)


BUSY = 1.5
"""How many times as long as at best a trial may take in the median, before others are suspected."""


def _measure(path: str, as_json: bool) -> None:
    # a folder that cannot be made is better known before half a minute has passed
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    from attnspec.bench.calibrate import calibrate

    console.say("measuring takes about half a minute; leave the machine alone as far as you can")
    with progress_bar() as show:
        found, measured = calibrate(show=show)
    replace_file(Path(path), json.dumps(found.data(), indent=2) + "\n")
    calibration.cache_clear()
    if as_json:
        trials = [asdict(one) for one in measured]
        console.result_json(
            {"ok": True, "file": shown_path(path), **found.data(), "trials": trials}
        )
        return
    console.result(table(found))
    console.say(f"{fit(measured)}\nwrote {shown_path(path)}")
    spread = statistics.median(one.median / one.seconds for one in measured)
    if spread > BUSY:
        console.say(
            f"warning: the machine was busy, its times vary by a factor of {spread:.1f}:"
            " these rates are rough, measure again when it is idle"
        )


def _show(path: str | None, as_json: bool) -> None:
    found = None
    if path is not None:
        try:
            found = read(path)
        except FileNotFoundError:
            found = None
        except RatesError as error:
            raise DamagedRates(
                f"{shown_path(path)}: {error}; `attnspec calibrate` writes it anew,"
                " `attnspec calibrate --reset` removes it"
            ) from None
    if as_json:
        rates = Rates() if found is None else found.rates
        data = {"rates": asdict(rates)} if found is None else found.data()
        file = None if path is None else shown_path(path)
        console.result_json({"ok": True, "file": file, "calibrated": found is not None, **data})
        return
    console.result(table(found))
    if found is None:
        where = "no file is read" if path is None else f"there is no {shown_path(path)}"
        console.say(f"these are the default rates: {where}")
    else:
        console.say(f"read {shown_path(path or '')}")


def _reset(path: str, as_json: bool) -> None:
    try:
        os.remove(path)
        removed = True
    except FileNotFoundError:
        removed = False
    if as_json:
        console.result_json({"ok": True, "file": shown_path(path), "removed": removed})
    else:
        console.say(f"removed {shown_path(path)}" if removed else f"there is no {shown_path(path)}")


def table(found: Calibration | None) -> str:
    """The default rates, and beside them those of this machine."""
    default = asdict(Rates())
    head = f"{'seconds for one head of size 64':<32}  {'default':>10}"
    if found is None:
        return "\n".join([head, *(f"{name:<32}  {x:>10.3g}" for name, x in default.items())])
    where = found.machine
    title = (
        f"{found.threads} thread{'s' * (found.threads != 1)} of {where.get('cores')}"
        f" {where.get('architecture')} cores with {where.get('vector_instructions')},"
        f" {where.get('system')}, torch {found.torch}"
    )
    lines = [title, f"{head}  {'here':>10}  ratio"]
    for name, x in asdict(found.rates).items():
        lines.append(f"{name:<32}  {default[name]:>10.3g}  {x:>10.3g}  {x / default[name]:5.2f}")
    return "\n".join(lines)


def fit(measured: Sequence[Measured]) -> str:
    """How far the estimates are from what was measured."""
    factors = {
        one.name: max(one.expected / one.seconds, one.seconds / one.expected) for one in measured
    }
    worst = max(factors, key=factors.__getitem__)
    return (
        f"estimates of {len(factors)} trials are off by {statistics.median(factors.values()):.2f}×"
        f" in the median, {factors[worst]:.2f}× at worst ({worst})"
    )
