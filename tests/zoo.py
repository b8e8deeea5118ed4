"""The specs of the zoo, with small samples of their run-time inputs."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

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

SMALLER: dict[str, dict[str, int]] = {
    "clustered": {"clusters": 8},
    "hybrid_chosen": {"block": 8},
    "hybrid_cluster": {"clusters": 5, "features": 32},
    "hybrid_topk": {"block": 8, "r": 2},
    "moba": {"block": 8, "r": 3},
    "msa": {"block": 8, "r": 3},
    "quest": {"page": 4, "pages": 4},
    "reformer": {"chunk": 8, "rounds": 2},
    "reformer_causal": {"chunk": 8, "rounds": 2, "buckets": 6},
    "reformer_hf": {"chunk": 8, "buckets": 6},
    "reformer_trax": {"chunk": 8},
    "routing_transformer": {"keys": 16, "clusters": 5},
    "scatterbrain": {"chunk": 8, "features": 32},
    "sinkhorn": {"block": 8},
    "sinkhorn_causal": {"block": 8},
    "sortcut": {"block": 8},
    "topk": {"keys": 9},
    "topk_blocks": {"block": 8, "r": 3},
    "xattention": {"block": 8},
    "axial": {"height": 12, "width": 20},
    "axial_layers": {"height": 12, "width": 20},
    "bigbird_etc": {"block": 8, "globals": 5},
    "dilated_2d": {"height": 13, "width": 20},
    "local_2d": {"height": 13, "width": 20},
    # half of its layers alike
    "longformer_autoregressive": {"low": 32, "high": 32},
    "neighborhood_2d": {"height": 12, "width": 20},
    "neighborhood_3d": {"frames": 4, "height": 9, "width": 8},
    "neighborhood_dilated": {"height": 15, "width": 18},
    "sliding_tile_2d": {"height": 16, "width": 24, "tile": 4},
    "sliding_tile_3d": {"frames": 4, "height": 8, "width": 12},
    "swin": {"height": 14, "width": 21},
}
"""Grids that take less time than the specs' own, which the slow tests try, and are not square; and
choices that leave something out of short sequences."""


@cache
def loaded(path: Path, name: str) -> Spec:
    """An attention of the zoo with its own parameters."""
    return load(path, name=name)


@cache
def smaller(path: Path, name: str | None = None) -> Spec:
    """An attention of the zoo, on a smaller grid where it has one."""
    return load(path, name=name, parameters=SMALLER.get(path.stem, {}))


def sample(spec: Spec, n: int) -> dict[str, npt.ArrayLike]:
    """One sample of every input that the spec declares."""
    at, made = np.arange(n), dict[str, npt.ArrayLike]()
    for entry in spec.inputs.values():
        blocks = -(-n // getattr(entry, "size", 1))
        match entry.kind:
            case "tokens":
                marked = at % 5 == 2
                marked[marked.cumsum() > (n if entry.at_most is None else entry.at_most)] = False
                made[entry.name] = marked
            case "ids":
                made[entry.name] = at * 3 // 7
            case "numbers":
                made[entry.name] = at * 5 % 11 * 400.5
            case "choices":
                # some repeat, some are none
                turn = at[:, None] * np.array([1, 5, 1])
                made[entry.name] = (turn % (blocks + 1) - 1)[None]
            case "scores":
                made[entry.name] = np.sin(np.arange(n * blocks)).reshape(1, n, blocks)
            case "buckets":
                made[entry.name] = np.arange(2 * n).reshape(1, 2, n) * 7 % 5
            case _:
                made[entry.name] = n // 2
    return made
