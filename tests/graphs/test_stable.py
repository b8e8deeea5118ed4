"""Rows that are the same pairs at every length: verdicts and figures, and the terms they name."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import strategies as st
from oracle import truth
from oracle.meaning import masks
from oracle.scalars import Invalid
from oracle.tree import Attention, Claim, Node, text
from population import spec_of
from specs import graphs, ten
from views import Case

from attnspec import parse

STABLE = Claim(Node("flag", ("stable",)))


def test_drawn_graphs_are_judged_as_brute_force_judges_them() -> None:
    """A verdict that refutes names a term of the graph, in the words of the language."""
    seen = {"proven": 0, "refuted": 0, "checked": 0}

    def asked(graph: Node, causal: bool) -> None:
        tree = Attention((Node("attend", (graph,)),), causal=causal, claims=(STABLE,))
        (verdict,) = parse(text(tree)).verdicts
        seen[verdict.status] += 1
        said = verdict.diagnostics[0].message if verdict.diagnostics else ""
        for term in re.findall("; `(.*?)` (?:has a size|loses|draws|reads)", said):
            assert spec_of(f"attend {term}").source
        try:
            # a length at which a size has no value is passed by
            assert len(masks(tree, 1)) == len(masks(tree, 2))
            held = truth.holds(tree, STABLE, 16)
        except Invalid:
            return
        assert held if verdict.status == "proven" else held or verdict.status == "refuted"
        failed = verdict.failed_at
        assert failed is None or failed > 16 or not truth.holds(tree, STABLE, failed)

    for seed in range(5):
        ten(asked, seed, graphs, st.booleans())
    assert min(seen["proven"], seen["refuted"]) > 10


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("causal attend full", "proven", ""),
        (
            "attend full",
            "refuted",
            "at n = 2: query 0 reads the later key 1 at n = 2, but not at n = 1",
        ),
        (
            "causal attend window(radius = isqrt(n))",
            "refuted",
            "query 2 reads 0 at n = 4, but not at n = 3; `window(radius = isqrt(n))` depends on n,"
            " the number of positions: write a number in place of `isqrt(n)`",
        ),
        (
            "heads 2 causal attend self head 1 { attend columns(last(2)) }",
            "refuted",
            "query 0 reads 0 at n = 2, but not at n = 3 in head 1; `columns(last(2))` reads"
            " `last(2)`, which changes as the sequence grows",
        ),
        ("causal attend expander(degree = 2)", "refuted", "use `random(keys = …)`, which"),
        ("attend random(keys = 2) & causal", "refuted", "draws among all n keys: add the"),
        ("causal attend random(keys = 2)", "proven", ""),
        ("causal attend random_blocks(size = 3, blocks = 1)", "proven", ""),
        (
            "causal attend shift(self, by = -2)",
            "refuted",
            "`shift(self, by = -2)` has no pairs at the last position",
        ),
        ("causal attend where((q - k) % n < 3)", "checked", ""),
        ("causal attend linear()", "proven", ""),
        ("attend linear()", "refuted", "`linear` mixes all positions: write the statement"),
        ("attend fourier()", "refuted", "mixes all positions: it has no causal form"),
        ("causal attend window(radius = 1) + linear()", "proven", ""),
        (
            "causal attend window(radius = isqrt(n)) + linear()",
            "refuted",
            "depends on n, the number of positions",
        ),
        ("causal attend favor(features = n)", "unchecked", "depends on n, the number of positions"),
        ("causal input x: tokens attend global(x)", "proven", ""),
        ("causal input x: tokens attend global(x - last(1))", "refuted", "`last(1)`"),
        ("causal input x: ids attend same(x) & window(radius = n)", "unchecked", "the input `x`"),
        ("sequence grid(4, 5) attend neighborhood(3, 3)", "proven", ""),
        ("sequence grid(n // 5, 5) causal attend axial", "proven", ""),
    ],
)
def test_claims_say_what_is_known(body: str, status: str, words: str) -> None:
    spec = parse(f"attention a {{ {body} require stable }}")
    (verdict,) = spec.verdicts
    assert verdict.status == status
    assert words in " ".join(d.message for d in verdict.diagnostics)
    report = spec.analyse(20)
    assert report.stable == {"refuted": False, "unchecked": None}.get(status, True)
    assert report.quality["stable"] == {"checked": "estimate", "unchecked": None}.get(
        status, "exact"
    )


def test_many_heads_are_proven_and_bounded() -> None:
    heads = "attention a { causal layers 64 heads 64 attend %s require stable }"
    assert parse(heads % "random(keys = 1)").verdicts[0].status == "proven"
    few = heads.replace("64", "8")
    assert parse(few % "random(keys = 1) | expander(degree = 2)").verdicts[0].status == "refuted"
    assert parse(heads % "window(radius = 64 * layer + head)").verdicts[0].status == "unchecked"


def test_stable_is_checked_for_each_head() -> None:
    body = "heads 4 causal attend shift(causal, by = 2 - head) require stable"
    (verdict,) = parse(f"attention a {{ {body} }}").verdicts
    assert verdict.status == "refuted"
    assert "in head 3; `shift(causal, by = -1)` has no pairs" in verdict.diagnostics[0].message


def test_a_claim_at_a_length_is_about_the_lengths_up_to_it() -> None:
    text = (
        "attention a { causal attend window(before = n // 9, after = 0) require stable at n = %d }"
    )
    assert parse(text % 8).verdicts[0].status == "checked"
    assert parse(text % 9).verdicts[0].status == "refuted"


def test_the_first_head_that_differs_is_named() -> None:
    for seed in range(4):
        body = f"heads 4 attend random(keys = 1, seed = {seed}) & columns(first(1)) require stable"
        spec = spec_of(f"{body} at n = 3")
        case, short = Case(spec, 3).masks[0], {n: Case(spec, n).masks[0] for n in (1, 2)}
        differ = [
            head
            for head in range(4)
            if any((case[head, :n, :n] != short[n][head]).any() for n in short)
            or any(case[head, :n, n:].any() for n in short)
        ]
        (verdict,) = spec.verdicts
        assert (verdict.status == "refuted") == bool(differ)
        assert not differ or f"in head {differ[0]};" in verdict.diagnostics[0].message


@pytest.mark.parametrize(
    ("graph", "blamed"),
    [
        ("topk(keys = 7, queries = 3)", "looks ahead"),
        ("lsh(chunk = 8, buckets = 4)", "looks ahead"),
        ("cluster(count = 4)", "looks ahead"),
        ("lsh(chunk = 8)", ""),
        ("cluster", ""),
        ("topk(blocks = 3, size = 2, queries = 1, always = columns(last(2)))", "`last(2)`"),
        ("topk(blocks = 3, size = 2, queries = 1, within = columns(last(2)))", "`last(2)`"),
        ("topk(blocks = 3, size = 2, queries = 1, within = columns(first(2)))", None),
    ],
)
def test_choices_that_look_ahead_or_count_by_length_are_not_stable(
    graph: str, blamed: str | None
) -> None:
    figure = spec_of(f"causal attend {graph}").analyse(20).to_dict(("stable",))["figures"]["stable"]
    assert (figure["value"] is True) == (blamed is None)
    # what a stream says
    q = torch.zeros(1, 1, 4, 4)
    if blamed:
        with pytest.raises(ValueError, match=re.escape(blamed)):
            spec_of(f"causal attend {graph}").compile().step(q, q, q)


@pytest.mark.parametrize(
    "text",
    [
        "window(before = 2 * isqrt(n), after = 0)",
        "window(radius = (n - 1) // 2)",
        "where(q - k < n and not (k == 0 or q % 2 == 1))",
        "where(-(q - k) ** 2 in -n..0)",
        "where(q - (k - 1) < n)",
        "where(q * (k + 1) // 2 < n ** 2)",
        "where(q - k in -n + 1..n - 1)",
        "where(k in {1, 2, n})",
        "block(size = max(1, n // 4), before = 1)",
        "random(keys = 3)",
        "random(keys = 3, seed = 5)",
        "columns((last(2) | every(4)) - positions(1, 3..5))",
        "columns(~last(3))",
    ],
)
def test_the_term_that_is_to_blame_is_quoted_as_it_is_written(text: str) -> None:
    (verdict,) = spec_of(f"attend {text} require stable").verdicts
    assert f"`{text}`" in verdict.diagnostics[0].message
