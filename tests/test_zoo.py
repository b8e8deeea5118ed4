"""Every spec of the zoo: says what it warns of, and computes what it means once it is emitted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import attnspec
from attnspec.emit import class_name
from attnspec.reading import read_source
from attnspec.spec import Spec
from attnspec.stack import Stack
from attnspec.verification import verify
from attnspec.works import unbuilt

EXAMPLES = Path(__file__).parent.parent / "examples"
FILES = sorted(path.name for path in EXAMPLES.glob("*.attn"))
LENGTHS = (1, 2, 7, 64, 127, 130)
LONGEST = 1100
"""A grid of the zoo is verified up to this size; larger ones at smaller parameters."""

SMALLER: dict[str, dict[str, int]] = {
    "bigbird_etc.attn": {"block": 8, "globals": 5},
    "neighborhood_3d.attn": {"frames": 4, "height": 9, "width": 8},
    "sliding_tile_2d.attn": {"height": 16, "width": 24, "tile": 4},
    "sliding_tile_3d.attn": {"frames": 4, "height": 8, "width": 12},
}


def loaded(name: str) -> Spec:
    return Spec(read_source(EXAMPLES / name), parameters=SMALLER.get(name))


def lengths(spec: Spec) -> list[int]:
    fixed = Stack(spec).fixed_length()
    if fixed is not None:
        return [fixed] if fixed <= LONGEST else []
    first = spec.program.extra_tokens
    return [n for n in LENGTHS if n > first]


def emitted(spec: Spec) -> torch.nn.Module:
    names: dict[str, object] = {}
    exec(compile(spec.emit(), "emitted", "exec"), names)
    module = names[class_name(spec.name)]()  # type: ignore[operator]
    assert isinstance(module, torch.nn.Module)
    return module


BUILT = [name for name in FILES if not unbuilt(loaded(name).program)]


@pytest.mark.parametrize("name", FILES)
def test_check_says_what_the_comment_announces(name: str) -> None:
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    announced = set(re.findall(r"^# Warns: (A\d{3})", text, re.MULTILINE))
    assert {d.code for d in attnspec.load(EXAMPLES / name).check()} == announced


@pytest.mark.parametrize("name", FILES)
def test_what_is_not_built_says_so(name: str) -> None:
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    assert ("# Not built yet:" in text) == (name not in BUILT)


@pytest.mark.parametrize("name", BUILT)
def test_the_emitted_module_computes_the_spec(name: str) -> None:
    spec = loaded(name)
    module = emitted(spec)
    tried = lengths(spec)
    assert tried, "every spec is tried at some length"
    for n in tried:
        found = verify(spec.program, n, module=module)
        assert found.ok, str(found)
