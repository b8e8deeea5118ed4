"""Source text and positions in it: every syntax node and every message carries a `Span`."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True, eq=False)
class Source:
    """A text with the name that messages show for it.

    `text` is normalised: no byte order mark, line ends are "\\n". `path` is the file it came from,
    which imports are relative to; None for text that never was a file.
    """

    name: str
    text: str
    path: Path | None = None

    @cached_property
    def _line_starts(self) -> list[int]:
        starts = [0]
        for offset, character in enumerate(self.text):
            if character == "\n":
                starts.append(offset + 1)
        return starts

    def line_column(self, offset: int) -> tuple[int, int]:
        """Line and column of a character offset, both counted from 1, columns in characters."""
        line = bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    def line_text(self, line: int) -> str:
        """The text of a line (counted from 1) without its line end."""
        start = self._line_starts[line - 1]
        end = self.text.find("\n", start)
        return self.text[start:] if end < 0 else self.text[start:end]


@dataclass(frozen=True)
class Span:
    """A half-open range of characters `start:end` of one source."""

    source: Source
    start: int
    end: int

    @property
    def line(self) -> int:
        return self.source.line_column(self.start)[0]

    @property
    def column(self) -> int:
        return self.source.line_column(self.start)[1]

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    def to(self, other: Span) -> Span:
        """The span from the start of this one to the end of the other."""
        return Span(self.source, self.start, other.end)
