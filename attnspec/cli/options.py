"""The arguments and options that several commands share, and how their texts are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import click

from attnspec.limits import LIMITS

Command = TypeVar("Command", bound=Callable[..., object])


def count(
    ctx: click.Context, param: click.Parameter, text: str | None, least: int = 0
) -> int | None:
    """A number of positions, a layer or a head: plain digits, from 0."""
    if text is None:
        return None
    required = f"an integer from {least} to 2**31 - 1 is required, got {text[:40]!r}"
    if not re.fullmatch(r"[0-9]{1,20}", text) or not least <= int(text) <= LIMITS.length:
        meant = "" if text == "0" else _meant(text)
        raise click.BadParameter(required + meant, ctx, param)
    return int(text)


positive = partial(count, least=1)
"""A whole number from 1."""


def lengths(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> tuple[int, ...]:
    """The lengths of a repeatable option, each of which may list several: `-n 64,128`."""
    parts = [part.strip() for text in texts for part in text.split(",")]
    return tuple(dict.fromkeys(count(ctx, param, part) or 0 for part in parts))


def _meant(text: str) -> str:
    """A hint at the plain number, for the ways in which people write one."""
    match = re.fullmatch(r"([0-9]{1,6})(?:\.0*)?[kK]", text)
    if match:
        thousands = int(match[1])
        return f": write {thousands * 1024} or {thousands * 1000}"
    if re.fullmatch(r"[0-9]{1,3}([,_'][0-9]{3})+", text):
        return f": write {re.sub('[^0-9]', '', text)}"
    if re.fullmatch(r"[0-9]{1,10}(\.[0-9]{1,10})?([eE]\+?[0-9]{1,2})?", text):
        number = float(text)
        return f": write {int(number)}" if number == int(number) <= LIMITS.length else ""
    return ""


def settings(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> dict[str, str]:
    """The `name=value` texts of a repeatable option as a mapping; each name once."""
    values: dict[str, str] = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        if not (name and value):
            raise click.BadParameter(
                f"NAME=VALUE is required, for example {_SETTING[param.name or '']}, got {text!r}",
                ctx,
                param,
            )
        if name in values:
            raise click.BadParameter(f"`{name}` is set twice", ctx, param)
        values[name] = value
    return values


_SETTING = {"parameters": "block=32", "inputs": "important=0,5,9"}


spec_argument = click.argument("spec", metavar="SPEC")

specs_argument = click.argument("specs", metavar="SPEC...", nargs=-1, required=True)

set_option = click.option(
    "--set",
    "parameters",
    metavar="NAME=VALUE",
    multiple=True,
    callback=settings,
    help="Set a parameter of the spec, for example --set block=32; repeatable.",
)

name_option = click.option(
    "--name", metavar="NAME", help="Choose one of several attentions in the file."
)

json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON value, and nothing else, on standard output.",
)

layer_option = click.option(
    "--layer", metavar="I", default="0", callback=count, help="The layer, from 0."
)

head_option = click.option("--head", metavar="I", callback=count, help="The head, from 0.")

force_option = click.option(
    "--force", is_flag=True, help="Overwrite a file that attnspec did not write."
)

backend_option = click.option(
    "--backend",
    metavar="NAME",
    default="auto",
    help="Use this backend, or fail with the reason: torch, dense, tables, edges, factored, flex or"
    " triton.",
)

input_option = click.option(
    "--input",
    "inputs",
    metavar="NAME=VALUE",
    multiple=True,
    callback=settings,
    help="A run-time input, repeatable: positions of `tokens` (important=0,5,100..120), the ids or"
    " numbers of all positions (doc=0*32,1*32 is 0 for 32 positions, then 1 for 32), or a length"
    " (len=12).",
)


def shape_options(heads: int) -> Callable[[Command], Command]:
    """Samples, heads where a spec declares none, and the size of a head."""
    declared = f"The number of heads of a spec without `heads`; default {heads}."
    options = (
        ("--head-size", "D", "64", "The size of a head; default 64."),
        ("--heads", "H", None, declared),
        ("--batch", "B", "1", "The number of samples; default 1."),
    )

    def decorated(command: Command) -> Command:
        for name, value, default, text in options:
            option = click.option(
                name, metavar=value, default=default, callback=positive, help=text
            )
            command = option(command)
        return command

    return decorated


def length_option(default: int) -> Callable[[Command], Command]:
    """`-n`: how many positions; without it, `default` or the size of the spec's grid."""
    return click.option(
        "-n",
        "length",
        metavar="N",
        callback=count,
        help=f"The number of positions; default {default}, or the size of the spec's grid.",
    )


queries_option = click.option(
    "-m",
    "queries",
    metavar="M",
    callback=count,
    help="The number of queries of a spec with `cross`, where -n counts the keys; default N.",
)
