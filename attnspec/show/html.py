"""Figures as one page for a browser: it says of each pair that is pointed at why it is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import escape
from importlib import resources

import numpy as np

from attnspec.check.verdicts import Verdict
from attnspec.show.drawing import COLOURS, MAKER, Cells, legend, one_plot, scale
from attnspec.show.figure import Figure, Plot
from attnspec.show.svg import svg

FEW = 3
"""The most plots that are drawn at their full size from the start."""

POINT = "Point at a cell, or go to a picture with Tab and use the arrow keys, to read what it is."
ENLARGE = "A click, or Enter, enlarges a picture and puts it back."

LATER, NONE = -2, -1
"""What stands in place of a set of terms where a cell has no pairs."""


def html(found: Figure, verdicts: Iterable[Verdict]) -> str:
    """The whole page, which needs nothing outside itself; `verdicts` are those on the claims."""
    many = len(found.plots) > FEW
    template = resources.files("attnspec.show").joinpath("page.html").read_text(encoding="utf-8")
    parts = {
        "maker": MAKER,
        "title": escape(found.name),
        "about": escape(found.about),
        "claims": "\n".join(map(_claim, verdicts)),
        "many": ' class="many"' if many else "",
        "help": f"{POINT} {ENLARGE}" if many else POINT,
        "plots": "\n".join(_figure(found, plot) for plot in found.plots),
        "legend": "\n".join(_key(paint, text) for paint, text in legend(found)),
        "notes": "\n".join(f"<p>{escape(t)}</p>" for t in (scale(found), *found.footer) if t),
        # `<` would end the script
        "data": json.dumps(_data(found), separators=(",", ":")).replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _figure(found: Figure, plot: Plot) -> str:
    heading = f"<h2>{escape(plot.where)}</h2>" if plot.where else ""
    lines = "".join(f"<span>{escape(line)}</span>" for line in plot.lines)
    title = f"{found.name}, {plot.where}" if plot.where else found.name
    drawn = one_plot(plot)
    picture = svg(drawn, title, ", ".join(plot.lines))
    size = f"--wide: {drawn.width:g}; --high: {drawn.height:g}"
    caption = f"<figcaption>{heading}{lines}</figcaption>"
    return f'<figure style="{size}">\n{caption}\n{picture}\n</figure>'


def _claim(verdict: Verdict) -> str:
    mark = {"proven": "✓", "checked": "✓", "refuted": "✗"}.get(verdict.status, "?")
    # what stands below a message's first line points into the text, which the page does not show
    messages = [found.message for found in verdict.diagnostics] or [str(verdict)]
    text = re.sub("`([^`]*)`", r"<code>\1</code>", escape(" ".join(messages)))
    return f"<li>{mark} {text}</li>"


def _key(paint: str, text: str) -> str:
    size = 'width="12" height="12"'
    square = f'<rect {size} class="{paint}" fill="{COLOURS[paint]}"/>'
    return f'<li><svg {size} aria-hidden="true">{square}</svg> {escape(text)}</li>'


def _data(found: Figure) -> dict[str, object]:
    """What the script reads: the runs of equal cells of each row, each (length, set of terms or
    LATER or NONE, pairs)."""
    first = found.plots[0].tally
    return {
        "n": first.n,
        "queries": first.queries,
        "side": first.side,
        "grid": list(found.grid),
        "terms": list(found.terms),
        "plots": [_plot_data(plot) for plot in found.plots],
    }


def _plot_data(plot: Plot) -> dict[str, object]:
    tally = plot.tally
    flat = plot.having.reshape(tally.density.size, len(plot.terms))
    sets, which = np.unique(flat, axis=0, return_inverse=True)
    number = np.where(tally.density > 0, which.reshape(tally.density.shape), NONE)
    number = np.where(tally.later, LATER, number)
    pairs = np.rint(tally.density * tally.allowed).astype(np.int64)
    square = next((item for item in one_plot(plot).items if isinstance(item, Cells)), None)
    return {
        "formula": plot.formula,
        "sampled": tally.sampled > 0,
        "square": [0, 0, 1] if square is None else [square.x, square.y, square.size],
        "sets": [np.array(plot.terms)[one].tolist() for one in sets],
        "allowed": _runs(tally.allowed),
        "rows": _runs(number, pairs),
    }


def _runs(*layers: np.ndarray) -> list[list[int]]:
    """For each row the runs in which all layers are constant: length, then each layer's value."""
    rows = []
    for lines in zip(*layers, strict=True):
        stacked = np.stack(lines)
        borders = np.flatnonzero((np.diff(stacked) != 0).any(axis=0)) + 1
        starts = np.concatenate([[0], borders]).astype(np.int64)
        lengths = np.diff(np.append(starts, stacked.shape[1]))
        rows.append(np.stack([lengths, *stacked[:, starts]], axis=1).reshape(-1).tolist())
    return rows
