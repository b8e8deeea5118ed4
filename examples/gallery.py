"""A picture of every spec of the zoo, as the site has them: `pictures(paths)`.

Each is what `attnspec show SPEC -o FILE.svg` draws, with the run-time inputs that `demo.py` makes
up, at the least of a few lengths at which some head leaves more than half of
the pairs out.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from click.testing import CliRunner

import attnspec
from attnspec.cli import main
from attnspec.examples.demo import show_options

LENGTHS = (64, 256, 1024, 4096)

FULL = 45.0
"""The percentage of pairs above which a longer sequence is tried."""

_SHARE = re.compile(r"\((\d+(?:\.\d+)?) %\)")

_NO_PAIRS = "A707"
"""What `attnspec show` says of a formula."""


def pictures(paths: Iterable[Path]) -> dict[Path, str | None]:
    """The SVG of each file, None for those that have no pairs."""
    return {path: _picture(path) for path in paths}


def _picture(path: Path) -> str | None:
    spec = attnspec.load(path)
    drawn = None
    for n in LENGTHS if spec.program.fixed_length is None else LENGTHS[:1]:
        drawn = _at(path, show_options(spec, n))
        if drawn is None or min(map(float, _SHARE.findall(drawn)), default=0) <= FULL:
            break
    return drawn


def _at(path: Path, options: str) -> str | None:
    """What one call draws; raises ValueError with what it says where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "picture.svg"
        called = CliRunner().invoke(main, ["show", str(path), "-o", str(file), *options.split()])
        if called.exit_code == 0:
            return file.read_text(encoding="utf-8")
    if f"error[{_NO_PAIRS}]" in called.output:
        return None
    raise ValueError(f"{path.name} must be drawn, got: {called.output}")
