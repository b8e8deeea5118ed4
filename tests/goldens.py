"""Golden files: texts that a test compares with, named after the test."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

import pytest

EVERY_ITEM = pytest.StashKey[tuple[pytest.Item, ...]]()
"""All collected tests, those included that -k and -m leave out."""


def golden_stem(item: pytest.Item) -> Path:
    """`<test file>/<test name>`: where a test's golden files lie, less their suffix."""
    return Path(item.path.stem) / re.sub(r"[^\w.,=\[\]-]", "_", item.name)


@dataclass(frozen=True)
class Golden:
    """Called with a text, compares it with the file `stem + suffix`, or writes that file."""

    stem: Path
    update: bool

    def path(self, suffix: str = ".txt") -> Path:
        return self.stem.with_name(self.stem.name + suffix)

    def __call__(self, text: str, suffix: str = ".txt") -> None:
        path = self.path(suffix)
        if self.update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
            return
        if not path.exists():
            pytest.fail(f"{path} does not exist; --update-golden writes it, then read it")
        approved = path.read_text(encoding="utf-8")
        lines = unified_diff(approved.splitlines(), text.splitlines(), "approved", "now", "", "", 1)
        assert text == approved, "\n".join(lines)

    def entries(self, answer: Callable[[str], tuple[str, Sequence[str]]]) -> None:
        """Ask every entry of the file anew.

        An entry is a line at the margin, which says what is asked and what must come of it, and
        below it, indented, the words of the answer. `answer` takes such a line and gives both. Only
        words are written anew: what must come of it is changed by hand. Lines that begin with `# `
        and empty ones are titles.
        """
        lines: list[str] = []
        wrong: dict[str, str] = {}
        for line in self.path().read_text(encoding="utf-8").rstrip("\n").split("\n"):
            if line.startswith("    "):
                continue
            lines.append(line)
            if line and not line.startswith("# "):
                made, words = answer(line)
                lines += [f"    {each}".rstrip() or "    ." for each in words]
                if made != line:
                    wrong[line] = made
        assert not wrong, wrong
        self("\n".join(lines) + "\n")

    def calls(self, ask: Callable[[str], tuple[str, object]]) -> None:
        """Ask every entry `KIND: CALL` of the file anew.

        `ask` gives the kind of a call and its words; the kind of one that this package refuses is
        "refused", and its words are those of the error.
        """

        def answer(line: str) -> tuple[str, Sequence[str]]:
            call = line.partition(": ")[2]
            try:
                kind, words = ask(call)
            except (ValueError, TypeError) as error:
                kind, words = "refused", error
            return f"{kind}: {call}", str(words).splitlines()

        self.entries(answer)


def orphans(folder: Path, stems: Iterable[Path], test_files: Iterable[Path]) -> list[Path]:
    """Files below `folder` that no test compares with.

    `stems` are those of the collected tests that use golden files, `test_files` the files that were
    collected in full: a folder is judged if its test file was collected or does not exist.
    """
    owned, collected = {folder / stem for stem in stems}, {path.stem for path in test_files}
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        owner = path.relative_to(folder).parts[0]
        names = {path.with_name(path.name[:i]) for i, c in enumerate(path.name) if c == "."}
        is_judged = owner in collected or not any(folder.parent.rglob(f"{owner}.py"))
        if is_judged and owned.isdisjoint(names):
            found.append(path)
    return found
