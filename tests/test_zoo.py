"""Every spec of the zoo says what it warns of, and what the oracle does not know is verified."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from population import population, small
from zoo import ATTENTIONS, EXAMPLES, FILES

import attnspec
from attnspec.backends import BACKENDS
from attnspec.limits import LIMITS
from attnspec.verification.verify import verify

OFFERED = [each.name for each in BACKENDS if each.name not in ("flex", "triton")]


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_check_says_what_the_comment_announces(name: str) -> None:
    path = EXAMPLES / f"{name}.attn"
    announced = set(re.findall(r"^# Warns: (A\d{3})", path.read_text("utf-8"), re.MULTILINE))
    assert {d.code for d in attnspec.load(path).check()} == announced


@pytest.mark.limits("", "tiny")
@pytest.mark.parametrize(
    ("path", "name"),
    [each for each in ATTENTIONS if f"{each[0].stem}:{each[1]}" not in population()],
)
def test_every_backend_computes_what_the_oracle_does_not_know(path: Path, name: str) -> None:
    """Two sequences."""
    program = small(path, name).program
    n = program.fixed_length or min(130, LIMITS.every_pair)
    found = verify(program, n, ["auto", *OFFERED])
    assert found.ok, str(found)
    assert found.exhaustive == (n <= LIMITS.every_pair)
    # what refuses does so because of inputs, normalisers, the number of edges, or as no graph
    known = "the input|normalize|torch|edges|mechanism|chosen in"
    assert all(re.search(known, why) for _, why in found.refused)
