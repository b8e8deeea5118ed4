"""The specs of the zoo."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from attnspec import Spec, load

EXAMPLES = Path(__file__).parent.parent / "examples"

FILES = sorted(EXAMPLES.glob("*.attn"))

ATTENTIONS = [
    (path, name)
    for path in FILES
    for name in re.findall(r"^attention (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
]
"""Every attention of every file."""

IDS = [f"{path.stem}:{name}" for path, name in ATTENTIONS]


@cache
def loaded(path: Path, name: str) -> Spec:
    """An attention of the zoo with its own parameters."""
    return load(path, name=name)
