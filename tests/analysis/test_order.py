"""How fast edges grow: counted over doublings, and bounded by how the spec is written."""

from __future__ import annotations

import re

import pytest
from hypothesis import strategies as st
from oracle.scalars import Invalid
from oracle.tree import Node, expression
from population import spec_of
from specs import graphs, predicates, ten
from sweeps import few
from zoo import ATTENTIONS, EXAMPLES, loaded

from attnspec import Spec, parse


def order_of(spec: Spec, n: int = 64) -> tuple[str, str, str]:
    """Its value, quality and note."""
    found = spec.analyse(n).to_dict(("order",))["figures"]["order"]
    return found["value"], found["quality"], found["note"]


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
    "where(false)": "0",
    # counts of few drawn pairs scatter
    "random(keys = 1, seed = 3) & residue(step = 8)": "n",
    "random(keys = 4, seed = 2) & columns(first(8))": "1",
    "random(keys = max(1, floor(log2(n))), seed = 5)": "n * log2(n)",
}


@pytest.mark.parametrize("graph", MEASURED)
def test_measured_orders(graph: str) -> None:
    assert order_of(spec_of(f"attend {graph}"))[:2] == (MEASURED[graph], "estimate")


def test_rows_of_closed_form_at_short_lengths_alone_are_counted_there() -> None:
    spec = loaded(EXAMPLES / "deepspeed_fixed.attn", "deepspeed_fixed")
    assert order_of(spec)[0] == "n**2"


@pytest.mark.parametrize(
    ("body", "most", "note"),
    [
        ("attend linear()", "n", "operations: "),
        ("attend fourier()", "n * log2(n)", "operations: "),
        ("attend cluster()", "n**(3/2)", "at most: "),
        ("attend sinkhorn(size = 8)", "n", "at most: "),
        ("causal attend lsh(rounds = 4, chunk = 32)", "n * log2(n)", "at most 256 n pairs"),
        ("attend lsh()", "n * log2(n)", "sorting 8 n log(n), and at most 1,024 n pairs"),
        ("attend topk(keys = 4)", "n**2", "n**2 scores, and at most 4 n pairs"),
        ("attend self | topk(blocks = 3, size = 8)", "n**2", "n**2 / 64 scores of blocks, and at"),
        ("input marked: tokens attend global(marked)", "n**2", "the input `marked`"),
        ("cross attend where(abs(q * n - k * m) <= 2 * m)", "n", "where m = n"),
    ],
)
def test_orders_without_counts_are_bounds(body: str, most: str, note: str) -> None:
    value, quality, said = order_of(spec_of(body))
    assert (value, note in said) == (most, True)
    assert quality == "bound" or "cross" in body


def test_the_order_of_a_grid_is_that_of_larger_and_smaller_ones() -> None:
    square = parse("attention a(h = 16) { sequence grid(h, h) attend axial }")
    assert order_of(square, 256)[:2] == ("n**(3/2)", "estimate")
    # on a grid of 7 x 7 a dilated box of 7 x 7 would be cut off, and look like more than n
    (path,) = [path for path, name in ATTENTIONS if name == "neighborhood_dilated"]
    assert order_of(loaded(path, "neighborhood_dilated"), 784)[:2] == ("n", "estimate")
    constant = parse("attention a { sequence grid(16, 16) attend axial }").analyse(256)
    assert constant.order is None


EXPONENTS = {"n": (1, 0), "n * log2(n)": (1, 1), "n**1.5": (1.5, 0), "n**1.75": (1.75, 0)}


def proven(body: str, bounds: dict[str, tuple[float, int]]) -> tuple[float, int] | None:
    """The least of the bounds that is proven."""
    claims = " ".join(f"require order <= {bound}" for bound in bounds)
    found = parse(f"attention a {{ {body} {claims} }}").verdicts
    said = zip(found, bounds.values(), strict=True)
    return next((growth for verdict, growth in said if verdict.status == "proven"), None)


@pytest.mark.parametrize("seed", few(range(2)))
@pytest.mark.parametrize("kind", few(["predicates", "graph"]))
def test_bounds_by_form_are_true_of_counts(kind: str, seed: int) -> None:
    def asked(first: Node, second: Node, word: str) -> None:
        both = Node("and" if word == "&" else "or", (first, second))
        where = Node("pattern", ("where", Node("arg", ("", both))))
        body = f"attend {expression(where if kind == 'predicates' else first)}"
        growth = proven(body, EXPONENTS)
        try:
            counts = [int(spec_of(body).mask(n).sum()) for n in (64, 256)]
        except (Invalid, ValueError):
            return
        # from one length to four times it, with what constants leave to be desired
        power, logs = growth or (2, 0)
        assert counts[1] <= 4**power * (8 / 6) ** logs * 1.7 * max(counts[0], 100)

    of = (graphs, graphs) if kind == "graph" else (predicates, predicates)
    ten(asked, seed, *of, st.sampled_from("&|"))


@pytest.mark.parametrize(
    ("graph", "most"),
    [
        ("residue(step = 3) & window(radius = isqrt(n))", "n**1.5"),
        ("shift(global(first(2)), by = 2)", "n"),
        ("where(abs(q - k) <= min(n, 5) - 1)", "n"),
        ("where((q - k) % isqrt(n) == 0 and (q - k) % isqrt(n) < 1)", "n**1.5"),
        ("residue(step = n * n)", "n"),
        ("summary(stride = max(1, n // 2), cells = 3)", "n"),
        ("fixed(stride = isqrt(n), cells = 2)", "n**1.5"),
        ("block(size = 4, before = isqrt(n), after = 1)", "n**1.5"),
        ("dilated(radius = n * n, step = isqrt(n))", "n**1.5"),
        ("global(every(isqrt(n)) | first(2))", "n**1.5"),
        ("window(radius = floor(n ** 0.25))", "n**1.5"),
        ("window(radius = min(n, 64))", "n"),
        ("powers(base = 2)", "n * log2(n)"),
    ],
)
def test_bounds_of_graphs_by_hand(graph: str, most: str) -> None:
    body = f"heads 2 attend {graph}"
    below = {name: growth for name, growth in EXPONENTS.items() if growth < EXPONENTS[most]}
    assert proven(body, {most: EXPONENTS[most]}) == EXPONENTS[most]
    assert not below or proven(body, below) is None


@pytest.mark.parametrize(
    ("body", "bound", "status"),
    [
        ("attend window(radius = isqrt(n))", "n**1.25", "refuted"),
        ("attend powers(base = 2)", "n", "refuted"),
        ("attend full", "n * n", "proven"),
        ("attend random_blocks(size = 4, blocks = isqrt(n))", "n**1.5", "proven"),
        ("causal attend full", "n**1.5", "refuted"),
        ("attend full - strided(stride = isqrt(n))", "n**1.75", "refuted"),
        # a head may make a size zero, which divides nothing
        ("heads 2 attend where((q - k) % (1 + head * n) == 0)", "n**1.75", "refuted"),
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
    grow = r"edges divided by the bound.* grows with n: "
    assert status != "refuted" or re.search(grow, verdict.diagnostics[0].message)
