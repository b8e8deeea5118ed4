"""What a spec between two sequences says, and what it cannot say, with the reason and the place."""

from __future__ import annotations

import pytest

from attnspec.ir.serial import from_data, to_data
from attnspec.spec import Spec, parse
from attnspec.text.diagnostics import Diagnostic, SpecError


def problem(body: str) -> Diagnostic:
    with pytest.raises(SpecError) as caught:
        parse(f"attention a {{ {body} }}")
    (found,) = caught.value.diagnostics
    return found


@pytest.mark.parametrize(
    ("body", "place", "why"),
    [
        ("cross causal attend full", "causal", "neither earlier nor later"),
        ("causal cross attend full", "causal", "neither earlier nor later"),
        ("cross sequence grid(2, 3) attend full", "sequence grid(2, 3)", "the cells of one"),
        ("cross extra_tokens 2 attend full", "extra_tokens 2", "before one sequence"),
        ("cross attend full & causal", "causal", "the places of queries and keys"),
        ("cross attend random(keys = 2)", "random(keys = 2)", "draws by the places"),
        ("cross attend random_blocks(size = 2, blocks = 2)", "random_blocks(", "draws"),
        ("cross attend self | expander(degree = 2)", "expander(degree = 2)", "walks in cycles"),
        ("cross attend lsh(chunk = 4)", "lsh(chunk = 4)", "into one order"),
        ("cross attend cluster(count = 2)", "cluster(count = 2)", "clusters of queries and keys"),
        ("cross attend sinkhorn(size = 2)", "sinkhorn(size = 2)", "blocks of one sequence"),
        ("cross attend topk(blocks = 2, size = 4)", "topk(", "say `queries = 1`"),
        ("cross attend topk(keys = 2, queries = 3)", "topk(", "say `queries = 1`"),
        (
            "cross input s: scores attend topk(keys = 2, score = s)",
            "topk(keys = 2, score = s)",
            "inputs are the keys'",
        ),
        ("cross input x: ids attend same(x)", "same(x)", "inputs belong to the keys"),
        ("cross input x: tokens attend global(x)", "x", "`x` belongs to the keys"),
        ("cross input x: tokens attend rows(first(2) | x)", "first(2) | x", "`x` belongs"),
        ("cross input x: tokens attend transpose(columns(x))", "x", "`x` belongs to the keys"),
        ("cross input x: length attend transpose(prefix(x))", "x", "`x` belongs to the keys"),
        (
            "cross input x: tokens attend topk(keys = 2, within = rows(x))",
            "x",
            "`x` belongs to the keys",
        ),
        ("cross attend self + linear()", "self + linear()", "the pairs of one sequence"),
        ("cross attend nystrom()", "nystrom()", "segments of one sequence"),
        ("cross attend fourier()", "fourier()", "mixes the positions of one sequence"),
        ("cross attend full score alibi()", "alibi()", "the distance q - k"),
        ("cross heads 1 attend full score alibi(slopes = [1])", "alibi(slopes = [1])", "distance"),
        ("cross heads 2 attend full score bias()", "bias()", "the distance q - k"),
        ("cross attend full require causal", "causal", "no key reads"),
        ("cross attend full require reach(layers = 2)", "reach(layers = 2)", "no key reads"),
        ("cross attend full require depth <= 2", "depth", "no key reads"),
        ("cross attend full require 2 >= diameter", "diameter", "no key reads"),
        ("cross attend full require path_length <= 2", "path_length", "no key reads"),
        ("cross attend full require spectral_gap >= 0", "spectral_gap", "no key reads"),
        ("cross attend self require causal subset full", "causal", "the places"),
    ],
)
def test_what_has_a_meaning_within_one_sequence_is_refused(body: str, place: str, why: str) -> None:
    found = problem(body)
    assert found.code == "A420"
    assert found.span is not None
    assert found.span.text.startswith(place)
    assert why in found.message
    # the message shows where the spec says that it has two
    assert [related.text for _, related in found.related] == ["cross"]


@pytest.mark.parametrize(
    "body",
    [
        "cross let m = 3 attend window(radius = m)",
        "cross input m: tokens attend columns(m)",
    ],
)
def test_no_other_name_is_m(body: str) -> None:
    found = problem(body)
    assert (found.code, found.span and found.span.text) == ("A204", "m")
    with pytest.raises(SpecError, match="`m` is the number of queries here"):
        parse("attention a(m = 3) { cross attend window(radius = m) }")


def test_m_is_a_number_in_specs_of_two_sequences_alone() -> None:
    found = problem("attend where(q * n < k * m)")
    assert (found.code, found.span and found.span.text) == ("A201", "m")
    counts = "`m` counts queries in a spec that says `cross`"
    positions = "in a predicate `q` is the position of the query, `k` that of the key"
    assert found.help == f"{positions}; {counts}"
    assert problem("attend window(radius = m)").help == counts
    # the parameter of a named graph is its own
    text = "graph near(m) = window(radius = m) attention a {{ {} attend near(m = 2) }}"
    assert parse(text.format("cross")).mask(5).sum() == parse(text.format("")).mask(5).sum()


def test_cross_is_said_once_and_outside_of_scopes() -> None:
    assert problem("cross cross attend full").code == "A406"
    assert problem("heads 2 attend full head 0 { cross }").code == "A405"


def spec_of(body: str) -> Spec:
    return parse(f"attention a {{ {body} }}")


@pytest.mark.parametrize(
    "body",
    [
        "cross attend transpose(rows(first(2)))",
        "cross input x: tokens attend columns(~x) | transpose(rows(x))",
        "cross input x: length attend prefix(x)",
        "cross input x: choices(size = 4) attend chosen(x)",
        "cross attend topk(mass = 0.5, size = 4, queries = 1)",
        "cross heads 2 attend full head 0 { attend efficient() }",
        "cross attend full score softcap(cap = 5) normalize softmax1",
        "cross(cross = 2) { cross attend window(radius = cross) }",
        "cross attend window(radius = m - n) require rows_nonempty require edges <= m * n",
    ],
)
def test_what_has_a_meaning_is_accepted(body: str) -> None:
    text = f"attention {body}" if body.startswith("cross(") else f"attention a {{ {body} }}"
    spec = parse(text)
    assert spec.program.cross
    # the text says the same again, and so does the plan
    assert parse(spec.source) == spec
    plan = from_data(to_data(spec.program))
    assert (plan.cross, plan.attends) == (True, spec.program.attends)


def test_two_sequences_are_another_spec() -> None:
    one, two = spec_of("attend full"), spec_of("cross attend full")
    assert one != two
    assert one.fingerprint != two.fingerprint
    assert "cross" not in to_data(one.program)
