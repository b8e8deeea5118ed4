"""The specs of the zoo, with small samples of their run-time inputs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attnspec.elaborate import attention_names
from attnspec.spec import Spec, load
from attnspec.text.decoding import read_source

EXAMPLES = Path(__file__).parent.parent / "examples"

FILES = sorted(EXAMPLES.glob("*.attn"))

ATTENTIONS = [(path, name) for path in FILES for name in attention_names(read_source(path))]
"""Every attention of every file."""

IDS = [f"{path.stem}:{name}" for path, name in ATTENTIONS]


@cache
def loaded(path: Path, name: str) -> Spec:
    """An attention of the zoo with its own parameters."""
    return load(path, name=name)


def sample(spec: Spec, n: int) -> dict[str, npt.ArrayLike]:
    """One sample of every input that the spec declares."""
    made: dict[str, npt.ArrayLike] = {}
    for entry in spec.inputs.values():
        if entry.kind == "tokens":
            marked = np.arange(n) % 5 == 2
            marked[marked.cumsum() > (n if entry.at_most is None else entry.at_most)] = False
            made[entry.name] = marked
        elif entry.kind == "ids":
            made[entry.name] = np.arange(n) * 3 // 7
        else:
            made[entry.name] = n // 2
    return made
