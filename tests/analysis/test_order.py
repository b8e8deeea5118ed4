"""How fast edges grow: counted over doublings, and bounded by how the spec is written."""

from __future__ import annotations

from fractions import Fraction

import pytest
from random_specs import spec_text
from zoo import ATTENTIONS, EXAMPLES, loaded

from attnspec.analysis.counting.degrees import total_edges
from attnspec.analysis.growth import order as order_module
from attnspec.analysis.growth.growth import growth_of
from attnspec.analysis.growth.size_growth import divisor_growth, growth_text, size_growth
from attnspec.analysis.quality import Figure
from attnspec.graphs.stack import Stack
from attnspec.ir.scalars import Apply, Scalar, Symbol
from attnspec.spec import Spec, parse


def spec_of(body: str) -> Spec:
    return parse(f"attention a {{ {body} }}")


def order_of(spec: Spec, n: int = 64) -> Figure[str]:
    found = spec.analyse(n).figure("order")
    assert isinstance(found, Figure), found
    return found


MEASURED = {
    "full": "n**2",
    "window(radius = 9)": "n",
    "~window(radius = 3)": "n**2",
    "residue(step = 8)": "n**2",
    "block(size = max(1, n // 4))": "n**2",
    "strided(stride = isqrt(n))": "n**(3/2)",
    "residue(step = isqrt(n)) | window(radius = 3)": "n**(3/2)",
    "expander(degree = 4) | global(every(isqrt(n)))": "n**(3/2)",
    "summary(stride = isqrt(n), cells = 1)": "n**(3/2)",
    "window(radius = floor(n**(1/3)))": "n**(4/3)",
    "powers": "n * log2(n)",
    "window(radius = ceil(log2(n + 1)))": "n * log2(n)",
    "global(first(4)) | random(keys = 3)": "n",
    # wrong until they were counted: sums that no size says, and sizes that come to nothing
    "where(q * k < n)": "n * log2(n)",
    "random(keys = 10 // n)": "0",
    "where(q * k * k < n)": "n",
    "where(q % (k + 1) == 0)": "n * log2(n)",
    "where(k * k * k <= q)": "n**(4/3)",
    "where(q == 0 and k <= log2(n))": "log2(n)",
    "where(q == k * k)": "n**(1/2)",
    "where(q == 3 and k == 4)": "1",
    "self & shift(self, by = 1) & where(q > k)": "0",
    # counts of few drawn pairs scatter
    "random(keys = 1, seed = 3) & residue(step = 8)": "n",
    "random(keys = 4, seed = 2) & columns(first(8))": "1",
    "random(keys = max(1, floor(log2(n))), seed = 5)": "n * log2(n)",
}


def test_rows_of_closed_form_at_short_lengths_alone_are_counted_there() -> None:
    spec = loaded(EXAMPLES / "deepspeed_fixed.attn", "deepspeed_fixed")
    assert order_of(spec).value == "n**2"


@pytest.mark.parametrize("graph", MEASURED)
def test_measured_orders(graph: str) -> None:
    found = order_of(spec_of(f"attend {graph}"))
    assert (found.value, found.quality) == (MEASURED[graph], "estimate")


@pytest.mark.parametrize(
    ("body", "most", "note"),
    [
        ("attend linear()", "n", "operations: "),
        ("attend fourier()", "n * log2(n)", "operations: "),
        ("attend cluster()", "n**(3/2)", "at most: "),
        ("attend sinkhorn(size = 8)", "n", "at most: "),
        ("causal attend lsh(rounds = 4, chunk = 32)", "n * log2(n)", "at most 256 n pairs"),
        ("attend topk(keys = 4)", "n**2", "n**2 scores, and at most 4 n pairs"),
        ("attend self | topk(blocks = 3, size = 8)", "n**2", "n**2 / 64 scores of blocks, and at"),
        ("input marked: tokens attend global(marked)", "n**2", "run-time inputs"),
    ],
)
def test_orders_without_counts_are_bounds(body: str, most: str, note: str) -> None:
    found = order_of(spec_of(body))
    assert (found.value, found.quality) == (most, "bound")
    assert note in found.note


def test_what_is_not_written_is_the_default() -> None:
    plain, written = (
        order_of(spec_of(f"attend {body}")).note
        for body in ("lsh()", "lsh(rounds = 8, chunk = 64)")
    )
    assert plain == written
    assert "sorting 8 n log(n), and at most 1,024 n pairs" in plain


def test_the_order_of_a_grid_is_that_of_larger_and_smaller_ones() -> None:
    found = order_of(parse("attention a(h = 16) { sequence grid(h, h) attend axial }"), 256)
    assert (found.value, found.quality) == ("n**(3/2)", "estimate")
    # on a grid of 7 x 7 a dilated box of 7 x 7 would be cut off, and look like more than n
    (path,) = [path for path, name in ATTENTIONS if name == "neighborhood_dilated"]
    found = order_of(loaded(path, "neighborhood_dilated"), 784)
    assert (found.value, found.quality) == ("n", "estimate")


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
    order = spec.analyse(spec.program.fixed_length or 0).order
    assert counted == measured
    assert (order is None) == (grid == "16, 16")


# --- bounds by form -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 100))]
)
def test_bounds_by_form_are_true_of_counts(seed: int) -> None:
    stack = parse(spec_text(seed)).stack()
    power, logs = map(float, growth_of(stack.program))
    few, many = total_edges(stack, 1 << 11), total_edges(stack, 1 << 13)
    # from one length to four times it, with what constants leave to be desired
    assert many <= 4**power * (13 / 11) ** logs * 1.3 * max(few, 1 << 11)


@pytest.mark.parametrize(
    ("scalar", "growth"),
    [
        (7, (0, 0)),
        (Symbol("n"), (1, 0)),
        (Symbol("head"), (0, 0)),
        (Apply("isqrt", (Symbol("n"),)), (Fraction(1, 2), 0)),
        (Apply("*", (Symbol("n"), Apply("log2", (Symbol("n"),)))), (1, 1)),
        (Apply("//", (Symbol("n"), Apply("isqrt", (Symbol("n"),)))), (Fraction(1, 2), 0)),
        (Apply("//", (Symbol("n"), Apply("+", (1, Symbol("head"))))), None),
        (Apply("/", (1, Apply("/", (1, Symbol("n"))))), (1, 0)),
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


def test_sizes_that_a_head_may_make_zero_divide_nothing() -> None:
    assert divisor_growth(Apply("*", (Symbol("head"), Symbol("n")))) is None


def test_growth_in_words() -> None:
    assert growth_text((Fraction(3, 2), Fraction(1))) == "n**(3/2) * log2(n)"
    assert growth_text((Fraction(2), Fraction(0))) == "n**2"
    assert growth_text((Fraction(0), Fraction(0))) == "1"


@pytest.mark.parametrize(
    ("graph", "most"),
    [
        ("full - strided(stride = isqrt(n))", "n**2"),
        ("~window(radius = 9)", "n**2"),
        ("residue(step = 3) & window(radius = isqrt(n))", "n**(3/2)"),
        ("shift(global(first(2)), by = 2)", "n"),
        ("where(abs(q - k) <= min(n, 5) - 1)", "n"),
        ("where((q - k) % isqrt(n) == 0 and (q - k) % isqrt(n) < 1)", "n**(3/2)"),
        ("where((q - k) % (1 + head * n) == 0)", "n**2"),
        ("residue(step = n * n)", "n"),
        ("summary(stride = n // 2, cells = 3)", "n"),
        ("fixed(stride = isqrt(n), cells = 2)", "n**(3/2)"),
        ("block(size = 4, before = isqrt(n), after = 1)", "n**(3/2)"),
        ("dilated(radius = n * n, step = isqrt(n))", "n**(3/2)"),
        ("global(every(isqrt(n)) | first(2))", "n**(3/2)"),
        ("random_blocks(size = 4, blocks = isqrt(n))", "n**(3/2)"),
        ("powers(base = 2)", "n * log2(n)"),
    ],
)
def test_bounds_of_graphs_by_hand(graph: str, most: str) -> None:
    assert growth_text(growth_of(spec_of(f"heads 2 attend {graph}").program)) == most


# --- claims ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "bound", "status"),
    [
        ("attend window(radius = isqrt(n))", "n**1.5", "proven"),
        ("attend window(radius = isqrt(n))", "n**1.25", "refuted"),
        ("attend powers(base = 2)", "n * log2(n)", "proven"),
        ("attend powers(base = 2)", "n", "refuted"),
        ("attend full", "n * n", "proven"),
        ("causal attend full", "n**1.5", "refuted"),
        ("attend linear()", "n", "proven"),
        ("attend where(q * k < n)", "n", "refuted"),
        ("attend where(q * k < n)", "n * log2(n)", "checked"),
        ("attend window(radius = isqrt(n)) & self", "n", "proven"),
        ("attend window(radius = isqrt(n)) - window(radius = isqrt(n) - 1)", "n", "checked"),
    ],
)
def test_claims_about_order(body: str, bound: str, status: str) -> None:
    (verdict,) = spec_of(f"{body} require order <= {bound}").verdicts
    assert verdict.status == status
    if status == "refuted":
        assert "edges over the bound grow" in verdict.diagnostics[0].message
