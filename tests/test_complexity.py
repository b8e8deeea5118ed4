"""Formulas in n against counts at many lengths, and orders against what is known of systems."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import sympy
from random_specs import spec_text
from zoo import ATTENTIONS, IDS, loaded

from attnspec.analysis import symbolic
from attnspec.analysis.complexity import edges_formula, growth_range, order
from attnspec.analysis.edges import total_edges
from attnspec.analysis.fitting import fitted, monomials
from attnspec.analysis.growth import growth_text, size_growth
from attnspec.analysis.quasi import formula_of
from attnspec.analysis.shapes import shape_of
from attnspec.scalars import Apply, Scalar, Symbol
from attnspec.spec import parse
from attnspec.stack import Stack

n = sympy.Symbol("n")


def stack_of(body: str) -> Stack:
    return Stack(parse(f"attention a {{ {body} }}"))


def assert_right(stack: Stack, formula: sympy.Expr, lengths: list[int]) -> int:
    """Hold a formula against counts; how many lengths it has a value at."""
    told = 0
    for length in lengths:
        value = symbolic.value(formula, length)
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
        symbolic.value(found.value, length) == EXACT[body].subs(n, length) for length in range(40)
    )
    assert assert_right(stack, found.value, [1, 2, 3, 17, 64, 257]) == 6


@pytest.mark.parametrize(("path", "name"), ATTENTIONS, ids=IDS)
def test_formulas_of_the_zoo(path: Path, name: str) -> None:
    stack = Stack(loaded(path, name))
    found = edges_formula(stack, stack.fixed_length() or 257)
    if found.value is None:
        assert found.note
        return
    lengths = [1, 2, 7, 64, 257, 500, 1024]
    assert assert_right(stack, found.value, lengths) >= 3
    assert (found.quality == "exact") == ("fitted" not in found.note)


@pytest.mark.parametrize("seed", range(60))
def test_formulas_of_random_compositions(seed: int) -> None:
    stack = Stack(parse(spec_text(seed)))
    found = edges_formula(stack, 64)
    if found.value is not None:
        assert assert_right(stack, found.value, [1, 2, 3, 5, 8, 31, 64, 100, 191]) >= 2


def test_that_random_compositions_often_have_a_formula() -> None:
    found = [edges_formula(Stack(parse(spec_text(seed))), 64) for seed in range(0, 60, 4)]
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


def test_why_there_is_no_formula() -> None:
    unknown = {
        "attend linear()": "is a mechanism",
        "attend lsh()": "decided by the data",
        "input marked: tokens attend global(marked)": "run-time inputs",
        "sequence grid(4, 8) attend axial": "a grid",
        "attend random(keys = 2) | self": "no formula was found",
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


def test_what_is_no_quasi_polynomial_has_no_shape() -> None:
    for body in ("attend powers", "attend random(keys = 2)", "attend where(q * k < n)"):
        assert shape_of(stack_of(body).bound(8).found[0][2]) is None
    shape = shape_of(stack_of("attend where(q // 6 == k // 6 and k % 4 < 2)").bound(8).found[0][2])
    assert shape is not None
    assert (shape.period, shape.proven) == (12, False)


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
    found = order(stack_of(body), 64)
    assert found.value == ORDERS[body]
    assert found.quality == "exact"


@pytest.mark.parametrize(("path", "name"), ATTENTIONS, ids=IDS)
def test_every_spec_of_the_zoo_has_an_order(path: Path, name: str) -> None:
    stack = Stack(loaded(path, name))
    found = order(stack, stack.fixed_length() or 256)
    assert found.value is not None or found.note
    if found.quality == "estimate" and found.value is not None:
        assert found.note.startswith("measured from n = ")


def test_orders_that_are_not_derived_are_measured() -> None:
    found = order(stack_of("attend where(q % 2 == 0 and k < 9) | where(abs(q - k) < 2)"), 64)
    assert (found.value, found.quality) == (n, "estimate") or found.quality == "exact"
    assert order(stack_of("attend where(q * k % 5 == 1)"), 64).value == n**2
    axial = order(stack_of("sequence grid(h, h) attend axial".replace("h", "16")), 256)
    assert axial.value is None
    text = "attention a(h = 16) { sequence grid(h, h) attend axial }"
    grown = order(Stack(parse(text)), 256)
    assert (grown.value, grown.quality) == (n ** sympy.Rational(3, 2), "estimate")
    # on a grid of 7 x 7 a dilated box of 7 x 7 would be cut off, and look like more than n
    (path,) = [path for path, name in ATTENTIONS if name == "neighborhood_dilated"]
    boxes = order(Stack(loaded(path, "neighborhood_dilated")), 784)
    assert (boxes.value, boxes.quality) == (n, "estimate")


def test_what_the_data_decide_has_an_upper_order_with_its_factors() -> None:
    found = order(stack_of("causal attend lsh(rounds = 4, chunk = 32)"), 64)
    assert found.value == n * sympy.log(n)
    assert found.quality == "bound"
    assert "at most 256 n pairs" in found.note
    reading = order(stack_of("input marked: tokens attend global(marked)"), 64)
    assert (reading.value, reading.quality) == (n**2, "bound")


@pytest.mark.parametrize("seed", range(100))
def test_derived_growth_is_true_of_counts(seed: int) -> None:
    stack = Stack(parse(spec_text(seed)))
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


# --- fitting --------------------------------------------------------------------------------------


def test_fits_are_exact_or_none() -> None:
    points = [(x, y) for x in range(5) for y in range(4)]
    values = [3 * x * x - x * y + 2 for x, y in points]
    found = fitted(points, values, monomials(2, 2))
    assert found is not None
    assert dict(found.terms) == {(): 2, (0, 0): 3, (0, 1): -1}
    values[7] += 1
    assert fitted(points, values, monomials(2, 2)) is None


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
    assert symbolic.readable(formula) == words
    assert f"pairs at n  {words}" in str(report)
    assert words.replace(">", "&gt;") in report._repr_html_()
    # as data it is what sympy reads back
    assert report.to_dict()["figures"]["edges_formula"]["value"] == str(formula)


def test_cases_within_a_sum_stand_in_parentheses() -> None:
    cases = sympy.Piecewise((symbolic.N, symbolic.N < 3), (2, True))
    assert symbolic.readable(1 + 2 * cases) == "2*(n for n < 3, 2 otherwise) + 1"
    root = sympy.floor(sympy.sqrt(symbolic.N))
    assert symbolic.readable(root**2 + symbolic.N) == "n + isqrt(n)**2"
    assert symbolic.readable(sympy.floor(symbolic.N / 2)) == "floor(n/2)"
