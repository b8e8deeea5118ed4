"""The arguments and options that several commands share, and how their texts are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

MOST = 2**31 - 1
"""The longest sequence."""

Command = TypeVar("Command", bound=Callable[..., object])


class Length(click.ParamType):
    """A number of positions, in plain digits."""

    name = "integer"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "N"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        text = str(value)
        if not re.fullmatch(r"[0-9]{1,20}", text):
            self.fail(f"an integer from 0 to 2**31 - 1 is required, got {text!r}{_meant(text)}")
        if int(text) > MOST:
            self.fail(f"an integer from 0 to 2**31 - 1 is required, got {text}")
        return int(text)


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
        return f": write {int(number)}" if number == int(number) <= MOST else ""
    return ""


class Slot(Length):
    """The number of a layer or a head, from 0."""

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "I"


class Settings(click.ParamType):
    """`name=value` as a pair; the value is an expression of the language."""

    name = "name=value"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "NAME=VALUE"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, sign, text = str(value).partition("=")
        name, text = name.strip(), text.strip()
        if not (sign and name and text):
            self.fail(f"NAME=VALUE is required, for example block=32, got {value!r}")
        return name, text


def settings(
    ctx: click.Context, param: click.Parameter, pairs: Sequence[tuple[str, str]]
) -> dict[str, str]:
    """The pairs of a repeatable option as a mapping; each name once."""
    found: dict[str, str] = {}
    for name, text in pairs:
        if name in found:
            raise click.BadParameter(f"`{name}` is set twice", ctx, param)
        found[name] = text
    return found


def _option(*names: str, **attributes: Any) -> Callable[[Command], Command]:
    return click.option(*names, **attributes)


spec_argument = click.argument("spec", metavar="SPEC")

specs_argument = click.argument("specs", metavar="SPEC...", nargs=-1, required=True)

set_option = _option(
    "--set",
    "parameters",
    type=Settings(),
    multiple=True,
    callback=settings,
    help="Set a parameter of the spec, for example --set block=32; repeatable.",
)

name_option = _option(
    "--name", metavar="NAME", help="Choose one of several attentions in the file."
)

json_option = _option(
    "--json", "as_json", is_flag=True, help="Print one JSON value on standard output, nothing else."
)

layer_option = _option("--layer", type=Slot(), default=0, help="The layer, from 0.")

head_option = _option("--head", type=Slot(), help="The head, from 0.")

force_option = _option("--force", is_flag=True, help="Write over a file that is not ours.")

backend_option = _option(
    "--backend",
    metavar="NAME",
    default="auto",
    help="Use this backend or fail with its reason; `attnspec plan` lists them.",
)

input_option = _option(
    "--input",
    "inputs",
    type=Settings(),
    multiple=True,
    callback=settings,
    help="A run-time input: positions of `tokens` (important=0,5,100..120), the ids of all positions"
    " (doc=0*32,1*32), or a length (len=12); repeatable.",
)


def length_option(default: int) -> Callable[[Command], Command]:
    """`-n`: how many positions; without it, `default` or the size of the spec's grid."""
    return _option(
        "-n",
        "length",
        type=Length(),
        help=f"How many positions; {default}, or the size of the spec's grid, if not given.",
    )
