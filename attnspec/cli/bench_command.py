"""`attnspec bench`: one spec timed beside others, in one run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from attnspec.cli import console, options
from attnspec.cli.console import progress_bar
from attnspec.cli.failures import INTERRUPTED, LimitReached, fitting
from attnspec.cli.show_command import require_slot
from attnspec.cli.specs import length_of, spec_at
from attnspec.graphs.stack import blamed
from attnspec.limits import LIMITS
from attnspec.lower.lower import require_built
from attnspec.text.diagnostics import hinted, time_text

if TYPE_CHECKING:
    from attnspec.bench.bench import Row
    from attnspec.bench.rivals import Problem, Setting
    from attnspec.spec import Spec

DEFAULT_LENGTH = 4096

DEFAULT_HEADS = 4
"""Where the spec declares none."""

LONG = 60.0
"""Seconds above which a run is announced."""

DTYPES = ("float32", "float64", "bfloat16", "float16")


def lengths(ctx: click.Context, param: click.Parameter, text: str | None) -> list[int] | None:
    """Lengths separated by commas, each once."""
    if text is None:
        return None
    if re.fullmatch(r"[0-9]{1,3}(,0[0-9]{2})+", text):
        plain = text.replace(",", "")
        message = f"lengths separated by commas are required, got {text!r}: write {plain}"
        raise click.BadParameter(message, ctx, param)
    values = list(options.lengths(ctx, param, [text]))
    if 0 in values:
        raise click.BadParameter("there is nothing to time at n = 0", ctx, param)
    return values


def rivals(ctx: click.Context, param: click.Parameter, text: str) -> list[str]:
    """Names of rivals separated by commas, each once."""
    from attnspec.backends.plugins import installed_names
    from attnspec.bench.rivals import RIVALS

    names = (*RIVALS, *installed_names())
    words = [part.strip() for part in text.split(",") if part.strip()]
    for name in words:
        if name not in names:
            message = hinted(f"there is no rival {name!r}", name, names)
            raise click.BadParameter(f"{message}\nthe rivals are {', '.join(names)}", ctx, param)
    return list(dict.fromkeys(words))


@click.command("bench")
@options.spec_argument
@click.option(
    "-n",
    "lengths",
    metavar="N,...",
    callback=lengths,
    help=f"The lengths; default {DEFAULT_LENGTH}, or the size of the spec's grid.",
)
@click.option(
    "--vs",
    "rivals",
    metavar="NAME,...",
    default="sdpa",
    show_default=True,
    callback=rivals,
    help="sdpa: dense attention without a mask. mask: dense attention with the spec's mask. flex:"
    " torch's FlexAttention, compiled. Or a backend: torch, dense, tables, edges, factored.",
)
@click.option("--backward", is_flag=True, help="Time the gradients of q, k and v as well.")
@click.option(
    "--rounds",
    metavar="R",
    default="5",
    callback=options.positive,
    help="The number of rounds; default 5.",
)
@click.option(
    "--seconds",
    metavar="S",
    type=click.FloatRange(min=0.1, max=1e6),
    default=60.0,
    help="Start no new round after S seconds at one length, and leave out a rival whose single call"
    " takes longer; default 60.",
)
@options.shape_options(DEFAULT_HEADS)
@click.option(
    "--dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="Of q, k, v."
)
@options.layer_option
@options.backend_option
@options.name_option
@options.set_option
@options.json_option
@click.pass_context
def command(
    ctx: click.Context,
    spec: str,
    lengths: list[int] | None,
    rivals: list[str],
    backward: bool,
    rounds: int,
    seconds: float,
    heads: int | None,
    head_size: int,
    batch: int,
    dtype: str,
    layer: int,
    backend: str,
    name: str | None,
    parameters: Mapping[str, str],
    as_json: bool,
) -> None:
    """Time a spec and its rivals in one run on the CPU.

    All take turns on the same tensors, and the figures are medians. Rivals that compute the same
    pairs must first agree with our result. eta is 1 where a pair of the graph costs as much as a
    pair of dense attention without a mask; higher is better. Data-dependent graphs choose their
    pairs from random queries and keys. Ctrl-C prints what has been timed so far. On a GPU, use
    `python -m benchmarks.gpu` in a clone of the project.

    Example: attnspec bench longformer -n 4096,16384 --vs sdpa,flex
    """
    import torch

    from attnspec.bench.rivals import Problem, Setting

    loaded = spec_at(spec, name, parameters)
    require_built(loaded.program)
    require_slot(loaded, layer, None)
    shape = heads_of(loaded, heads), batch, head_size
    setting = Setting(*shape, getattr(torch, dtype), backward, layer, backend)
    chosen = lengths or [length_of(loaded.program, None, DEFAULT_LENGTH)]
    if max(chosen) > LIMITS.planned:
        # what a call takes is estimated by its plan
        raise LimitReached(f"lengths up to n = {LIMITS.planned:,} are timed, got {max(chosen):,}")
    with fitting():
        problems = []
        for n in chosen:
            with blamed(loaded.stack(), n):
                problems.append(Problem(loaded, n, setting))
                # refusals of backends come before anything is timed
                _ = problems[-1].plan
    rows, interrupted = _timed(problems, rivals, rounds, seconds)
    if as_json:
        console.result_json(to_dict(loaded, setting, rounds, rows, interrupted))
    elif rows or not interrupted:
        console.result(table(heading(loaded, setting), rows))
    if interrupted:
        console.say("interrupted")
        ctx.exit(INTERRUPTED)


def _timed(
    problems: Sequence[Problem], rivals: Sequence[str], rounds: int, seconds: float
) -> tuple[tuple[Row, ...], bool]:
    """The rows of a run, with a bar while it goes on, and whether it was interrupted."""
    from attnspec.bench.bench import bench, expected

    rows: tuple[Row, ...] = ()
    try:
        about = expected(problems, rivals, rounds, seconds)
        if about > LONG:
            console.say(
                f"this takes about {about / 60:.0f} minutes;"
                " --seconds, --rounds or a shorter -n make it less"
            )
        with progress_bar() as show:
            for progress in bench(problems, rivals, rounds, seconds):
                rows = progress.rows
                show(progress.share, progress.doing)
    except KeyboardInterrupt:
        return rows, True
    return rows, False


def heads_of(spec: Spec, asked: int | None) -> int:
    """The heads of the spec, or as many as are asked for where it declares none."""
    if spec.heads is None:
        return DEFAULT_HEADS if asked is None else asked
    if asked not in (None, spec.heads):
        raise click.UsageError(f"`{spec.name}` has {spec.heads} heads, got --heads {asked}")
    return spec.heads


def heading(spec: Spec, setting: Setting) -> str:
    """What was timed, in a line."""
    import torch

    threads = torch.get_num_threads()
    parts = [
        spec.name if spec.layers == 1 else f"{spec.name}, layer {setting.layer}",
        "forward and backward" if setting.backward else "forward",
        f"{setting.heads} head{'s' * (setting.heads != 1)} of size {setting.size}",
        f"batch {setting.batch}",
        str(setting.dtype).removeprefix("torch."),
        f"{threads} thread{'s' * (threads != 1)}",
    ]
    return ", ".join(parts)


def table(title: str, rows: Sequence[Row]) -> str:
    """A line for each subject, refusals in words."""
    head = ("n", "subject", "median", "from", "to", "ratio", "eta", "predicted", "backend")
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[at]) for line in lines if len(line) > at) for at in range(len(head))]
    widths[2] = max(len(line[2]) for line in lines if len(line) == len(head))
    shown = []
    for line in lines:
        # words start on the left, those of a refusal too
        words = (1, 2) if len(line) == 3 else (1, 8)
        sides = ["<" if at in words else ">" for at in range(len(line))]
        cells = [f"{cell:{x}{wide}}" for cell, x, wide in zip(line, sides, widths, strict=False)]
        shown.append("  ".join(cells).rstrip())
    return "\n".join([title, *shown])


def _cells(row: Row) -> tuple[str, ...]:
    if row.timing is None:
        return f"{row.n:,}", row.subject, f"refused: {row.reason}"
    return (
        f"{row.n:,}",
        row.subject,
        time_text(row.timing.median),
        time_text(row.timing.least),
        time_text(row.timing.most),
        "" if row.ratio is None else f"{row.ratio:.2f}×",
        "" if row.eta is None else f"{row.eta:.2f}",
        "" if row.predicted is None else time_text(row.predicted),
        ", ".join(row.backends),
    )


def to_dict(
    spec: Spec, setting: Setting, rounds: int, rows: Sequence[Row], interrupted: bool
) -> dict[str, object]:
    """The run as plain data; times in seconds."""
    from attnspec.bench.timing import machine, versions

    return {
        "ok": not interrupted,
        "interrupted": interrupted,
        "name": spec.name,
        "layer": setting.layer,
        "heads": setting.heads,
        "head_size": setting.size,
        "batch": setting.batch,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "backward": setting.backward,
        "rounds": rounds,
        "machine": machine(),
        "versions": versions(),
        "rows": [row.data() for row in rows],
    }
