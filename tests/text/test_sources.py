"""No file of the repository names a place on a machine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from package_map import ROOT

MACHINE_PATH = re.compile(
    r"(?<![\w./:])(?:/(?:home|root|work|opt|mnt|tmp|Users)|[A-Z]:\\+\w+)[/\\]"
)


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
