"""Pairs between two sequences against their definition: masks, lists of pairs and calls."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from sweeps import few

from attnspec import AttnSpecError, Spec, parse

SIZES = ((0, 5), (5, 0), (1, 1), (7, 16), (33, 20), (130, 257), (20, 20))
"""Queries and keys."""

Pair = Callable[[int, int, int, int], bool]
"""Whether query q of m reads key k of n."""

GRAPHS: dict[str, Pair] = {
    "full": lambda q, k, m, n: True,
    "self": lambda q, k, m, n: q == k,
    "where(abs(q * n - k * m) <= 2 * m)": lambda q, k, m, n: abs(q * n - k * m) <= 2 * m,
    "window(before = 2, after = m // 4)": lambda q, k, m, n: -(m // 4) <= q - k <= 2,
    "~window(radius = 4)": lambda q, k, m, n: abs(q - k) > 4,
    "full - dilated(radius = 6, step = 2)": lambda q, k, m, n: abs(q - k) > 6 or (q - k) % 2 == 1,
    "rows(last(2)) | columns(last(3))": lambda q, k, m, n: q >= m - 2 or k >= n - 3,
    "global(last(2))": lambda q, k, m, n: q >= m - 2 or k >= n - 2,
    "global(~last(2) & every(3))": lambda q, k, m, n: (
        (q < m - 2 and q % 3 == 0) or (k < n - 2 and k % 3 == 0)
    ),
    "transpose(rows(last(2)))": lambda q, k, m, n: k >= n - 2,
    "transpose(where(q < 3 and k < m - 1))": lambda q, k, m, n: k < 3 and q < m - 1,
    "shift(window(radius = 1), by = 3)": lambda q, k, m, n: q >= 3 and k >= 3 and abs(q - k) <= 1,
    "shift(rows(last(2)), by = -2)": lambda q, k, m, n: m > q + 2 >= m - 2 and k + 2 < n,
    "transpose(shift(columns(last(2)), by = 1))": lambda q, k, m, n: (
        q >= 1 and k >= 1 and q > m - 2
    ),
    "block(size = 4) | prefix(2) | summary(stride = 5, cells = 2)": lambda q, k, m, n: (
        q // 4 == k // 4 or k < 2 or k % 5 >= 3
    ),
    "where(q * n < m - n) - where((k * m) % 4 < 2)": lambda q, k, m, n: (
        q * n < m - n and not k * m % 4 < 2
    ),
    "~(where(2 * k - q >= m * n // 3) | where((q * k) % 3 == 1))": lambda q, k, m, n: (
        not (2 * k - q >= m * n // 3 or q * k % 3 == 1)
    ),
    "where(q + k == abs(m - n)) | where(k * m > min(m, n) // 2) & where(q - k != 3)": (
        lambda q, k, m, n: q + k == abs(m - n) or (k * m > min(m, n) // 2 and q - k != 3)
    ),
    "powers(base = 2) & residue(step = 2)": lambda q, k, m, n: (
        (q - k) % 2 == 0 and (q == k or (abs(q - k) & (abs(q - k) - 1)) == 0)
    ),
    "strided(stride = 3) & fixed(stride = 4, cells = 1)": lambda q, k, m, n: (
        (abs(q - k) < 3 or (q - k) % 3 == 0) and (q // 4 == k // 4 or k % 4 >= 3)
    ),
}


def spec_of(body: str) -> Spec:
    return parse(f"attention a {{ cross {body} }}")


def brute(pair: Pair, m: int, n: int) -> np.ndarray:
    """bool [m, n], pair by pair."""
    rows = [[bool(pair(q, k, m, n)) for k in range(n)] for q in range(m)]
    return np.array(rows, bool).reshape(m, n)


@pytest.mark.parametrize("graph", GRAPHS)
def test_masks_are_those_of_the_definition(graph: str) -> None:
    spec = spec_of(f"attend {graph}")
    for m, n in SIZES:
        expected = brute(GRAPHS[graph], m, n)
        assert np.array_equal(spec.mask(n, m=m), expected), (m, n)
        found = spec.adjacency(n, m=m)
        assert found.shape == (m, n)
        assert found.dtype == np.dtype(bool)
        assert found.indices.dtype == np.int32
        assert found.has_canonical_format
        assert np.array_equal(found.toarray(), expected)
    assert np.array_equal(spec.mask(9), brute(GRAPHS[graph], 9, 9))


def test_inputs_are_the_keys() -> None:
    spec = spec_of("input x: tokens attend columns(x) | rows(last(2)) | columns(~x & last(3))")
    for m, n in SIZES:
        marked = np.arange(n) % 3 == 1
        expected = brute(
            lambda q, k, m, n: k % 3 == 1 or q >= m - 2 or (k % 3 != 1 and k >= n - 3), m, n
        )
        assert np.array_equal(spec.mask(n, m=m, inputs={"x": marked}), expected)
    with pytest.raises(AttnSpecError, match=r"must be bool \[5\], got bool \[9\]"):
        spec.mask(5, m=9, inputs={"x": np.zeros(9, bool)})


def test_choices_have_a_row_for_each_query() -> None:
    spec = spec_of("input x: choices(size = 2) attend chosen(x)")
    lists = np.array([[[0, 1], [2, -1], [3, 3]]])
    expected = [[1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 1]]
    assert spec.mask(7, m=3, inputs={"x": lists}).astype(int).tolist() == expected
    with pytest.raises(AttnSpecError, match=r"\[H or H_kv or 1, 4, choices\]"):
        spec.mask(7, m=4, inputs={"x": lists})


def test_where_both_are_as_long_it_is_a_spec_of_one_sequence() -> None:
    spec = spec_of("let w = m // 8 attend where(abs(q * n - k * m) <= w * m) | rows(last(2))")
    same = parse("attention a { attend where(abs(q * n - k * n) <= n // 8 * n) | rows(last(2)) }")
    assert np.array_equal(spec.mask(33), same.mask(33))
    assert spec.analyse(33).edges == same.analyse(33).edges


def test_m_is_for_two_sequences_alone() -> None:
    spec = parse("attention a { attend full }")
    for asked in (spec.mask, spec.adjacency, spec.analyse, spec.plan):
        with pytest.raises(AttnSpecError, match="got m = 3: `a` has one sequence"):
            asked(4, m=3)
    with pytest.raises(AttnSpecError, match="m must be between 0"):
        spec_of("attend full").mask(4, m=-1)
    with pytest.raises(TypeError, match="m must be an integer"):
        spec_of("attend full").mask(4, m=True)
    with pytest.raises(AttnSpecError, match="use `adjacency`"):
        spec_of("attend full").graph(4)


SPECS = (*GRAPHS, "self head 1 { attend columns(last(2)) - rows(first(1)) }")


@pytest.mark.parametrize("graph", few(SPECS, 4))
def test_figures_are_those_of_the_masks(graph: str) -> None:
    spec = spec_of(f"{'heads 2 layers 2 ' * ('head' in graph)}attend {graph}")
    for m, n in ((7, 16), (33, 20), (20, 20), (0, 5), (5, 0)):
        report = spec.analyse(n, m=m)
        slots = np.ndindex(spec.layers, spec.heads or 1)
        masks = np.stack([spec.mask(n, layer, head, m=m) for layer, head in slots])
        keys, readers = masks.sum(2), masks.sum(1)
        assert report.edges == masks.sum()
        assert (report.m, report.n, report.causal) == (m, n, None)
        assert (report.degree, report.readers) == (keys.max(initial=0), readers.max(initial=0))
        assert str(report).startswith(f"a  m = {m}, n = {n}, ")
        if 0 in (m, n):
            assert (report.density, report.min_degree, report.flops) == (0, 0, 0)
            assert "nothing to run" in str(spec.plan(n, m=m))
        else:
            assert (report.min_degree, report.min_readers) == (keys.min(), readers.min())
    assert spec.analyse(20).edges == spec.analyse(20, m=20).edges


def test_figures_of_one_sequence_are_unknown_between_two() -> None:
    report = spec_of("attend full").analyse(9, m=5)
    names = ("causal", "depth", "diameter", "path_length", "spectral_gap", "kv_cache")
    for figure in report.to_dict(names)["figures"].values():
        unknown = {"value": None, "quality": None, "note": "queries and keys are two sequences"}
        assert figure == unknown
    for ask in (report.hops, report.told, report.eccentricity, lambda i: report.path(i, 0)):
        with pytest.raises(AttnSpecError, match="two sequences, and keys read nothing"):
            ask(0)
    assert (report.symmetric, spec_of("attend full").analyse(9).symmetric) == (None, True)
    with pytest.raises(AttnSpecError, match="no tensors are analysed"):
        spec_of("attend topk(keys = 2)").analyse(4, tensors=(np.zeros((1, 4, 2)),) * 2)


@pytest.mark.parametrize(
    ("graph", "reads"),
    [
        ("window(radius = n // 4)", False),
        ("where(q * n <= k)", False),
        ("transpose(rows(last(2)))", False),
        ("topk(keys = 3, within = window(radius = 9))", False),
        ("where(q < m)", True),
        ("window(radius = m)", True),
        ("rows(last(2))", True),
        ("transpose(columns(~last(2)))", True),
        ("shift(window(radius = 3), by = n - 5)", True),
        ("topk(keys = m)", True),
    ],
)
def test_rows_are_stable_where_no_graph_reads_m(graph: str, reads: bool) -> None:
    figure = spec_of(f"attend {graph}").analyse(9, m=5).to_dict(("stable",))["figures"]["stable"]
    assert (figure["note"] == "the graph depends on m, the number of queries") == reads


def test_costs_are_those_of_m_queries() -> None:
    spec = spec_of("attend full")
    assert spec.analyse(16, m=40, head_dim=8).useful_flops == 4 * 8 * 16 * 40
    wide, long, square = spec.analyse(64, m=1000), spec.analyse(1000, m=64), spec.analyse(1000)
    assert wide.edges == long.edges == 64_000
    for name in ("flops", "useful_flops", "bytes", "peak_memory"):
        assert getattr(long, name) < getattr(square, name)
        # keys among more queries are read more often, and pairs by themselves hold more
        assert getattr(wide, name) < getattr(square, name) or name in ("bytes", "peak_memory")
    plan = spec.plan(64, m=1000)
    assert (plan.m, plan.n, spec.plan(64).m) == (1000, 64, 64)
    assert str(plan).startswith("a, m = 1000, n = 64, cpu")
    one = parse("attention a { attend full }")
    assert one.plan(64).m is None
    assert "m" not in one.analyse(9).to_dict()
