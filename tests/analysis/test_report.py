"""Reports: what they answer, how far it is to be trusted, as text, JSON and HTML."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from population import inputs_of, small, spec_of
from zoo import ATTENTIONS, IDS

from attnspec import AttnSpecError, SpecError, parse
from attnspec.analysis.report.printed import table


@pytest.mark.parametrize(("path", "name"), ATTENTIONS[::16], ids=IDS[::16])
def test_reports_of_the_zoo(path: Path, name: str) -> None:
    spec = small(path, name)
    n = spec.program.fixed_length or 48
    report = spec.analyse(n, inputs_of(spec, n))
    for page in (str(report), report._repr_html_()):
        assert spec.name in page
    figures = report.to_dict()["figures"]
    assert all(each["quality"] or each["note"] for each in figures.values())
    assert report.program.cross or "spectral_gap" in figures


def test_figures_of_one_head_of_one_layer() -> None:
    report = spec_of("layers 2 heads 2 attend window(radius = 1)").analyse(10)
    wanted = {"edges": 28, "density": 0.28, "degree": 3, "min_degree": 2, "mean_degree": 2.8}
    wanted |= {"readers": 3, "min_readers": 2, "empty_rows": 0, "unread_keys": 0}
    assert vars(report.per_head[1, 1]) == wanted
    assert report.edges == 4 * 28


def test_generation() -> None:
    two = spec_of("causal heads 2 head 0 { attend self } head 1 { attend full }").analyse(8)
    assert two.eviction == (
        "head 0: a key can go 0 steps after it was written\nhead 1: every key stays to the end"
    )
    assert two.kv_cache_bytes == 9 * 2 * 64 * 4
    assert spec_of("attend window(before = 3, after = 0)").analyse(8).kv_cache == 4
    assert spec_of("attend full").analyse(8).kv_cache is None
    nothing = spec_of("causal attend full").analyse(0)
    assert (nothing.kv_cache, nothing.kv_cache_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("mechanism", "width", "columns"),
    [
        ("linear()", 64, 65),
        ("linear(feature = identity, normalize = none)", 64, 64),
        ("favor(features = 32)", 32, 65),
        ("favor(features = 32, kind = trig)", 64, 65),
        ("rfa(features = 8, gated = true)", 16, 65),
        ("taylor(order = 1)", 65, 65),
    ],
)
def test_generation_from_sums(mechanism: str, width: int, columns: int) -> None:
    spec = spec_of(f"causal layers 3 heads 2 attend {mechanism}")
    for n in (0, 1, 1000):
        report = spec.analyse(n)
        assert (report.kv_cache, report.kv_cache_bytes) == (0, 3 * 2 * width * columns * 4)
        assert report.eviction == "each key goes into sums of one size and is gone"
    q = torch.randn(1, 2, 5, 64)
    _, state = spec.compile().step(q, q, q)
    assert sum(part.sums.numel() for part in state.parts) == 2 * width * columns


@pytest.mark.parametrize(
    "text",
    [
        "attend linear()",
        "causal attend gmlp(max_length = 9)",
        "causal attend self + rbf()",
        "causal input d: ids attend same(d) + linear()",
        "causal heads 2 input d: ids head 0 { attend linear() } head 1 { attend same(d) }",
        "causal layers 2 attend linear() layer 1 { attend gmlp(max_length = 4) }",
    ],
)
def test_specs_without_a_state_have_no_cache(text: str) -> None:
    report = spec_of(text).analyse(9)
    assert (report.kv_cache, report.kv_cache_bytes) == (None, None)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("attend linear()", "`linear` is a mechanism, which has no pairs"),
        (
            "input marked: tokens attend global(marked)",
            "the pairs depend on the input `marked`, known only in a call",
        ),
    ],
)
def test_figures_known_only_at_run_time_say_why(body: str, reason: str) -> None:
    report = spec_of(body).analyse(32)
    names = ["edges", "density", "degree", "rows_nonempty", "symmetric", "kv_cache"]
    # what a mechanism lets through is known
    reads = "input" in body
    for name in [*names, *["depth"] * reads]:
        unknown = {"value": None, "quality": None, "note": reason}
        assert report.to_dict((name,))["figures"][name] == unknown
        assert (getattr(report, name), report.quality[name]) == (None, None)
    assert report.order is not None
    assert report.per_head == {}
    assert f"not known: {reason}" in str(report).replace("all else: ", "")
    assert "<td>not known</td>" in report._repr_html_()
    if reads:
        with pytest.raises(AttnSpecError, match="nothing is known of paths"):
            report.hops(0)


def test_analyse_refuses_wrong_arguments() -> None:
    grid = spec_of("sequence grid(3, 4) attend axial")
    with pytest.raises(AttnSpecError, match="12 cells, got n = 11"):
        grid.analyse(11)
    with pytest.raises(SpecError, match="at least 1"):
        spec_of("attend dilated(radius = 4, step = n - 5)").analyse(5)
    with pytest.raises((ValueError, TypeError)):
        grid.analyse(-1)
    reading, none = spec_of("input marked: tokens attend global(marked)"), np.zeros(4, bool)
    with pytest.raises(AttnSpecError, match="declares no input"):
        reading.analyse(4, inputs={"other": none, "marked": none})
    with pytest.raises(KeyError):
        grid.analyse(12).figure("size")


def test_figures_beyond_the_supported_length_are_refused() -> None:
    longer = spec_of("attend window(radius = isqrt(n))").analyse(1 << 23)
    # exact, or the error of the limit: nothing in between
    for name in ("edges", "degree"):
        with pytest.raises(AttnSpecError, match="this analysis supports n <= 4,194,304"):
            getattr(longer, name)
    assert "supports n <= 4,194,304" in str(longer)
    figures = [spec_of("attend window(radius = 4)").analyse(n).to_dict()["figures"] for n in LONG]
    assert ["depth" in each for each in figures] == [True, False]
    assert ["spectral_gap" in each for each in figures] == [False, False]


LONG = 8192, 1 << 17


def test_every_figure_has_an_attribute_of_its_name_and_json_is_plain() -> None:
    report = spec_of("causal heads 2 attend strided(stride = 4)").analyse(16)
    data = json.loads(report.to_json(tuple(report.quality)))
    assert (data["name"], data["n"]) == ("sample", 16)
    assert [row["head"] for row in json.loads(report.to_json())["per_head"]] == [0, 1]
    for name, figure in data["figures"].items():
        value = getattr(report, name)
        assert figure["value"] == value or value != value, name
        assert figure["quality"] == report.quality[name]
    assert json.loads(report.to_json(("edges",)))["figures"].keys() == {"edges"}
    for n in (0, 1):
        short = spec_of("causal attend window(before = 2, after = 0)").analyse(n)
        assert (short.edges, short.causal) == (n, True)
        assert str(short)
        assert json.loads(short.to_json())["n"] == n


def test_a_page_reads_at_a_glance() -> None:
    text = str(spec_of("heads 2 head 0 { attend self } head 1 { attend full }").analyse(64))
    lines = {line.strip().split("  ")[0]: line for line in reversed(text.splitlines())}
    assert "4,160" in lines["pairs"]
    assert lines["pairs"].rstrip().endswith("exact")
    assert "1 to 64" in lines["keys of a query"]
    assert max(map(len, text.splitlines())) < 140
    long = str(spec_of("attend window(radius = 2) | global(first(1))").analyse(16_385))
    assert "unless asked for: depth, diameter, path_length, spectral_gap" in long


def test_large_numbers_keep_three_digits() -> None:
    for n, shown in ((10, "25.6 k"), (1000, "256 M"), (1100, "310 M"), (62_500, "1 T")):
        report = spec_of("attend full").analyse(n)
        assert report.flops == 256 * n * n
        assert shown in str(report)


def test_several_reports_are_a_table() -> None:
    spec = spec_of("attend window(radius = 2)")
    assert "n = 16" in table([spec.analyse(16), spec.analyse(64)]).plain
    other = parse("attention b { attend full }").analyse(16)
    lines = table([spec.analyse(16), other]).plain.splitlines()
    assert lines[0].split() == ["sample", "b"]
    assert any("256" in line for line in lines)


def test_html_is_escaped() -> None:
    markup = spec_of("attend where(q - k < 2 and k - q < 2)").analyse(9)._repr_html_()
    assert markup.startswith("<table>")
    assert markup.count("<tr>") == markup.count("</tr>")
    assert "n &gt;= " in markup or "&gt;" not in markup


@pytest.mark.parametrize(
    ("body", "note"),
    [
        ("causal attend window(radius = 1)", "proven for every n"),
        ("sequence grid(3, 3) attend axial", "the grid has one length"),
    ],
)
def test_why_a_graph_is_stable_is_said(body: str, note: str) -> None:
    found = spec_of(body).analyse(9).to_dict(("stable",))["figures"]["stable"]
    assert found == {"value": True, "quality": "exact", "note": note}
