"""Prints what `make quick` gives to pytest: the tests of the rooms in which something has changed.

`python tests/quick.py [BASE]` compares with BASE (HEAD if none is given), untracked files included.
A change of the package is seen in the tests of its room and in the views of specs, of which a part
runs: nearly every file of tests imports nearly every module, and their graph leaves none out.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SEEN_BY = {
    "README.md": ["tests/test_docs.py"],
    "benchmarks": ["tests/bench"],
    "docs": ["tests/test_docs.py", "tests/test_site.py"],
    "editors": ["tests/editor"],
    "examples": ["tests/test_zoo.py", "tests/test_views.py"],
}


def tests_of(path: Path) -> list[str]:
    """What may notice a change of a file, relative to the root; every test if nobody knows."""
    top, *below = path.parts
    if top == "tests":
        if path.name.startswith("test_") or "golden" in below:
            stem = path.stem if "golden" not in below else below[1]
            return [str(x.relative_to(ROOT)) for x in (ROOT / "tests").rglob(f"{stem}.py")]
        every = (ROOT / "tests").rglob("test_*.py")
        return [str(x.relative_to(ROOT)) for x in every if f" {path.stem} " in x.read_text()]
    if top in SEEN_BY:
        return SEEN_BY[top]
    room = below[0] if top == "attnspec" and len(below) > 1 else top
    own = [f"tests/{room}", f"tests/test_{path.stem}.py"]
    own = [each for each in own if (ROOT / each).exists()]
    return [*own, "tests/test_views.py"] if own else ["tests"]


def changed(base: str) -> Iterator[Path]:
    for words in (
        ("diff", "--name-only", "--no-renames", base),
        ("ls-files", "-o", "--exclude-standard"),
    ):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        yield from map(Path, done.stdout.splitlines())


if __name__ == "__main__":
    paths = list(changed(*sys.argv[1:] or ["HEAD"]))
    chosen = sorted({each for path in paths for each in tests_of(path)})
    if chosen:
        print("--some", ",".join(sorted({path.stem for path in paths})), *chosen)
