"""What `check` says: claims against brute force, counterexamples, proofs, lints."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from package_map import ROOT
from random_terms import mask, term

from attnspec.analysis.counting.figures import FIGURES
from attnspec.check.verdicts import _CHECKS
from attnspec.elaborate.names import METRICS, PROPERTIES
from attnspec.graphs.forms.properties import is_symmetric, never_reads_later, reads_itself
from attnspec.spec import Spec, parse
from attnspec.text.diagnostics import Diagnostic


def spec_of(body: str) -> Spec:
    return parse(f"attention a {{ {body} }}")


def found(body: str) -> list[Diagnostic]:
    return spec_of(body).check()


def verdicts(body: str, *claims: str) -> list[str]:
    """The messages about claims, lints and advice left out."""
    required = " ".join(f"require {claim}" for claim in claims)
    judged = spec_of(f"{body} {required}").verdicts
    said = [d for verdict in judged for d in verdict.diagnostics]
    return [d.message for d in said if d.code.startswith("A6")]


# --- figures by brute force --------------------------------------------------------------------


# --- counterexamples ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "claim", "counterexample"),
    [
        ("attend full", "causal", "at n = 2: position 0 reads the later position 1"),
        (
            "layers 2 attend causal layer 1 { attend window(before = 0, after = 5) }",
            "causal at n = 9",
            "at n = 9: position 0 reads the later position 1 in layer 1",
        ),
        ("attend where(k < q)", "rows_nonempty", "at n = 1: query 0 has no key"),
        (
            "heads 2 attend self head 1 { attend rows(first(3)) }",
            "rows_nonempty",
            "at n = 64: query 3 has no key in head 1",
        ),
        (
            "layers 2 heads 2 attend self layer 1 { head 0 { attend rows(first(3)) } }",
            "rows_nonempty at n = 5",
            "at n = 5: query 3 has no key in layer 1, head 0",
        ),
        ("attend causal", "symmetric", "at n = 2: 1 reads 0, but 0 does not read 1"),
        ("causal attend full", "symmetric", "at n = 2: 1 reads 0, but 0 does not read 1"),
        ("attend self", "full subset causal", "at n = 2: (0, 1) is only in the first graph"),
        ("attend self", "self == causal", "at n = 2: (1, 0) is only in the second graph"),
        ("attend self", "degree > 1 at n = 9, 3", "at n = 3: degree is 1, must be > 1"),
        ("attend full", "edges <= 2 * n", "at n = 64: edges are 4,096, must be <= 128"),
        (
            "heads 2 attend self head 1 { attend window(before = 9, after = 0) }",
            "degree <= 9",
            "at n = 64: degree is 10, must be <= 9; for example query 9 reads 0..9 in head 1",
        ),
        ("attend full", "density < 0.5", "at n = 1: density is 1, must be < 0.5"),
        ("attend full", "1 < degree <= 9", "at n = 1: degree is 1, must be > 1"),
        ("attend self", "reach(layers = n) at n = 4", "after 4 layers query 0 has not read 1"),
    ],
)
def test_counterexamples(body: str, claim: str, counterexample: str) -> None:
    (diagnostic, *rest) = [d for d in found(f"{body} require {claim}") if d.code == "A606"]
    assert f"does not hold {counterexample}" in diagnostic.message or (
        counterexample in diagnostic.message
    )
    assert diagnostic.severity == "error"
    assert diagnostic.span is not None
    assert diagnostic.span.text == f"require {claim}"
    # a chain is two claims
    assert len(rest) == (1 if claim.startswith("1 <") else 0)


@pytest.mark.parametrize(
    ("claim", "truth"),
    [
        ("self subset causal", True),
        ("self | where(k < q) == causal", True),
        ("transpose(causal) | causal == full", True),
        ("window(radius = 1) - self == dilated(radius = 1, step = 1) & ~self", True),
        ("full subset where(q >= k)", False),
        ("shift(full, by = 1) == full", False),
        ("self - self subset self & where(q < k)", True),
    ],
)
def test_graphs_are_compared_as_sets_of_pairs(claim: str, truth: bool) -> None:
    assert (verdicts("attend self", claim) == []) == truth


def test_under_causal_graphs_of_claims_are_causal_too() -> None:
    assert verdicts("causal attend self", "full == causal") == []
    assert len(verdicts("attend self", "full == causal")) == 1


@pytest.mark.parametrize(
    ("body", "claim", "truth"),
    [
        ("attend full", "order <= n ** 2", True),
        ("attend full", "order <= n * log2(n)", False),
        ("attend window(radius = 5)", "order <= n", True),
        ("attend powers(base = 2)", "order <= n * log2(n)", True),
        ("attend powers(base = 2)", "order <= n", False),
        ("causal attend strided(stride = isqrt(n))", "order <= n ** 1.5", True),
        ("attend random(keys = 3)", "order <= n", True),
        ("attend where(q % 7 == k % 7)", "order <= n * sqrt(n)", False),
        ("attend where(q * k % 7 == 1)", "order <= n * sqrt(n)", False),
    ],
)
def test_order_is_proven_or_judged_by_counting(body: str, claim: str, truth: bool) -> None:
    said = verdicts(body, claim)
    assert (said == []) == truth
    assert all("edges over the bound grow" in message for message in said)


def test_a_claim_without_an_answer() -> None:
    for claim in (
        "degree <= 1 // (n - 64) at n = 64",
        "reach(layers = n - 100)",
        "degree <= log2(n - 1)",
        "order <= n - n",
        "residue(step = n - 1) subset full",
    ):
        (diagnostic,) = found(f"attend full require {claim}")
        assert diagnostic.code == "A608", claim
        assert diagnostic.severity == "error"


OPEN = "where(q * k % 7 == 0)"
"""A graph whose pairs have no closed form."""

# --- what is not checked -----------------------------------------------------------------------


def test_costs_of_one_layer() -> None:
    body = "layers 2 heads 3 attend full"
    # products of all pairs: 4 d operations each, heads of size 64
    assert verdicts(body, "flops == 3 * 4 * 64 * n ** 2 at n = 32, 64") == []
    (refuted,) = verdicts(body, "flops < 3 * 4 * 64 * n ** 2 at n = 32")
    assert "flops are 786,432, must be < 786,432" in refuted
    assert verdicts("attend window(radius = 1)", "bytes <= 10_000 * n") == []
    assert len(verdicts("attend window(radius = 1)", "bytes <= n")) == 1
    # of mechanisms the products of their formulas
    assert verdicts("heads 2 attend linear()", "flops == 2 * 4 * 64 * 64 * n") == []
    (refuted,) = verdicts("heads 2 attend linear()", "flops < 2 * 4 * 64 * 64 * n")
    assert "at n = 1: flops are 32,768, must be < 32,768" in refuted
    assert verdicts("causal attend favor(features = 8)", "bytes <= 20_000 * n") == []
    # beside a graph, exact weights and products; layers may have heads of both kinds
    hybrid = "causal attend window(before = 15, after = 0) + linear()"
    assert verdicts(hybrid, "flops <= 100_000 * n") == []
    (refuted,) = verdicts(hybrid, "flops <= 1_000 * n")
    assert "does not hold at n = " in refuted
    both = "heads 2 head 0 { attend linear() } head 1 { attend window(radius = 4) }"
    assert verdicts(both, "flops <= 50_000 * n") == []


@pytest.mark.parametrize(
    ("body", "claim", "reason"),
    [
        ("attend gmlp(max_length = 8)", "bytes >= n", "learned for at most 8 positions"),
        ("attend full", "bytes <= n at n = 5_000_000", "supports n <= 4,194,304"),
        ("input x: tokens attend global(x)", "degree <= n", "depend on run-time inputs"),
        ("input x: tokens attend full", "full subset global(x)", "depend on run-time inputs"),
        ("attend linear()", "edges <= n", "`linear` is a mechanism"),
        ("attend full + linear()", "degree <= n", "`linear` is a mechanism"),
        ("attend topk(size = 4, blocks = 1)", "rows_nonempty", "decided by the data"),
        ("attend lsh(buckets = 4) | self", "edges <= n * n", "`lsh` is decided by the data"),
        ("sequence grid(3, 3) attend axial", "order <= n ** 1.5", "one length"),
        ("attend full", f"{OPEN} == full at n = 70_000", "so many pairs"),
        ("attend window(radius = 9)", "path_length > 1 at n = 5000", "8 queries were followed"),
        ("attend topk(size = 4, blocks = 1) & lsh()", "causal", "`lsh` is decided by the data"),
        ("attend full", "degree <= n at n = 2_000_000_000", "supports n <= 4,194,304"),
        ("attend where(q * k == q * q)", "edges == n at n = 1_000_000", "so many are not"),
        ("attend block(size = n // 4000)", "degree <= n", "at n = 1, 2, 64, 257, 1,024: `size`"),
    ],
)
def test_what_is_not_checked_says_so(body: str, claim: str, reason: str) -> None:
    diagnostics = [d for d in found(f"{body} require {claim}") if d.code != "A320"]
    (diagnostic,) = diagnostics
    assert diagnostic.code == "A609"
    assert diagnostic.severity == "warning"
    assert reason in diagnostic.message


def test_a_length_that_is_too_long_does_not_hide_the_others() -> None:
    codes = [d.code for d in found(f"attend full require {OPEN} == self at n = 70_000, 7")]
    assert codes == ["A606"]
    turned = OPEN.replace("q * k", "k * q")
    codes = [d.code for d in found(f"attend full require {OPEN} == {turned} at n = 70_000, 7")]
    assert codes == ["A609"]


def test_large_closed_forms_are_counted() -> None:
    claim = "edges == 5 * n - 6 at n = 1_000_000"
    assert verdicts("attend window(radius = 2)", claim) == []
    assert len(verdicts("attend window(radius = 2)", claim.replace("6 at", "5 at"))) == 1


def test_a_spec_that_no_length_has_is_an_error() -> None:
    (diagnostic,) = found("attend residue(step = 0 * n)")
    assert (diagnostic.code, diagnostic.severity) == ("A320", "error")
    # a grid that fits none of the lengths is none
    assert found("sequence grid(isqrt(n), 7) attend axial") == []
    # at most lengths it has a size
    assert found("attend residue(step = n - 5)") == []


def test_many_layers_and_heads_are_bounded() -> None:
    assert found("layers 4096 heads 64 attend self require degree == 1 require causal") == []
    body = "layers 64 heads 64 attend random(keys = 1) require degree == 1 at n = 8"
    assert [d.code for d in found(body)] == ["A609"]


# --- proofs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [*range(1), *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 8))],
)
def test_proofs_are_sound(part: int) -> None:
    proven = {"itself": 0, "symmetric": 0, "never later": 0}
    for seed in range(part * 150, part * 150 + 150):
        graph = term(random.Random(seed))
        for n in (1, 2, 3, 6, 13):
            pairs = mask(graph, n)
            if reads_itself(graph):
                proven["itself"] += 1
                assert pairs.diagonal().all(), (graph, n)
                assert mask(graph, n, causal=True).any(axis=1).all(), (graph, n)
            if is_symmetric(graph):
                proven["symmetric"] += 1
                assert (pairs == pairs.T).all(), (graph, n)
            if never_reads_later(graph):
                proven["never later"] += 1
                assert not np.triu(pairs, 1).any(), (graph, n)
    assert min(proven.values()) > 5


@pytest.mark.parametrize(
    ("body", "claim"),
    [
        ("input x: ids attend same(x)", "rows_nonempty"),
        ("input x: ids attend same(x)", "symmetric"),
        ("input x: tokens attend global(x) | self", "rows_nonempty"),
        ("input x: tokens attend global(x)", "symmetric"),
        ("input x: ids causal attend same(x)", "causal"),
        ("input x: ids attend same(x) & causal", "causal"),
        ("causal attend linear()", "causal"),
        ("attend window(radius = n)", "symmetric"),
    ],
)
def test_what_follows_from_the_text_is_proven_for_every_input(body: str, claim: str) -> None:
    assert verdicts(body, claim) == []


@pytest.mark.parametrize(
    ("body", "claim"),
    [
        ("input x: ids causal attend same(x)", "symmetric"),
        ("input x: tokens attend columns(x)", "rows_nonempty"),
        ("input x: tokens attend columns(x) & causal & (transpose(causal) | self)", "symmetric"),
    ],
)
def test_what_does_not_follow_is_not_proven(body: str, claim: str) -> None:
    (message,) = verdicts(body, claim)
    assert "is not checked" in message


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("pattern", ["neighborhood(3, 3)", "axial", "where(k.row == q.row)"])
def test_extra_tokens_have_no_cell_and_no_key(pattern: str, count: int) -> None:
    body = f"sequence grid(3, 3) extra_tokens {count} attend {pattern}"
    (message,) = verdicts(body, "rows_nonempty")
    assert "query 0 has no key" in message
    assert verdicts(body.replace(f"extra_tokens {count}", ""), "rows_nonempty") == []


# --- lints -------------------------------------------------------------------------------------


def test_rows_without_keys_are_counted_and_listed() -> None:
    (diagnostic,) = found("causal heads 2 attend self head 1 { attend where(k < q - 5) }")
    assert (diagnostic.code, diagnostic.severity) == ("A901", "warning")
    assert diagnostic.message == "6 of 1024 queries have no key in head 1: 0, 1, 2, 3, …"
    assert diagnostic.span is not None
    assert diagnostic.span.text == "attend where(k < q - 5)"


def test_one_statement_is_reported_once() -> None:
    (diagnostic,) = found("layers 3 heads 4 attend where(k < q - layer)")
    assert diagnostic.message == "1 of 1024 queries have no key in layer 0, head 0: 0"


def test_a_graph_without_pairs() -> None:
    (diagnostic,) = found("heads 2 attend self head 0 { attend self & where(q < k) }")
    assert (diagnostic.code, diagnostic.severity) == ("A902", "warning")
    assert diagnostic.message == "this graph has no pairs at n = 1024 in head 0"


def test_rows_that_are_empty_at_some_lengths_only() -> None:
    (diagnostic,) = found("attend columns(positions(100))")
    assert diagnostic.code == "A901"
    assert diagnostic.message.startswith("64 of 64 queries")


def test_rows_with_keys_are_not_reported() -> None:
    for body in ("attend self", "attend columns(first(1))", "input x: tokens attend global(x)"):
        assert [d for d in found(body) if d.code.startswith("A9")] == []


def test_unused_names() -> None:
    text = (
        "attention a(r = 1, s = r, t = 2) { let u = s let v = t input w: ids heads 2"
        " attend window(radius = u) head 1 { let z = v attend self } }"
    )
    unused = [(d.code, d.severity, d.message) for d in parse(text).check()]
    assert unused == [
        ("A903", "warning", "the input `w` is never used"),
        ("A903", "warning", "the local name `z` is never used"),
    ]


def test_a_name_used_in_a_claim_is_used() -> None:
    text = "attention a(r = 1) { attend self require degree <= r }"
    assert parse(text).check() == []


# --- known truths ------------------------------------------------------------------------------


def test_a_causal_window_needs_as_many_layers_as_it_takes_to_walk() -> None:
    body = "causal attend window(before = 31, after = 0)"
    assert verdicts(body, "depth == 17 at n = 512", "reach(layers = 17) at n = 512") == []
    assert len(verdicts(body, "reach(layers = 16) at n = 512")) == 1


def test_chunks_never_join_all_pairs() -> None:
    body = "causal attend where(q // 64 == k // 64)"
    (message,) = verdicts(body, "depth <= 1000 at n = 65")
    assert "some allowed pair is never joined" in message
    assert verdicts(body, "depth == 1 at n = 64") == []


def test_dilation_splits_parity() -> None:
    body = "layers 4 attend dilated(radius = 8, step = 2)"
    (message,) = verdicts(body, "reach(layers = 4) at n = 9")
    assert "query 0 has not read 1" in message
    assert verdicts(body + " layer 3 { attend window(radius = 1) }", "depth == 4 at n = 9") == []


@pytest.mark.parametrize("tokens", ["first(1)", "last(1)", "positions(5)", "every(100)"])
def test_a_global_token_makes_the_diameter_two(tokens: str) -> None:
    assert verdicts(f"attend global({tokens}) | self", "diameter == 2 at n = 7, 64, 257") == []


def test_the_order_of_layers_matters() -> None:
    first = "where(q // 8 == k // 8)"
    second = "where(k % 8 == 7) | self"
    layers = "causal layers 2 layer 0 { attend %s } layer 1 { attend %s } "
    claim = "reach(layers = 2) at n = 64"
    # summaries are read after their block has been read by them
    assert verdicts(layers % (first, second), claim) == []
    assert len(verdicts(layers % (second, first), claim)) == 1


def test_a_spec_with_fewer_layers_repeats_its_last() -> None:
    body = "layers 2 attend self layer 1 { attend window(radius = 1) }"
    assert verdicts(body, "depth == 7 at n = 7", "reach(layers = 7) at n = 7") == []
    assert len(verdicts(body, "reach(layers = 6) at n = 7")) == 1


def test_direction_is_from_query_to_key() -> None:
    body = "attend where(k == q - 1) | self"
    spec = spec_of(body)
    assert spec.graph(5).has_edge(3, 2)
    assert not spec.graph(5).has_edge(2, 3)
    assert verdicts(body, "causal") == []
    assert len(verdicts("attend where(k == q + 1) | self", "causal")) == 1


def test_heads_that_are_told_apart_are_declared() -> None:
    text = "attention a {{ {} attend residue(step = 3) | window(radius = 2 * head) }}"
    (warning,) = parse(text.format("")).check()
    assert (warning.code, warning.severity) == ("A904", "warning")
    assert warning.span is not None
    assert warning.span.text == "window(radius = 2 * head)"
    assert parse(text.format("heads 4")).check() == []
    # draws of heads are no sizes
    assert parse("attention a { attend random(keys = 3) | self }").check() == []


def test_every_word_of_a_claim_has_a_meaning_and_a_row_in_the_reference() -> None:
    apart = {"depth", "diameter", "path_length", "order"}
    assert set(METRICS) == {*FIGURES, *apart}
    assert set(PROPERTIES) <= set(_CHECKS)
    reference = (ROOT / "grammar" / "README.md").read_text(encoding="utf-8")
    rows = reference.partition("| claim | holds when |\n")[2].partition("\n\n")[0].splitlines()
    named = {word for row in rows for word in re.findall(r"`(\w+)", row.split("|")[1])}
    assert {*METRICS, *PROPERTIES} <= named


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ("where(k % (n - 64) == 0)", "`where` has no value: division by zero at n = 64"),
        ("residue(step = 10 // (n - 64))", "got 0 at n = 1024"),
    ],
)
def test_the_length_at_which_there_is_no_graph_is_said_once(graph: str, message: str) -> None:
    (diagnostic,) = found(f"attend {graph}")
    assert diagnostic.code == "A320"
    assert diagnostic.message.endswith(message)
    assert diagnostic.message.count("n = ") == 1


@pytest.mark.parametrize(
    ("body", "claim", "missing"),
    [
        ("attend where(k <= q and q % (n - 1) >= 0)", "causal", "1"),
        ("causal attend where(q // (n - 2) == 0)", "causal", "2"),
        ("attend where(log2(n - 1) == k) | self", "rows_nonempty", "1"),
        ("attend where([1, 2, 3][n // 70] > abs(q - k))", "symmetric", "257, 1,024"),
        ("attend where(k <= q and q % (k - 100) == 0)", "causal", "257, 1,024"),
        ("attend window(radius = n - 3)", "symmetric", "1, 2"),
        ("attend global(first(9 // (n - 1)))", "symmetric", "1"),
        (
            "input t: tokens attend rows(t) | shift(self, by = 2 // (n - 1)) | self",
            "rows_nonempty",
            "1",
        ),
        ("attend where(k <= q and q % (n - 1) >= 0)", "edges <= n * n", "1"),
        ("cross attend where(q // (n - 1) >= 0)", "stable", "1"),
        ("attend full scale 1 / (n - 1)", "symmetric", "1"),
        ("layers 2 causal attend full scale 1 / (n - 2 * layer)", "causal", "2"),
        ("attend full score softcap(cap = n - 1)", "rows_nonempty", "1"),
        ("causal attend favor(features = 8 + 8 // (n - 1), seed = 0)", "causal", "1"),
    ],
)
def test_a_proof_ends_where_a_number_has_no_value(body: str, claim: str, missing: str) -> None:
    messages = [d.message for d in found(f"{body} require {claim}") if d.code == "A609"]
    assert messages[0].startswith(f"`{claim}` is not checked at n = {missing}: `")
    codes = [d.code for d in found(f"{body} require {claim} at n = 5, 1, 2, 300")]
    assert "A320" in codes or "A608" in codes


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("attend where(k <= q and q % (n - 100) >= 0) require causal", "checked"),
        ("attend full scale 1 / (n + layer) require symmetric", "proven"),
        ("attend full scale 1 / (n - 1) require symmetric for n >= 2", "proven"),
        ("attend where(k <= q and q % (n - 100) >= 0) require causal for n >= 101", "proven"),
        ("attend where(k <= q and q % (n - 1) >= 0) require causal for n >= 2", "proven"),
        ("attend where(k <= q and q % max(n - 1, 1) >= 0) require causal", "proven"),
        ("heads 2 attend where(k <= q and [3, 5][head] <= q // isqrt(n)) require causal", "proven"),
        ("attend residue(step = isqrt(n)) require symmetric", "proven"),
    ],
)
def test_a_proof_is_for_every_length_only_where_numbers_have_values(body: str, status: str) -> None:
    (verdict,) = spec_of(body).verdicts
    assert verdict.status == status


@pytest.mark.parametrize("figure", ["diameter", "depth"])
@pytest.mark.parametrize("body", ["window(radius = 2)", "window(radius = 1) | residue(step = 5)"])
def test_an_example_is_as_far_apart_as_the_figure_says(figure: str, body: str) -> None:
    spec = spec_of(f"attend {body} require {figure} <= 1 at n = 40")
    (message,) = (d.message for d in spec.check() if d.code == "A606")
    named = re.search(r"is (\d+), must be <= 1; for example (\d+) -> (\d+) takes (\d+) ", message)
    assert named is not None
    most, query, key, steps = map(int, named.groups())
    (distance,) = (spec.analyse(40).hops(query)[key],)
    assert most == steps == distance == getattr(spec.analyse(40), figure)


def test_symmetry_is_judged_at_long_lengths() -> None:
    assert verdicts("attend window(radius = 2) | rows(first(1))", "symmetric at n = 8192") == [
        "`symmetric` does not hold at n = 8192: 0 reads 3, but 3 does not read 0"
    ]
    long = spec_of("attend where(abs(q * q - k * k) % 90 == 1) require symmetric at n = 8192")
    assert [verdict.status for verdict in long.verdicts] == ["proven"]
    pairs = "where((q - k) % 4096 == 1) | where((k - q) % 4096 == 1)"
    (verdict,) = spec_of(f"attend {pairs} require symmetric at n = 8192").verdicts
    assert verdict.status == "checked"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("input t: tokens input x: ids attend full - (columns(t) - same(x))", "proven"),
        ("input t: tokens attend full - (columns(t) & where(q != k))", "proven"),
        ("input t: tokens attend full - columns(t)", "unchecked"),
        ("input t: tokens attend ~(rows(t) & ~(self | columns(t)))", "proven"),
    ],
)
def test_a_complement_of_what_reads_others_reads_itself(body: str, status: str) -> None:
    (verdict,) = spec_of(f"{body} require rows_nonempty").verdicts
    assert verdict.status == status
