"""Whether a position can learn of a later one: masks, mechanisms, inputs, and what `check` says."""

from __future__ import annotations

import numpy as np
import pytest

from attnspec.analysis.quality import Figure
from attnspec.analysis.reach.leaks import Leak, later_pair, leak
from attnspec.graphs.forms.properties import never_reads_later
from attnspec.graphs.stack import TooMuch
from attnspec.ir.mechanisms import MECHANISMS, MechanismDeclaration
from attnspec.limits import LIMITS
from attnspec.spec import Spec, parse


def spec_of(body: str) -> Spec:
    return parse(f"attention a {{ {body} }}")


def claimed(body: str) -> list[str]:
    """What `check` says of the claim."""
    return [d.message for d in spec_of(f"{body} require causal").check() if d.code[:2] == "A6"]


def test_a_leak_in_one_head_of_a_late_layer() -> None:
    body = "layers 5 heads 2 attend causal layer 3 { head 1 { attend global(positions(4)) } }"
    assert leak(spec_of(body).stack(), 9) == Figure(Leak(0, ((3, 1, 4),)))
    assert claimed(f"{body}") == [
        "`causal` does not hold at n = 64: position 0 reads the later position 4 in layer 3, head 1"
    ]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: m.name)
def test_a_mechanism_mixes_the_future_unless_the_spec_is_causal(
    mechanism: type[MechanismDeclaration],
) -> None:
    given = {
        "mixer": "hidden = 8, max_length = 64",
        "gmlp": "max_length = 64",
        "synthesizer": "max_length = 64",
    }
    body = f"attend {mechanism.name}({given.get(mechanism.name, '')})"
    (message,) = claimed(body)
    assert "`causal` does not hold at n = 2: position 0 reads the later position 1" in message
    assert f"`{mechanism.name}` mixes all positions" in message
    if mechanism.causal:
        assert claimed(f"causal {body}") == []


def test_a_mechanism_beside_causal_heads() -> None:
    (message,) = claimed("layers 2 heads 2 attend causal layer 1 { head 1 { attend linear() } }")
    assert "in layer 1, head 1, where `linear` mixes all positions" in message
    (message,) = claimed("attend causal + linear()")
    assert "`linear` mixes all positions" in message


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("input x: tokens attend causal | global(x)", "`x` marks every token"),
        ("input x: tokens(at_most = 1) attend causal | global(x)", "`x` marks the first 1 tokens"),
        ("input x: tokens attend causal | rows(x) & columns(last(1))", "`x` marks every token"),
        ("input x: tokens attend full - rows(x)", "`x` marks no token"),
        ("input x: ids attend same(x)", "`x` has one label for all tokens"),
        ("input x: ids attend ~same(x)", "`x` has a label for each token"),
        ("input x: length attend causal | prefix(x)", "`x` is 2"),
        ("attend causal | lsh()", "`lsh` joins them"),
        ("attend topk(size = 4, blocks = 1) - window(radius = 1)", "`topk` joins them"),
    ],
)
def test_a_leak_that_some_input_opens(body: str, said: str) -> None:
    (message,) = claimed(body)
    assert "does not hold at n = " in message
    assert "reads the later position" in message
    assert said in message


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
def test_what_no_input_can_open_is_proven(body: str) -> None:
    assert claimed(body) == []


def test_what_is_neither_shown_nor_proven_is_not_checked() -> None:
    (message,) = claimed("input x: ids attend same(x) & where(q // 2 >= k)")
    assert "is not checked: its pairs depend on run-time inputs" in message
    (message,) = claimed("attend lsh() & topk(size = 4, blocks = 1)")
    assert "is not checked: `lsh` is decided by the data" in message


def test_given_inputs_are_those_that_count() -> None:
    spec = spec_of("input x: tokens attend causal | global(x)")
    assert leak(spec.stack({"x": np.arange(9) == 3}), 9) == Figure(Leak(0, ((0, 0, 3),)))
    assert leak(spec.stack({"x": np.zeros(9, bool)}), 9) == Figure(None)


def test_long_sequences() -> None:
    n = 1 << 20
    assert leak(spec_of("attend strided(stride = 99)").stack(), n).value == Leak(0, ((0, 0, 1),))
    assert leak(spec_of("attend window(before = 7, after = 0)").stack(), n) == Figure(None)
    with pytest.raises(TooMuch):
        leak(spec_of("attend where(q * k < q)").stack(), n)


@pytest.mark.parametrize(
    ("predicate", "proven"),
    [
        ("k <= q", True),
        ("q > k and q % 2 == 0", True),
        ("q == k or k < q", True),
        ("k < q or k % 2 == 0", False),
        ("q <= k", False),
        ("not (q < k)", False),
    ],
)
def test_predicates_that_keep_the_order(predicate: str, proven: bool) -> None:
    graph = spec_of(f"attend where({predicate})").program.attends[0].graph
    assert graph is not None
    assert never_reads_later(graph) == proven


def test_the_first_positions_of_longer_sequences_are_looked_at() -> None:
    n = LIMITS.positions + 1
    assert later_pair(spec_of("attend full").relation(n), n) == (0, 1)
    with pytest.raises(TooMuch, match="supports n <="):
        # a query that reads itself reads nothing later
        later_pair(spec_of("attend window(before = 3, after = 0)").relation(n), n)
