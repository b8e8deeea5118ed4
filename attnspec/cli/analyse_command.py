"""`attnspec analyse`: what specs read, reach and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

from attnspec.analysis.report.printed import page, table
from attnspec.analysis.report.report import NAMES, Report
from attnspec.cli import console, options
from attnspec.cli.failures import LimitReached, fitting
from attnspec.cli.specs import example_of, length_of, needed_inputs, read_inputs, spec_at
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import hinted

DEFAULT_LENGTH = 4096

MOST_REPORTS = 16
"""The most specs times lengths that are put side by side."""


def names(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    """The names of figures in `--only`."""
    if text is None:
        return None
    chosen = tuple(part.strip() for part in text.split(","))
    for name in chosen:
        if name not in NAMES:
            titles = {entry.title: each for each, entry in Report.entries.items()}
            message = f"the figures are {', '.join(NAMES)}, got {name!r}"
            raise click.BadParameter(hinted(message, titles.get(name, name), NAMES), ctx, param)
    return chosen


@click.command("analyse")
@options.specs_argument
@click.option(
    "-n",
    "asked",
    metavar="N",
    multiple=True,
    callback=options.lengths,
    help=f"The number of positions; default {DEFAULT_LENGTH}, or the size of the spec's grid."
    " Repeat it, or write -n 1024,4096, for a table.",
)
@options.queries_option
@click.option(
    "--only",
    metavar="NAME,...",
    callback=names,
    help="Print only these figures, for example edges,depth,flops; a wrong name lists them all.",
)
@options.shape_options(1)
@options.input_option
@options.name_option
@options.set_option
@options.json_option
def command(
    specs: Sequence[str],
    asked: tuple[int, ...],
    queries: int | None,
    only: tuple[str, ...] | None,
    batch: int,
    heads: int | None,
    head_size: int,
    inputs: Mapping[str, str],
    name: str | None,
    parameters: Mapping[str, str],
    as_json: bool,
) -> None:
    """Report the pairs, the reach and the cost of a spec.

    Each figure is marked as exact, a bound or an estimate. Several lengths, or several specs, make
    a table.

    Example: attnspec analyse bigbird -n 4096,16384
    """
    reports, advice = [], ""
    for spec in specs:
        loaded = spec_at(spec, name, parameters)
        for n in asked or (length_of(loaded.program, None, DEFAULT_LENGTH),):
            if max(n, queries or 0) > LIMITS.positions:
                raise LimitReached(
                    f"lengths up to {min(LIMITS.length, LIMITS.positions):,} are analysed"
                )
            arrays = None
            needed = needed_inputs(loaded, range(loaded.layers))
            if inputs:
                arrays = read_inputs(loaded, inputs, needed, n)
            else:
                examples = (example_of(loaded.inputs[each], n) for each in sorted(needed))
                advice = advice or " ".join(filter(None, examples))
            with fitting():
                report = loaded.analyse(
                    n, arrays, batch=batch, heads=heads, head_dim=head_size, m=queries
                )
            reports.append(report)
    if len(reports) > MOST_REPORTS:
        raise click.UsageError(f"up to {MOST_REPORTS} columns make a table, got {len(reports)}")
    what = ", ".join(only) if only else "every figure, `--only` asks for fewer"
    one = len(reports) == 1
    with console.patience(f"counting {what}"):
        # figures are counted when they are read
        if as_json:
            values = [{"ok": True, **report.to_dict(only)} for report in reports]
            text = console.as_json(values[0] if one else {"ok": True, "reports": values})
        else:
            text = console.styled(page(reports[0], only) if one else table(reports, only))
    console.result(text)
    if advice and not as_json:
        console.say(f"note: for the figures of one sample give its inputs, for example {advice}")
