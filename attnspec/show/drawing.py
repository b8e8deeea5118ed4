"""Figures as shapes on a sheet: what SVG, PNG and HTML have in common.

Lengths are in points, x to the right and y downwards. Text is monospaced, so that its width is
known without a font. The colours are those of Okabe and Ito, which readers tell apart whatever
their eyes; the first ones differ in grey too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from attnspec.show.figure import Figure, Plot
from attnspec.show.tally import tick_step

MAKER = "attnspec show"
"""What files say of who drew them."""

COLOURS = {
    "paper": "#ffffff",
    "ink": "#1b2733",
    "quiet": "#56646f",
    "frame": "#8b98a3",
    "none": "#eceff1",
    "later": "#fafbfb",
    "rest": "#e3d7ee",
    "term0": "#0072b2",
    "term1": "#e69f00",
    "term2": "#009e73",
    "term3": "#d55e00",
    "term4": "#56b4e9",
    "term5": "#cc79a7",
    "others": "#3a3a3a",
}
"""Each paint by name, on white paper."""

TERMS = tuple(name for name in COLOURS if name.startswith("term"))

LEVELS = 8
"""Shades of a colour, by how full a cell is."""

WIDEST = 1240
"""The most points of a sheet with several plots in a row."""

_MARGIN, _GAP, _LINE = 24, 32, 17
_ADVANCE = 0.61
"""The width of a character, in font sizes: a little more than monospaced fonts have."""

_TITLE, _TEXT, _SMALL = 16, 11.5, 10
_SMALLEST, _LARGEST, _SIDE = 2, 32, 384
"""Points of a cell: at least, at most, and of the side of a plot in between."""


@dataclass(frozen=True)
class Fill:
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float
    paint: str


@dataclass(frozen=True)
class Cells:
    """Square cells of `size`: `paints` [rows, columns] are indices into `names`, -1 for none, and
    `levels` [rows, columns] from 1 to LEVELS say how strong."""

    x: float
    y: float
    size: float
    names: tuple[str, ...]
    paints: npt.NDArray[np.int64]
    levels: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stroke:
    """A line, one point wide."""

    x: float
    y: float
    to_x: float
    to_y: float
    paint: str


@dataclass(frozen=True)
class Label:
    """A line of text on its base line; `anchor` is the part of it that stands at x."""

    x: float
    y: float
    text: str
    size: float = _TEXT
    paint: str = "ink"
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


Item = Fill | Cells | Stroke | Label


@dataclass(frozen=True)
class Drawing:
    """Items on a sheet, those behind first."""

    width: float
    height: float
    items: tuple[Item, ...]


def opacity(level: int) -> float:
    """How much of its colour a cell of a level shows; the emptiest is still seen."""
    return 0.2 + 0.8 * level / LEVELS


def legend(found: Figure) -> list[tuple[str, str]]:
    """The paints of a figure that occur, each with what it means."""
    drawn = [plot for plot in found.plots if plot.tally.density.size]
    leading = {int(term) for plot in drawn for term in np.unique(plot.leading) if term >= 0}
    keys = [(TERMS[i], found.terms[i]) for i in sorted(leading) if i < len(TERMS)]
    if max(leading, default=0) >= len(TERMS):
        keys.append(("others", "other terms"))
    formulas = dict.fromkeys(plot.formula for plot in drawn if plot.formula is not None)
    if formulas:
        keys.append(("rest", f"{', '.join(f'`{name}`' for name in formulas)} alone"))
    plain = (plot for plot in drawn if plot.formula is None)
    if any(((plot.leading < 0) & ~plot.tally.later).any() for plot in plain):
        keys.append(("none", "not read"))
    if any(plot.tally.later.any() for plot in drawn):
        keys.append(("later", "later (causal)"))
    return keys


def scale(found: Figure) -> str:
    """What a cell is, where it is more than a pair."""
    side = found.plots[0].tally.side
    if side == 1:
        return ""
    text = f"a cell is {side:,} × {side:,} pairs, the stronger the fuller"
    several = len(found.terms) > 1
    return text + ", in the colour of the term with most of them" * several


def sheet(found: Figure) -> Drawing:
    """The whole figure: header, plots in rows, legend, footer."""
    plots = [one_plot(plot) for plot in found.plots]
    titles = [_titles(*pair) for pair in zip(found.plots, plots, strict=True)]
    wide = max(
        *(plot.width for plot in plots),
        *(_width(label.text, _TEXT) for lines in titles for label in lines),
    )
    columns = max(1, min(len(plots), int((WIDEST - 2 * _MARGIN + _GAP) // (wide + _GAP))))
    inner = max(columns * (wide + _GAP) - _GAP, 360)
    items: list[Item] = []
    y = float(_MARGIN)
    for line in _wrapped(found.name, inner, _TITLE):
        y += 20
        items.append(Label(_MARGIN, y - 4, line, _TITLE, bold=True))
    for line in _wrapped(found.about, inner, _TEXT):
        y += _LINE
        items.append(Label(_MARGIN, y - 2, line, paint="quiet"))
    for start in range(0, len(plots), columns):
        row = range(start, min(len(plots), start + columns))
        y += 14
        above = max(len(titles[i]) for i in row) * _LINE
        for column, i in enumerate(row):
            x = _MARGIN + column * (wide + _GAP)
            top = y + above - len(titles[i]) * _LINE
            items.extend(_moved(titles[i], x, top))
            items.extend(_moved(plots[i].items, x, y + above))
        y += above + max(plots[i].height for i in row)
    y += 10
    lines, y = _legend_lines(legend(found), inner, y)
    items.extend(lines)
    y += 4
    for note in (scale(found), *found.footer):
        for line in _wrapped(note, inner, _SMALL):
            y += 15
            items.append(Label(_MARGIN, y, line, _SMALL, "quiet"))
    width, height = inner + 2 * _MARGIN, y + _MARGIN
    return Drawing(width, height, (Fill(0, 0, width, height, "paper"), *items))


def _titles(plot: Plot, drawn: Drawing) -> list[Label]:
    """The lines above a plot, from its layers and heads to what stands beside its graph."""
    inner = max(drawn.width, _SIDE)
    heading = _wrapped(plot.where, inner, _TEXT)
    lines = [*heading, *(line for text in plot.lines for line in _wrapped(text, inner, _TEXT))]
    return [
        Label(0, (number + 1) * _LINE - 4, line, bold=number < len(heading))
        for number, line in enumerate(lines)
    ]


def _legend_lines(
    keys: Sequence[tuple[str, str]], inner: float, y: float
) -> tuple[list[Item], float]:
    """The legend in as many lines as it needs, and where it ends."""
    items: list[Item] = []
    x, low = 0.0, y
    for number, (paint, text) in enumerate(keys):
        lines = _wrapped(text, inner - 18, _SMALL, most=4)
        wide = 18 + max(_width(line, _SMALL) for line in lines)
        if number == 0 or x + wide > inner:
            x, y = 0.0, low + 16
        items.append(Fill(_MARGIN + x, y - 10, 12, 12, "frame"))
        items.append(Fill(_MARGIN + x + 0.5, y - 9.5, 11, 11, paint))
        for row, line in enumerate(lines):
            items.append(Label(_MARGIN + x + 18, y + 14 * row, line, _SMALL))
        low = max(low, y + 14 * (len(lines) - 1))
        x += wide + 16
    return items, low


def one_plot(plot: Plot) -> Drawing:
    """The cells of one plot in their frame, with ticks and their labels."""
    tally = plot.tally
    if not tally.density.size:
        text = "no positions, so no pairs"
        return Drawing(_width(text, _TEXT), 24, (Label(0, 18, text),))
    most = max(tally.rows, tally.cells)
    size = min(_LARGEST, max(_SMALLEST, _SIDE // most))
    wide, high = size * tally.cells, size * tally.rows
    longest = _width(f"{max(tally.n, tally.queries) - 1:,}", _SMALL)
    left, top = longest + 10, 34
    items: list[Item] = [
        Label(0, 12, "query ↓  key →", _SMALL, "quiet"),
        Fill(left, top, wide, high, "none" if plot.formula is None else "rest"),
        cells_of(plot, left, top, size),
    ]
    ends = ((0, 0, wide, 0), (0, high, wide, high), (0, 0, 0, high), (wide, 0, wide, high))
    items.extend(Stroke(left + a, top + b, left + c, top + d, "frame") for a, b, c, d in ends)
    right = left + wide
    for tick in range(0, most, tick_step(tally, plot.period, (longest + 12) / size)):
        label, at = f"{tick * tally.side:,}", (tick + (0.5 if tally.side == 1 else 0)) * size
        if tick < tally.rows:
            items.append(Stroke(left - 4, top + at, left, top + at, "frame"))
            items.append(Label(left - 6, top + at + 3.5, label, _SMALL, "quiet", "end"))
        if tick < tally.cells:
            items.append(Stroke(left + at, top - 4, left + at, top, "frame"))
            items.append(Label(left + at, top - 7, label, _SMALL, "quiet", "middle"))
            right = max(right, left + at + _width(label, _SMALL) / 2)
    return Drawing(max(right, _width("query ↓  key →", _SMALL)), top + high + 6, tuple(items))


def cells_of(plot: Plot, x: float, y: float, size: float) -> Cells:
    """The cells with pairs in their terms' colours, and those that are later."""
    names = (*TERMS, "others", "later")
    later = plot.tally.later
    # square roots, so that a thin line in a large cell is still seen
    levels = np.maximum(1, np.ceil(np.sqrt(plot.tally.density) * LEVELS)).astype(np.int64)
    paints = np.where(later, names.index("later"), np.minimum(plot.leading, len(TERMS)))
    return Cells(x, y, size, names, paints, np.where(later, LEVELS, levels))


def _moved(items: Sequence[Item], dx: float, dy: float) -> Iterator[Item]:
    for item in items:
        x, y = item.x + dx, item.y + dy
        if isinstance(item, Stroke):
            yield replace(item, x=x, y=y, to_x=item.to_x + dx, to_y=item.to_y + dy)
        else:
            yield replace(item, x=x, y=y)


def _width(text: str, size: float) -> float:
    return len(text) * size * _ADVANCE


def _wrapped(text: str, width: float, size: float, most: int | None = None) -> list[str]:
    """The lines of a text in a width, at most so many."""
    columns = max(16, int(width / (size * _ADVANCE)))
    return textwrap.wrap(text, columns, max_lines=most, placeholder=" …")
