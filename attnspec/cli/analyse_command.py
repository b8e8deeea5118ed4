"""`attnspec analyse`: what specs read, reach and cost."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import click
import numpy as np

from attnspec.analysis.report.printed import page, table
from attnspec.analysis.report.report import NAMES, Report
from attnspec.cli import console
from attnspec.cli.failures import LimitReached, fitting
from attnspec.cli.options import (
    MOST,
    count,
    input_option,
    json_option,
    name_option,
    set_option,
    specs_argument,
)
from attnspec.cli.specs import length_of, read_inputs, spec_at
from attnspec.graphs.stack import MOST_POSITIONS
from attnspec.ir.program import inputs_of
from attnspec.spec import Spec
from attnspec.text.diagnostics import did_you_mean

DEFAULT_LENGTH = 4096

MOST_REPORTS = 16
"""The most specs times lengths that are put side by side."""

LARGEST_HEAD = 4096


def lengths(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> tuple[int, ...]:
    """The lengths of a repeatable option, each of which may list several: `-n 64,128`."""
    found: dict[int, None] = {}
    for text in texts:
        for part in text.split(","):
            number = count(ctx, param, part.strip())
            if number is not None:
                found[number] = None
    return tuple(found)


def names(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    """The names of figures in `--only`."""
    if text is None:
        return None
    chosen = tuple(part.strip() for part in text.split(","))
    for name in chosen:
        if name not in NAMES:
            hint = did_you_mean(name, NAMES)
            raise click.BadParameter(
                f"the figures are {', '.join(NAMES)}, got {name!r}" + (f": {hint}" if hint else ""),
                ctx,
                param,
            )
    return chosen


@click.command("analyse")
@specs_argument
@click.option(
    "-n",
    "asked",
    metavar="N",
    multiple=True,
    callback=lengths,
    help=f"How many positions; {DEFAULT_LENGTH}, or the size of the spec's grid, if not given."
    " Several, or -n 1024,4096, make a table.",
)
@click.option(
    "--only", metavar="NAME,...", callback=names, help="These figures alone, by their names."
)
@click.option(
    "--head-size",
    metavar="D",
    default="64",
    show_default=True,
    callback=count,
    help="The size of a head, for what it costs.",
)
@input_option
@name_option
@set_option
@json_option
def command(
    specs: Sequence[str],
    asked: tuple[int, ...],
    only: tuple[str, ...] | None,
    head_size: int,
    inputs: Mapping[str, str],
    name: str | None,
    parameters: Mapping[str, str],
    as_json: bool,
) -> None:
    """Say what a spec reads, reaches and costs.

    Every figure is exact, a bound or an estimate, and says which. Several lengths, or several
    specs, make a table.

    Example: attnspec analyse bigbird.attn -n 4096,16384
    """
    if not 1 <= head_size <= LARGEST_HEAD:
        raise click.UsageError(f"--head-size must be from 1 to {LARGEST_HEAD}, got {head_size}")
    reports = []
    for spec in specs:
        loaded = spec_at(spec, name, parameters)
        for n in asked or (length_of(loaded.program, None, DEFAULT_LENGTH),):
            if n > MOST_POSITIONS:
                raise LimitReached(f"lengths up to {min(MOST, MOST_POSITIONS):,} are analysed")
            given = _inputs(loaded, inputs, n)
            with fitting():
                reports.append(Report(loaded.elaborated, n, given, head_size=head_size))
    if len(reports) > MOST_REPORTS:
        raise click.UsageError(f"up to {MOST_REPORTS} columns make a table, got {len(reports)}")
    if as_json:
        values = [{"ok": True, **report.to_dict(only)} for report in reports]
        console.result_json(values[0] if len(values) == 1 else {"ok": True, "reports": values})
        return
    text = page(reports[0], only) if len(reports) == 1 else table(reports, only)
    plain = sys.stdout is None or console.is_ascii(sys.stdout)
    if plain or not console.has_colour(sys.stdout):
        console.result(text.plain)
    else:
        console.result(console.ansi(text, console.width()))


def _inputs(spec: Spec, texts: Mapping[str, str], n: int) -> dict[str, np.ndarray] | None:
    """One sample of the inputs that the graphs read, None where none is given."""
    if not texts:
        return None
    graphs = (attend.graph for attend in spec.program.attends if attend.graph is not None)
    needed = set().union(*(inputs_of(graph) for graph in graphs))
    return read_inputs(spec, texts, needed, n)
