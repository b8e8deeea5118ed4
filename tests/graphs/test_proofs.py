"""What is proven for every length: equalities, subsets, properties, and equal specs."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from oracle.tree import Node, expression
from population import spec_of
from specs import graphs, ten
from sweeps import checkered

from attnspec import parse


def status(body: str, *claims: str) -> list[str]:
    required = " ".join(f"require {claim}" for claim in claims)
    return [each.status for each in parse(f"attention a {{ {body} {required} }}").verdicts]


MEANT = {
    "full": "true",
    "causal": "k <= q",
    "self": "q == k",
    "window(radius = 9)": "abs(q - k) <= 9",
    "window(before = 70, after = 3)": "q - k <= 70 and k - q <= 3",
    "window(before = 12, after = 0)": "q - k <= 12 and k <= q",
    "dilated(radius = 512, step = 8)": "abs(q - k) <= 512 and (q - k) % 8 == 0",
    "residue(step = 64)": "(q - k) % 64 == 0",
    "strided(stride = 128)": "abs(q - k) < 128 or (q - k) % 128 == 0",
    "block(size = 64)": "q // 64 == k // 64",
    "block(size = 48, before = 2, after = 1)": "q // 48 - k // 48 <= 2 and k // 48 - q // 48 <= 1",
    "summary(stride = 64, cells = 4)": "k % 64 >= 64 - 4",
    "fixed(stride = 48, cells = 8)": "q // 48 == k // 48 or k % 48 >= 48 - 8",
    "global(first(16))": "q < 16 or k < 16",
    "global(every(1000))": "q % 1000 == 0 or k % 1000 == 0",
    "rows(last(7))": "q >= n - 7",
    "columns(first(16))": "k < 16",
    "columns(last(5))": "k >= n - 5",
    "prefix(100)": "k < 100",
    "strided(stride = isqrt(n))": "abs(q - k) < isqrt(n) or (q - k) % isqrt(n) == 0",
    "fixed(stride = isqrt(n), cells = 1)": (
        "q // isqrt(n) == k // isqrt(n) or k % isqrt(n) >= isqrt(n) - 1"
    ),
}

FIGURES = (
    "edges degree min_degree readers depth diameter causal symmetric rows_nonempty stable"
    " order kv_cache eviction"
).split()


@pytest.mark.parametrize(("graph", "causal"), checkered(MEANT, ["", "causal "]))
def test_a_pattern_is_its_predicate(graph: str, causal: str) -> None:
    predicate = MEANT[graph]
    assert status("attend self", f"{graph} == where({predicate})") == ["proven"]
    named, written = (
        spec_of(f"{causal}attend {each}").analyse(300).to_dict(tuple(FIGURES))["figures"]
        for each in (graph, f"where({predicate})")
    )
    assert [name for name in FIGURES if named[name]["value"] != written[name]["value"]] == []


WINDOW = "window(before = 5, after = 3)"

PROVEN = [
    # distances, of positions and of blocks
    f"{WINDOW} subset where(q - k < 6)",
    f"{WINDOW} == where(abs(q - k - 1) <= 4)",
    f"{WINDOW} subset where(q <= k + 5)",
    f"{WINDOW} == where(k - q in -5..3)",
    "where(q - k == 2) subset where(k - q <= -2)",
    "where(k - q != 2) == where(q - k > -2) | where(k - q >= 3)",
    "~window(radius = 3) == where(abs(q - k) > 3)",
    "where(abs(q - k) >= 3) == ~window(radius = 2)",
    "block(size = 4, before = 1) subset where(q // 4 - k // 4 <= 1)",
    "where(k // 4 > q // 4) == ~where(q // 4 >= k // 4)",
    "block(size = 4) subset window(radius = 3)",
    "window(radius = 8) subset block(size = 8, before = 1, after = 1)",
    "block(size = 5) subset block(size = 12, before = 1, after = 1)",
    "self subset block(size = isqrt(n))",
    "summary(stride = 8, cells = 1) subset fixed(stride = 8, cells = 2)",
    "where(q - k in 0..4) subset where(q // 4 - k // 4 <= 1)",
    "window(radius = isqrt(n)) subset window(radius = isqrt(n) + 2)",
    "self subset window(radius = isqrt(n))",
    "self subset powers(base = 2) | random_blocks(size = 2, blocks = 1)",
    # steps, and tokens
    "where(k % 4 != q % 4) == ~residue(step = 4)",
    "where((k - q) % 4 == 0) == residue(step = 4)",
    "residue(step = 12) subset residue(step = 4)",
    "self subset residue(step = isqrt(n))",
    "rows(every(3)) == where(q % 3 == 0)",
    "columns(~every(3)) == where(k % 3 != 0)",
    "summary(stride = 4, cells = 2) == where(not (k % 4 < 2))",
    "where(3 >= q) == rows(first(4))",
    "where(-k < -3) == columns(~first(4))",
    "where(k - n <= -3) == columns(~last(2))",
    "columns(first(2)) subset columns(first(5))",
    "columns(last(2)) subset columns(last(5))",
    "fixed(stride = n, cells = 2) subset fixed(stride = n, cells = 3)",
    # unions, intersections, bands that touch
    "self & columns(first(2)) subset columns(first(3)) | residue(step = 3)",
    "window(before = 2, after = 0) | where(q - k in 3..5) == window(before = 5, after = 0)",
    "window(radius = 3) & window(radius = 9) == window(radius = 3)",
    "residue(step = 3) - residue(step = 3) == full - full",
    "transpose(window(before = 2, after = 0)) == window(before = 0, after = 2)",
]
TRUE_OR_NOT = {
    "window(radius = 4) subset window(radius = 3)": "refuted",
    "self subset where(q - k <= isqrt(n) - 5)": "refuted",
    "where(q - k in 0..1) subset window(radius = isqrt(n) - 1)": "refuted",
    "where(q - k in 0..5) subset where(q // 4 - k // 4 <= 1)": "refuted",
    "residue(step = 4) subset residue(step = 12)": "refuted",
    "self subset where((q - k) % 3 == 1)": "refuted",
    "block(size = 8, before = 1, after = 1) subset window(radius = 8)": "refuted",
    "fixed(stride = 8, cells = 2) subset summary(stride = 8, cells = 1)": "refuted",
    "columns(first(3)) subset columns(first(2))": "refuted",
    "window(radius = 5) subset window(radius = n)": "checked",
    "shift(residue(step = 3), by = 0) == residue(step = 3)": "checked",
    "columns(positions(3, 20..30)) == where(k == 3 or k in 20..30)": "checked",
    "powers(base = 2) subset where(abs(q - k) in {0, 1, 2, 4})": "refuted",
}


@pytest.mark.parametrize("claim", PROVEN)
def test_claims_are_proven(claim: str) -> None:
    assert status("attend self", claim) == ["proven"]


@pytest.mark.parametrize(("claim", "said"), TRUE_OR_NOT.items())
def test_claims_are_refuted_or_checked(claim: str, said: str) -> None:
    assert status("attend self", claim) == [said]


def test_sizes_are_those_of_the_layer_and_head() -> None:
    places = "layers 2 heads 3 attend self"
    wide, near = "window(radius = 8 * layer + head)", "window(radius = 8 * layer + head - 1)"
    tokens = "columns(first(layers + heads))"
    assert status(places, f"self subset {wide}", f"{tokens} == columns(first(5))") == ["proven"] * 2
    # what holds in some heads alone does not hold
    assert status(places, "window(radius = 3) subset window(radius = 8 * layer + 2)") == ["refuted"]
    assert status(places.replace("self", "full"), f"{near} subset {wide}") != ["proven"]


@pytest.mark.parametrize(
    ("predicate", "symmetric", "itself"),
    [
        ("abs(q - k) <= 3", True, True),
        ("(q - k) % 4 == 0", True, True),
        ("0 != (q - k) % isqrt(n)", True, False),
        ("q // 4 == k // 4 or q * k <= n", True, True),
        ("q <= k and k <= q", True, True),
        ("q < k or q > k", True, False),
        ("q % 2 == 0 and k % 2 == 0", True, False),
        ("(q - k) ** 2 < n", True, None),
        ("max(q, k) - min(q, k) <= 2", True, None),
        ("not (q + k == n)", True, None),
        ("q < k or q == k", False, True),
        ("(q - k) % 4 == 1", False, False),
        ("(q - k) ** 3 < n", False, None),
        ("abs(q - 2 * k) <= 3", False, None),
        ("q // 4 == k // 5", False, None),
        ("k % 2 == 0", False, None),
        ("q.row == k.row or q.col == k.col", True, None),
        ("abs(q.row - k.row) + abs(q.col - k.col) <= 2", True, None),
        ("q.row == k.row or q.col < k.col", False, None),
        ("q.row == k.col", False, None),
    ],
)
def test_symmetry_and_reading_itself_are_proven(
    predicate: str, symmetric: bool, itself: bool | None
) -> None:
    grid = "sequence grid(4, 5) " * ("." in predicate)
    body = f"{grid}attend where({predicate})"
    found = status(body, "symmetric", f"self subset where({predicate})")
    assert (found[0] != "refuted") == symmetric
    assert not symmetric or found[0] == "proven"
    assert itself is None or (found[1] == "proven") == itself


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
    assert (status(f"attend where({predicate})", "causal") == ["proven"]) == proven


def test_a_token_that_is_no_cell_has_no_coordinates() -> None:
    body = "sequence grid(4, 5) extra_tokens 2 attend where(q.row == k.row)"
    assert status(body, "rows_nonempty", "symmetric") == ["refuted", "proven"]


A, B, C = (f"residue(step = {step})" for step in (2, 3, 5))


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (f"~~{A}", A, True),
        (f"transpose(transpose({A}))", A, True),
        (f"{A} - {B}", f"{A} & ~{B}", True),
        (f"{A} - {B} - {C}", f"{A} & ~{B} & ~{C}", True),
        (f"{A} - ~{B}", f"{A} & {B}", True),
        (f"{A} | full", "full", True),
        (f"{A} & full", A, True),
        (f"{A} | {B} & full", f"{A} | {B}", True),
        (f"{A} | {A}", A, True),
        (f"{C} & ({A} | full & ({B} | {A}))", f"({A} | {B}) & {C}", True),
        ("where(q - k < 4 and t(k) <= t(q))", "where(t(k) <= t(q)) & where(q - k < 4)", True),
        (f"{A} - {B}", f"{B} - {A}", False),
        (f"{A} | {B}", f"{A} & {B}", False),
        (f"~{A}", A, False),
        (f"shift({A}, by = 1)", f"shift({A}, by = 2)", False),
        (f"transpose({A})", A, False),
    ],
)
def test_graphs_are_equal_however_they_are_written(one: str, other: str, equal: bool) -> None:
    times = "input t: numbers " * ("t(" in one)
    first, second = (spec_of(f"{times}attend {each}") for each in (one, other))
    assert (first == second) == (first.fingerprint == second.fingerprint) == equal


def test_order_grouping_and_repetition_do_not_matter() -> None:
    def asked(a: Node, b: Node, c: Node, op: str) -> None:
        first, second, third = (f"({expression(each)})" for each in (a, b, c))
        one = spec_of(f"attend {first} {op} {second} {op} {third}")
        assert one == spec_of(f"attend {third} {op} ({second} {op} {first} {op} {third})")

    ten(asked, 0, graphs, graphs, graphs, st.sampled_from("|&"))


def test_equal_heads_are_one() -> None:
    body = "layers 2 heads 3 attend {} | {} head 1 {{ attend {} }}"
    one, other = (spec_of(body.format(*each)) for each in ((A, B, C), (B, A, C)))
    assert one == other
    by_size = "heads 2 attend window(radius = 2 ** (head + 1))"
    assert spec_of(f"{by_size} head 1 {{ attend window(radius = 4) }}") == spec_of(by_size)
