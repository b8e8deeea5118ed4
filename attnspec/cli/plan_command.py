"""`attnspec plan`: which backend runs which heads, what it costs, and why the others do not."""

from __future__ import annotations

import math
from collections.abc import Mapping

import click

from attnspec.backends.planner import LONGEST, Plan
from attnspec.cli import console, options
from attnspec.cli.failures import LimitReached, fitting
from attnspec.cli.specs import length_of, spec_at

DEFAULT_LENGTH = 4096


@click.command("plan")
@options.spec_argument
@options.length_option(DEFAULT_LENGTH)
@options.queries_option
@click.option(
    "--device",
    type=click.Choice(("cpu", "cuda", "mps", "xpu")),
    default="cpu",
    show_default=True,
    help="The type of device to plan for; it need not be in this machine.",
)
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
    batch: int,
    heads: int | None,
    head_size: int,
    backend: str,
    name: str | None,
    parameters: Mapping[str, str],
    as_json: bool,
) -> None:
    """Say which backend runs which heads, and why.

    One line for each group of heads and each backend: the one chosen, the estimated cost of the
    others, or the reason for which they refuse; what several groups are refused for alike stands
    at the end, once.

    Example: attnspec plan bigbird.attn -n 16384 --device cuda
    """
    loaded = spec_at(spec, name, parameters)
    n = length_of(loaded.program, length, DEFAULT_LENGTH)
    longest = max(n, queries or 0)
    if longest > LONGEST:
        raise LimitReached(f"plans are made up to n = {LONGEST:,}, got {longest:,}")
    with fitting():
        plan = loaded.plan(n, device, batch, heads, head_size, backend, queries)
    if as_json:
        console.result_json({"ok": True, **to_dict(plan)})
    else:
        console.result(str(plan))


def to_dict(plan: Plan) -> dict[str, object]:
    """A plan as plain data; seconds are estimates of the forward of all samples and heads of
    a step, and None where there are none."""
    return {
        "name": plan.name,
        **({} if plan.m is None else {"m": plan.m}),
        "n": plan.n,
        "device": plan.device,
        "batch": plan.shape.batch,
        "heads": plan.shape.heads,
        "head_size": plan.shape.head_dim,
        "rates": plan.rates,
        "steps": [
            {
                "layers": list(step.layers),
                "heads": None if step.heads is None else list(step.heads),
                "chosen": step.chosen.name,
                "candidates": [
                    {
                        "backend": candidate.backend.name,
                        "seconds": _estimate(candidate.seconds) if plan.is_estimated else None,
                        "refusal": candidate.refusal,
                    }
                    for candidate in step.candidates
                ],
            }
            for step in plan.steps
        ],
    }


def _estimate(seconds: float | None) -> float | None:
    return None if seconds is None or not math.isfinite(seconds) else seconds
