"""Formulas in n against counts at many lengths, and orders against what is known of systems."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import pairwise
from math import inf, isqrt, log2
from pathlib import Path
from typing import Any

import pytest
import sympy
from random_specs import spec_text
from zoo import ATTENTIONS, loaded, of_each_kind

from attnspec.analysis.counting.degrees import edges_of, total_edges
from attnspec.analysis.growth import order as order_module
from attnspec.analysis.growth import quasi_polynomials, sympy_text
from attnspec.analysis.growth.fitted_counts import LENGTHS, _roots, fit_of, sizes_of
from attnspec.analysis.growth.fitting import Formula, Piece, Polynomial, fitted, monomials
from attnspec.analysis.growth.order import _is_quick, edges_formula, growth_range, order
from attnspec.analysis.growth.quasi_polynomials import Counter, formula_of
from attnspec.analysis.growth.shapes import shape_of
from attnspec.analysis.growth.size_growth import growth_text, size_growth
from attnspec.analysis.quality import Figure
from attnspec.graphs.stack import Stack
from attnspec.ir.scalars import Apply, Scalar, Symbol
from attnspec.spec import Spec, parse

n = sympy.Symbol("n")


def spec_of(body: str) -> Spec:
    return parse(f"attention a {{ {body} }}")


def order_of(spec: Spec, n: int) -> Figure[sympy.Expr | None]:
    return order(spec.stack(), n, spec.elaborated)


def stack_of(body: str) -> Stack:
    return spec_of(body).stack()


def assert_right(stack: Stack, formula: sympy.Expr, lengths: list[int]) -> int:
    """Hold a formula against counts; how many lengths it has a value at."""
    told = 0
    for length in lengths:
        value = sympy_text.value(formula, length)
        if value is sympy.nan:
            continue
        assert value == total_edges(stack, length), f"n = {length}: {formula}"
        told += 1
    return told


# --- formulas -------------------------------------------------------------------------------------

EXACT = {
    "attend full": n**2,
    "causal attend full": n**2 / 2 + n / 2,
    "attend self": n,
    "heads 3 layers 2 attend full": 6 * n**2,
    "attend window(radius = 5)": sympy.Piecewise((11 * n - 30, n >= 5), (n**2, True)),
    "causal attend window(before = 3, after = 2)": sympy.Piecewise(
        (4 * n - 6, n >= 3), (n**2 / 2 + n / 2, True)
    ),
    "attend block(size = 4)": 4 * n - 4 * sympy.Mod(n, 4) + sympy.Mod(n, 4) ** 2,
    "attend global(first(1)) | self": sympy.Piecewise((3 * n - 2, n >= 1), (0, True)),
}


@pytest.mark.parametrize("body", EXACT)
def test_formulas_are_as_derived_by_hand(body: str) -> None:
    stack = stack_of(body)
    found = edges_formula(stack, 64)
    assert found.quality == "exact"
    assert found.value is not None
    assert sympy.simplify(found.value - EXACT[body]) == 0 or all(
        sympy_text.value(found.value, length) == EXACT[body].subs(n, length) for length in range(40)
    )
    assert assert_right(stack, found.value, [1, 2, 3, 17, 64, 257]) == 6


def test_each_head_counts_where_a_pattern_knows_its_edges() -> None:
    stack = stack_of("heads 3 layers 2 causal attend powers(base = 2)")
    found = edges_formula(stack, 64)
    assert found.value is not None
    assert assert_right(stack, found.value, [1, 2, 3, 17, 64, 257]) == 6


# fits take hundreds of counts, and are kept for whoever asks next
@pytest.mark.xdist_group("growth")
@of_each_kind
def test_formulas_of_the_zoo(path: Path, name: str) -> None:
    stack = loaded(path, name).stack()
    found = edges_formula(stack, stack.program.fixed_length or 257)
    if found.value is None:
        assert found.note
        return
    lengths = [1, 2, 7, 64, 257, 500, 1024]
    assert assert_right(stack, found.value, lengths) >= 3
    assert (found.quality == "exact") == ("fitted" not in found.note)


@pytest.mark.parametrize(
    "seed",
    [
        # the ninth and the tenth take as long as all others
        pytest.param(seed, marks=pytest.mark.slow) if seed in (9, 10) or seed >= 25 else seed
        for seed in range(60)
    ],
)
def test_formulas_of_random_compositions(seed: int) -> None:
    stack = parse(spec_text(seed)).stack()
    found = edges_formula(stack, 64)
    if found.value is not None:
        assert assert_right(stack, found.value, [1, 2, 3, 5, 8, 31, 64, 100, 191]) >= 2


def test_that_random_compositions_often_have_a_formula() -> None:
    found = [edges_formula(parse(spec_text(seed)).stack(), 64) for seed in range(0, 60, 4)]
    assert sum(figure.value is not None for figure in found) >= 4


@pytest.mark.parametrize(
    "body",
    [
        "attend strided(stride = isqrt(n))",
        "causal heads 2 head 0 { attend window(before = isqrt(n), after = 0) }"
        " head 1 { attend residue(step = isqrt(n)) }",
        "attend fixed(stride = isqrt(n), cells = 2)",
        "attend block(size = max(1, n // 4))",
    ],
)
def test_sizes_that_depend_on_n_are_fitted_and_say_so(body: str) -> None:
    stack = stack_of(body)
    found = edges_formula(stack, 400)
    assert found.value is not None
    assert found.quality == "estimate"
    assert "fitted, and right at" in found.note
    # lengths that the fit has not seen; n = s (s + 2) is where isqrt has its last length
    assert assert_right(stack, found.value, [900, 960, 961, 5000, 40_000, 44_943]) == 6


def test_a_fit_is_right_at_every_length_that_was_counted() -> None:
    term = spec_of("attend strided(stride = isqrt(n))").program.attends[0].graph
    assert term is not None
    for wrong in (0, LENGTHS[1], LENGTHS[7], LENGTHS[-1]):

        def count(n: int, wrong: int = wrong) -> int:
            return 3 * n + 1 + (n == wrong)

        assert (fit_of(term, sizes_of(term), {}, count) is None) == (wrong > 0)


def test_why_there_is_no_formula() -> None:
    unknown = {
        "attend linear()": "is a mechanism",
        "attend lsh()": "decided by the data",
        "input marked: tokens attend global(marked)": "run-time inputs",
        "sequence grid(4, 8) attend axial": "a grid",
        "attend random(keys = 2) | self": "no formula was found",
        "attend where(9 != n)": "no formula was found",
        "attend where(n > 9 and q > k)": "no formula was found",
    }
    for body, reason in unknown.items():
        found = edges_formula(stack_of(body), 32)
        assert found.value is None
        assert reason in found.note, body


def test_powers_and_random_have_formulas_of_their_own() -> None:
    for body in (
        "attend powers(base = 2)",
        "causal attend powers(base = 3)",
        "attend random(keys = 5)",
        "causal attend random(keys = 5)",
    ):
        stack = stack_of(body)
        found = edges_formula(stack, 100)
        assert found.quality == "exact"
        assert found.value is not None
        assert assert_right(stack, found.value, [1, 2, 3, 4, 5, 9, 27, 28, 64, 65, 1000]) == 11


def test_a_formula_says_from_where_on_it_holds() -> None:
    relation = stack_of("attend window(radius = 20) - window(radius = 7)").bound(64).found[0][2]
    formula = formula_of(relation)
    assert formula is not None
    assert formula.proven
    assert [piece.start for piece in formula.pieces] == [0, 7, 20]
    # every length below the last piece was looked at, and some from there on
    assert 20 < formula.checked <= formula.longest + 1


@pytest.mark.parametrize(("predicate", "proven"), [("q - k <= 3", True), ("q + k <= n", False)])
def test_a_formula_is_proven_where_the_shape_of_the_graph_is(predicate: str, proven: bool) -> None:
    formula = formula_of(stack_of(f"attend where({predicate})").bound(64).found[0][2])
    assert formula is not None
    assert formula.proven == proven


def test_short_lengths_that_no_polynomial_fits_are_soon_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tick = "k % 64 == 63 and 0 <= q // 64 - k // 64 <= 8"
    stack = stack_of(f"causal attend window(before = 15, after = 0) | where({tick})")
    tried: list[int] = []

    def counted(points: Any, values: Any, basis: Any) -> Any:
        tried.append(len(points))
        return fitted(points, values, basis)

    monkeypatch.setattr(quasi_polynomials, "fitted", counted)
    formula = quasi_polynomials.formula_of.__wrapped__(stack.bound(64).found[0][2])
    # one shorter at a time, these were thousands
    assert formula is not None
    assert len(tried) < 500
    relation = stack.bound(64).found[0][2]
    for n in (formula.pieces[0].start, 600, 1000, 5000):
        piece = max((p for p in formula.pieces if p.start <= n), key=lambda p: p.start)
        assert piece.at(n) == edges_of(relation, n)


@pytest.mark.parametrize(
    "body",
    [
        # both were looked for among all residues of a period, or lengths, beyond every integer
        "attend shift(window(radius = 2**62), by = 2**62)",
        "attend " + " & ".join(f"where(q % {p} <= k % {p + 1} + 4)" for p in range(80, 130, 2)),
    ],
)
def test_a_period_too_long_to_be_counted_has_no_formula(body: str) -> None:
    relation = stack_of(body).bound(8).found[0][2]
    assert shape_of(relation) is not None
    assert formula_of(relation) is None


def test_a_count_costs_as_much_as_it_has_parts() -> None:
    one, two, three = (
        Counter(parse(f"attention a {{ attend where({text}) }}").relation(64), 64).price(100)
        for text in ("k < 3", "k < 3 and q - k < 9", "k < 3 and q - k < 9 and q // 3 == k // 3")
    )
    assert (two, three) == (2 * one, 3 * one)


def test_a_count_that_a_pattern_knows_costs_nothing_and_one_by_rows_the_more_the_longer() -> None:
    def prices(body: str) -> list[float]:
        counter = Counter(parse(f"attention a {{ {body} }}").relation(64), 64)
        return [counter.price(n) for n in (64, 1 << 10, 1 << 14, 1 << 17)]

    known = ("full", "window(radius = 3)", "block(size = 5)", "powers", "random(keys = 2)")
    # the degrees of a causal graph at the longest length are those at all
    table = "causal attend window(before = 3, after = 0) | residue(step = 4)"
    least = {price for body in known for price in prices(f"attend {body}")} | {*prices(table)}
    assert len(least) == 1
    for body in (
        "where(k < 3 or q % 3 == 1)",
        "window(radius = 3) | columns(first(2))",
        "columns(first(3)) - window(radius = 2)",
        "where(q * k % 5 == 1)",
    ):
        found = prices(f"attend {body}")
        assert max(least) < found[0] < found[1] < found[2], body
        # eight times as many rows
        assert 4 * found[2] < found[3], body


@pytest.mark.parametrize("body", ["attend block(size = 1500)", "attend window(radius = 3000)"])
def test_long_periods_of_patterns_that_know_their_edges_are_counted_whole(body: str) -> None:
    stack = stack_of(body)
    found = edges_formula(stack, 64)
    assert found.quality == "exact"
    assert found.value is not None
    assert assert_right(stack, found.value, [1, 64, 1499, 1501, 2999, 6001, 50_000]) == 7


@pytest.mark.parametrize("cuts", [(), (1,), (5,), (3, 8), (1, 2), (4, 9, 11)])
def test_residues_of_one_polynomial_are_found_together(cuts: tuple[int, ...]) -> None:
    period, base, draws = 12, 24, random.Random(len(cuts))
    ends = [0, *cuts, period]
    weights = [[draws.randint(-9, 9) for _ in range(6)] for _ in ends[1:]]

    def count(n: int) -> int:
        r = n % period
        a, b, c, d, e, f = weights[sum(r >= cut for cut in cuts)]
        return a + b * n + c * r + d * n * n + e * n * r + f * r * r

    counts = {n: count(n) for n in range(base, base + 4 * period)}
    piece = quasi_polynomials._by_ranges(base, counts, period)
    assert piece is not None
    assert [(low, high) for low, high, _ in piece.cases] == [*pairwise(ends)]
    assert all(piece.at(n) == count(n) for n in range(base, base + 9 * period))
    # one more than a formula may have
    scattered = {n: pow(n % period, 5 + n % 2) * n for n in counts}
    assert quasi_polynomials._by_ranges(base, scattered, period) is None


@pytest.mark.parametrize("most", [1, 20.5, 200, 5000])
@pytest.mark.parametrize("stop", [1, 2, 9, 100, 4096, 99_999])
def test_lengths_that_are_looked_at_reach_from_none_to_the_last(stop: int, most: float) -> None:
    found = sorted({*quasi_polynomials._spread(stop, most)})
    assert (found[0], found[-1]) == (0, stop - 1)
    # the gap grows with the length, by an eighth of it at most
    assert all(high - low <= 1 + low // 8 for low, high in pairwise(found))


@pytest.mark.parametrize(("body", "grows"), [("full", n**2), ("self", n), ("columns(first(1))", n)])
def test_three_lengths_are_fewer_than_what_fits_everything(body: str, grows: sympy.Expr) -> None:
    spec = parse(f"attention a(h = 9) {{ sequence grid(h, h, h) attend {body} }}")
    found = order_of(spec, 729)
    assert (found.value, found.quality) == (grows, "estimate")
    assert found.note.startswith("measured from n = 729 to 19,683")


def test_what_a_graph_is_shifted_by_is_a_size() -> None:
    body = "attend shift(window(radius = 3), by = isqrt(n)) | window(radius = n // 8)"
    (attend,) = stack_of(body).program.attends
    assert attend.graph is not None
    assert sizes_of(attend.graph) == [Apply("//", (Symbol("n"), 8)), Apply("isqrt", (Symbol("n"),))]


def test_what_is_no_quasi_polynomial_has_no_shape() -> None:
    for body in ("attend powers", "attend random(keys = 2)", "attend where(q * k < n)"):
        assert shape_of(stack_of(body).bound(8).found[0][2]) is None
    for predicate, found in (
        ("q // 6 == k // 6 and k % 4 < 2", (12, True)),
        ("(q // 4) // 3 - k // 12 <= 1", (12, True)),
        ("n - q <= 3 or k >= n // 2", (2, False)),
        ("2 * q - k <= 3", (1, False)),
        ("q + k <= n", (1, False)),
    ):
        shape = shape_of(stack_of(f"attend where({predicate})").bound(8).found[0][2])
        assert shape is not None
        assert (shape.period, shape.proven) == found, predicate


# --- order ----------------------------------------------------------------------------------------

ORDERS = {
    "attend full": n**2,
    "attend window(radius = 9)": n,
    "attend strided(stride = isqrt(n))": n ** sympy.Rational(3, 2),
    "attend residue(step = 8)": n**2,
    "attend residue(step = isqrt(n)) | window(radius = 3)": n ** sympy.Rational(3, 2),
    "attend powers": n * sympy.log(n),
    "causal attend powers | self": n * sympy.log(n),
    "attend window(radius = ceil(log2(n + 1)))": n * sympy.log(n),
    "attend block(size = max(1, n // 4))": n**2,
    "attend global(first(4)) | random(keys = 3)": n,
    "attend summary(stride = isqrt(n), cells = 1)": n ** sympy.Rational(3, 2),
    "attend ~window(radius = 3)": n**2,
    "attend full - window(radius = 3)": n**2,
    "heads 2 head 0 { attend self } head 1 { attend full }": n**2,
    "attend expander(degree = 4) | global(every(isqrt(n)))": n ** sympy.Rational(3, 2),
    "attend linear()": n,
    "attend fourier()": n * sympy.log(n),
    "attend sinkhorn(size = 8)": n,
    "attend cluster()": n ** sympy.Rational(3, 2),
}


@pytest.mark.parametrize("body", ORDERS)
def test_orders_are_derived(body: str) -> None:
    found = order_of(spec_of(body), 64)
    assert found.value == ORDERS[body]
    assert found.quality == "exact"


def test_orders_that_are_not_derived_are_measured() -> None:
    found = order_of(spec_of("attend where(q % 2 == 0 and k < 9) | where(abs(q - k) < 2)"), 64)
    assert (found.value, found.quality) == (n, "estimate") or found.quality == "exact"
    assert order_of(spec_of("attend where(q * k % 5 == 1)"), 64).value == n**2
    axial = order_of(spec_of("sequence grid(h, h) attend axial".replace("h", "16")), 256)
    assert axial.value is None
    text = "attention a(h = 16) { sequence grid(h, h) attend axial }"
    grown = order_of(parse(text), 256)
    assert (grown.value, grown.quality) == (n ** sympy.Rational(3, 2), "estimate")
    # on a grid of 7 x 7 a dilated box of 7 x 7 would be cut off, and look like more than n
    (path,) = [path for path, name in ATTENTIONS if name == "neighborhood_dilated"]
    boxes = order_of(loaded(path, "neighborhood_dilated"), 784)
    assert (boxes.value, boxes.quality) == (n, "estimate")


@pytest.mark.parametrize(
    ("given", "grid", "measured"),
    [
        ("", "16, 16", [256]),
        # from a quarter of its extents to four times as long
        ("(h = 4)", "h, h", [1, 4, 16, 36, 64, 144, 256]),
        ("(h = 4)", "h, 64", [64, 128, 256, 384, 512, 768, 1024]),
        ("(h = 6)", "h, h", [9, 36, 81, 144, 324, 576]),
        ("(h = 3, w = 5)", "h, w", [15, 60, 135, 240]),
    ],
)
def test_grids_of_one_size_are_counted_once(
    given: str, grid: str, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def count(stack: Stack, n: int) -> int:
        counted.append(n)
        return total_edges(stack, n)

    monkeypatch.setattr(order_module, "total_edges", count)
    spec = parse(f"attention a{given} {{ sequence grid({grid}) attend axial }}")
    found = order_of(spec, spec.program.fixed_length or 0)
    assert counted == measured
    assert (found.value is None) == (grid == "16, 16")


def test_what_the_data_decide_has_an_upper_order_with_its_factors() -> None:
    found = order_of(spec_of("causal attend lsh(rounds = 4, chunk = 32)"), 64)
    assert found.value == n * sympy.log(n)
    assert found.quality == "bound"
    assert "at most 256 n pairs" in found.note
    for body, note in (
        ("topk(keys = 4)", "n**2 scores, and at most 4 n pairs"),
        ("topk(blocks = 3, size = 8)", "n**2 / 64 scores of blocks, and at most 24 n pairs"),
        (
            "topk(mass = 0.9, size = 8, queries = 1)",
            "n**2 / 8 scores of blocks, and pairs by these",
        ),
    ):
        # patterns that the data do not decide leave nothing out
        for all_of in (body, f"{body} | window(radius = 2)", f"self | {body}"):
            assert order_of(spec_of(f"attend {all_of}"), 64).note == note
    reading = order_of(spec_of("input marked: tokens attend global(marked)"), 64)
    assert (reading.value, reading.quality) == (n**2, "bound")


def test_what_is_not_written_is_the_default() -> None:
    bodies = "attend lsh()", "attend lsh(rounds = 8, chunk = 64)"
    plain, written = (order_of(spec_of(body), 64).note for body in bodies)
    assert plain == written
    assert "sorting 8 n log(n), and at most 1,024 n pairs" in plain


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 100))]
)
def test_derived_growth_is_true_of_counts(seed: int) -> None:
    stack = parse(spec_text(seed)).stack()
    known = growth_range(stack)
    few, many = total_edges(stack, 1 << 11), total_edges(stack, 1 << 13)
    if few == 0:
        return
    # from one length to four times it, with what constants leave to be desired
    assert many / few <= 4 ** float(known.high[0]) * (13 / 11) ** float(known.high[1]) * 1.3
    assert many / few >= 4 ** float(known.low[0]) / 1.5


@pytest.mark.parametrize(
    ("scalar", "growth"),
    [
        (7, (0, 0)),
        (Symbol("n"), (1, 0)),
        (Symbol("head"), (0, 0)),
        (Apply("isqrt", (Symbol("n"),)), (Fraction(1, 2), 0)),
        (Apply("*", (Symbol("n"), Apply("log2", (Symbol("n"),)))), (1, 1)),
        (Apply("//", (Symbol("n"), Apply("isqrt", (Symbol("n"),)))), (Fraction(1, 2), 0)),
        (Apply("**", (Symbol("n"), 0.25)), (Fraction(1, 4), 0)),
        (Apply("min", (Symbol("n"), 64)), (0, 0)),
        (Apply("-", (Symbol("n"), Apply("isqrt", (Symbol("n"),)))), (1, 0)),
        (Apply("-", (Symbol("n"), Symbol("n"))), None),
        (Apply("%", (Symbol("n"), 3)), None),
    ],
)
def test_growth_of_sizes(scalar: Scalar, growth: tuple[float, float] | None) -> None:
    found = size_growth(scalar)
    assert (None if found is None else (float(found[0]), float(found[1]))) == growth


def test_growth_in_words() -> None:
    assert growth_text((Fraction(3, 2), Fraction(1))) == "n**1.5 * log2(n)"
    assert growth_text((Fraction(0), Fraction(0))) == "a constant"


def test_claims_about_order_are_proven_or_refuted_by_growth() -> None:
    def verdicts(body: str, claim: str) -> list[str]:
        return [d.message for d in parse(f"attention a {{ {body} require {claim} }}").check()]

    assert verdicts("attend strided(stride = isqrt(n))", "order <= n**1.5") == []
    assert verdicts("attend linear()", "order <= n") == []
    (refuted,) = verdicts("attend strided(stride = isqrt(n))", "order <= n * log2(n)")
    assert refuted.endswith("does not hold: the edges grow as n**1.5")
    (counted,) = verdicts("attend where(q * k % 5 == 1) | self", "order <= n")
    assert "edges over the bound grow" in counted


@pytest.mark.parametrize(
    ("graph", "meant"),
    [
        # what is taken away grows as fast: nothing may be left
        ("window(radius = 9) - self", (None, "n")),
        ("full - causal", (None, "n**2")),
        ("full - strided(stride = isqrt(n))", ("n**2", "n**2")),
        ("~full", (None, "n**2")),
        ("~window(radius = 9)", ("n**2", "n**2")),
        ("residue(step = 3) & window(radius = isqrt(n))", (None, "n**1.5")),
        ("self | window(radius = isqrt(n))", ("n**1.5", "n**1.5")),
        ("shift(window(radius = isqrt(n)), by = 2)", ("n**1.5", "n**1.5")),
        ("shift(global(first(2)), by = 2)", (None, "n")),
        ("where(abs(q - k) <= min(n, 5) - 1)", ("n", "n")),
        ("residue(step = isqrt(n))", ("n**1.5", "n**1.5")),
        ("where((q - k) % isqrt(n) >= isqrt(n) // 2)", (None, "n**2")),
        ("residue(step = n)", ("n", "n")),
        ("residue(step = n * n)", ("n", "n")),
        ("strided(stride = n // 2)", ("n**2", "n**2")),
        ("summary(stride = n // 2, cells = 3)", ("n", "n")),
        ("summary(stride = isqrt(n), cells = isqrt(n))", ("n**2", "n**2")),
        ("summary(stride = isqrt(n), cells = n)", ("n**2", "n**2")),
        ("fixed(stride = isqrt(n), cells = 2)", ("n**1.5", "n**1.5")),
        ("block(size = isqrt(n), before = 2)", ("n**1.5", "n**1.5")),
        ("block(size = 4, before = isqrt(n), after = 1)", ("n**1.5", "n**1.5")),
        ("dilated(radius = n, step = isqrt(n))", ("n**1.5", "n**1.5")),
        ("dilated(radius = 8, step = isqrt(n))", ("n", "n")),
        ("dilated(radius = n * n, step = isqrt(n))", ("n**1.5", "n**1.5")),
        ("global(first(isqrt(n)))", ("n**1.5", "n**1.5")),
        ("global(every(isqrt(n)) | first(2))", ("n**1.5", "n**1.5")),
        ("columns(every(n))", ("n", "n")),
        ("random(keys = isqrt(n))", ("n**1.5", "n**1.5")),
        ("random_blocks(size = 4, blocks = isqrt(n))", ("n**1.5", "n**1.5")),
        ("powers(base = 2)", ("n * log2(n)", "n * log2(n)")),
    ],
)
def test_growth_of_graphs(graph: str, meant: tuple[str | None, str]) -> None:
    """By hand; None for a lower bound that says nothing."""
    known = growth_range(stack_of(f"attend {graph}"))
    low, high = growth_text(known.low), growth_text(known.high)
    # a graph is not known to have any edge
    assert (None if low == "a constant" else low, high) == meant


@pytest.mark.parametrize("said", ["q", "n - q", "n - 1 - q"])
@pytest.mark.parametrize("size", ["0", "1", "2"])
def test_rows_at_an_end_are_counted(said: str, size: str) -> None:
    """Few of them, or none: where there is no row, there is no growth to tell."""
    n = 64
    for op in ("<", "<="):
        graph = f"where({said} {op} {size})"
        known = growth_range(stack_of(f"attend {graph}"))
        rows = int(stack_of(f"attend {graph}").mask(n).any(1).sum())
        assert growth_text(known.low) == ("n" if rows else "a constant"), (graph, rows)
        assert growth_text(known.high) == "n" or not rows


@pytest.mark.parametrize(
    ("body", "bound", "status"),
    [
        ("attend window(radius = isqrt(n))", "n**1.5", "proven"),
        ("attend window(radius = isqrt(n))", "n**1.49", "refuted"),
        ("attend window(radius = isqrt(n))", "n**1.51", "proven"),
        ("attend powers(base = 2)", "n * log2(n)", "proven"),
        ("attend powers(base = 2)", "n", "refuted"),
        ("attend full", "n**2", "proven"),
        ("attend full", "n * n", "proven"),
        ("causal attend full", "n**2", "proven"),
        ("causal attend full", "n**1.9", "refuted"),
        # of what may be less than it seems nothing is refuted unseen
        ("attend full - causal", "n**2", "proven"),
        ("attend window(radius = isqrt(n)) & self", "n", "proven"),
        ("attend window(radius = isqrt(n)) - window(radius = isqrt(n) - 1)", "n", "checked"),
    ],
)
def test_orders_at_their_bounds(body: str, bound: str, status: str) -> None:
    (verdict,) = parse(f"attention a {{ {body} require order <= {bound} }}").verdicts
    assert verdict.status == status


# --- fitting --------------------------------------------------------------------------------------


def sum_of(formulas: list[tuple[int, Formula]], at: int) -> int | None:
    """The sum of formulas, each times a number, where all of them are known."""
    total = 0
    for times, formula in formulas:
        known = [piece for piece in formula.pieces if piece.start <= at]
        count = known[-1].at(at) if known else None
        if count is None:
            return None
        total += times * count
    return total


def test_sums_of_formulas_have_their_cases() -> None:
    draw = random.Random(0)
    for _ in range(12):
        formulas = []
        for times in (1, 3, 2)[: draw.randint(1, 3)]:
            starts = sorted(draw.sample((0, 2, 3, 7), draw.randint(1, 3)))
            cases = [
                ((), Fraction(draw.randint(-3, 9))),
                ((0,), Fraction(draw.randint(0, 3))),
                ((0, 0), Fraction(draw.randint(0, 2))),
            ]
            pieces = [
                Piece(start, (Symbol("n"),), ((0, inf, Polynomial(tuple(cases[: 1 + at]))),))
                for at, start in enumerate(starts)
            ]
            formulas.append((times, Formula(tuple(pieces), True, 0, 0)))
        every = sympy_text.of_formulas(formulas)
        for at in (0, 1, 2, 3, 6, 7, 40):
            meant, found = sum_of(formulas, at), every.subs(sympy_text.N, at)
            assert found is sympy.nan if meant is None else found == meant, (every, at)


@pytest.mark.parametrize(
    "graph",
    [
        *("full", "causal", "self", "window(radius = 5)", "block(size = 4)", "global(first(2))"),
        *("residue(step = 3)", "strided(stride = 7)", "where(q < 3)", "full - self"),
        *("window(radius = isqrt(n))", "block(size = n)", "where(q + k < n)"),
    ],
)
def test_the_degree_is_that_of_growing_counts(graph: str) -> None:
    formula = formula_of(spec_of(f"attend {graph}").relation(64))
    assert formula is not None
    few, many = (formula.pieces[-1].at(1 << power) for power in (40, 44))
    assert few is not None
    assert many is not None
    assert formula.degree == round(log2(many / few) / 4)


def test_sizes_are_made_from_their_roots() -> None:
    root, third = Apply("isqrt", (Symbol("n"),)), Apply("//", (Symbol("n"), 3))
    twice, longer = Apply("*", (2, root)), Apply("+", (Symbol("n"), 1))
    cases: list[tuple[list[Scalar], list[Scalar]]] = [
        ([], []),
        ([3, Symbol("n"), Apply("+", (Symbol("head"), 2))], []),
        ([root, twice], [root]),
        ([Apply("+", (twice, third)), third], [root, third]),
        ([Apply("max", (1, Apply("-", (third, 2))))], [third]),
        ([Apply("max", (longer, 4)), twice], [longer, root]),
        ([Apply("isqrt", (third,))], [Apply("isqrt", (third,))]),
    ]
    for sizes, roots in cases:
        assert _roots(sizes) == roots, sizes


def test_fits_are_exact_or_none() -> None:
    points = [(x, y) for x in range(5) for y in range(4)]
    values = [3 * x * x - x * y + 2 for x, y in points]
    found = fitted(points, values, monomials(2, 2))
    assert found is not None
    assert dict(found.terms) == {(): 2, (0, 0): 3, (0, 1): -1}
    values[7] += 1
    assert fitted(points, values, monomials(2, 2)) is None


def test_a_fit_says_at_which_lengths_it_is_right() -> None:
    term = spec_of("attend residue(step = isqrt(n))").program.attend(0, 0).graph
    assert term is not None
    counted: dict[int, int] = {}

    def count(n: int) -> int:
        # of `step` residues `rest` have one position more than the others
        step = isqrt(n)
        turns, rest = divmod(n, step)
        # one pair more at one length, which the fit is then wrong at
        counted[n] = step * turns**2 + 2 * turns * rest + rest + (n == 50)
        return counted[n]

    found = fit_of(term, sizes_of(term), {}, count)
    assert found is not None
    (piece,) = found.pieces
    right = [n for n in counted if n >= piece.start and piece.at(n) == counted[n]]
    assert piece.start == 51
    assert (found.checked, found.longest) == (len(right), max(right))


def test_a_fit_of_blocks_that_never_end_holds_from_the_first_position_on() -> None:
    term = spec_of("attend block(size = n + isqrt(n))").program.attend(0, 0).graph
    assert term is not None
    found = fit_of(term, sizes_of(term), {}, lambda n: n * n)
    assert found is not None
    (piece,) = found.pieces
    assert piece.start == 0
    assert [piece.at(n) for n in (1, 7, 3000)] == [1, 49, 9_000_000]


def test_halves_are_kept() -> None:
    points = [(x,) for x in range(6)]
    found = fitted(points, [x * (x + 1) // 2 for (x,) in points], monomials(1, 2))
    assert found is not None
    assert found.at((7,)) == 28
    assert dict(found.terms)[0, 0] == Fraction(1, 2)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("attend window(radius = 5)", "11*n - 30 for n >= 5, n**2 otherwise"),
        ("attend random(keys = 8)", "8*n for n >= 8, n**2 otherwise"),
        ("attend full", "n**2"),
    ],
)
def test_formulas_are_printed_in_words(body: str, words: str) -> None:
    report = parse(f"attention a {{ {body} }}").analyse(400)
    formula = report.edges_formula
    assert formula is not None
    assert sympy_text.readable(formula) == words
    assert f"pairs at n  {words}" in str(report)
    assert words.replace(">", "&gt;") in report._repr_html_()
    # as data it is what sympy reads back
    assert report.to_dict()["figures"]["edges_formula"]["value"] == str(formula)


def test_cases_within_a_sum_stand_in_parentheses() -> None:
    cases = sympy.Piecewise((sympy_text.N, sympy_text.N < 3), (2, True))
    assert sympy_text.readable(1 + 2 * cases) == "2*(n for n < 3, 2 otherwise) + 1"
    root = sympy.floor(sympy.sqrt(sympy_text.N))
    assert sympy_text.readable(root**2 + sympy_text.N) == "n + isqrt(n)**2"
    assert sympy_text.readable(sympy.floor(sympy_text.N / 2)) == "floor(n/2)"


def test_counting_is_quick_where_every_head_has_closed_rows() -> None:
    for body, quick in (("full", True), ("random(keys = 2)", False)):
        for other in ("window(radius = 2)", "expander(degree = 2)"):
            text = f"attention a {{ heads 2 attend {body} head 1 {{ attend {other} }} }}"
            assert _is_quick(parse(text).stack(), 300) == (quick and "window" in other)
