"""Pictures for the terminal: two cells in each character where colours or block signs allow.

Rows are queries, downwards; columns are keys, to the right. A sequence that fits is drawn pair by
pair, a longer one in square cells of several positions, each as dark as it is full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from rich.style import Style
from rich.text import Text

from attnspec.show.tally import Tally

Signs = Literal["colour", "blocks", "ascii"]
"""Coloured half blocks, block signs of one colour, or plain ASCII."""

WIDE = 36
"""Up to this many cells each takes two columns and a line of its own."""

GAP = "   "

_PANEL, _LATER, _SELF = (44, 47, 58), (27, 29, 36), (255, 176, 66)
_FAINT, _FULL = (62, 88, 138), (105, 185, 255)


@dataclass(frozen=True)
class Panel:
    """One picture with the lines above it."""

    title: tuple[str, ...]
    tally: Tally


def side_for(n: int, room: int) -> int:
    """The positions in a cell so that n of them fit into `room` columns: 2^i, 3 * 2^i or 5 * 2^i."""
    least = -(-n // max(1, room))
    power = 1
    while power * 2 <= least:
        power *= 2
    choices = [power, power * 5 // 4, power * 3 // 2, power * 2]
    return next(side for side in choices if side >= least)


def room_for(n: int, width: int) -> int:
    """How many columns of a terminal are left for cells beside labels and frame."""
    return max(4, width - len(str(max(0, n - 1))) - 3)


def draw(panels: Sequence[Panel], width: int, signs: Signs) -> Text:
    """The pictures beside each other where the width allows, else below each other, and a legend."""
    blocks = [[*map(Text, panel.title), *_picture(panel.tally, signs)] for panel in panels]
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
    legend = _legend([panel.tally for panel in panels], signs)
    if legend.plain:
        lines.extend([Text(), legend])
    return Text("\n").join(lines)


def _beside(blocks: Sequence[list[Text]], widths: Sequence[int]) -> Iterator[Text]:
    for index in range(max(len(block) for block in blocks)):
        line = Text()
        for block, width in zip(blocks, widths, strict=True):
            part = block[index] if index < len(block) else Text()
            if line.plain:
                line.append(GAP)
            line.append_text(part)
            line.append(" " * (width - part.cell_len))
        line.rstrip()
        yield line


# --- one picture -------------------------------------------------------------------------------


def _picture(tally: Tally, signs: Signs) -> list[Text]:
    """The frame with its ticks, and the cells inside."""
    if tally.n == 0:
        return [Text("no positions, so no pairs")]
    cells = tally.cells
    wide = 2 if cells <= WIDE else 1
    step = _tick_step(tally, wide)
    ticks = list(range(0, cells, step))
    labels = [str(tick * tally.side) for tick in ticks]
    margin = max(len(label) for label in labels) + 1
    top, across, corner, bar = ("+", "-", "+", "|") if signs == "ascii" else ("┴", "─", "┌", "│")
    left, right, low, end = ("+", "+", "+", "+") if signs == "ascii" else ("┤", "┐", "└", "┘")

    numbers, border = "", list(across * (cells * wide))
    for tick, label in zip(ticks, labels, strict=True):
        if tick * wide + len(label) <= cells * wide or tick == 0:
            numbers = numbers.ljust(tick * wide) + label
            border[tick * wide] = top
    edge = Style(dim=True) if signs == "colour" else Style()
    lines = [
        Text("query ↓  key →"),
        Text(" " * (margin + 1) + numbers),
        Text(" " * margin).append(corner + "".join(border) + right, edge),
    ]
    names = {tick: label for tick, label in zip(ticks, labels, strict=True)}
    for row, inside in _rows(tally, signs, wide):
        label = names.get(row, "")
        line = Text(label.rjust(margin - 1) + " ").append(left if label else bar, edge)
        lines.append(line.append_text(inside).append(bar, edge))
    lines.append(Text(" " * margin).append(low + across * (cells * wide) + end, edge))
    return lines


def _tick_step(tally: Tally, wide: int) -> int:
    """Cells between two ticks, so that labels stay apart and numbers stay round."""
    label = len(str(max(0, tally.n - 1)))
    least = max(label + 2, 5) / wide
    binary = tally.side > 1 or tally.n % 8 == 0
    steps = (2**i for i in range(32)) if binary else (m * 10**i for i in range(9) for m in (1, 2, 5))
    # rows come two to a line unless they are wide, and a label needs a line of its own
    return next(step for step in steps if step >= least and (wide == 2 or step % 2 == 0))


def _rows(tally: Tally, signs: Signs, wide: int) -> Iterator[tuple[int, Text]]:
    """The lines of a picture with the number of the first row of cells in each."""
    cells = tally.cells
    if signs == "colour":
        colours = _colours(tally)
        for row in range(0, cells, 1 if wide == 2 else 2):
            lower = None if wide == 2 or row + 1 == cells else colours[row + 1]
            yield row, _coloured(colours[row], lower, wide)
        return
    if wide == 2 or (signs == "ascii" and tally.side == 1):
        for row in range(cells):
            yield row, Text("".join(_sign(tally, row, column, signs, wide) for column in range(cells)))
        return
    for row in range(0, cells, 2):
        if tally.side == 1:
            kept = tally.density[row : row + 2] > 0
            yield row, Text("".join(_half(*pair) for pair in kept.T.tolist()))
        else:
            shares = tally.density[row : row + 2]
            later = tally.later[row : row + 2].all(axis=0)
            some = (~tally.later[row : row + 2]).sum(axis=0)
            mean = shares.sum(axis=0) / np.maximum(some, 1)
            yield row, Text(
                "".join(
                    _shade(share, off, signs) for share, off in zip(mean, later, strict=True)
                )
            )


def _half(upper: bool, lower: bool = False) -> str:
    return (" ", "▄", "▀", "█")[2 * upper + lower]


def _sign(tally: Tally, row: int, column: int, signs: Signs, wide: int) -> str:
    """One cell without colour; where pairs are drawn, what is not read is a dot."""
    share, later = float(tally.density[row, column]), bool(tally.later[row, column])
    if tally.side > 1:
        return _shade(share, later, signs) * wide
    if later:
        return " " * wide
    if signs == "ascii":
        return ("#" if share else ".").ljust(wide)
    return "█" * wide if share else "·".ljust(wide)


def _shade(share: float, later: bool, signs: Signs) -> str:
    if later:
        return " "
    level = 0 if share == 0 else 1 if share < 0.25 else 2 if share < 0.75 else 3 if share < 1 else 4
    return " .:+#"[level] if signs == "ascii" else " ░▒▓█"[level]


# --- colours -----------------------------------------------------------------------------------


def _colours(tally: Tally) -> np.ndarray:
    """uint8 [cells, cells, 3]."""
    share = tally.density[..., None]
    faint, full = np.array(_FAINT), np.array(_FULL)
    # square roots, so that a thin line in a large cell is still seen
    shaded = faint + (full - faint) * np.sqrt(share)
    colours = np.where(share > 0, shaded, np.array(_PANEL))
    colours = np.where(tally.later[..., None], np.array(_LATER), colours)
    if tally.side == 1:
        itself = np.eye(tally.cells, dtype=bool) & (tally.density > 0)
        colours[itself] = _SELF
    return np.asarray(colours, dtype=np.uint8)


def _style(foreground: Sequence[int] | None, background: Sequence[int] | None) -> Style:
    def name(colour: Sequence[int] | None) -> str | None:
        return None if colour is None else "#{:02x}{:02x}{:02x}".format(*colour)

    return Style(color=name(foreground), bgcolor=name(background))


def _coloured(upper: np.ndarray, lower: np.ndarray | None, wide: int) -> Text:
    line = Text()
    for column, colour in enumerate(upper.tolist()):
        if wide == 2:
            line.append("  ", _style(None, colour))
        else:
            line.append("▀", _style(colour, None if lower is None else lower[column].tolist()))
    return line


def _legend(tallies: Sequence[Tally], signs: Signs) -> Text:
    drawn = [tally for tally in tallies if tally.n]
    if not drawn:
        return Text()
    pairs, causal = drawn[0].side == 1, any(tally.later.any() for tally in drawn)
    entries: list[tuple[str, tuple[int, ...], str]]
    if signs == "colour":
        entries = [("██", _FULL, "reads" if pairs else "all of a cell")]
        if pairs:
            entries.append(("██", _SELF, "reads itself"))
        else:
            entries.append(("██", _FAINT, "a little of it"))
        entries.append(("██", _PANEL, "nothing"))
        if causal:
            entries.append(("██", _LATER, "later: ruled out by causal"))
        legend = Text("   ").join(
            Text(sign, _style(colour, None)).append(f" {text}") for sign, colour, text in entries
        )
    elif pairs:
        return Text()
    else:
        few, some, most, every = ".:+#" if signs == "ascii" else "░▒▓█"
        legend = Text(
            f"{few} below a quarter of a cell   {some} below three quarters   {most} below all   {every} all"
        )
    if not pairs:
        legend.append(f"   (a cell is {drawn[0].side:,} x {drawn[0].side:,} pairs)")
    return legend
