"""The differential tester itself: it finds nothing in a few specs, and finds what is made wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from oracle import meaning, tree, truth
from oracle.scalars import Invalid
from oracle.tree import Attention, Claim, Input, Node, Scope, name, number, pattern
from soak.generator import spec_of
from soak.run import one, tried
from soak.shrink import shrunk

SPECS = 16


@pytest.mark.limits("", "tiny")
def test_a_few_random_specs_mean_what_the_contract_says() -> None:
    checks: Counter[str] = Counter()
    for index in range(SPECS):
        outcome = one(f"smoke:{index}")
        if outcome is not None:
            assert not outcome.trial.findings, str(outcome)
            checks.update(outcome.trial.checks)
    for kind in ("mask", "adjacency", "edges", "claim", "call", "steps"):
        assert checks[kind], f"nothing was looked at: {kind}"


def _narrower(spec: Attention, n: int, inputs: Mapping[str, Any] | None = None) -> np.ndarray:
    """Masks in which every `dilated` forgets its own position: a wrong meaning."""
    found = meaning.masks(spec, n, inputs)
    wrong = any(
        each.kind == "pattern" and each.parts[0] == "dilated"
        for top in spec.statements()
        for each in top.walk()
    )
    return found & ~np.eye(n, dtype=bool) if wrong else found


def test_a_wrong_meaning_is_reported_and_made_small() -> None:
    leaf = pattern("dilated", radius=9, step=2)
    other = Node("g|", (pattern("residue", step=7), pattern("window", radius=1)))
    spec = Attention((Node("attend", (Node("g|", (other, leaf)),)),), causal=True)
    assert not tried(spec, "seed").findings

    def wrong(smaller: Attention) -> bool:
        return any(each.check == "mask" for each in tried(smaller, "seed", _narrower).findings)

    assert wrong(spec)
    small = shrunk(spec, wrong)
    assert tree.text(small) == tree.text(Attention((Node("attend", (leaf,)),)))


@pytest.mark.parametrize(
    ("node", "written"),
    [
        (Node("-", (number(1), Node("-", (number(2), number(3))))), "1 - (2 - 3)"),
        (Node("**", (number(-2), number(2))), "(-2) ** 2"),
        (Node("g~", (Node("g|", (pattern("full"), pattern("self"))),)), "~(full | self)"),
        (Node("g-", (pattern("full"), Node("g&", (pattern("self"),) * 2))), "full - (self & self)"),
        (Node("g&", (pattern("full"), Node("g-", (pattern("self"),) * 2))), "full & self - self"),
    ],
)
def test_texts_have_the_brackets_they_need(node: Node, written: str) -> None:
    assert tree.expression(node) == written


def test_a_seed_is_a_spec() -> None:
    assert spec_of("3:4") == spec_of("3:4")
    assert len({tree.text(spec_of(f"3:{index}")) for index in range(50)}) == 50


def test_the_oracle_knows_stable_rows_figures_by_head_and_short_inputs() -> None:
    def claim(*parts: Any) -> Claim:
        return Claim(Node("flag" if len(parts) == 1 else "figure", parts))

    shrinking = pattern("window", radius=Node("//", (name("n"), number(4))))
    for graph, causal, last in (
        (pattern("full"), False, 1),
        (pattern("full"), True, 12),
        (pattern("columns", Node("last", (number(1),))), True, 1),
        (shrinking, True, 3),
    ):
        spec = Attention((Node("attend", (graph,)),), causal=causal)
        held = [truth.holds(spec, claim("stable"), n) for n in range(1, 13)]
        assert held == [n <= last for n in range(1, 13)]
    wide = Scope("head", (1,), "1", (Node("attend", (pattern("full"),)),))
    spec = Attention((Node("attend", (pattern("self"),)), wide), layers=2, heads=2)
    by_head = Node("+", (Node("*", (name("head"), number(8))), number(1)))
    assert truth.holds(spec, claim("degree", "<=", by_head), 8)
    assert not truth.holds(spec, claim("degree", "==", by_head), 8)
    same, inputs = pattern("same", name("doc")), {"doc": np.array([0, 0, 1, 1])}
    spec = Attention((Node("attend", (same,)),), inputs=(Input("doc", "ids"),), causal=True)
    assert truth.holds(spec, claim("stable"), 4, inputs)
    with pytest.raises(Invalid, match="no input doc"):
        meaning.masks(Attention(spec.body), 3)
