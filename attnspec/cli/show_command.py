"""`attnspec show`: the pattern as a picture, in the terminal or in a file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from attnspec.cli import console, options
from attnspec.cli.failures import LimitReached, fitting
from attnspec.cli.files import require_folder, write_result
from attnspec.cli.specs import length_of, needed_inputs, read_inputs, shown_path, spec_at
from attnspec.elaborate import Elaborated
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import decides
from attnspec.ir.crossing import crossed
from attnspec.show import drawing
from attnspec.show.figure import Figure, figure
from attnspec.show.html import html
from attnspec.show.panels import has_graph, sheet
from attnspec.show.png import png
from attnspec.show.svg import svg
from attnspec.show.tally import TooLong
from attnspec.show.terminal import draw
from attnspec.spec import Spec

DEFAULT_LENGTH = 64

SUFFIXES = (".png", ".svg", ".html")


@click.command("show")
@options.spec_argument
@options.length_option(DEFAULT_LENGTH)
@options.queries_option
@click.option(
    "--layer",
    metavar="I",
    callback=options.count,
    help="The layer, from 0; if not given, the first that has pairs, in a file all that differ.",
)
@options.head_option
@click.option(
    "-o",
    "output",
    metavar="FILE",
    help="Write a .png, .svg or .html instead; the last says why each pair is.",
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

    Rows are queries, columns are keys. Without --head, all heads of the layer that differ from each
    other are drawn. A sequence too long for the terminal is drawn in cells, each as bright as it is
    full. Of graphs that tensors decide a sample is drawn. In a file, the heads of all layers are
    drawn, each pair in the colour of the term that has it.

    Example: attnspec show longformer.attn -n 256 --set radius=16 -o longformer.html
    """
    if output is not None:
        require_target(output, spec)
    loaded = spec_at(spec, name, parameters)
    n = length_of(loaded.program, length, DEFAULT_LENGTH)
    require_slot(loaded, layer, head)
    if output is not None:
        write_picture(output, drawn(loaded, n, layer, head, inputs, queries), force=force)
        console.say(f"wrote {shown_path(output)}")
        return
    if layer is None:
        layers = range(loaded.program.layers or 1)
        layer = next((each for each in layers if has_graph(loaded.program, each)), 0)
    console.result(picture(loaded, n, layer, head, inputs, queries))


def drawn(
    spec: Spec,
    n: int,
    layer: int | None,
    head: int | None,
    inputs: Mapping[str, str],
    m: int | None = None,
) -> Figure:
    """What a picture in a file shows."""
    layers = range(spec.layers) if layer is None else [layer]
    given = read_inputs(spec, inputs, needed_inputs(spec, layers, head), n)
    with fitting(), in_time():
        elaborated, length = crossed_at(spec, n, m)
        known = samples(spec, n, layers, given)
        return figure(elaborated, length, layer=layer, head=head, inputs=given, known=known)


def picture(
    spec: Spec,
    n: int,
    layer: int,
    head: int | None,
    inputs: Mapping[str, str],
    m: int | None = None,
) -> str:
    """The whole text of a picture for standard output, with colours where it shows them."""
    width = console.width()
    given = read_inputs(spec, inputs, needed_inputs(spec, [layer], head), n)
    with fitting(), in_time():
        elaborated, length = crossed_at(spec, n, m)
        known = samples(spec, n, [layer], given)
        drawn = sheet(
            elaborated, length, layer=layer, head=head, inputs=given, width=width, known=known
        )
    signs = console.signs()
    body = console.styled(draw(drawn.panels, width, signs))
    name, facts = drawn.header
    name = click.style(name, bold=True) if signs == "colour" else name
    return "\n".join([name, facts, "", body, *drawn.footer])


def crossed_at(spec: Spec, n: int, m: int | None) -> tuple[Elaborated, int]:
    """The spec for n keys and m queries, and the length that holds both."""
    program, length = crossed(spec.program, n, m)
    return replace(spec.elaborated, program=program), length


def samples(
    spec: Spec, n: int, layers: Sequence[int], inputs: Mapping[str, np.ndarray]
) -> Mapping[tuple[int, int], Relation]:
    """What tensors that are drawn decide, where they decide something."""
    graphs = (attend.graph for attend in spec.program.attends)
    if not any(graph is not None and decides(graph) for graph in graphs):
        return {}
    if spec.program.cross:
        # the stack says which graph is decided, and what shows its pairs
        return {}
    # torch takes long to load, and most pictures need none
    from attnspec.compile.decided import sample_pairs

    return sample_pairs(spec.program, n, layers, inputs)


@contextmanager
def in_time() -> Iterator[None]:
    """A picture that would take too long reaches a limit of the compiler."""
    try:
        yield
    except TooLong as error:
        raise LimitReached(str(error)) from None


def require_slot(spec: Spec, layer: int | None, head: int | None) -> None:
    """Refuse a layer or head that the spec does not have."""
    for what, number, most in (("layer", layer, spec.layers), ("head", head, spec.heads)):
        if number is not None and most is not None and number >= most:
            raise click.UsageError(
                f"`{spec.name}` has {most} {what}{'' if most == 1 else 's'},"
                f" counted from 0, got --{what} {number}"
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


def write_picture(path: str, found: Figure, *, force: bool) -> None:
    """Write a figure as what the file's suffix says; raises OSError.

    A picture that this command drew is replaced, anything else only by `force`.
    """
    suffix = Path(path).suffix.lower()
    about = "; ".join([found.about, *(", ".join([p.where, *p.lines]) for p in found.plots)])
    content: str | bytes
    if suffix == ".png":
        content = png(drawing.sheet(found), found.name, about)
    elif suffix == ".svg":
        content = f"<!-- {drawing.MAKER} -->\n{svg(drawing.sheet(found), found.name, about)}\n"
    else:
        content = html(found)
    write_result(path, content, force=force or _is_ours(path))


def _is_ours(path: str) -> bool:
    """Whether a file is a picture of this command, which the next one may replace."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return drawing.MAKER.encode() in file.read(1000)
