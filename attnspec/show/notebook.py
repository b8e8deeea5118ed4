"""Specs in notebooks: a drawing at a short length beside their text."""

from __future__ import annotations

from html import escape

from attnspec.elaborate import Elaborated
from attnspec.graphs.bind import extents_of
from attnspec.ir.api_checks import length_of
from attnspec.ir.crossing import crossed
from attnspec.lower.mechanism_sizes import longest_of
from attnspec.show.panels import Sample
from attnspec.show.picture import Picture
from attnspec.text.diagnostics import AttnSpecError, InternalError

SHORT = 64
"""The length at which a spec is drawn where none is named."""


def picture_of(
    spec: Elaborated,
    n: int | None,
    layer: int | None = None,
    head: int | None = None,
    inputs: Sample | None = None,
    m: int | None = None,
) -> Picture:
    """The picture of a spec, its figure made, so that what is wrong is said at once.

    Raises AttnSpecError for a length, layer or head that the spec does not have.
    """
    program = spec.program
    if n is None:
        n = program.fixed_length or min(SHORT, longest_of(program) or SHORT)
    extents_of(*crossed(program, n, m))
    for what, number, most in (
        ("layer", layer, program.layer_count),
        ("head", head, program.head_count),
    ):
        if number is not None and not 0 <= number < most:
            raise AttnSpecError(f"{what} must be between 0 and {most - 1}, got {number}")
    picture = Picture(spec, length_of(n), layer, head, dict(inputs or {}), m)
    _ = picture.figure
    return picture


def drawing_of(spec: Elaborated) -> tuple[str | None, str]:
    """The drawing of a spec as SVG, or None and the reason why there is none."""
    try:
        return picture_of(spec, None)._repr_svg_(), ""
    except InternalError:
        raise
    except AttnSpecError as error:
        return None, str(error)


def html_of(spec: Elaborated) -> str:
    """The drawing with the text below it, or with why there is no drawing."""
    picture, reason = drawing_of(spec)
    above = picture or f"<p>Not drawn: {escape(reason.splitlines()[0])}</p>"
    return f"{above}\n<pre>{escape(spec.source)}</pre>"
