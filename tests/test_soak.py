"""The strategy and the oracle themselves: random specs mean what the contract says, every word of
the language is drawn, and what is made wrong is found and made small."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
import pytest
import soak
from hypothesis import strategies as st
from oracle import meaning, tree, truth
from oracle.scalars import Invalid
from oracle.tree import Attention, Claim, Input, Node, Scope, name, number, pattern
from specs import MECHANISMS, STATIC, Maker, drawn, part_of, specs, ten
from views import PAIRS, Case, differing

from attnspec import parse


@pytest.mark.parametrize(
    "seed",
    [
        0,
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(2, marks=pytest.mark.limits("", "tiny")),
    ],
)
def test_random_specs_mean_what_the_contract_says(seed: int) -> None:
    ten(lambda spec, data: soak.ask(spec, data), seed, specs(), st.data())


def test_every_pattern_mechanism_and_operator_is_drawn() -> None:
    wanted = {*(each.name for each in STATIC), *MECHANISMS, *tree._LEVELS, "transpose", "shift"}
    missing, turn = wanted - {"**", "/"}, 0
    while missing and turn < 20:
        missing = missing.difference(*(spec.words() for spec in drawn(30, 1000 * turn)))
        turn += 1
    assert not missing


class Narrower(Case):
    """`dilated` forgets its own position."""

    @cached_property
    def masks(self) -> np.ndarray:
        own = np.eye(self.n, dtype=bool) & ("dilated" in self.attention.words())
        return meaning.masks(self.attention, self.n, self.inputs) & ~own


def test_a_wrong_meaning_is_found_and_made_small() -> None:
    def mask(spec: Attention) -> None:
        if differing(Narrower(parse(tree.text(spec)), 7, spec), {"mask": PAIRS["mask"]}):
            raise soak.Finding(spec, "mask")

    def written(make: Maker) -> Node:
        dilated = pattern("dilated", radius=make.count(0, 9), step=make.count(1, 5))
        return Node("g|", (make.graph(2), dilated))

    wrong = part_of(written).map(lambda graph: Attention((Node("attend", (graph,)),)))
    with pytest.raises(soak.Finding, match=r"attend full \| dilated\(radius = 0, step = 1\)"):
        ten(mask, 0, wrong)
    spec = Attention((Node("attend", (pattern("dilated", radius=1, step=1),)),))
    with pytest.raises(soak.Finding, match="mask: "):
        ten(lambda data: soak.ask(spec, data, Narrower), 0, st.data())


@pytest.mark.parametrize(
    ("graph", "causal", "last"),
    [
        (pattern("full"), False, 1),
        (pattern("full"), True, None),
        (pattern("window", before=2, after=0), False, None),
        (pattern("columns", Node("last", (number(1),))), True, 1),
        (pattern("window", radius=Node("//", (name("n"), number(4)))), True, 3),
    ],
)
def test_a_row_is_stable_up_to_a_length(graph: Node, causal: bool, last: int | None) -> None:
    spec = Attention((Node("attend", (graph,)),), causal=causal)
    claim = Claim(Node("flag", ("stable",)))
    held = [truth.holds(spec, claim, n) for n in range(1, 13)]
    assert held == [last is None or n <= last for n in range(1, 13)]


def test_a_bound_by_head_is_compared_with_the_figure_of_each() -> None:
    wide = Scope("head", (1,), "1", (Node("attend", (pattern("full"),)),))
    spec = Attention((Node("attend", (pattern("self"),)), wide), layers=2, heads=2)
    by_head = Node("+", (Node("*", (name("head"), number(8))), number(1)))
    for compare, bound, held in (
        ("<=", by_head, True),
        ("==", by_head, False),
        ("<=", number(8), True),
        ("<", Node("*", (name("s"), number(9))), False),
    ):
        claim = Claim(Node("figure", ("degree", compare, bound)))
        of_head = replace(spec, lets=(("s", name("head")),))
        assert truth.holds(of_head, claim, 8) == held


def test_inputs_of_a_shorter_sequence_are_its_first_positions() -> None:
    inputs = {"doc": np.array([0, 0, 1, 1]), "size": 3}
    claim = Claim(Node("flag", ("stable",)))
    same = pattern("same", name("doc"))
    declared = Input("doc", "ids"), Input("size", "length")
    for graph in (same, Node("g&", (same, pattern("prefix", name("size"))))):
        spec = Attention((Node("attend", (graph,)),), inputs=declared, causal=True)
        assert truth.holds(spec, claim, 4, inputs)


def test_an_input_that_is_not_declared_has_no_meaning() -> None:
    spec = Attention((Node("attend", (pattern("same", name("doc")),)),))
    with pytest.raises(Invalid, match="no input doc"):
        meaning.masks(spec, 3)
