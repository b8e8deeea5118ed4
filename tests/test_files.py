"""Files that commands write: Python must not take an old compilation for the new text."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from attnspec.cli.files import write_result


def value_of(path: Path) -> int:
    """The VALUE of a module, by the import system and its cache of compilations."""
    spec = importlib.util.spec_from_file_location("written", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: int = module.VALUE
    return found


def test_a_rewrite_of_equal_size_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "written.py"
    for value in range(5):
        write_result(str(path), f"VALUE = {value}\n", force=True)
        assert value_of(path) == value


def test_without_the_later_time_the_old_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "written.py"
    seen = []
    for value in range(5):
        path.write_text(f"VALUE = {value}\n", encoding="utf-8")
        seen.append(value_of(path))
    assert seen != list(range(5))
