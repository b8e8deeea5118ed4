"""Figures of m queries that read n keys of another sequence."""

from __future__ import annotations

import json

import numpy as np
import pytest

from attnspec import AttnSpecError, Report, Spec, parse

SIZES = ((1, 1), (7, 16), (33, 20), (130, 257), (20, 20))

SPECS = (
    "attend where(abs(q * n - k * m) <= 2 * m)",
    "attend full",
    "heads 2 layers 2 attend self head 1 { attend columns(last(2)) - rows(first(1)) }",
    "attend residue(step = 3) | rows(last(2)) | transpose(window(before = 3, after = 0))",
)


def spec_of(body: str) -> Spec:
    return parse(f"attention a {{ cross {body} }}")


@pytest.mark.parametrize("body", SPECS)
def test_counts_are_those_of_the_mask(body: str) -> None:
    spec = spec_of(body)
    for m, n in SIZES:
        report = spec.analyse(n, m=m)
        slots = np.ndindex(spec.layers, spec.heads or 1)
        masks = np.stack([spec.mask(n, i, j, report.stack.inputs, m) for i, j in slots])
        assert report.edges == masks.sum()
        assert (report.degree, report.min_degree) == (masks.sum(2).max(), masks.sum(2).min())
        assert (report.readers, report.min_readers) == (masks.sum(1).max(), masks.sum(1).min())
        assert report.causal is None
        assert (report.m, report.n) == (m, n)
    assert spec.analyse(20).edges == spec.analyse(20, m=20).edges


@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0), (0, 0)])
def test_there_are_no_pairs_without_queries_or_keys(m: int, n: int) -> None:
    for body in SPECS:
        spec = spec_of(body)
        report = spec.analyse(n, m=m)
        assert (report.edges, report.density, report.degree, report.min_degree) == (0, 0, 0, 0)
        assert report.flops == 0
        assert str(report)
        assert "nothing to run" in str(spec.plan(n, m=m))


def test_what_is_about_one_sequence_is_not_known() -> None:
    report = spec_of("attend full").analyse(9, m=5)
    names = "causal depth diameter path_length spectral_gap kv_cache"
    for name in names.split():
        assert getattr(report, name) is None
        assert report.to_dict((name,))["figures"][name]["note"] == (
            "queries and keys are two sequences"
        )
    for ask in (report.hops, report.told, report.eccentricity, lambda i: report.path(i, 0)):
        with pytest.raises(AttnSpecError, match="of which the keys read nothing"):
            ask(0)
    assert report.symmetric is None
    assert spec_of("attend full").analyse(9).symmetric is True
    with pytest.raises(AttnSpecError, match="no tensors are analysed"):
        spec_of("attend topk(keys = 2)").analyse(4, tensors=(np.zeros((1, 4, 2)),) * 2)


def test_rows_are_stable_where_no_graph_reads_m() -> None:
    assert spec_of("attend window(radius = n // 4)").analyse(9, m=5).stable is True
    report = spec_of("attend where(q * n <= k * m)").analyse(9, m=5)
    assert report.stable is False
    assert (
        report.to_dict()["figures"]["stable"]["note"] == "the graph reads m, the number of queries"
    )


def costs(report: Report) -> tuple[int, ...]:
    found = report.flops, report.useful_flops, report.bytes, report.peak_memory
    return tuple(each for each in found if each is not None)


def test_costs_are_those_of_m_queries() -> None:
    spec = spec_of("attend full")
    report = spec.analyse(16, m=40, head_dim=8)
    assert report.useful_flops == 4 * 8 * 16 * 40
    wide, long = spec.analyse(64, m=1000), spec.analyse(1000, m=64)
    assert wide.edges == long.edges == 64_000
    square = spec.analyse(1000)
    assert all(a < b for a, b in zip(costs(long), costs(square), strict=True))
    # keys that are laid out among more queries are read more often, and not computed with
    assert all(a < 0.1 * b for a, b in zip(costs(wide)[:2], costs(square), strict=False))
    assert costs(wide)[3] < costs(square)[3]
    plan = spec.plan(64, m=1000)
    assert (plan.m, plan.n) == (1000, 64)
    assert str(plan).startswith("a, m = 1000, n = 64, cpu")
    assert spec.plan(64).m == 64
    assert parse("attention a { attend full }").plan(64).m is None


def test_reports_say_both_lengths() -> None:
    report = spec_of("attend full").analyse(9, m=5)
    assert str(report).startswith("a  m = 5, n = 9, ")
    assert "m = 5, n = 9" in report._repr_html_()
    assert repr(report) == "<Report a, m = 5, n = 9>"
    found = json.loads(report.to_json())
    assert (found["m"], found["n"]) == (5, 9)
    assert "m" not in parse("attention a { attend full }").analyse(9).to_dict()


def test_bounds_of_choices_are_those_of_the_keys() -> None:
    report = spec_of("attend topk(keys = 5)").analyse(3, m=40)
    assert (report.edges, report.degree, report.density) == (120, 3, 1.0)
    assert report.quality["edges"] == "bound"
    report = spec_of("attend topk(keys = 5) | window(radius = 0)").analyse(30, m=7)
    assert (report.edges, report.degree) == (7 * 6, 6)


def test_inputs_and_choices_are_counted() -> None:
    marked = np.arange(9) % 4 == 0
    report = spec_of("input x: tokens attend columns(x)").analyse(9, {"x": marked}, m=5)
    assert (report.edges, report.unread_keys) == (15, 6)
    lists = np.array([[[0, 1], [2, -1], [3, 3]]])
    spec = spec_of("input x: choices(size = 2) attend chosen(x)")
    assert spec.analyse(7, {"x": lists}, m=3).edges == 7
