"""Pictures in terminals, files and notebooks: what they show beside the mask, and their layout."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import chdir
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner
from goldens import Golden
from population import inputs_of, population, spec_of
from views import is_decided

from attnspec import AttnSpecError, Spec, SpecError, load, parse, zoo
from attnspec.cli import main

SVG = "{http://www.w3.org/2000/svg}"
CELL = re.compile(r"M(\d+) (\d+)h(\d+)v1h-(\d+)z")
UNION = "attend window(radius = 2) | global(first(2)) | random(keys = 2, seed = 1)"
STACK = (
    "layers 3 heads 2 attend window(radius = 1) layer 1 { head 1 { attend full } }"
    " layer 2 { attend linear() }"
)
BAND = "cross attend where(abs(q * n - k * m) <= 3 * m) | columns(first(2))"


def svg_of(spec: Spec, n: int, **options: Any) -> str:
    return spec.show(n, **options)._repr_svg_()


def page_of(spec: Spec, n: int, folder: Path, **options: Any) -> str:
    spec.show(n, **options).save(folder / "page.html")
    return (folder / "page.html").read_text("utf-8")


def data_of(page: str) -> dict[str, Any]:
    """What the script of a page reads."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert match is not None
    found: dict[str, Any] = json.loads(match[1])
    return found


def cells(runs: list[list[int]], values: int) -> np.ndarray:
    """int [rows, columns, values] from runs."""
    rows = [np.array(row).reshape(-1, values + 1) for row in runs]
    return np.array([np.repeat(row[:, 1:], row[:, 0], axis=0) for row in rows])


def painted(text: str, rows: int, columns: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each plot of an SVG the cells in the colours of terms, and those in that of the later."""
    for group in ElementTree.fromstring(text).iter(f"{SVG}g"):
        read, later = np.zeros((rows, columns), int), np.zeros((rows, columns), int)
        for path in group.iter(f"{SVG}path"):
            target = later if path.get("class") == "later" else read
            for match in CELL.finditer(path.get("d", "")):
                x, y, wide, back = map(int, match.groups())
                assert wide == back
                target[y, x : x + wide] += 1
        assert max(read.max(initial=0), later.max(initial=0)) <= 1
        yield read.astype(bool), later.astype(bool)


def words(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", " ", html))


# --- pairs ---------------------------------------------------------------------------------------

DRAWN = [
    name
    for name, spec in population().items()
    if all(attend.graph is not None and not attend.mechanism for attend in spec.program.attends)
    and not is_decided(spec)
][::9]


@pytest.mark.parametrize("name", DRAWN)
def test_terminal_svg_and_page_show_each_pair(name: str, tmp_path: Path) -> None:
    spec = population()[name]
    n = spec.program.fixed_length or 19
    inputs = inputs_of(spec, n) or None
    mask = spec.mask(n, inputs=inputs)
    options: dict[str, Any] = {"layer": 0, "head": 0, "inputs": inputs}
    above = np.triu(np.ones((n, n), bool), 1) & spec.program.causal
    ((read, later),) = painted(svg_of(spec, n, **options), n, n)
    assert np.array_equal(read, mask)
    assert np.array_equal(later, above)
    data = data_of(page_of(spec, n, tmp_path, **options))
    (plot,) = data["plots"]
    which, pairs = np.moveaxis(cells(plot["rows"], 2), -1, 0)
    assert np.array_equal(which >= 0, mask)
    assert np.array_equal(which == -2, above)
    assert np.array_equal(pairs, mask)
    rows = [re.split("[│┤]", x)[1] for x in str(spec.show(n, **options)).splitlines() if "│" in x]
    if all(len(row) == 2 * n for row in rows):
        shown = [[row[2 * k : 2 * k + 2] == "██" for k in range(n)] for row in rows]
        assert np.array_equal(shown, mask)


def test_another_pattern_would_be_seen() -> None:
    ((read, _),) = painted(svg_of(spec_of("attend window(radius = 3)"), 13), 13, 13)
    assert not np.array_equal(read, spec_of("attend window(radius = 4)").mask(13))


@pytest.mark.parametrize(("m", "n"), [(3, 7), (7, 3), (20, 30)])
def test_two_sequences_have_m_rows_of_n_keys(m: int, n: int, tmp_path: Path) -> None:
    spec = spec_of(BAND)
    ((read, _),) = painted(svg_of(spec, n, m=m), m, n)
    assert np.array_equal(read, spec.mask(n, m=m))
    data = data_of(page_of(spec, n, tmp_path, m=m))
    assert (data["queries"], data["n"]) == (m, n)
    given = {"sel": np.array([[[0], [1], [2], [-1], [0], [1]]])}
    spec = spec_of("cross input sel: choices(size = 4) attend chosen(sel) | window(radius = 1)")
    ((read, _),) = painted(svg_of(spec, 12, m=6, inputs=given), 6, 12)
    assert np.array_equal(read, spec.mask(12, m=6, inputs=given))


@pytest.mark.parametrize("causal", ["", "causal "])
def test_why_is_the_terms_that_have_a_pair(causal: str, tmp_path: Path) -> None:
    data = data_of(page_of(spec_of(causal + UNION), 40, tmp_path))
    assert data["terms"] == UNION.removeprefix("attend ").split(" | ")
    (plot,) = data["plots"]
    which = cells(plot["rows"], 2)[..., 0]
    for number, term in enumerate(data["terms"]):
        has = np.array([number in one for one in plot["sets"]])
        own = spec_of(f"{causal}attend {term}").mask(40)
        assert np.array_equal((which >= 0) & has[which], own)
    # the definitions of a file and what is said twice have one name each
    terms = data_of(page_of(zoo("tree_heap"), 64, tmp_path))["terms"]
    assert len(set(terms)) == len(terms)


@pytest.mark.parametrize("body", [UNION, f"causal {UNION}", "attend full - window(radius = 2)"])
def test_long_sequences_are_counted_in_cells(body: str, tmp_path: Path) -> None:
    n, spec = 1000, spec_of(body)
    data = data_of(page_of(spec, n, tmp_path))
    side = data["side"]
    assert 64 < -(-n // side) <= 128
    (plot,) = data["plots"]
    borders = np.arange(0, n, side)

    def summed(array: np.ndarray) -> np.ndarray:
        return np.add.reduceat(np.add.reduceat(array.astype(int), borders, 0), borders, 1)

    possible = np.tril(np.ones((n, n))) if spec.program.causal else np.ones((n, n))
    assert np.array_equal(cells(plot["rows"], 2)[..., 1], summed(spec.mask(n)))
    assert np.array_equal(cells(plot["allowed"], 1)[..., 0], summed(possible))


def test_very_long_sequences_are_counted_or_estimated() -> None:
    spec = spec_of("causal attend window(before = 99, after = 0)")
    assert len(svg_of(spec, 65536)) < 50_000
    assert f"{sum(min(q, 99) + 1 for q in range(65536)):,}" in str(spec.show(65536))
    spec = spec_of("cross attend where((q * k) % 7 < 3 and q * n >= k * m)")
    assert "≈" in str(spec.show(6000, m=1000))
    assert "≈" not in str(spec.show(60, m=10))


@pytest.mark.parametrize("n", [0, 1, 37, 1000, 100_000])
@pytest.mark.parametrize("width", ["20", "40", "200"])
def test_pictures_keep_to_the_width_of_the_terminal(width: str, n: int) -> None:
    text = "attention a { causal attend window(before = 9, after = 0) }"
    done = CliRunner(env={"COLUMNS": width}).invoke(main, ["show", "-", "-n", str(n)], input=text)
    framed = [x for x in done.stdout.splitlines() if x.endswith(("│", "|", "+", "┐", "┘"))]
    assert bool(framed) == (n > 0)
    assert max(map(len, framed), default=0) <= int(width)


def test_pairs_are_drawn_up_to_a_length(tmp_path: Path) -> None:
    spec = spec_of("attend window(radius = 3)")
    sides = [data_of(page_of(spec, n, tmp_path))["side"] for n in (256, 257)]
    assert sides[0] == 1 < sides[1]
    assert data_of(page_of(spec, 0, tmp_path))["plots"][0]["rows"] == []


# --- layers, heads, mechanisms -------------------------------------------------------------------


def test_layers_and_heads_that_differ_are_drawn_once(tmp_path: Path) -> None:
    spec = spec_of(STACK)
    plots = [*painted(svg_of(spec, 9), 9, 9)]
    for (read, _), head in zip(plots, (0, 1), strict=True):
        assert np.array_equal(read, spec.mask(9, 1, head))
    assert len([*painted(svg_of(spec, 9, layer=1), 9, 9)]) == 2
    assert len([*painted(svg_of(spec, 9, layer=1, head=1), 9, 9)]) == 1
    inputs = {"d": np.array([0, 0, 1, 1])}
    for body, count in (
        ("layers 2 heads 2 attend self", 1),
        ("heads 4 input d: ids attend same(d) head 3 { attend same(d) & causal }", 2),
        ("heads 2 input d: ids attend same(d) & random(keys = 2)", 2),
    ):
        given = inputs if "input" in body else None
        assert len([*painted(svg_of(spec_of(body), 4, inputs=given), 4, 4)]) == count, body
    hybrid = spec_of("causal attend window(before = 4, after = 0) + linear()")
    assert data_of(page_of(hybrid, 16, tmp_path))["plots"][0]["formula"] == "linear"
    assert svg_of(hybrid, 16).count('class="rest"') == 2
    with pytest.raises(SpecError) as caught:
        spec_of("attend linear()").show(8)
    assert caught.value.diagnostics[0].code == "A707"


# --- layout --------------------------------------------------------------------------------------


def boxes(svg: ElementTree.Element) -> list[tuple[str, float, float, float, float]]:
    """Where each line of text stands, by the width that monospaced fonts have."""
    placed = []
    for item in svg.iter(f"{SVG}text"):
        text, size = "".join(item.itertext()), float(item.get("font-size", "12"))
        wide, x, y = len(text) * size * 0.603, float(item.get("x", "0")), float(item.get("y", "0"))
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[item.get("text-anchor", "start")]
        placed.append((text, left, y - 0.8 * size, left + wide, y + 0.2))
    return placed


ODD = ", ".join(map(str, range(1, 200, 2)))
LAYOUTS = {
    "small": ("attend window(radius = 3)", 3),
    "pairs": (UNION, 100),
    "cells": (UNION, 100_000),
    "heads": ("heads 13 attend window(radius = head) | global(first(head))", 9),
    "long": (f"attend {' | '.join(f'where(q == k + {i})' for i in range(9))}", 20),
    "many": (f"attend {' | '.join(f'where(q == k + {i})' for i in range(40))}", 20),
    "wide": (f"attend where({' or '.join(f'q - k == {i}' for i in range(60))})", 9),
    "stack": (STACK, 9),
    "layers": (f"layers 200 attend full layer {ODD} {{ attend self }}", 9),
}


@pytest.mark.parametrize(("body", "n"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_no_text_is_cut_off_or_in_the_way(body: str, n: int) -> None:
    drawing = ElementTree.fromstring(svg_of(spec_of(body), n))
    placed, (*_, width, height) = boxes(drawing), map(float, drawing.get("viewBox", "").split())
    assert len(placed) > 3
    for number, (said, left, top, right, bottom) in enumerate(placed):
        assert 0 <= left, said
        assert right <= width <= 1240, said
        assert bottom <= height, said
        for other, x, y, to_x, to_y in placed[:number]:
            assert left >= to_x or right <= x or top >= to_y or bottom <= y, (said, other)


# --- the page ------------------------------------------------------------------------------------


def test_a_page_asks_for_nothing_and_can_be_heard(tmp_path: Path) -> None:
    page = page_of(spec_of(STACK), 9, tmp_path)
    assert not re.search(r"src=|href=|url\(|@import|fetch\(", page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page
    assert page.count('role="img"') == page.count("<desc>") == page.count("<figure ") == 2
    assert "{{" not in page
    page = page_of(spec_of("attend where(q < k and k <= q + 3) | self"), 9, tmp_path)
    assert "where(q &lt; k and k &lt;= q + 3)" in page


def test_claims_and_a_count_stand_above_many_small_pictures(tmp_path: Path) -> None:
    many = "causal layers 3 heads 8 attend window(before = layer * 8 + head, after = 0)"
    page = page_of(spec_of(f"{many} require causal require depth <= 2"), 9, tmp_path)
    top, pictures = page.split("<main class", 1)
    assert "24 different graphs, 12 of them drawn" in top
    assert "<li>✓ <code>causal</code> is proven for every n</li>" in top
    assert "<li>✗ <code>depth &lt;= 2</code> does not hold at n = 64" in top
    assert pictures.count("<figure ") == 12
    assert "<main>" in page_of(spec_of(STACK), 9, tmp_path)


def contrast(one: str, other: str) -> float:
    """The ratio of two colours by the accessibility guidelines, which ask for 4.5 of words."""

    def light(colour: str) -> float:
        six = colour if len(colour) == 7 else "#" + "".join(2 * digit for digit in colour[1:])
        parts = np.array([*bytes.fromhex(six[1:])]) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ (0.2126, 0.7152, 0.0722)) + 0.05

    return max(light(one) / light(other), light(other) / light(one))


def test_words_can_be_read_by_day_and_by_night(tmp_path: Path) -> None:
    page = page_of(spec_of(STACK), 9, tmp_path)
    assert "svg { display: block; width: min(100%, " in page
    begin, end = page.index("@media (prefers-color-scheme: dark)"), page.index("@media print")
    drawn = dict(re.findall(r'class="(\w+)" (?:fill|stroke)="(#\w+)"', page))
    by_night = dict(re.findall(r"\.(\w+) \{ fill: (#\w+)", page[begin:end]))
    assert drawn.keys() <= by_night.keys()
    for style, fills in ((page[:begin], drawn), (page[begin:end], by_night)):
        # the first of each colour is that of the page as a whole, the second that of its remarks
        paper, bar = (re.findall(f"{key}: (#\\w+)", style)[0] for key in ("background", "--bar"))
        ink, quiet = re.findall(r" color: (#\w+)", style)[:2]
        for words in (ink, quiet, fills["quiet"]):
            assert contrast(words, paper) >= 4.5
        assert contrast(ink, bar) >= 4.5
    assert contrast("#777777", "#fff") < 4.5 < contrast("#767676", "#ffffff")


NODE = """
const [page, cells] = [require("fs").readFileSync(0, "utf8"), JSON.parse(process.argv[1])];
const data = page.match(/id="data">(.*?)<\\/script>/s)[1], said = {}, handlers = {};
const width = Number(page.match(/<figure [^]*?viewBox="0 0 ([0-9.]+) /)[1]);
const svg = {
  viewBox: { baseVal: { width } },
  getBoundingClientRect: () => ({ left: 10, top: 20, width: width / 2 }),
  appendChild: child => child,
  addEventListener: (name, handler) => { handlers[name] = handler; },
};
globalThis.document = {
  getElementById: name => name === "said" ? said : { textContent: data },
  createElementNS: () => ({ setAttribute: () => {} }),
  querySelectorAll: () => [{ querySelector: () => svg }],
  querySelector: () => null,
};
new Function(page.match(/<script>([^]*?)<\\/script>/)[1])();
const [left, top, size] = JSON.parse(data).plots[0].square;
const point = ([row, column]) => {
  const clientX = 10 + (left + (column + 0.5) * size) / 2;
  handlers.pointermove({ clientX, clientY: 20 + (top + (row + 0.5) * size) / 2 });
  return said.innerText;
};
const press = key => {
  handlers.keydown({ key, preventDefault: () => {} });
  return said.innerText;
};
console.log(JSON.stringify(cells.map(cell => cell.map ? point(cell) : press(cell))));
"""


def heard(page: str, events: list[Any]) -> list[str]:
    """What a page says after each event: a cell that is pointed at, or a key."""
    done = subprocess.run(
        ["node", "-e", NODE, json.dumps(events)],
        input=page,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_page_says_what_a_cell_is(tmp_path: Path, golden: Golden) -> None:
    page = page_of(spec_of(UNION), 12, tmp_path)
    keys = ["ArrowUp", "ArrowLeft", "ArrowDown", "ArrowRight"]
    moved = heard(page, [(0, 1), *keys, "Tab"])
    # the first row has none above it
    assert moved == heard(page, [(0, 1), (0, 1), (0, 0), (1, 0), (1, 1), (1, 1)])
    assert len(set(moved)) == 4
    shown = []
    for body, n, places in (
        (UNION, 12, [(9, 8), (0, 1), (9, 3)]),
        ("causal attend window(before = 4, after = 0) + linear()", 12, [(9, 0), (0, 9)]),
        ("causal attend window(before = 9, after = 0)", 1024, [(0, 0), (9, 0), (0, 9)]),
        ("sequence grid(2, 3) attend axial", 6, [(4, 1)]),
    ):
        texts = heard(page_of(spec_of(body), n, tmp_path), places)
        shown += [
            body,
            *(
                f"    {place}: {' / '.join(text.splitlines())}"
                for place, text in zip(places, texts, strict=True)
            ),
        ]
    golden("\n".join(shown) + "\n")


# --- files and notebooks -------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with chdir(tmp_path):
        Path("a.attn").write_text(f"attention a {{ {UNION} }}")
        yield tmp_path


def shown(*arguments: str) -> int:
    return CliRunner().invoke(main, ["show", "a.attn", *arguments]).exit_code


@pytest.mark.parametrize("suffix", ["svg", "html", "png"])
def test_the_same_spec_gives_the_same_bytes_over_pictures_alone(suffix: str, folder: Path) -> None:
    first, second, mine = (folder / f"{name}.{suffix}" for name in ("one", "two", "mine"))
    assert shown("-n", "20", "-o", first.name) == 0
    load("a.attn").show(20).save(second)
    assert first.read_bytes() == second.read_bytes()
    mine.write_text("mine")
    assert shown("-o", mine.name) == 3
    assert mine.read_text() == "mine"
    assert shown("-o", mine.name, "--force") == 0
    before = mine.read_bytes()
    assert shown("-n", "9", "-o", mine.name.upper().replace("MINE", "mine")) == 0
    assert len(before) > 500
    assert shown("-n", "9", "-o", mine.name) == 0
    assert mine.read_bytes() != before


def test_requests_that_do_not_fit_leave_no_file(folder: Path) -> None:
    for status, arguments in (
        (2, ["-o", "x.pdf"]),
        (2, ["-o", ".svg"]),
        (2, ["-o", "x.svg", "--layer", "1"]),
        (2, ["-o", "x.svg", "--input", "x=1"]),
        (4, ["-o", "x.svg", "-n", "2147483647"]),
        (3, ["-o", "none/x.svg"]),
        (3, ["-o", "a.attn/x.svg", "--force"]),
    ):
        assert shown(*arguments) == status, arguments
    assert [path.name for path in folder.iterdir()] == ["a.attn"]
    picture = spec_of("attend window(radius = 1)").show(4)
    (folder / "x.svg").mkdir()
    for error, name in (
        (FileNotFoundError, "none/x.svg"),
        (OSError, "x.svg"),
        (ValueError, "s.pdf"),
    ):
        with pytest.raises(error):
            picture.save(folder / name)


@pytest.mark.parametrize(
    ("body", "n"),
    [
        ("heads 2 attend full head 1 { attend self }", None),
        ("sequence grid(3, 5) attend axial", 15),
        ("causal attend window(before = 3, after = 0) + linear()", None),
        ("attend topk(keys = 3)", None),
        ("input x: tokens attend global(x) | self", 0),
        ("attend favor()", 0),
        ("attend window(radius = 100 - n * 2)", 0),
    ],
)
def test_a_spec_draws_itself_or_says_why_not(body: str, n: int | None) -> None:
    spec = spec_of(body)
    svg, html = spec._repr_svg_(), spec._repr_html_()
    assert spec.source in words(html)
    assert (svg is None) == (n == 0)
    if svg is not None:
        assert svg in html
        assert n is None or f"n = {n}" in "".join(ElementTree.fromstring(svg).itertext())


def test_specs_plans_and_reports_in_notebooks() -> None:
    spec = parse(f"attention a(r = 3) {{ {UNION} }}")
    assert (str(spec), repr(spec)) == (spec.source, "<Spec a, r=3>")
    plan = spec.plan(100)
    root = ElementTree.fromstring(plan._repr_html_())
    assert "".join(root.itertext()) == str(plan)
    assert "<table" in spec.analyse(100)._repr_html_()
    marked = np.arange(16) == 3
    spec = spec_of("input x: tokens attend global(x) | self")
    assert "█" in str(spec.show(16, inputs={"x": marked}))
    for wrong in (
        {"n": 16},
        {"n": -1, "inputs": {"x": marked}},
        {"n": 16, "layer": 1, "inputs": {"x": marked}},
        {"n": 16, "head": 2, "inputs": {"x": marked}},
    ):
        with pytest.raises(AttnSpecError):
            spec.show(**wrong)


# --- PNG and axes --------------------------------------------------------------------------------


def test_a_png_shows_each_pair_whatever_a_user_has_set(folder: Path) -> None:
    import matplotlib
    from matplotlib.image import imread

    n, spec = 40, spec_of("attend window(radius = 3)")
    spec.show(n).save(folder / "x.png")
    pixels = imread(folder / "x.png")
    (fill,) = set(re.findall(r'class="term0" fill="#(\w+)"', svg_of(spec, n)))
    colour = np.array(list(bytes.fromhex(fill))) / 255
    square = data_of(page_of(spec, n, folder))["plots"][0]["square"]
    # the plot stands below the header, at a place that its cells give away
    blue: np.ndarray = np.all(np.abs(pixels[..., :3] - colour) < 0.01, axis=-1)
    size = 2 * square[2]
    rows, columns = np.flatnonzero(blue.any(axis=1)), np.flatnonzero(blue.any(axis=0))
    top, left = rows[0], columns[columns >= 2 * (24 + square[0])][0]
    centres = np.arange(n) * size + size // 2
    assert np.array_equal(blue[np.ix_(top + centres, left + centres)], spec.mask(n))
    plain = (folder / "x.png").read_bytes()
    assert b"Date" not in plain
    changed: Any = {"font.size": 30, "savefig.bbox": "tight", "axes.facecolor": "red"}
    with matplotlib.rc_context(changed):
        spec.show(n).save(folder / "y.png")
    assert (folder / "y.png").read_bytes() == plain


def test_pairs_are_drawn_on_axes_of_a_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure as Canvas

    spec = parse("attention a { heads 2 attend full head 1 { attend self } }")
    axes = Canvas().subplots()
    assert spec.plot(6, axes, head=1) is axes
    drawn: Any = axes.images[0].get_array()
    assert np.array_equal(drawn[..., 3] > 0, spec.mask(6, head=1))
    assert axes.get_title() == "a"
    monkeypatch.setattr("attnspec.show.png.find_spec", lambda name: None)
    for ask in (lambda: spec.plot(4), lambda: spec.show(4).save(folder / "x.png")):
        with pytest.raises(AttnSpecError, match=r"attnspec\[plot\]"):
            ask()
    spec.show(4).save(folder / "x.svg")
