"""What no file of the repository holds; each check is shown a fault, too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from package_map import MODULES, ROOT

LINES = 400
"""The most lines of a file of the package."""

SOURCES = pytest.mark.parametrize("path", MODULES.values(), ids=list(MODULES))

MACHINE_PATH = re.compile(
    r"(?<![\w./:])(?:/(?:home|root|work|opt|mnt|tmp|Users)|[A-Z]:\\+\w+)[/\\]"
)


@SOURCES
def test_no_assert_in_the_package(path: Path) -> None:
    assert assert_lines(path.read_text(encoding="utf-8")) == []


def assert_lines(text: str) -> list[int]:
    return [node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assert)]


def test_an_assert_is_found() -> None:
    assert assert_lines("# assert nothing\ndef f(x):\n    assert x\n") == [3]


@SOURCES
def test_files_are_short(path: Path) -> None:
    lines = line_count(path.read_text(encoding="utf-8"))
    assert lines <= LINES


def line_count(text: str) -> int:
    return len(text.splitlines())


def test_a_long_file_is_found() -> None:
    assert line_count("\n" * (LINES + 1)) > LINES


def test_no_file_names_a_place_on_a_machine() -> None:
    assert [fault for path in texts(ROOT) for fault in machine_paths(path)] == []


def machine_paths(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []
    return [f"{path.name}:{i}" for i, line in enumerate(lines, 1) if MACHINE_PATH.search(line)]


def texts(folder: Path) -> Iterable[Path]:
    """Every file of the repository, as far as it is not made from others."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or path.suffix in {".pyc", ".egg-info"}:
            continue
        if path.is_file():
            yield path
        elif path.name == ".ci" or not path.name.startswith((".", "build", "dist", "venv", "__py")):
            yield from texts(path)


def test_a_place_on_a_machine_is_found(tmp_path: Path) -> None:
    place = "/".join(("", "home", "someone", "spec.attn"))
    path = tmp_path / "sample.txt"
    path.write_text(f"https://example.org{place}\nopen('{place}')\n./{place}\n")
    assert machine_paths(path) == ["sample.txt:2"]
    assert list(texts(tmp_path)) == [path]
