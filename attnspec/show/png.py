"""Drawings by matplotlib, which comes with the extra `plot`: PNG, and pairs on a user's axes."""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from attnspec.show.drawing import (
    COLOURS,
    LEVELS,
    MAKER,
    Cells,
    Drawing,
    Fill,
    Item,
    Label,
    cells_of,
    opacity,
)
from attnspec.show.figure import Figure
from attnspec.text.diagnostics import AttnSpecError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DENSITY = 144
"""Pixels for an inch, two for a point."""

_SIDES = {"start": "left", "middle": "center", "end": "right"}


def png(drawing: Drawing, title: str, about: str) -> bytes:
    """A whole picture; `title` and `about` are kept in it as text. Raises AttnSpecError."""
    require_matplotlib("a .png")
    import matplotlib.style
    from matplotlib.figure import Figure as Canvas

    width, height = np.ceil(drawing.width), np.ceil(drawing.height)
    # a user's own settings must not change the bytes
    with matplotlib.style.context(["default", {"text.parse_math": False}]):
        canvas = Canvas(figsize=(width / 72, height / 72), dpi=DENSITY)
        axes = canvas.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        for order, item in enumerate(drawing.items):
            _add(axes, item, order)
        data = io.BytesIO()
        facts = {"Software": MAKER, "Title": title, "Description": about}
        canvas.savefig(data, format="png", dpi=DENSITY, metadata=facts)
    return data.getvalue()


def require_matplotlib(what: str) -> None:
    """Raises AttnSpecError where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise AttnSpecError(
            f'{what} needs matplotlib: pip install "attnspec[plot]"; .svg and .html need nothing'
        )


def plotted(found: Figure, axes: Axes | None) -> Axes:
    """The pairs of the first plot of a figure on axes, by default new ones: queries down, keys
    across, both in positions. Raises AttnSpecError."""
    require_matplotlib("`plot`")
    from matplotlib import pyplot

    if axes is None:
        axes = pyplot.subplots()[1]
    plot = found.plots[0]
    tally = plot.tally
    extent = (-0.5, tally.n - 0.5, tally.queries - 0.5, -0.5)
    if tally.density.size:
        axes.imshow(_pixels(cells_of(plot, 0, 0, 1)), extent=extent, interpolation="nearest")
    title = f"{found.name}, {plot.where}" if plot.where else found.name
    axes.set(title=title, xlabel="key", ylabel="query")
    return axes


def _add(axes: Axes, item: Item, order: int) -> None:
    """Put one item on top of those before it."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    if isinstance(item, Fill):
        paint = COLOURS[item.paint]
        place = (item.x, item.y)
        shape = Rectangle(place, item.width, item.height, color=paint, lw=0, zorder=order)
        axes.add_patch(shape)
    elif isinstance(item, Cells):
        rows, columns = (count * item.size for count in item.paints.shape)
        extent = (item.x, item.x + columns, item.y + rows, item.y)
        axes.imshow(_pixels(item), extent=extent, interpolation="nearest", zorder=order)
    elif isinstance(item, Label):
        axes.text(
            item.x,
            item.y,
            item.text,
            size=item.size,
            color=COLOURS[item.paint],
            family="DejaVu Sans Mono",
            weight="bold" if item.bold else "normal",
            ha=_SIDES[item.anchor],
            va="baseline",
            zorder=order,
        )
    else:
        ends = [item.x, item.to_x], [item.y, item.to_y]
        axes.add_line(Line2D(*ends, color=COLOURS[item.paint], lw=1, zorder=order))


def _pixels(item: Cells) -> np.ndarray:
    """uint8 [rows, columns, 4], clear where nothing is drawn."""
    colours = [bytes.fromhex(COLOURS[name][1:]) for name in item.names]
    table = np.array([[*colour, 255] for colour in colours])
    pixels = table[item.paints]
    shown = [round(255 * opacity(level)) for level in range(LEVELS + 1)]
    pixels[..., 3] = np.where(item.paints >= 0, np.array(shown)[item.levels], 0)
    return pixels.astype(np.uint8)
