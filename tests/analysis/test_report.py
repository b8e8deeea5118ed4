"""Reports: what they answer, how far it is to be trusted, as text, JSON and HTML."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from zoo import ATTENTIONS, IDS, sample, smaller

import attnspec
from attnspec.analysis.counting.head_counts import HeadCounts
from attnspec.analysis.quality import Figure, Unknown
from attnspec.analysis.report.inquiry import CHOICES
from attnspec.analysis.report.printed import page, table, value_of
from attnspec.analysis.report.report import NAMES, Report, data_of
from attnspec.backends.factored.features.sums import State
from attnspec.spec import Spec, parse
from attnspec.text.diagnostics import AttnSpecError, SpecError


def spec_of(body: str) -> Spec:
    return parse(f"attention a {{ {body} }}")


# --- figures by brute force -----------------------------------------------------------------


# all figures: from where on a spec is cheaper is found by plans at a dozen lengths
@pytest.mark.parametrize(
    ("path", "name"),
    [
        pytest.param(*each, id=label, marks=[pytest.mark.slow] if at % 8 else [])
        for at, (each, label) in enumerate(zip(ATTENTIONS, IDS, strict=True))
    ],
)
def test_reports_of_the_zoo(path: Path, name: str) -> None:
    spec = smaller(path, name)
    n = spec.program.fixed_length or 48
    report = spec.analyse(n, sample(spec, n))
    text = str(report)
    for group in (text, page(report).plain, report._repr_html_()):
        assert spec.name in group
    assert_shown(report, text)


def assert_shown(report: Report, text: str) -> None:
    """Figures of the graph are there, or it is said why not; two sequences have no such graph."""
    figures = report.to_dict()["figures"]
    if report.program.cross:
        assert "spectral_gap" not in figures
        return
    found = figures["spectral_gap"]
    assert found["quality"] in ("exact", "bound", "estimate") or found["note"]
    if report.stack.unknown is None:
        assert found["quality"] is not None
        assert "spectral gap" in text


def test_one_head_of_one_layer() -> None:
    report = spec_of("layers 2 heads 2 attend window(radius = 1)").analyse(10)
    assert report.per_head[1, 1] == HeadCounts(
        edges=28,
        density=0.28,
        degree=3,
        min_degree=2,
        mean_degree=2.8,
        readers=3,
        min_readers=2,
        empty_rows=0,
        unread_keys=0,
    )
    assert report.edges == 4 * 28


def test_growth() -> None:
    report = spec_of("causal attend window(before = isqrt(n), after = 0)").analyse(900)
    assert report.order == "n**(3/2)"
    assert report.quality["order"] == "estimate"


def test_generation() -> None:
    report = spec_of("causal heads 3 attend window(before = 9, after = 0)").analyse(100)
    assert report.kv_cache == 10
    assert report.kv_cache_bytes == 3 * 10 * 2 * 64 * 4
    assert report.eviction == "a key can go 9 steps after it was written"
    two = spec_of("causal heads 2 head 0 { attend self } head 1 { attend full }").analyse(8)
    assert two.eviction == (
        "head 0: a key can go 0 steps after it was written\nhead 1: every key stays to the end"
    )
    assert two.kv_cache_bytes == 9 * 2 * 64 * 4
    backward = spec_of("attend window(before = 3, after = 0)").analyse(8)
    assert backward.kv_cache == 4
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
        assert report.kv_cache == 0
        assert report.kv_cache_bytes == 3 * 2 * width * columns * 4
        assert report.eviction == "each key goes into sums of one size and is gone"
    # what a stream holds
    q = torch.randn(1, 2, 5, 64)
    _, state = spec.compile().step(q, q, q)
    sums = [part.total for part in state.parts if isinstance(part, State)]
    assert sum(x.numel() for x in sums) == 2 * width * columns


def test_mechanisms_break_even() -> None:
    linear, favor = (spec_of(f"attend {x}").analyse(9).break_even for x in ("linear()", "favor()"))
    assert linear is not None
    assert favor is not None
    # four times the features of a head of size 64
    assert 2 * linear < favor < 8192


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
def test_what_goes_on_from_no_sums_alone(text: str) -> None:
    report = spec_of(text).analyse(9)
    assert report.kv_cache is None
    assert report.kv_cache_bytes is None


# --- what is not known -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("attend linear()", "`linear` is a mechanism"),
        ("input marked: tokens attend global(marked)", "its pairs depend on run-time inputs"),
    ],
)
def test_what_is_known_at_run_time_alone(body: str, reason: str) -> None:
    report = spec_of(body).analyse(32)
    names = ["edges", "density", "degree", "rows_nonempty", "symmetric", "kv_cache"]
    # what a mechanism lets through is known (tests/graphs/test_influence.py)
    felt = body == "attend linear()"
    for name in names if felt else [*names, "depth"]:
        assert getattr(report, name) is None, name
        assert report.quality[name] is None
        found = report.figure(name)
        assert isinstance(found, Unknown)
        assert found.reason == reason
    assert report.order is not None
    assert report.per_head == {}
    if not felt:
        with pytest.raises(AttnSpecError, match="nothing is known of paths"):
            report.hops(0)
    assert f"not known: {reason}" in str(report).replace("all else: ", "")
    assert report.to_dict()["figures"]["edges"] == {"value": None, "quality": None, "note": reason}


def test_mechanisms_have_operations_by_their_formula() -> None:
    report = spec_of("layers 2 heads 4 attend linear()").analyse(100)
    assert report.flops == 4 * 4 * 100 * 64 * 64
    assert report.quality["flops"] == "estimate"
    # q, k, v and the output, features twice and the sums: written, and read
    assert report.bytes == 4 * 4 * (4 * 6400 + 2 * (2 * 6400 + 64 * 65))
    assert report.quality["bytes"] == "estimate"
    assert report.useful_flops is None
    assert report.causal is False
    assert spec_of("causal attend linear()").analyse(100).causal is True


def test_a_sample_of_the_inputs_makes_figures_exact() -> None:
    spec = spec_of("input marked: tokens attend window(radius = 1) | global(marked)")
    marked = np.zeros(40, bool)
    marked[[3, 20]] = True
    report = spec.analyse(40, inputs={"marked": marked})
    assert report.edges == spec.mask(40, inputs={"marked": marked}).sum()
    assert report.quality["edges"] == "exact"
    assert report.diameter == 2
    # a sample says nothing of other lengths
    assert report.quality["order"] == "bound"


def test_what_the_spec_or_the_caller_gets_wrong() -> None:
    grid = spec_of("sequence grid(3, 4) attend axial")
    with pytest.raises(AttnSpecError, match="12 cells, got n = 11"):
        grid.analyse(11)
    with pytest.raises(SpecError, match="at least 1"):
        spec_of("attend dilated(radius = 4, step = n - 5)").analyse(5)
    with pytest.raises((ValueError, TypeError)):
        grid.analyse(-1)
    reading = spec_of("input marked: tokens attend global(marked)")
    none = np.zeros(4, bool)
    with pytest.raises(AttnSpecError, match="declares no input"):
        reading.analyse(4, inputs={"other": none, "marked": none})
    with pytest.raises(AttnSpecError):
        spec_of("attend full").analyse(4).eccentricity(4)


@pytest.mark.parametrize("n", [0, 1])
def test_short_sequences(n: int) -> None:
    report = spec_of("causal attend window(before = 2, after = 0)").analyse(n)
    assert report.edges == n
    assert report.causal is True
    assert str(report)
    assert json.loads(report.to_json())["n"] == n


def test_a_million_positions() -> None:
    report = spec_of("causal attend strided(stride = 128)").analyse(1 << 20)
    assert report.degree == 127 + (1 << 20) // 128
    assert report.quality["degree"] == "exact"
    assert "diameter" not in report.to_dict()["figures"]
    longer = spec_of("attend window(radius = isqrt(n))").analyse(1 << 23)
    # exact, or the error of the limit: nothing in between
    for name in ("edges", "degree"):
        with pytest.raises(AttnSpecError, match="this analysis supports n <= 4,194,304"):
            getattr(longer, name)
        assert longer.quality[name] is None
    assert longer.density is None
    assert "supports n <= 4,194,304" in str(longer)
    assert longer.to_dict()["figures"]["edges"]["value"] is None


@pytest.mark.parametrize("body", ["attend random(keys = 0)", "attend where(false)"])
def test_no_pairs_have_order_0(body: str) -> None:
    report = spec_of(body).analyse(9)
    assert (report.edges, report.order) == (0, "0")


# --- text and data -----------------------------------------------------------------


def test_every_figure_has_an_attribute_of_its_name() -> None:
    report = spec_of("causal attend window(before = 2, after = 0)").analyse(12)
    assert set(report.quality) == set(NAMES)
    assert len(report.quality) == len(Report.entries)
    for name in NAMES:
        if name in CHOICES:
            # nothing is decided
            continue
        value, found = getattr(report, name), report.figure(name)
        assert isinstance(found, Figure), name
        assert value is found.value or value == found.value
        assert report.quality[name] in ("exact", "bound", "estimate")
    with pytest.raises(KeyError):
        report.figure("size")


def test_json_is_plain() -> None:
    report = spec_of("heads 2 attend strided(stride = isqrt(n))").analyse(64)
    data = json.loads(report.to_json())
    assert data["name"] == "a"
    assert data["figures"]["edges"] == {"value": report.edges, "quality": "exact", "note": ""}
    assert data["figures"]["order"]["value"] == "n**(3/2)"
    assert [row["head"] for row in data["per_head"]] == [0, 1]
    assert json.loads(report.to_json(("edges",)))["figures"].keys() == {"edges"}
    assert data_of(Figure(None, note="never")) == {
        "value": None,
        "quality": "exact",
        "note": "never",
    }


def test_a_page_reads_at_a_glance() -> None:
    text = str(spec_of("heads 2 head 0 { attend self } head 1 { attend full }").analyse(64))
    lines = {line.strip().split("  ")[0]: line for line in reversed(text.splitlines())}
    assert "4,160" in lines["pairs"]
    assert lines["pairs"].rstrip().endswith("exact")
    assert "1 to 64" in lines["keys of a query"]
    assert "head 0" in text
    assert "head 1" in text
    assert max(map(len, text.splitlines())) < 140


@pytest.mark.parametrize(("kind", "step"), [("flops", 1000), ("bytes", 1024)])
def test_large_numbers_are_read_back_to_three_digits(kind: str, step: int) -> None:
    entry = Report.entries[kind]
    assert entry.kind == kind
    ending = r"()$" if kind == "flops" else r"(i?)B$"
    for power, part in product(range(6), (1, 1.26, 9.995, 99.96, 500, 999, step - 0.4)):
        meant = round(part * step**power)
        found = re.match(r"([\d.]+) ?([kKMGTP]?)" + ending, value_of(entry, Figure(meant)))
        assert found is not None
        said, prefix, binary = found.groups()
        shown = float(said) * step ** " KMGTP".index(prefix.upper() or " ")
        assert abs(shown - meant) <= meant / 200, (meant, said)
        # in the largest unit of which there is one
        assert 1 <= float(said) <= step, (meant, said)
        assert bool(binary) == bool(prefix and kind == "bytes")


def test_a_page_names_what_it_did_not_look_for() -> None:
    spec = attnspec.parse("attention a { attend window(radius = 2) | global(first(1)) }")
    assert "unless named" not in str(spec.analyse(4096))
    page = str(spec.analyse(16_385))
    assert "unless named: depth, diameter, path_length, spectral_gap" in page
    cross = attnspec.parse("attention a { cross attend full }")
    assert "unless named" not in str(cross.analyse(1 << 20))


def test_several_reports_are_a_table() -> None:
    spec = spec_of("attend window(radius = 2)")
    short = table([spec.analyse(16), spec.analyse(64)]).plain
    assert "n = 16  n = 64" in " ".join(short.split()).replace("n = 16 n = 64", "n = 16  n = 64")
    other = table([spec.analyse(16), parse("attention b { attend full }").analyse(16)]).plain
    header = other.splitlines()[0].split()
    assert header == ["a", "b"]
    assert "(e)" in other
    assert "256" in other


def test_html_is_escaped() -> None:
    markup = spec_of("attend where(q - k < 2 and k - q < 2)").analyse(9)._repr_html_()
    assert markup.startswith("<table>")
    assert markup.count("<tr>") == markup.count("</tr>")
    assert "n &gt;= " in markup or "&gt;" not in markup


def test_html_says_what_is_not_known() -> None:
    report = spec_of("input x: ids attend same(x)").analyse(9)
    unknown = [x for x in report.default_names if isinstance(report.figure(x), Unknown)]
    markup = report._repr_html_()
    assert unknown
    assert markup.count("<td>not known</td>") == len(unknown)
    assert markup.count("<td>") == 2 * len(report.default_names)


@pytest.mark.parametrize(
    ("body", "note"),
    [
        ("causal attend window(radius = 1)", "proven for every n"),
        ("sequence grid(3, 3) attend axial", "the grid has one length"),
    ],
)
def test_why_a_graph_is_stable_is_said(body: str, note: str) -> None:
    assert spec_of(body).analyse(9).figure("stable") == Figure(True, "exact", note)


def test_the_package_exports_the_report() -> None:
    assert attnspec.Report is Report
    spec = spec_of("attend full")
    assert spec.analyze(3).edges == spec.analyse(3).edges == 9
    assert repr(spec.analyse(3)) == "<Report a, n = 3>"
