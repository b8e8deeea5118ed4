"""`attnspec show`: the pattern as a picture, in the terminal or in a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import click

from attnspec.cli import console, options
from attnspec.cli.failures import fitting
from attnspec.cli.files import require_folder, write_result
from attnspec.cli.specs import length_of, needed_inputs, read_inputs, shown_path, spec_at
from attnspec.show.drawing import MAKER
from attnspec.show.panels import first_drawn
from attnspec.show.picture import SUFFIXES, Picture
from attnspec.spec import Spec
from attnspec.text.diagnostics import count_of

DEFAULT_LENGTH = 64


@click.command("show")
@options.spec_argument
@options.length_option(DEFAULT_LENGTH)
@options.queries_option
@click.option(
    "--layer",
    metavar="I",
    callback=options.count,
    help="The layer, from 0; default the first that has pairs, in a file all distinct layers.",
)
@options.head_option
@click.option(
    "-o",
    "output",
    metavar="FILE",
    help="Write a .svg, a .html, which is an interactive page, or a .png, which needs"
    ' `pip install "attnspec[plot]"`.',
)
@options.force_option
@options.input_option
@options.name_option
@options.set_option
def command(
    spec: str,
    length: int | None,
    queries: int | None,
    layer: int | None,
    head: int | None,
    output: str | None,
    force: bool,
    inputs: Mapping[str, str],
    name: str | None,
    parameters: Mapping[str, str],
) -> None:
    """Draw which query reads which key, in the terminal or in a file.

    Rows are queries, columns are keys. Without --head, each distinct head of the layer is drawn. A
    sequence too long for the terminal is drawn in cells: the fuller a cell, the more of its pairs
    are in the graph. Data-dependent graphs show one random sample. A file shows the heads of all
    layers, and each pair has the colour of the pattern that contains it. A page (.html, which needs
    no network) also explains why each pair is in the graph.

    Example: attnspec show longformer -n 256 --set radius=16 -o longformer.html
    """
    if output is not None:
        require_target(output, spec)
    loaded = spec_at(spec, name, parameters)
    n = length_of(loaded.program, length, DEFAULT_LENGTH)
    require_slot(loaded, layer, head)
    if output is not None:
        picture = picture_of(loaded, n, layer, head, inputs, queries)
        with fitting():
            content = picture.content(Path(output).suffix.lower())
        # a picture that this command drew is replaced
        is_ours = lambda data: MAKER.encode() in data[:1000]  # noqa: E731
        write_result(output, content, force=force, is_ours=is_ours)
        console.say(f"wrote {shown_path(output)}")
        return
    if layer is None:
        # inputs that other layers read are not asked for
        layer = first_drawn(loaded.program)
    signs = console.signs()
    with fitting():
        picture = picture_of(loaded, n, layer, head, inputs, queries)
        figure, text = picture.text(console.width(), signs)
    title = click.style(figure.name, bold=True) if signs == "colour" else figure.name
    console.result("\n".join([title, figure.about, "", console.styled(text), *figure.footer]))


def picture_of(
    spec: Spec,
    n: int,
    layer: int | None,
    head: int | None,
    inputs: Mapping[str, str],
    m: int | None = None,
) -> Picture:
    layers = range(spec.layers) if layer is None else [layer]
    arrays = read_inputs(spec, inputs, needed_inputs(spec, layers, head), n)
    return Picture(spec.elaborated, n, layer, head, arrays, m)


def require_slot(spec: Spec, layer: int | None, head: int | None) -> None:
    """Refuse a layer or head that the spec does not have."""
    for what, number, most in (("layer", layer, spec.layers), ("head", head, spec.heads)):
        if number is not None and most is not None and number >= most:
            raise click.UsageError(
                f"`{spec.name}` has {count_of(most, what)}, counted from 0, got --{what} {number}"
            )


def require_target(path: str, spec: str) -> None:
    """Refuse what cannot become a picture, before anything is computed.

    Raises click.UsageError for another suffix and for the spec itself; OSError where there is no
    folder.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise click.UsageError(
            f"a picture is a file of {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]},"
            f" got {shown_path(path)!r}"
        )
    require_folder(path)
    if spec != "-" and os.path.exists(path) and os.path.samefile(path, spec):
        raise click.UsageError(f"the output is the spec itself: {shown_path(path)}")
