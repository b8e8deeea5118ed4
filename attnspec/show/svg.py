"""Drawings as SVG: the same text for the same drawing, with no fonts, ids or dates in it."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from attnspec.show.drawing import COLOURS, LEVELS, Cells, Drawing, Fill, Item, Label, opacity

FONT = "'DejaVu Sans Mono', Menlo, Consolas, monospace"


def svg(drawing: Drawing, title: str, about: str) -> str:
    """A whole picture; `title` and `about` are for those who hear it."""
    width, height = (_number(np.ceil(side)) for side in (drawing.width, drawing.height))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" font-family="{FONT}"'
            ' style="max-width:100%;height:auto" role="img">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(about)}</desc>",
            *(line for item in drawing.items for line in _item(item)),
            "</svg>",
        ]
    )


def _item(item: Item) -> Iterator[str]:
    if isinstance(item, Fill):
        size = f'width="{_number(item.width)}" height="{_number(item.height)}"'
        yield f"<rect {_at(item.x, item.y)} {size} {_paint('fill', item.paint)}/>"
    elif isinstance(item, Cells):
        yield from _cells(item)
    elif isinstance(item, Label):
        anchor = f' text-anchor="{item.anchor}"' if item.anchor != "start" else ""
        weight = ' font-weight="bold"' if item.bold else ""
        yield (
            f'<text {_at(item.x, item.y)} font-size="{_number(item.size)}"{anchor}{weight}'
            f' xml:space="preserve" {_paint("fill", item.paint)}>{escape(item.text)}</text>'
        )
    else:
        path = f"M{_number(item.x)} {_number(item.y)}L{_number(item.to_x)} {_number(item.to_y)}"
        yield f'<path d="{path}" {_paint("stroke", item.paint)}/>'


def _cells(item: Cells) -> Iterator[str]:
    """A path for each paint and level; cells beside each other are one rectangle."""
    place = f"translate({_number(item.x)} {_number(item.y)}) scale({_number(item.size)})"
    yield f'<g transform="{place}" shape-rendering="crispEdges">'
    kinds = np.where(item.paints >= 0, item.paints * (LEVELS + 1) + item.levels, -1)
    paths: dict[int, list[str]] = {}
    for row, line in enumerate(kinds):
        borders = np.flatnonzero(np.diff(line)) + 1
        starts, stops = [0, *borders.tolist()], [*borders.tolist(), len(line)]
        for start, stop in zip(starts, stops, strict=True):
            wide = stop - start
            paths.setdefault(int(line[start]), []).append(f"M{start} {row}h{wide}v1h-{wide}z")
    for kind in sorted(kind for kind in paths if kind >= 0):
        paint, level = divmod(kind, LEVELS + 1)
        faint = f' fill-opacity="{_number(opacity(level))}"' if level < LEVELS else ""
        name = item.names[paint]
        yield f'<path d="{"".join(paths[kind])}" {_paint("fill", name)}{faint}/>'
    yield "</g>"


def _paint(what: str, name: str) -> str:
    # the class lets a page with a dark side choose another colour
    return f'class="{name}" {what}="{COLOURS[name]}"'


def _at(x: float, y: float) -> str:
    return f'x="{_number(x)}" y="{_number(y)}"'


def _number(value: float) -> str:
    return f"{round(float(value), 2):g}"
