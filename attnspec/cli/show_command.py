"""`attnspec show`: the pattern as a picture in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import click

from attnspec.cli import console
from attnspec.cli.failures import LimitReached, fitting
from attnspec.cli.inputs import read_inputs
from attnspec.cli.options import (
    count,
    head_option,
    input_option,
    length_option,
    name_option,
    set_option,
    spec_argument,
)
from attnspec.cli.specs import length_of, spec_at
from attnspec.ir import inputs_of
from attnspec.show.panels import has_graph, sheet
from attnspec.show.tally import TooLong
from attnspec.show.terminal import Signs, draw
from attnspec.spec import Spec

DEFAULT_LENGTH = 64


@click.command("show")
@spec_argument
@length_option(DEFAULT_LENGTH)
@click.option(
    "--layer",
    metavar="I",
    callback=count,
    help="The layer, from 0; the first that has pairs, if not given.",
)
@head_option
@input_option
@name_option
@set_option
def command(
    spec: str,
    length: int | None,
    layer: int | None,
    head: int | None,
    inputs: Mapping[str, str],
    name: str | None,
    parameters: Mapping[str, str],
) -> None:
    """Draw which query reads which key, in the terminal.

    Rows are queries, columns are keys. Without --head, all heads of the layer that differ from each
    other are drawn. A sequence too long for the terminal is drawn in cells, each as bright as it is
    full.

    Example: attnspec show longformer.attn -n 256 --set radius=16
    """
    loaded = spec_at(spec, name, parameters)
    n = length_of(loaded.program, length, DEFAULT_LENGTH)
    if layer is None:
        layers = range(loaded.program.layers or 1)
        layer = next((each for each in layers if has_graph(loaded, each)), 0)
    console.result(picture(loaded, n, layer, head, inputs))


def picture(spec: Spec, n: int, layer: int, head: int | None, inputs: Mapping[str, str]) -> str:
    """The whole text of a picture for standard output, with colours where it shows them."""
    width = console.width()
    require_slot(spec, layer, head)
    given = read_inputs(spec, inputs, needed_inputs(spec, layer, head), n)
    with fitting():
        try:
            drawn = sheet(spec, n, layer=layer, head=head, inputs=given, width=width)
        except TooLong as error:
            raise LimitReached(str(error)) from None
    signs: Signs = "blocks"
    if sys.stdout is not None and console.is_ascii(sys.stdout):
        signs = "ascii"
    elif sys.stdout is not None and console.has_colour(sys.stdout):
        signs = "colour"
    body = draw(drawn.panels, width, signs)
    name, facts = drawn.header
    if signs == "colour":
        return "\n".join(
            [click.style(name, bold=True), facts, "", console.ansi(body, width), *drawn.footer]
        )
    return "\n".join([name, facts, "", body.plain, *drawn.footer])


def require_slot(spec: Spec, layer: int, head: int | None) -> None:
    """Refuse a layer or head that the spec does not have."""
    for what, number, most in (("layer", layer, spec.layers), ("head", head, spec.heads)):
        if number is not None and most is not None and number >= most:
            raise click.UsageError(
                f"`{spec.name}` has {most} {what}{'' if most == 1 else 's'},"
                f" counted from 0, got --{what} {number}"
            )


def needed_inputs(spec: Spec, layer: int, head: int | None) -> set[str]:
    """The run-time inputs that the graphs of a layer, or of one of its heads, read."""
    heads = range(spec.heads or 1) if head is None else [head]
    attends = [spec.program.attend(layer, one) for one in heads]
    return {name for a in attends if a.graph is not None for name in inputs_of(a.graph)}
