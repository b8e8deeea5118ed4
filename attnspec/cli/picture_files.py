"""Pictures in files: which kinds there are, and when one may be written."""

from __future__ import annotations

import os
from pathlib import Path

import click

from attnspec.cli.files import require_folder, write_result
from attnspec.cli.specs import shown_path
from attnspec.show.drawing import MAKER, sheet
from attnspec.show.figure import Figure
from attnspec.show.html import html
from attnspec.show.png import png
from attnspec.show.svg import svg

SUFFIXES = (".png", ".svg", ".html")


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
        content = png(sheet(found), found.name, about)
    elif suffix == ".svg":
        content = f"<!-- {MAKER} -->\n{svg(sheet(found), found.name, about)}\n"
    else:
        content = html(found)
    write_result(path, content, force=force or _is_ours(path))


def _is_ours(path: str) -> bool:
    """Whether a file is a picture of this command, which the next one may replace."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return MAKER.encode() in file.read(1000)
