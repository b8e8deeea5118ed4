"""Figures as one page for a browser: it says of each pair that is pointed at why it is read."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import escape
from importlib import resources

import numpy as np

from attnspec.show.drawing import COLOURS, MAKER, Cells, Key, legend, one_plot, scale
from attnspec.show.figure import Figure, Plot
from attnspec.show.reached import Reach
from attnspec.show.svg import svg

LATER, NONE = -2, -1
"""What stands in place of a set of terms where a cell has no pairs."""


def html(found: Figure, reach: Reach | str | None = None) -> str:
    """The whole page, which needs nothing outside itself; with what is reached, or why that is not
    known, below the pictures."""
    template = resources.files("attnspec.show").joinpath("page.html").read_text(encoding="utf-8")
    # `<` would end the script
    known = None if isinstance(reach, str) else reach
    data = json.dumps({**_data(found), "reach": _reach_data(known)}, separators=(",", ":")).replace(
        "<", "\\u003c"
    )
    parts = {
        "maker": MAKER,
        "title": escape(found.name),
        "about": escape(found.about),
        "plots": "\n".join(_figure(found, plot) for plot in found.plots),
        "legend": "\n".join(_key(key) for key in legend(found)),
        "notes": "\n".join(f"<p>{escape(t)}</p>" for t in (scale(found), *found.footer) if t),
        "reached": "" if reach is None else section(found, reach),
        "data": data,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _figure(found: Figure, plot: Plot) -> str:
    heading = f"<h2>{escape(plot.where)}</h2>" if plot.where else ""
    lines = "<br>".join(escape(line) for line in plot.lines)
    title = f"{found.name}, {plot.where}" if plot.where else found.name
    picture = svg(one_plot(plot), title, ", ".join(plot.lines))
    return f"<figure>\n<figcaption>{heading}{lines}</figcaption>\n{picture}\n</figure>"


def _key(key: Key) -> str:
    square = f'<rect width="12" height="12" class="{key.paint}" fill="{COLOURS[key.paint]}"/>'
    return (
        f'<li><svg width="12" height="12" aria-hidden="true">{square}</svg> {escape(key.text)}</li>'
    )


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


def _reach_data(reach: Reach | None) -> dict[str, object] | None:
    """The same of what is reached, each run (length, layers), and graphs by progressions."""
    if reach is None:
        return None
    return {
        "hops": _runs(reach.hops),
        "graphs": reach.graphs,
        "layers": reach.layers,
        "paints": {paint: COLOURS[paint] for paint in ("ink", "term0")},
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


# --- what is reached ------------------------------------------------------------------------------


def section(found: Figure, reach: Reach | str) -> str:
    """What is reached, as a part of the page; of what is not known the reason."""
    if isinstance(reach, str):
        return _section(f'<p class="about">Not shown: {escape(reach)}.</p>')
    n, most = found.plots[0].tally.n, max(1, int(reach.hops.max()))
    drawing = one_plot(_empty(found.plots[0]))
    picture = svg(drawing, f"{found.name}, what is reached", "layers until a key is read")
    whose = "" if reach.side == 1 else " of the last query of each row of cells"
    what = "a key" if reach.side == 1 else "a key of a cell"
    controls = (
        '<p><label for="layers">layers</label> '
        f'<input id="layers" type="range" min="0" max="{most}" value="1" step="1">'
        ' <output id="count" for="layers"></output></p>\n<p id="share"></p>'
    )
    ends = "".join(
        f'<label>{name} <input id="{name}" type="number" min="0" max="{n - 1}" step="1"></label> '
        for name in ("query", "key")
    )
    way = (
        f"<fieldset><legend>Path</legend>{ends}"
        '<button type="button" id="forget">Forget</button></fieldset>\n'
        '<p class="about">Click on a query, then on a key, or press Enter on each; Escape forgets'
        ' them.</p>\n<ol id="path" aria-live="polite"></ol>'
    )
    if reach.no_paths:
        way = f'<p class="about">No paths: {escape(reach.no_paths)}.</p>'
    return _section(
        f'<p class="about">Layers{whose} until {what} is read, the darker the fewer.</p>\n'
        f'<div class="beside">\n<div id="reach">{picture}</div>\n'
        f'<div class="controls">\n{controls}\n{way}\n</div>\n</div>'
    )


def _section(body: str) -> str:
    heading = '<h2 id="reached">What is reached</h2>'
    return f'<section aria-labelledby="reached">\n{heading}\n{body}\n</section>'


def _empty(plot: Plot) -> Plot:
    """The frame of a plot without its pairs."""
    none = np.zeros_like(plot.tally.density)
    blank = replace(plot.tally, density=none)
    return replace(plot, tally=blank, leading=np.full_like(plot.leading, -1), formula=None)
