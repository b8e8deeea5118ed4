"""Figures at lengths that no mask has: derived by hand, for a million positions and more."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise
from math import comb

import numpy as np
import pytest
from population import spec_of
from sweeps import few

N = 1 << 20

EDGES: dict[str, int] = {
    "attend full": N**2,
    "causal attend full": N * (N + 1) // 2,
    "attend window(radius = 256)": N * 513 - 256 * 257,
    "causal attend window(radius = 300)": 301 * N - 300 * 301 // 2,
    "attend powers(base = 2)": N + 2 * sum(N - 2**i for i in range(20)),
    "attend dilated(radius = 64, step = 4)": 33 * N - 2 * sum(range(4, 65, 4)),
    "attend residue(step = 64)": N * N // 64,
    "attend block(size = 64)": N * 64,
    "attend block(size = 64, before = 1, after = 2)": 4 * 64 * N - (1 + 1 + 2) * 64 * 64,
    "attend summary(stride = 64, cells = 5)": N * 5 * N // 64,
    "attend fixed(stride = 64, cells = 5)": N * 5 * N // 64 + N * 59,
    "attend strided(stride = 64)": N * N // 64 + 126 * N - 63 * 64,
    "attend strided(stride = isqrt(n))": N * 1024 + 2046 * N - 1023 * 1024,
    "attend global(first(3))": 3 * (2 * N - 3),
    "attend columns(first(3))": 3 * N,
    "attend rows(last(2)) | columns(every(1024))": N * 1024 + 2 * N - 2 * 1024,
    # of four residues modulo 64 that differ by 16 one holds the column
    "attend residue(step = 64) | columns(every(4))": N * (N // 64 + N // 4) - (N // 4) * (N // 64),
    "attend prefix(100) - rows(first(100))": 100 * (N - 100),
    "attend ~window(radius = 256)": N * N - N * 513 + 256 * 257,
    "attend random(keys = 32, seed = 11)": 32 * N,
    "attend random_blocks(size = 64, blocks = 3, seed = 1)": N * 64 * 3,
    "sequence grid(1024, 1024) attend neighborhood(13, 13)": 169 * N,
    "sequence grid(1024, 1024) attend axial": N * 2047,
    "attend where(abs(q - k) <= 100)": N * 201 - 100 * 101,
    "attend where(q // 64 == k // 64 and k % 2 == 0)": N * 32,
}

DEGREES: dict[str, tuple[int, int, int]] = {
    "attend window(radius = 256)": (513, 257, 513),
    "causal attend strided(stride = 128)": (127 + N // 128, 1, 127 + N // 128),
    "attend global(first(3))": (N, 3, N),
    "attend rows(last(2)) | columns(every(1024))": (N, 1024, N),
    "attend fixed(stride = 64, cells = 5)": (5 * N // 64 + 59,) * 2 + (N,),
    "sequence grid(1024, 1024) attend neighborhood(13, 13)": (169, 169, 361),
    "attend powers(base = 2)": (40, 21, 40),
}
"""The most and the fewest keys of a query, the most readers of a key."""


@pytest.mark.parametrize("body", EDGES)
def test_edges(body: str) -> None:
    report = spec_of(body).analyse(N)
    assert (report.edges, report.quality["edges"]) == (EDGES[body], "exact")


@pytest.mark.parametrize("body", few(DEGREES))
def test_degrees(body: str) -> None:
    report = spec_of(body).analyse(N)
    assert (report.degree, report.min_degree, report.readers) == DEGREES[body]
    assert report.quality["degree"] == "exact"


@pytest.mark.parametrize("body", [x for x in EDGES if "64" in x and "random" not in x])
def test_edges_are_a_polynomial_within_each_residue_class(body: str) -> None:
    """At n = base + 64 t its degree is two at most: three small n say what it is at a large one."""
    for offset in (5, 63):
        base = 256 + offset
        small = [int(spec_of(body).mask(base + 64 * t).sum()) for t in range(3)]
        assert spec_of(body).analyse(N + offset).edges == _extrapolated(small, N // 64 - 4)


def _extrapolated(values: list[int], t: int) -> int:
    """The polynomial through (0, values[0]), (1, values[1]), … at t, in Newton's form."""
    total, differences = Fraction(0), list(values)
    for order in range(len(values)):
        total += differences[0] * comb(t, order)
        differences = [b - a for a, b in pairwise(differences)]
    return int(total)


def test_drawn_graphs_are_counted_from_their_tables() -> None:
    n = 50_000
    drawn = spec_of("attend random(keys = 5, seed = 3)").adjacency(n).tocoo()
    near = int((np.abs(drawn.row - drawn.col) <= 1).sum())
    both = spec_of("attend random(keys = 5, seed = 3) | window(radius = 1)").analyse(n)
    assert both.edges == 5 * n + 3 * n - 2 - near
    rest = spec_of("attend ~random(keys = 5, seed = 3)").analyse(n)
    assert rest.readers == n - np.bincount(drawn.col, minlength=n).min()
    # about as many keys of each query fall on either side as chance has it
    assert abs((drawn.col < n // 2).mean() - 0.5) < 0.01


def hops(body: str, query: int, n: int = N) -> np.ndarray:
    return np.asarray(spec_of(body).analyse(n).hops(query))


def test_hops_of_a_million_positions() -> None:
    line = hops("causal attend window(before = 1, after = 0)", N - 1)
    assert np.array_equal(line, np.arange(N)[::-1])
    even = hops("attend dilated(radius = 64, step = 4)", 6)
    assert (even >= 0).sum() == N // 4
    assert even[6 + 64 * 1000] == 1000
    strided = hops("attend strided(stride = isqrt(n))", 12_345)
    assert np.bincount(strided).tolist() == [1, 3069, N - 3070]
    assert np.bincount(hops("attend self | global(first(1))", 9)).tolist() == [1, 1, N - 2]


LONG = 1 << 18

REACH = [
    ("causal attend strided(stride = isqrt(n))", N, "diameter", 2, "exact"),
    ("causal attend window(before = 31, after = 0)", LONG, "depth", -(-(LONG - 1) // 31), "exact"),
    ("attend window(radius = 100)", LONG, "diameter", -(-(LONG - 1) // 100), "exact"),
    ("attend block(size = 100)", 1 << 16, "depth", None, "exact"),
    ("layers 3 attend window(radius = 2 + layer)", 10_000, "depth", 3 + 2498, "exact"),
    (
        "attend window(radius = 9) | global(positions(77)) | random(keys = 2)",
        1 << 16,
        "diameter",
        2,
        "exact",
    ),
    ("attend full", 1 << 16, "diameter", 1, "exact"),
    ("attend random(keys = 8, seed = 3) & residue(step = 2)", 10_000, "depth", None, "exact"),
    ("attend full", 0, "depth", 0, "exact"),
    ("causal layers 2 attend self", 0, "diameter", 0, "exact"),
    ("attend window(radius = 3)", 0, "path_length", 0.0, "exact"),
]


@pytest.mark.parametrize(("body", "n", "name", "value", "quality"), REACH)
def test_reach(body: str, n: int, name: str, value: float | None, quality: str) -> None:
    found = spec_of(body).analyse(n).to_dict((name,))["figures"][name]
    assert (found["value"], found["quality"]) == (value, quality)


def test_path_lengths_of_a_causal_window() -> None:
    gap = np.arange(1, LONG)
    exact = ((LONG - gap) * -(-gap // 31)).sum() / (LONG - gap).sum()
    report = spec_of("causal attend window(before = 31, after = 0)").analyse(LONG)
    assert report.path_length == pytest.approx(exact)
    assert report.quality["path_length"] == "exact"


def test_an_estimate_of_the_diameter_names_a_pair() -> None:
    report = spec_of("attend random(keys = 8, seed = 3) | window(radius = 1)").analyse(10_000)
    found = report.to_dict(("diameter", "path_length"))["figures"]
    assert [each["quality"] for each in found.values()] == ["estimate", "estimate"]
    note = found["diameter"]["note"]
    assert "so this is a lower bound" in note
    query, key = map(int, re.findall(r"query (\d+) takes .* to read key (\d+)", note)[0])
    assert report.hops(query)[key] == found["diameter"]["value"]


@pytest.mark.parametrize(
    ("body", "symmetric"),
    [
        ("attend window(radius = 500) | columns(every(7))", False),
        ("attend window(radius = 500) | global(every(97))", True),
        # as many keys as readers everywhere, and still no mirror image
        ("attend where((k - q - 1) % n < 500)", False),
    ],
)
def test_symmetry_of_what_is_too_large_to_compare_pair_by_pair(body: str, symmetric: bool) -> None:
    assert spec_of(body).analyse(40_000).symmetric is symmetric


@pytest.mark.parametrize(
    ("body", "n", "figures"),
    [
        ("attend where(q * q * k % 7 == 3)", N, ("edges", "degree", "symmetric", "causal")),
        ("attend where(q * k < q)", N, ("causal",)),
        ("attend window(radius = isqrt(n))", 1 << 23, ("edges", "degree", "density")),
    ],
)
def test_figures_without_a_closed_form_are_unknown_at_long_lengths(
    body: str, n: int, figures: tuple[str, ...]
) -> None:
    found = spec_of(body).analyse(n).to_dict(figures)["figures"]
    for name in figures:
        assert (found[name]["value"], found[name]["quality"]) == (None, None)
        assert found[name]["note"]
