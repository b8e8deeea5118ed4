"""`attnspec plan`: which backend runs which heads, what it costs, and why the others do not."""

from __future__ import annotations

from collections.abc import Mapping

import click

from attnspec.cli import console, options
from attnspec.cli.failures import fitting
from attnspec.cli.specs import length_of, read_inputs, spec_at

DEFAULT_LENGTH = 4096

RATE = click.FloatRange(min=0, min_open=True)


@click.command("plan")
@options.spec_argument
@options.length_option(DEFAULT_LENGTH)
@options.queries_option
@click.option(
    "--device",
    type=click.Choice(("cpu", "cuda", "mps", "xpu")),
    default="cpu",
    show_default=True,
    help="The type of device to plan for; this machine need not have one.",
)
@click.option(
    "--devices",
    callback=options.positive,
    metavar="P",
    help="Plan one sequence over P devices (a number, unlike --device): which positions each holds,"
    " and what it receives.",
)
@click.option(
    "--key-heads",
    callback=options.positive,
    metavar="H",
    help="With --devices: heads of keys and values; default as many as query heads.",
)
@click.option(
    "--link",
    type=RATE,
    metavar="R",
    help="With --devices: bytes per second into a device; default 5e10.",
)
@click.option(
    "--speed",
    type=RATE,
    metavar="R",
    help="With --devices: operations per second of a device; default 2e14.",
)
@options.input_option
@options.shape_options(1)
@options.backend_option
@options.name_option
@options.set_option
@options.json_option
def command(
    spec: str,
    length: int | None,
    queries: int | None,
    device: str,
    devices: int | None,
    key_heads: int | None,
    link: float | None,
    speed: float | None,
    inputs: Mapping[str, str],
    batch: int,
    heads: int | None,
    head_size: int,
    backend: str,
    name: str | None,
    parameters: Mapping[str, str],
    as_json: bool,
) -> None:
    """Show which backend runs which heads, and why.

    Each group of heads has a line for each backend: the estimated time, `chosen` for the one that
    runs, or the reason why a backend refuses. Reasons common to all groups are printed once, at the
    end.

    Example: attnspec plan bigbird -n 16384 --device cuda
    """
    loaded = spec_at(spec, name, parameters)
    n = length_of(loaded.program, length, DEFAULT_LENGTH)
    if devices is not None:
        from attnspec.distributed.planning import Rates

        rates = Rates(link or Rates.link, speed or Rates.speed)
        arrays = read_inputs(loaded, inputs, inputs, n) if inputs else None
        if queries is not None:
            raise click.UsageError(
                "-m is about two sequences, and --devices cuts one: remove one of the two"
            )
        with fitting():
            distribution = loaded.distribute(
                n, devices, batch, heads, head_size, key_heads, arrays, rates
            )
        console.answer(as_json, distribution.to_dict(), str(distribution))
        return
    travels = {"--key-heads": key_heads, "--input": inputs, "--link": link, "--speed": speed}
    for option, value in travels.items():
        if value:
            raise click.UsageError(f"{option} works only with --devices: add --devices P")
    with fitting():
        plan = loaded.plan(n, device, batch, heads, head_size, backend, queries)
    console.answer(as_json, plan.to_dict(), str(plan))
