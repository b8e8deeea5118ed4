"""Golden files: texts that a test compares with, named after the test."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
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

    def __call__(self, text: str, suffix: str = ".txt") -> None:
        path = self.stem.with_name(self.stem.name + suffix)
        if self.update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
            return
        if not path.exists():
            pytest.fail(f"{path} does not exist; --update-golden writes it, then read it")
        assert text == path.read_text(encoding="utf-8")


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
