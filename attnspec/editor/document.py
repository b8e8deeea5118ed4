"""A text as an editor holds it, right or wrong, and places in it as editors count them.

Editors count lines from 0 and columns in UTF-16 units; everything else here counts characters.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from attnspec.editor.symbols import Symbols
from attnspec.grammar.scanner import Scan, scan
from attnspec.text.decoding import source_of_bytes
from attnspec.text.diagnostics import SpecError
from attnspec.text.source import Source

Place = tuple[int, int]
"""A line and a column, as editors count them."""

MOST_FILES, MOST_FOLDERS = 256, 1024
"""The most specs of a folder that are known, and the most folders below it that are examined."""


@dataclass(frozen=True)
class Document:
    """One text; `path` is its file, which imports are relative to, None where there is none."""

    text: str
    path: Path | None = None

    @cached_property
    def source(self) -> Source:
        """The text as the language reads it, whatever characters it holds."""
        text = self.text.replace("\r\n", "\n").replace("\r", "\n")
        return Source(self.name, text, self.path)

    @property
    def name(self) -> str:
        """What messages call it."""
        return "<text>" if self.path is None else self.path.name

    def checked(self) -> Source:
        """The same for the compiler; raises SpecError for characters that no spec may hold."""
        return source_of_bytes(self.text.encode("utf-8", "replace"), self.name, self.path)

    @cached_property
    def scan(self) -> Scan:
        """Its words and brackets; none where it is beyond the limits of the language."""
        try:
            return scan(self.source)
        except SpecError:
            return Scan(self.source, enclosing=[-1])

    @cached_property
    def symbols(self) -> Symbols:
        """What its names stand for."""
        return Symbols(self.scan)

    def place(self, offset: int) -> Place:
        """Where a character is."""
        line, column = self.source.line_column(offset)
        return line - 1, _units(self.source.line_text(line)[: column - 1])

    def offset(self, place: Place) -> int:
        """The character at a place, the last of its line or of the text where it lies beyond."""
        lines = self.source.text.split("\n")
        line, units = place
        if line >= len(lines):
            return len(self.source.text)
        column = 0
        while column < len(lines[line]) and _units(lines[line][: column + 1]) <= units:
            column += 1
        return sum(len(each) + 1 for each in lines[:line]) + column

    def word_at(self, offset: int) -> int | None:
        """The number of the word that a place touches, the later one of two; None between words."""
        words = self.scan.words
        after = bisect_left(words, offset, key=lambda word: word.end)
        # neither of the two ends before the place
        near = [at for at in range(after, min(after + 2, len(words))) if words[at].start <= offset]
        named = [number for number in near if words[number].kind in ("name", "string")]
        return named[-1] if named else near[-1] if near else None

    def ends(self, word: int) -> tuple[int, int]:
        """The first character of a word and the one behind its last."""
        entry = self.scan.words[word]
        return entry.start, entry.end

    def imported(self, word: int) -> Document | None:
        """The file that the string of an import names, as it is on the disk, if there is one."""
        if self.path is None or word >= len(self.scan.words):
            return None
        path = self.path.parent / self.scan.words[word].text.strip('"')
        try:
            return Document(path.read_text(encoding="utf-8"), path)
        except (OSError, ValueError):
            return None

    def is_comment(self, offset: int) -> bool:
        """Whether a place lies in a comment, its end included."""
        line = self.source.text.rfind("\n", 0, offset) + 1
        return any(line <= comment.start < offset for comment in self.scan.comments)


def specs_below(folder: Path) -> list[Path]:
    """The specs of a folder and of those below it, in order; none of hidden folders and of those
    that hold packages of others."""
    paths: list[Path] = []
    for number, (at, folders, files) in enumerate(os.walk(folder)):
        folders[:] = sorted(name for name in folders if name[0] not in "._" and name not in _OTHERS)
        paths += [Path(at, name) for name in sorted(files) if name.endswith(".attn")]
        if number >= MOST_FOLDERS or len(paths) >= MOST_FILES:
            break
    return paths[:MOST_FILES]


_OTHERS = ("node_modules", "site-packages")


def _units(text: str) -> int:
    return len(text.encode("utf-16-le", "surrogatepass")) // 2
