"""Whether a position can learn of a later one: masks, mechanisms, inputs, and what `check` says."""

from __future__ import annotations

import numpy as np
import pytest
from population import spec_of

from attnspec.ir.mechanisms import MECHANISMS, MechanismDeclaration


def claimed(body: str) -> list[str]:
    """What `check` says of the claim."""
    return [d.message for d in spec_of(f"{body} require causal").check() if d.code[:2] == "A6"]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: m.name)
def test_a_mechanism_mixes_the_future_unless_the_spec_is_causal(
    mechanism: type[MechanismDeclaration],
) -> None:
    needs = {"mixer": "hidden = 8, max_length = 64", "gmlp": "max_length = 64"}
    needs["synthesizer"] = needs["gmlp"]
    body = f"attend {mechanism.name}({needs.get(mechanism.name, '')})"
    (message,) = claimed(body)
    assert "`causal` does not hold at n = 2: position 0 reads the later position 1" in message
    assert f"`{mechanism.name}` mixes all positions" in message
    assert not mechanism.causal or claimed(f"causal {body}") == []


HEADS = "layers 5 heads 2 attend causal layer 3 {{ head 1 {{ attend {} }} }}"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (HEADS.format("global(positions(4))"), "position 0 reads the later position 4 in layer 3,"),
        (HEADS.format("linear()"), "in layer 3, head 1, where `linear` mixes all positions"),
        ("attend causal + linear()", "`linear` mixes all positions"),
        ("input x: tokens attend causal | global(x)", "`x` marks every token"),
        ("input x: tokens(at_most = 1) attend causal | global(x)", "`x` marks the first 1 tokens"),
        ("input x: tokens attend causal | rows(x) & columns(last(1))", "`x` marks every token"),
        ("input x: tokens attend full - rows(x)", "`x` marks no token"),
        ("input x: ids attend same(x)", "`x` has one label for all tokens"),
        ("input x: ids attend ~same(x)", "`x` has a label for each token"),
        ("input x: length attend causal | prefix(x)", "`x` is 2"),
        ("attend causal | lsh()", "`lsh` chooses this pair"),
        ("attend topk(size = 4, blocks = 1) - window(radius = 1)", "`topk` chooses this pair"),
        # neither shown nor proven
        ("input x: ids attend same(x) & where(q // 2 >= k)", "is not checked: the pairs depend on"),
        (
            "attend lsh() & topk(size = 4, blocks = 1)",
            "is not checked: the pairs of `lsh` are chosen from the tensors of each call",
        ),
    ],
)
def test_a_leak_in_some_head_or_by_some_input_is_shown(body: str, said: str) -> None:
    (message,) = claimed(body)
    assert said in message
    assert "reads the later position" in message or "not checked" in said


@pytest.mark.parametrize(
    "body",
    [
        "input x: ids causal attend same(x)",
        "input x: ids attend same(x) & causal",
        "input x: tokens attend global(x) & where(k <= q and q % 3 != 1)",
        "input x: tokens attend global(x) & shift(causal, by = 2)",
        "input x: length attend causal - prefix(x)",
        "attend lsh(cut = bucket, share_qk = false) & window(before = 9, after = 0)",
    ],
)
def test_causality_under_every_input_is_proven(body: str) -> None:
    assert claimed(body) == []


def test_inputs_that_are_known_are_those_that_count() -> None:
    spec = spec_of("input x: tokens attend causal | global(x)")
    for marked, causal in ((np.arange(9) == 3, False), (np.zeros(9, bool), True)):
        assert spec.analyse(9, {"x": marked}).causal is causal
    long = {"strided(stride = 99)": False, "window(before = 7, after = 0)": True}
    for graph, causal in long.items():
        assert spec_of(f"attend {graph}").analyse(1 << 20).causal is causal
