"""Every spec of the zoo: says what it warns of, and computes what it means once it is emitted."""

from __future__ import annotations

import re

import pytest
import torch
from attention_checks import BACKEND_NAMES
from sweeps import checkered
from zoo import EXAMPLES, smaller

import attnspec
from attnspec.compile.emit import class_name
from attnspec.lower.mechanism_sizes import longest_of
from attnspec.spec import Spec
from attnspec.verification import verify, verify_each

FILES = sorted(path.name for path in EXAMPLES.glob("*.attn"))
LENGTHS = (1, 2, 63, 64, 65, 200, 257, 1000)
SHORT = (130,)
"""The lengths of every run of the tests."""


def loaded(name: str) -> Spec:
    return smaller(EXAMPLES / name)


def lengths(spec: Spec, wanted: tuple[int, ...]) -> list[int]:
    fixed = spec.program.fixed_length
    if fixed is not None:
        return [fixed]
    longest = longest_of(spec.program) or max(wanted)
    return [min(n, longest) for n in wanted if n > spec.program.extra_tokens]


def verify_all(spec: Spec, wanted: tuple[int, ...], turn: int | None = None) -> None:
    """Every backend that takes the spec, at every length that it has. In its turn a file goes
    through what is chosen for it and one of the others alone: files of one family, which follow
    each other, through all of them."""
    tried = lengths(spec, wanted)
    assert tried, "every spec is tried at some length"
    chosen = {step.chosen.name for step in spec.plan(tried[0]).steps}
    others = [*BACKEND_NAMES, "lists", "factored"]
    if turn is not None:
        # boxes of grids are few, and laid out in two ways
        grids = ["bands", "tiles"] if spec.program.grid else []
        turns = {BACKEND_NAMES[turn % len(BACKEND_NAMES)]: None, **dict.fromkeys(grids)}
        others = [*turns, "lists", "factored"]
        others = [name for name in others if chosen != {name}]
    # no single backend runs layers of graphs and of formulas
    backends = ["auto"] if {"factored"} < chosen else ["auto", *others]
    for n in tried:
        found = verify_each(spec.program, n, backends)
        assert found.ok, str(found)
        assert found.exhaustive
        # what refuses does so because of inputs, normalisers, the number of edges, or as no graph
        known = "run-time input|normalises|torch|edges|formula|keys decide|decided by data"
        assert all(re.search(known, why) for _, why in found.refused)


def emitted(spec: Spec) -> torch.nn.Module:
    names: dict[str, object] = {}
    exec(compile(spec.emit(), "emitted", "exec"), names)
    module = names[class_name(spec.name)]()  # type: ignore[operator]
    assert isinstance(module, torch.nn.Module)
    return module


@pytest.mark.parametrize("name", FILES)
def test_check_says_what_the_comment_announces(name: str) -> None:
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    announced = set(re.findall(r"^# Warns: (A\d{3})", text, re.MULTILINE))
    assert {d.code for d in attnspec.load(EXAMPLES / name).check()} == announced


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("name", checkered(FILES))
def test_the_emitted_module_computes_the_spec(name: str) -> None:
    spec = loaded(name)
    module = emitted(spec)
    for n in lengths(spec, SHORT):
        found = verify(spec.program, n, module=module)
        assert found.ok, str(found)


@pytest.mark.parametrize("name", FILES)
def test_backends_in_turn_compute_the_spec(name: str) -> None:
    verify_all(loaded(name), SHORT, FILES.index(name))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FILES)
def test_every_backend_computes_the_spec_at_every_length(name: str) -> None:
    verify_all(attnspec.load(EXAMPLES / name), LENGTHS)
