"""What no file of the repository holds; each check is shown a fault, too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from package_map import MODULES, ROOT

LINES = 75
"""The most lines of a function of the package."""

MACHINE_PATH = re.compile(
    r"(?<![\w./:])(?:/(?:home|root|work|opt|mnt|tmp|Users)|[A-Z]:\\+\w+)[/\\]"
)


def test_no_assert_in_the_package() -> None:
    found = {name: assert_lines(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def statements(text: str) -> Iterator[ast.AST]:
    """The statements of a file, at any depth, and what else has some; no expressions."""
    below: list[ast.AST] = [ast.parse(text)]
    while below:
        node = below.pop()
        yield node
        below += [x for x in ast.iter_child_nodes(node) if not isinstance(x, ast.expr)]


def assert_lines(text: str) -> list[int]:
    return [node.lineno for node in statements(text) if isinstance(node, ast.Assert)]


def test_an_assert_is_found() -> None:
    assert assert_lines("# assert nothing\ndef f(x):\n    assert x\n") == [3]
    deep = "try:\n    f()\nexcept E:\n    match x:\n        case 1:\n            assert y\n"
    assert assert_lines(deep) == [6]


def test_functions_are_short() -> None:
    found = {
        name: long_functions(path.read_text(encoding="utf-8")) for name, path in MODULES.items()
    }
    assert {name: functions for name, functions in found.items() if functions} == {}


def long_functions(text: str) -> list[str]:
    return [
        f"{node.name}: {lines} lines"
        for node in statements(text)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > LINES
    ]


def test_a_long_function_is_found() -> None:
    body = "    pass\n" * LINES
    assert long_functions(f"class C:\n  def f():\n{body}") == [f"f: {LINES + 1} lines"]


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
