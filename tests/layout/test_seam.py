"""What the back half asks of a graph: so few methods that another representation can stand behind
them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from population import population

import attnspec

ROOMS = {"layout", "lower", "backends", "runtime", "distributed"}

PAIRS = {"holds", "progressions", "rows", "row_keys", "closed_rows", "degrees", "edges", "cover"}
"""Pairs, keys and counts of rows, one or all of them."""

OTHERS = {"phase", "transposed", "strides", "boxes", "listing", "classes", "parts"}
"""Other graphs, and the orders that suit one."""

ESTIMATES = {"typical_degree"}
"""What costs of drawn graphs are made of."""


def stands_in_a_room(file: str) -> bool:
    inside = Path(file).parts
    return "attnspec" in inside and bool(ROOMS & {*inside[inside.index("attnspec") :]})


def is_asked(thing: object, name: str) -> bool:
    """Whether a thing is a graph, and a method of this name one that every graph has."""
    classes = {each.__name__: each for each in type(thing).__mro__}
    return "Relation" in classes and name in vars(classes["Relation"])


@pytest.mark.filterwarnings("ignore")
def test_kernels_ask_a_graph_for_few_methods() -> None:
    asked: set[str] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        name, above = frame.f_code.co_name, frame.f_back
        if event == "call" and above is not None and stands_in_a_room(above.f_code.co_filename):
            if is_asked(frame.f_locals.get("self"), name):
                asked.add(name)

    for spec in [*population().values()][::9]:
        if spec.inputs or spec.program.grid or spec.program.fixed_length:
            continue
        # another spec, of which nothing is known yet
        spec = attnspec.parse(spec.source.replace(spec.name, f"{spec.name}_asked", 1))
        heads, x = spec.heads or 2, torch.randn(1, spec.heads or 2, 70, 8)
        sys.setprofile(profile)
        try:
            spec.plan(70, heads=heads)
            spec.compile()(x, x, x)
        finally:
            sys.setprofile(None)
    assert {"holds", "progressions", "strides", "cover"} <= asked
    assert asked <= PAIRS | OTHERS | ESTIMATES
