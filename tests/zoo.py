"""The specs of the zoo, with small samples of their run-time inputs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from attnspec.elaborate import attention_names
from attnspec.spec import Spec, load
from attnspec.text.decoding import read_source

EXAMPLES = Path(__file__).parent.parent / "examples"

FILES = sorted(EXAMPLES.glob("*.attn"))

ATTENTIONS = [(path, name) for path in FILES for name in attention_names(read_source(path))]
"""Every attention of every file."""

IDS = [f"{path.stem}:{name}" for path, name in ATTENTIONS]

every_attention = pytest.mark.parametrize(
    ("path", "name"),
    [
        # one worker takes all that is asked of an attention, and finds again what it counted
        pytest.param(*each, id=label, marks=pytest.mark.xdist_group(label))
        for each, label in zip(ATTENTIONS, IDS, strict=True)
    ],
)

SMALLER: dict[str, dict[str, int]] = {
    "axial": {"height": 12, "width": 20},
    "axial_layers": {"height": 12, "width": 20},
    "bigbird_etc": {"block": 8, "globals": 5},
    "dilated_2d": {"height": 13, "width": 20},
    "local_2d": {"height": 13, "width": 20},
    "neighborhood_2d": {"height": 12, "width": 20},
    "neighborhood_3d": {"frames": 4, "height": 9, "width": 8},
    "neighborhood_dilated": {"height": 15, "width": 18},
    "sliding_tile_2d": {"height": 16, "width": 24, "tile": 4},
    "sliding_tile_3d": {"frames": 4, "height": 8, "width": 12},
    "swin": {"height": 14, "width": 21},
}
"""Grids that take less time than the specs' own, which the slow tests try, and are not square."""


@cache
def loaded(path: Path, name: str) -> Spec:
    """An attention of the zoo with its own parameters."""
    return load(path, name=name)


@cache
def smaller(path: Path, name: str | None = None) -> Spec:
    """An attention of the zoo, on a smaller grid where it has one."""
    return load(path, name=name, **SMALLER.get(path.stem, {}))


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
