"""Patterns that nobody tuned for: every backend that takes them is right, at small odd lengths by
every pair, at long ones by samples."""

from __future__ import annotations

import pytest
from attention_checks import spec_of

from attnspec.ir.program import Program
from attnspec.lower.work import BackendError
from attnspec.verification import Verification, verify

UNTUNED = {
    "where": "attend where((q * 7 + k * 3) % 11 == 0)",
    "five strides": "attend residue(step = 3) | residue(step = 5) | residue(step = 7)"
    " | residue(step = 11) | residue(step = 13)",
    "window without a residue": "attend window(radius = 30) - residue(step = 3)",
    "causal expander": "attend expander(degree = 6, seed = 1) & causal",
    "3-D neighbourhoods": "sequence grid({grid}) attend neighborhood(3, 5, 3)",
    "unequal documents": "causal input document: ids attend same(document)",
}
GRIDS = {4500: "15, 15, 20", 20_000: "20, 25, 40"}
LONG = 20_000
QUICK = {
    "window without a residue": "auto",
    "causal expander": "scattered",
    "3-D neighbourhoods": "auto",
    "unequal documents": "auto",
}
"""Backends with which a pattern is tried in less than a second."""

REFUSED = {
    ("five strides", "scattered"): "edges are listed one by one",
    ("unequal documents", "tiles"): "run-time input",
    ("unequal documents", "scattered"): "run-time input",
}


def program_of(name: str, n: int) -> Program:
    return spec_of(UNTUNED[name].replace("{grid}", GRIDS[n])).program


def assert_sampled(found: Verification) -> None:
    assert found.ok, str(found)
    assert not found.exhaustive
    kinds = {check.what.split(" that ")[0] for check in found.checks}
    assert {"gradients reach the keys", "outputs and gradients agree with float64"} <= kinds
    assert any("each pair lies once" in kind for kind in kinds)


@pytest.mark.parametrize(("name", "backend"), QUICK.items())
def test_samples_of_a_long_sequence(name: str, backend: str) -> None:
    n = 4500
    assert_sampled(verify(program_of(name, n), n, backend=backend))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["tiles", "bands", "scattered"])
@pytest.mark.parametrize("name", UNTUNED)
def test_samples_of_a_long_sequence_by_every_backend(name: str, backend: str) -> None:
    program = program_of(name, LONG)
    if (name, backend) in REFUSED:
        with pytest.raises(BackendError, match=REFUSED[name, backend]):
            verify(program, LONG, backend=backend)
    else:
        assert_sampled(verify(program, LONG, backend=backend))
