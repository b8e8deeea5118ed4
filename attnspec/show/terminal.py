"""Pictures for the terminal: two cells in each character where colours or block signs allow.

Rows are queries, downwards; columns are keys, to the right. A sequence that fits is drawn pair by
pair, a longer one in square cells of several positions, each as dark as it is full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from typing import Literal

import numpy as np
from rich.style import Style
from rich.text import Text

from attnspec.show.figure import Plot
from attnspec.show.tally import Tally, room_for, tick_step

Signs = Literal["colour", "blocks", "ascii"]
"""Coloured half blocks, block signs of one colour, or plain ASCII."""

WIDE = 36
"""Up to this many cells each takes two columns and a line of its own."""

GAP = "   "

_PANEL, _LATER, _SELF = (44, 47, 58), (27, 29, 36), (255, 176, 66)
_FAINT, _FULL = (62, 88, 138), (105, 185, 255)


def draw(plots: Sequence[Plot], width: int, signs: Signs) -> Text:
    """The pictures beside each other where the width allows, else below, and a legend."""
    blocks = [[*map(Text, _title(plot)), *_picture(plot, width, signs)] for plot in plots]
    widths = [max(line.cell_len for line in block) for block in blocks]
    lines: list[Text] = []
    start = 0
    while start < len(blocks):
        end, used = start + 1, widths[start]
        while end < len(blocks) and used + len(GAP) + widths[end] <= width:
            used += len(GAP) + widths[end]
            end += 1
        if lines:
            lines.append(Text())
        lines.extend(_beside(blocks[start:end], widths[start:end]))
        start = end
    drawn = [plot.tally for plot in plots if plot.tally.density.size]
    halves = any(_cell_width(each, width) == 1 for each in drawn)
    legend = _legend(drawn, signs, halves)
    if legend.plain:
        lines.extend([Text(), legend])
    return Text("\n").join(lines)


def _title(plot: Plot) -> list[str]:
    """The lines above a picture; one that stands alone has its figures in one line."""
    if plot.where:
        return [plot.where, *plot.lines]
    return [", ".join(plot.lines[:2]), *plot.lines[2:]]


def _beside(blocks: Sequence[list[Text]], widths: Sequence[int]) -> Iterator[Text]:
    for parts in zip_longest(*blocks, fillvalue=Text()):
        line = Text()
        for part, width in zip(parts, widths, strict=True):
            if line.plain:
                line.append(GAP)
            line.append_text(part)
            line.append(" " * (width - part.cell_len))
        line.rstrip()
        yield line


# --- one picture -------------------------------------------------------------------------------


def _picture(plot: Plot, width: int, signs: Signs) -> list[Text]:
    """The frame with its ticks, and the cells inside."""
    tally = plot.tally
    if not tally.density.size:
        return [Text("no positions, so no pairs")]
    cells = tally.cells
    wide = _cell_width(tally, width)
    longest = max(0, tally.n - 1, tally.queries - 1)
    # rows may come two to a line, and a label needs a line of its own
    step = tick_step(tally, plot.period, max(len(str(longest)) + 2, 5) / wide, even=wide == 1)
    ticks = list(range(0, max(cells, tally.rows), step))
    labels = [str(tick * tally.side) for tick in ticks]
    margin = max(len(label) for label in labels) + 1
    top, across, corner, bar = ("+", "-", "+", "|") if signs == "ascii" else ("┴", "─", "┌", "│")
    left, right, low, end = ("+", "+", "+", "+") if signs == "ascii" else ("┤", "┐", "└", "┘")

    numbers, border = "", list(across * (cells * wide))
    for tick, label in zip(range(0, cells, step), labels, strict=False):
        if tick * wide + len(label) <= cells * wide or tick == 0:
            numbers = numbers.ljust(tick * wide) + label
            border[tick * wide] = top
    edge = Style(dim=True) if signs == "colour" else Style()
    lines = [
        Text("query ↓  key →"),
        Text(" " * (margin + 1) + numbers),
        Text(" " * margin).append(corner + "".join(border) + right, edge),
    ]
    names = dict(zip(ticks, labels, strict=True))
    for rows, inside in _rows(tally, signs, wide):
        label = next((names[row] for row in rows if row in names), "")
        line = Text(label.rjust(margin - 1) + " ").append(left if label else bar, edge)
        lines.append(line.append_text(inside).append(bar, edge))
    lines.append(Text(" " * margin).append(low + across * (cells * wide) + end, edge))
    return lines


def _cell_width(tally: Tally, width: int) -> int:
    """Columns of a cell: where one is enough, a line holds two rows of cells."""
    return 2 if tally.cells <= min(WIDE, room_for(tally.n, width) // 2) else 1


def _rows(tally: Tally, signs: Signs, wide: int) -> Iterator[tuple[range, Text]]:
    """The lines of a picture with the rows of cells that each shows."""
    cells = tally.cells
    single = wide == 2 or (signs == "ascii" and tally.side == 1)
    for first in range(0, tally.rows, 1 if single else 2):
        rows = range(first, min(tally.rows, first + (1 if single else 2)))
        if signs == "colour":
            yield rows, _coloured(_colours(tally, rows), wide)
        elif single:
            signed = (_sign(tally, first, column, signs, wide) for column in range(cells))
            yield rows, Text("".join(signed))
        else:
            shares = tally.density[rows.start : rows.stop].T.tolist()
            yield rows, Text("".join(_pair(pair, signs) for pair in shares))


def _sign(tally: Tally, row: int, column: int, signs: Signs, wide: int) -> str:
    """A cell with a line of its own; where pairs are drawn, one that is not read is a dot."""
    share = float(tally.density[row, column])
    if tally.side > 1:
        return _shade(share, signs) * wide
    if tally.later[row, column]:
        return " " * wide
    if signs == "ascii":
        return ("#" if share else ".").ljust(wide)
    return "█" * wide if share else "·".ljust(wide)


def _pair(shares: Sequence[float], signs: Signs) -> str:
    """A cell and the one below it in one character."""
    upper, lower = shares[0], shares[-1] if len(shares) > 1 else 0.0
    if signs == "blocks" and {upper, lower} == {0.0, 1.0}:
        return "▀" if upper else "▄"
    return _shade(sum(shares) / len(shares), signs)


def _shade(share: float, signs: Signs) -> str:
    level = 0 if share == 0 else 1 if share < 0.25 else 2 if share < 0.75 else 3 if share < 1 else 4
    return (" .:+#" if signs == "ascii" else " ░▒▓█")[level]


# --- colours -----------------------------------------------------------------------------------


def _colours(tally: Tally, rows: range) -> np.ndarray:
    """uint8 [rows, cells, 3]."""
    part = np.s_[rows.start : rows.stop]
    share = tally.density[part, :, None]
    faint, full = np.array(_FAINT), np.array(_FULL)
    # square roots, so that a thin line in a large cell is still seen
    shaded = faint + (full - faint) * np.sqrt(share)
    colours = np.where(share > 0, shaded, np.array(_PANEL))
    colours = np.where(tally.later[part, :, None], np.array(_LATER), colours)
    if tally.side == 1:
        for place, row in enumerate(rows):
            if row < tally.cells and tally.density[row, row]:
                colours[place, row] = _SELF
    return np.asarray(colours, dtype=np.uint8)


def _hex(colour: Sequence[int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _coloured(colours: np.ndarray, wide: int) -> Text:
    """One or two rows of cells; a run of equal cells is one span, so that little is sent."""
    line = Text()
    columns = colours.transpose(1, 0, 2).tolist()
    for column, run in groupby(columns):
        length = sum(1 for _ in run)
        upper, lower = _hex(column[0]), _hex(column[1]) if len(column) > 1 else None
        if wide == 2:
            line.append("  " * length, Style(bgcolor=upper))
        else:
            line.append("▀" * length, Style(color=upper, bgcolor=lower))
    return line


def _legend(drawn: Sequence[Tally], signs: Signs, halves: bool) -> Text:
    """What the colours, shades and halves of signs mean; nothing where the picture speaks for
    itself. `halves` says that a line holds two rows of cells."""
    if not drawn:
        return Text()
    side, causal = drawn[0].side, any(tally.later.any() for tally in drawn)
    cell = f"a cell is {side:,} × {side:,} pairs: " if side > 1 else ""
    rows = "queries" if side == 1 else "rows of cells"
    if signs == "colour":
        itself = [(_FULL, "reads"), (_SELF, "reads itself")]
        entries = itself if side == 1 else [(_FAINT, "few"), (_FULL, "all")]
        entries.append((_PANEL, "none"))
        if causal:
            entries.append((_LATER, "later (causal)"))
        legend = Text(cell)
        for number, (colour, text) in enumerate(entries):
            legend.append("  " if number else "").append("██", Style(color=_hex(colour)))
            legend.append(f" {text}")
        return legend.append(f"\na line is two {rows}, one above the other" * halves)
    few, some, most, every = ".:+#" if signs == "ascii" else "░▒▓█"
    parts = []
    if halves and side == 1 and signs == "blocks":
        parts.append("a line is two queries: ▀ the upper reads the key, ▄ the lower, █ both")
    if side > 1:
        parts.append(f"{cell}{few} few  {some} from 1/4  {most} from 3/4  {every} all")
    if halves and side > 1:
        alone = ", ▀ all of the upper alone, ▄ of the lower" if signs == "blocks" else ""
        parts.append(f"a line is two rows of cells, counted together{alone}")
    return Text("\n".join(parts))
