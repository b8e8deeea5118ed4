"""The specs of the zoo, with small samples of their run-time inputs."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from attnspec.elaborate import attention_names
from attnspec.ir.program import Leaf, Term
from attnspec.ir.scalars import Apply
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


def _kind(value: object) -> Hashable:
    """Of an argument its word, or what an expression is made of, or its type."""
    if isinstance(value, Apply):
        return frozenset(re.findall("op='(.+?)'", str(value)))
    return value if isinstance(value, str | bool) else type(value).__name__


def _parts(term: Term, around: str = "") -> Iterator[Hashable]:
    """Its patterns and operators within which others, and the arguments that are given."""
    if isinstance(term, Leaf):
        yield around, term.pattern
        yield term.pattern, tuple(sorted(name for name, _ in term.arguments))
        yield from ((term.pattern, name, _kind(value)) for name, value in term.arguments)
        return
    yield around, term.op
    for part in term.terms:
        yield from _parts(part, term.op)


def _kinds(spec: Spec) -> Iterator[Hashable]:
    """What a spec has of which others may have as well."""
    program = spec.program
    yield "grid", None if program.grid is None else len(program.grid)
    yield "cross", bool(program.cross)
    yield "places", program.heads is None, len(program.slots) > 1, len(program.attends) > 1
    yield from (("input", entry.kind, entry.at_most is None) for entry in program.inputs)
    # some sweeps leave out what has mechanisms
    graphs = all(attend.mechanism is None for attend in program.attends)
    for attend in program.attends:
        if attend.graph is not None:
            yield from ((part, program.causal, graphs) for part in _parts(attend.graph))
        if attend.mechanism is not None:
            name = attend.mechanism.name
            yield name, program.causal, attend.graph is not None
            yield from ((name, each, _kind(value)) for each, value in attend.mechanism.arguments)
        yield "weights", attend.normalize, *(score.name for score in attend.scores)


def _with_something_new() -> Iterator[tuple[Path, str]]:
    seen: set[Hashable] = set()
    for each in ATTENTIONS:
        found = {*_kinds(loaded(*each))}
        if found - seen:
            yield each
        seen |= found


OF_EACH_KIND = frozenset(_with_something_new())
"""Attentions that together have each pattern within each operator, with each choice of arguments,
each mechanism, kind of input and so on that any has."""

of_each_kind = pytest.mark.parametrize(
    ("path", "name"),
    [
        pytest.param(
            *each,
            id=label,
            marks=[
                pytest.mark.xdist_group(label),
                *([] if each in OF_EACH_KIND else [pytest.mark.slow]),
            ],
        )
        for each, label in zip(ATTENTIONS, IDS, strict=True)
    ],
)
"""Every attention; by default those of each kind."""


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
        elif entry.kind == "numbers":
            made[entry.name] = np.arange(n) * 5 % 11 * 400.5
        elif entry.kind == "choices":
            # some repeat, some are none
            blocks, turn = -(-n // entry.size), np.arange(n)[:, None] * np.array([1, 5, 1])
            made[entry.name] = (turn % (blocks + 1) - 1)[None]
        elif entry.kind == "scores":
            blocks = -(-n // entry.size)
            made[entry.name] = np.sin(np.arange(n * blocks)).reshape(1, n, blocks)
        elif entry.kind == "buckets":
            made[entry.name] = np.arange(2 * n).reshape(1, 2, n) * 7 % 5
        else:
            made[entry.name] = n // 2
    return made
