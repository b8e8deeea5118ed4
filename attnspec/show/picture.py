"""The picture of a spec at one length, wherever it is shown: terminal, notebook or file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from rich.text import Text

from attnspec.check.verdicts import judge
from attnspec.elaborate import Elaborated
from attnspec.graphs.stack import decides
from attnspec.ir.crossing import crossed
from attnspec.show import drawing
from attnspec.show.figure import Figure, figure
from attnspec.show.html import html
from attnspec.show.panels import Known, Sample, first_drawn
from attnspec.show.png import png
from attnspec.show.svg import svg
from attnspec.show.terminal import Signs, draw

SUFFIXES = (".png", ".svg", ".html")
"""What a picture may be saved as."""

WIDTH = 80
"""Columns of a picture as text."""


@dataclass(frozen=True)
class Picture:
    """Which query reads which key at n positions: of one layer, one head, or all that differ.

    `str` is text for a terminal, of one layer; a notebook shows the drawing; `save` writes .svg,
    .png, or .html, a page to point at that says more. `inputs` is one sample of the run-time
    inputs, `m` the number of queries of a spec with `cross`, n where it is None.
    """

    spec: Elaborated = field(repr=False)
    n: int
    layer: int | None = None
    head: int | None = None
    inputs: Sample = field(default_factory=dict, repr=False)
    m: int | None = None

    @cached_property
    def _crossed(self) -> tuple[Elaborated, int]:
        """The spec for m queries, and the length that holds these and n keys."""
        program, length = crossed(self.spec.program, self.n, self.m)
        return replace(self.spec, program=program), length

    def text(self, width: int = WIDTH, signs: Signs = "blocks") -> tuple[Figure, Text]:
        """The figure of one layer in so many columns, the first that has pairs if none is named,
        and what is drawn of it."""
        layer = first_drawn(self.spec.program) if self.layer is None else self.layer
        figure = self._figure(layer, width)
        return figure, draw(figure.plots, width, signs)

    def __str__(self) -> str:
        figure, body = self.text()
        return "\n".join([figure.name, figure.about, "", body.plain, *figure.footer])

    @cached_property
    def figure(self) -> Figure:
        """What a file shows."""
        return self._figure(self.layer)

    def _figure(self, layer: int | None, width: int | None = None) -> Figure:
        spec, length = self._crossed
        layers = range(spec.program.layer_count) if layer is None else [layer]
        known = self._samples(layers)
        return figure(spec, length, layer, self.head, self.inputs, known, width)

    def _samples(self, layers: Sequence[int]) -> Known:
        """What tensors that are drawn decide, where they decide something."""
        if self.spec.program.cross:
            # the stack says which graph is decided, and what shows its pairs
            return {}
        if not any(map(decides, self.spec.program.graphs)):
            return {}
        # torch takes long to load, and most pictures need none
        from attnspec.compile.decided import sample_pairs

        return sample_pairs(self.spec.program, self.n, layers, self.inputs)

    @property
    def _about(self) -> str:
        plots = [", ".join([plot.where, *plot.lines]) for plot in self.figure.plots]
        return "; ".join([self.figure.about, *plots])

    def _repr_svg_(self) -> str:
        return svg(drawing.sheet(self.figure), self.figure.name, self._about)

    def content(self, suffix: str) -> str | bytes:
        """What a file of one of SUFFIXES holds."""
        if suffix == ".png":
            return png(drawing.sheet(self.figure), self.figure.name, self._about)
        if suffix == ".svg":
            return f"<!-- {drawing.MAKER} -->\n{self._repr_svg_()}\n"
        return html(self.figure, judge(self.spec.program))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a .png, .svg or .html file, in place of what is there.

        Raises ValueError for another suffix, OSError where nothing can be written there.
        """
        suffix = Path(path).suffix.lower()
        if suffix not in SUFFIXES:
            suffixes = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
            raise ValueError(f"a picture is saved as {suffixes}, got {os.fspath(path)!r}")
        content = self.content(suffix)
        data = content if isinstance(content, bytes) else content.encode("utf-8")
        try:
            Path(path).write_bytes(data)
        except OSError as error:
            message = f"the picture cannot be written there, {error.strerror or error}"
            raise type(error)(error.errno, message, os.fspath(path)) from None
