"""Draws the picture of the README: `python -m attnspec.examples.picture zoo.svg`.

One square per pattern, query down, key across; what a query reads is dark. The text is the same for
the same specs, so that the picture changes only when a pattern does.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from attnspec.ir.program import ParameterValue
from attnspec.spec import Spec
from attnspec.text.decoding import read_source

SHOWN: tuple[tuple[str, dict[str, ParameterValue], int, int], ...] = (
    ("causal_window", {"keys": 12}, 64, 0),
    ("longformer", {"radius": 5, "globals": 2}, 64, 0),
    ("bigbird", {"block": 4, "r": 2}, 64, 0),
    ("sparse_strided", {}, 64, 1),
    ("sparse_fixed_merged", {"stride": 8, "cells": 2}, 64, 0),
    ("logsparse", {}, 64, 0),
    ("neighborhood_2d", {"height": 8, "width": 8, "size": 3}, 64, 0),
    ("block_diffusion", {}, 64, 0),
)
_CELL, _GAP, _HEAD = 3, 26, 34
_SIDE = 64 * _CELL
_COLUMNS = 4


@dataclass(frozen=True)
class Panel:
    """One pattern of the picture."""

    title: str
    mask: np.ndarray

    @property
    def caption(self) -> str:
        edges = int(self.mask.sum())
        return f"{edges:,} of {self.mask.size:,} pairs"


def drawn(panels: list[Panel]) -> str:
    """The SVG of the panels, row by row."""
    rows = -(-len(panels) // _COLUMNS)
    width = _COLUMNS * (_SIDE + _GAP) + _GAP
    height = rows * (_SIDE + _GAP + _HEAD) + _GAP // 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="ui-monospace, monospace">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for index, panel in enumerate(panels):
        x = _GAP + index % _COLUMNS * (_SIDE + _GAP)
        y = _HEAD + index // _COLUMNS * (_SIDE + _GAP + _HEAD)
        parts.extend(_panel(panel, x, y))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _panel(panel: Panel, x: int, y: int) -> list[str]:
    n = len(panel.mask)
    cell = _SIDE / n
    strokes: list[str] = []
    for row, line in enumerate(panel.mask):
        padded = np.diff(np.concatenate([[0], line.astype(np.int8), [0]]))
        starts, stops = np.flatnonzero(padded == 1), np.flatnonzero(padded == -1)
        for a, b in zip(starts.tolist(), stops.tolist(), strict=True):
            corner, side = f"M{a * cell:.4g} {row * cell:.4g}", (b - a) * cell
            strokes.append(f"{corner}h{side:.4g}v{cell:.4g}h{-side:.4g}z")
    return [
        f'<text x="{x}" y="{y - 16}" font-size="13" font-weight="bold" fill="#17324d">'
        f"{panel.title}</text>",
        f'<text x="{x}" y="{y - 4}" font-size="10" fill="#5b7083">{panel.caption}</text>',
        f'<g transform="translate({x} {y})">',
        f'<rect width="{_SIDE}" height="{_SIDE}" fill="#eef3f7"/>',
        f'<path d="{"".join(strokes)}" fill="#0b6e8f"/>',
        "</g>",
    ]


def panels() -> list[Panel]:
    """The panels of `SHOWN`, each from its file in the zoo."""
    found = []
    for name, parameters, n, head in SHOWN:
        with resources.as_file(resources.files("attnspec.examples") / f"{name}.attn") as path:
            spec = Spec(read_source(path), parameters=parameters)
        found.append(Panel(name, spec.mask(n, head=head)))
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(drawn(panels()), encoding="utf-8")
