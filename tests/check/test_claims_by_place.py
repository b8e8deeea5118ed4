"""Claims that mention `layer` or `head` hold for each, or name one for which they do not."""

from __future__ import annotations

import pytest

from attnspec.check.verdicts import Verdict
from attnspec.spec import parse


def verdict(body: str, claim: str) -> Verdict:
    (only,) = parse(f"attention a {{ {body} require {claim} }}").verdicts
    return only


def message(body: str, claim: str) -> str:
    """What is wrong with a claim."""
    (only,) = verdict(body, claim).diagnostics
    return only.message


# --- against the definition ---------------------------------------------------------------------


# --- what is said ---------------------------------------------------------------------------------

WIDER = "heads 4 attend window(radius = 3 * head)"


def test_each_head_is_compared_with_its_own_number() -> None:
    assert verdict(WIDER, "degree <= 6 * head + 1").status == "checked"
    assert verdict(WIDER, "degree == 6 * head + 1 at n = 64").status == "checked"
    assert message(WIDER, "degree <= 4 * (head + 1)") == (
        "`degree <= 4 * (head + 1)` does not hold at n = 64 in head 2: degree is 13, must be"
        " <= 12; for example query 6 reads 0..12 in head 2"
    )


def test_a_layer_is_that_of_all_its_heads_and_a_head_that_of_all_layers() -> None:
    body = "layers 3 heads 2 attend self head 1 { attend window(radius = layer) }"
    assert verdict(body, "degree == 2 * layer + 1 at n = 9").status == "checked"
    assert verdict(body, "degree == 4 * head + 1 at n = 9").status == "checked"
    assert "in layer 2, head 0: degree is 1, must be == 5" in message(
        body, "degree == 2 * layer + 1 + 0 * head at n = 9"
    )
    assert verdict(body, "edges == 3 * n + head * (6 * n - 8) at n = 9").status == "checked"
    # products of all pairs: 4 d operations each, heads of size 64
    costs = "layers 2 heads 2 layer 0 { head 0 { attend full } head 1 { attend self } }"
    costs += " layer 1 { attend full }"
    own = "flops == 4 * 64 * (n ** 2 + n + layer * (n ** 2 - n)) at n = 512"
    assert verdict(costs, own).status == "checked"
    assert "in layer 1: flops are 134,217,728" in message(
        costs, own.replace("layer", "(layer // 2)")
    )


def test_graphs_are_compared_in_every_layer_and_head() -> None:
    assert verdict(WIDER, "window(radius = head) subset full").status == "proven"
    assert verdict(WIDER, "window(radius = head) subset window(radius = 3)").status == "proven"
    assert "at n = 64 in head 3: (0, 3) is only in the first" in message(
        WIDER, "window(radius = head) subset window(radius = 2)"
    )
    both = "layers 3 heads 2 attend full"
    assert "in layer 2, head 1: " in message(
        both, "window(radius = layer + head) subset window(radius = 2)"
    )


def test_draws_of_a_claim_are_those_of_every_head() -> None:
    body = "heads 3 attend full"
    claim = "random(keys = 2, seed = 5) subset random(keys = 2, seed = 5) | self"
    assert verdict(body, claim).status == "proven"
    alone = "random(keys = 2, seed = 5) subset random(keys = 2, seed = 5, per_head = false)"
    # the draws of all heads are those of none
    assert verdict(body, f"{alone} at n = 9").status == "refuted"


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        ("reach(layers = 2 - head) at n = 9", "at n = 9 in head 2: after 0 layers query 0"),
        ("depth <= 2 - head at n = 9", "at n = 9 in head 2: depth is 2, must be <= 0"),
        ("depth >= 1 + head at n = 9", "at n = 9 in head 2: depth is 2, must be >= 3"),
        ("depth == 2 + head // 2 at n = 9", "at n = 9 in head 2: depth is 2, must be == 3"),
        ("depth != 4 - head at n = 9", "at n = 9 in head 2: depth is 2, must be != 2"),
        ("order <= n ** (2 - head)", "edges over the bound grow in head 2"),
        ("degree <= 9 // head at n = 9", "division by zero in head 0"),
        ("residue(step = head) subset full", "at n = 1 in head 0"),
    ],
)
def test_what_fails_names_its_head(claim: str, words: str) -> None:
    body = "heads 3 attend window(radius = 1) | global(first(1))"
    found = message(body, claim)
    assert words in found


def test_proofs_of_reach_are_of_every_head() -> None:
    body = "heads 3 attend full"
    assert verdict(body, "depth <= 1 + head").status == "proven"
    assert verdict(body, "depth <= 2 - head at n = 9").status == "refuted"


def test_without_heads_nothing_is_said_of_each_of_them() -> None:
    alone = "attend window(radius = 3 * head)"
    assert "does not declare how many `heads`" in message("attend full", "degree <= n + head")
    assert "does not declare how many `heads`" in message(alone, "degree <= 1")
    assert "does not declare how many `heads`" in message(alone, "causal")
    # what fails for the first fails, and what follows for any of them follows
    assert "degree is 1, must be < 1" in message(alone, "degree < 1")
    assert verdict(alone, "window(radius = head) subset full").status == "proven"
    assert verdict(alone, "symmetric").status == "proven"


def test_a_bound_of_nothing_is_no_order() -> None:
    assert "the bound grow in head 0" in message("heads 2 attend self", "order <= n ** head")
    assert verdict("heads 2 attend self", "order <= n * (head + 1)").status == "proven"
    assert verdict("heads 2 attend self", "order <= n * head").status == "refuted"


def test_many_layers_and_heads_are_bounded() -> None:
    body = "layers 4096 heads 64 attend self"
    assert verdict(body, "degree <= head + 1 at n = 64").status == "checked"
    assert "16,384 layers and heads" in message(body, "degree <= head + layer + 1 at n = 64")
