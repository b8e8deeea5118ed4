"""Every spec of the zoo says what it warns of, and what the oracle does not know is verified."""

from __future__ import annotations

import re

import pytest
from attention_checks import BACKEND_NAMES
from population import population
from zoo import EXAMPLES, smaller

import attnspec
from attnspec.lower.mechanism_sizes import longest_of
from attnspec.verification import verify_each

FILES = sorted(path.name for path in EXAMPLES.glob("*.attn"))
KNOWN = {name.partition(":")[0] + ".attn" for name in population()}


@pytest.mark.parametrize("name", FILES)
def test_check_says_what_the_comment_announces(name: str) -> None:
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    announced = set(re.findall(r"^# Warns: (A\d{3})", text, re.MULTILINE))
    assert {d.code for d in attnspec.load(EXAMPLES / name).check()} == announced


@pytest.mark.parametrize("name", [name for name in FILES if name not in KNOWN])
def test_every_backend_computes_what_the_oracle_does_not_know(name: str) -> None:
    """What the data decide, two sequences, and mechanisms of low rank."""
    program = smaller(EXAMPLES / name).program
    n = program.fixed_length or min(130, longest_of(program) or 130)
    found = verify_each(program, n, ["auto", *BACKEND_NAMES, "lists", "factored"])
    assert found.ok, str(found)
    assert found.exhaustive
    # what refuses does so because of inputs, normalisers, the number of edges, or as no graph
    known = "run-time input|normalises|torch|edges|formula|keys decide|decided by data"
    assert all(re.search(known, why) for _, why in found.refused)
