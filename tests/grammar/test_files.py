"""Files that commands write: Python must not take an old compilation for the new text."""

from __future__ import annotations

import itertools
from pathlib import Path

from attnspec.cli.files import write_result


def looks_alike(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """What Python goes by: the size, and the time of change in whole seconds."""
    return before == after


def marks(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, int(found.st_mtime)


def test_a_rewrite_of_equal_size_has_another_time(tmp_path: Path) -> None:
    path = tmp_path / "written.py"
    seen = []
    for value in range(5):
        write_result(str(path), f"VALUE = {value}\n", force=True)
        seen.append(marks(path))
    pairs = itertools.pairwise(seen)
    assert not any(looks_alike(before, after) for before, after in pairs)


def test_what_looks_alike_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "written.py"
    path.write_text("VALUE = 1\n", encoding="utf-8")
    assert looks_alike(marks(path), marks(path))
