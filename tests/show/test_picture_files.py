"""Pictures in files: what they say against the mask, and when one is written."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner, Result

import attnspec
from attnspec.cli import main
from attnspec.show.drawing import COLOURS, TERMS, WIDEST, Drawing, Label, sheet
from attnspec.show.figure import MOST_CELLS, MOST_PAIRS, MOST_PLOTS, MOST_TERMS, Figure, figure
from attnspec.show.html import LATER, NONE, html
from attnspec.show.png import png
from attnspec.show.svg import svg
from attnspec.spec import Spec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SVG = "{http://www.w3.org/2000/svg}"
CELL = re.compile(r"M(\d+) (\d+)h(\d+)v1h-(\d+)z")

WINDOW = "attention a { attend window(radius = 3) }"
UNION = "attention a { attend window(radius = 2) | global(first(2)) | random(keys = 2, seed = 1) }"
SPECS = {
    "window": WINDOW,
    "union": UNION,
    "causal union": "attention a { causal attend window(radius = 2) | residue(step = 7) }",
    "difference": "attention a { attend full - window(radius = 2) }",
    "definition": "graph near(r) = window(radius = r)\nattention a { attend near(1) | self }",
    "nothing": "attention a { attend self - full }",
    "hybrid": "attention a { causal attend window(before = 4, after = 0) + linear() }",
}


def run(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(main, ["show", *arguments], input=text)


def drawn(spec: Spec | str, n: int, **options: Any) -> Figure:
    loaded = attnspec.parse(spec) if isinstance(spec, str) else spec
    return figure(loaded.elaborated, n, **{"layer": None, "head": None, "inputs": {}, **options})


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


def painted(text: str, n: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each plot of an SVG the cells in the colours of terms, and those in that of the later."""
    for group in ElementTree.fromstring(text).iter(f"{SVG}g"):
        read, later = np.zeros((n, n), int), np.zeros((n, n), int)
        for path in group.iter(f"{SVG}path"):
            target = later if path.get("class") == "later" else read
            for match in CELL.finditer(path.get("d", "")):
                x, y, wide, back = map(int, match.groups())
                assert wide == back
                target[y, x : x + wide] += 1
        assert max(read.max(initial=0), later.max(initial=0)) <= 1
        yield read.astype(bool), later.astype(bool)


# --- what they say -------------------------------------------------------------------------------


@pytest.mark.parametrize("text", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("n", [1, 2, 13, 64, 65])
def test_svg_and_html_show_each_pair(text: str, n: int) -> None:
    spec = attnspec.parse(text)
    mask = spec.mask(n)
    found = drawn(spec, n)
    above = np.triu(np.ones((n, n), bool), 1) & spec.program.causal
    ((read, later),) = painted(svg(sheet(found), "title", "about"), n)
    np.testing.assert_array_equal(read, mask)
    np.testing.assert_array_equal(later, above)
    (plot,) = data_of(html(found))["plots"]
    which, pairs = np.moveaxis(cells(plot["rows"], 2), -1, 0)
    np.testing.assert_array_equal(which >= 0, mask)
    np.testing.assert_array_equal(which == LATER, above)
    np.testing.assert_array_equal(which == NONE, ~mask & ~above)
    np.testing.assert_array_equal(pairs, mask)
    assert f"{mask.sum():,} of {n * n:,} pairs" in html(found)


def test_another_pattern_would_be_seen() -> None:
    other = attnspec.parse("attention a { attend window(radius = 4) }").mask(13)
    ((read, _),) = painted(svg(sheet(drawn(WINDOW, 13)), "", ""), 13)
    assert not np.array_equal(read, other)


@pytest.mark.parametrize("causal", ["", "causal"])
def test_why_is_the_terms_that_have_a_pair(causal: str) -> None:
    n = 40
    found = drawn(UNION.replace("attend", f"{causal} attend"), n)
    data = data_of(html(found))
    assert data["terms"] == ["window(radius = 2)", "global(first(2))", "random(keys = 2, seed = 1)"]
    (plot,) = data["plots"]
    which = cells(plot["rows"], 2)[..., 0]
    for number, term in enumerate(data["terms"]):
        own = attnspec.parse(f"attention a {{ {causal} attend {term} }}").mask(n)
        has = np.array([number in one for one in plot["sets"]])
        np.testing.assert_array_equal((which >= 0) & has[which], own)


def test_a_pair_has_the_colour_of_the_first_term() -> None:
    (plot,) = drawn(UNION, 40).plots
    masks = [
        attnspec.parse(f"attention a {{ attend {term} }}").mask(40)
        for term in ("window(radius = 2)", "global(first(2))", "random(keys = 2, seed = 1)")
    ]
    expected = np.select(masks, [0, 1, 2], -1)
    np.testing.assert_array_equal(plot.leading, expected)


def test_definitions_and_repeated_terms_are_named_once() -> None:
    text = "attention a { attend window(radius = 1) | global(first(1)) | window(radius = 1) }"
    assert drawn(text, 8).terms == ("window(radius = 1)", "global(first(1))")
    spec = attnspec.load(EXAMPLES / "tree_heap.attn")
    assert len(set(drawn(spec, 64).terms)) == len(drawn(spec, 64).terms)


@pytest.mark.parametrize("text", SPECS.values(), ids=SPECS.keys())
def test_long_sequences_are_counted_in_cells(text: str) -> None:
    n = 1000
    spec = attnspec.parse(text)
    mask = spec.mask(n)
    found = drawn(spec, n)
    data = data_of(html(found))
    side = data["side"]
    count = -(-n // side)
    assert MOST_CELLS // 2 < count <= MOST_CELLS
    (plot,) = data["plots"]
    borders = np.arange(0, n, side)

    def summed(array: np.ndarray) -> np.ndarray:
        return np.add.reduceat(np.add.reduceat(array.astype(int), borders, 0), borders, 1)

    np.testing.assert_array_equal(cells(plot["rows"], 2)[..., 1], summed(mask))
    possible = np.tril(np.ones((n, n))) if spec.program.causal else np.ones((n, n))
    np.testing.assert_array_equal(cells(plot["allowed"], 1)[..., 0], summed(possible))
    assert f"{mask.sum():,} of 1,000,000 pairs" in found.plots[0].lines[0]
    assert f"a cell is {side} × {side} pairs" in html(found)


def test_a_sequence_of_65536() -> None:
    n = 65536
    spec = attnspec.parse("attention a { causal attend window(before = 99, after = 0) }")
    found = drawn(spec, n)
    assert found.plots[0].tally.edges == sum(min(q, 99) + 1 for q in range(n))
    assert "≈" not in found.plots[0].lines[0]
    assert len(svg(sheet(found), "", "")) < 50_000


@pytest.mark.parametrize("n", [MOST_PAIRS, MOST_PAIRS + 1])
def test_pairs_are_drawn_up_to_a_length(n: int) -> None:
    tally = drawn(WINDOW, n).plots[0].tally
    assert (tally.side == 1) == (n <= MOST_PAIRS)


def test_no_positions() -> None:
    found = drawn(UNION, 0)
    assert "no positions, so no pairs" in svg(sheet(found), "", "")
    assert data_of(html(found))["plots"][0]["rows"] == []


def test_inputs_and_grids() -> None:
    spec = attnspec.load(EXAMPLES / "longformer_inputs.attn", radius=2)
    marked = np.arange(20) == 7
    found = drawn(spec, 20, inputs={"important": marked})
    ((read, _),) = painted(svg(sheet(found), "", ""), 20)
    np.testing.assert_array_equal(read, spec.mask(20, inputs={"important": marked}))
    spec = attnspec.load(EXAMPLES / "neighborhood_2d.attn", height=4, width=6, size=3)
    found = drawn(spec, 24)
    assert data_of(html(found))["grid"] == [4, 6]
    ticks = {item.text for item in sheet(found).items if isinstance(item, Label)}
    assert {"0", "6", "12", "18"} <= ticks


# --- layers, heads, mechanisms -------------------------------------------------------------------

STACK = """attention a {
    layers 3 heads 2
    attend window(radius = 1)
    layer 1 { head 1 { attend full } }
    layer 2 { attend linear() }
}"""


def test_layers_and_heads_that_differ_are_drawn_once() -> None:
    found = drawn(STACK, 9)
    every = [plot.where for plot in found.plots]
    assert every == ["layer 0 every head; layer 1 head 0", "layer 1 head 1"]
    assert found.footer == ("layer 2 every head: `linear` is a formula and has no pairs",)
    spec = attnspec.parse(STACK)
    plots = painted(svg(sheet(found), "", ""), 9)
    for (read, _), head in zip(plots, (0, 1), strict=True):
        np.testing.assert_array_equal(read, spec.mask(9, 1, head))
    assert [plot.where for plot in drawn(STACK, 9, layer=1).plots] == ["head 0", "head 1"]
    assert [plot.where for plot in drawn(STACK, 9, layer=1, head=1).plots] == [""]
    same = "attention a { layers 2 heads 2 attend self }"
    assert [plot.where for plot in drawn(same, 9).plots] == [""]
    assert "layer 1 of 3 · head 1 of 2" in html(drawn(STACK, 9, layer=1, head=1))


def test_only_so_many_plots() -> None:
    found = drawn("attention a { heads 16 attend window(radius = head) }", 32)
    assert len(found.plots) == MOST_PLOTS
    assert found.footer == ("not drawn: head 12..15; --layer and --head choose",)


def test_a_formula_beside_a_graph_has_the_other_pairs() -> None:
    found = drawn(SPECS["hybrid"], 16)
    assert "`linear` on all other pairs of the past" in found.plots[0].lines
    assert data_of(html(found))["plots"][0]["formula"] == "linear"
    text = svg(sheet(found), "", "")
    # the square below the cells, and the legend
    assert text.count('class="rest"') == 2
    assert 'class="none"' not in text
    same = "attention a { heads 2 attend window(radius = 1) head 1 {"
    both = drawn(f"{same} attend window(radius = 1) + linear() }} }}", 8)
    assert [plot.formula for plot in both.plots] == [None, "linear"]


def test_formulas_alone_are_refused_as_in_the_terminal(tmp_path: Path) -> None:
    text = "attention a { attend linear() }"
    plain, filed = run("-", text=text), run("-", "-o", str(tmp_path / "x.html"), text=text)
    assert (filed.exit_code, filed.stderr) == (plain.exit_code, plain.stderr) == (1, plain.stderr)
    assert list(tmp_path.iterdir()) == []


# --- layout --------------------------------------------------------------------------------------


def boxes(drawing: Drawing) -> list[tuple[str, float, float, float, float]]:
    """Where each line of text stands, by the width that monospaced fonts have."""
    found = []
    for item in drawing.items:
        if isinstance(item, Label):
            wide = len(item.text) * item.size * 0.603
            left = item.x - {"start": 0.0, "middle": wide / 2, "end": wide}[item.anchor]
            found.append((item.text, left, item.y - 0.8 * item.size, left + wide, item.y + 0.2))
    return found


STEPS = [f"where(q == k + b * {i})" for i in range(9)]
DISTANCES = [f"q - k == {i}" for i in range(60)]
ODD = ", ".join(map(str, range(1, 200, 2)))
LAYOUTS = {
    "small": (WINDOW, 3),
    "pairs": (UNION, 100),
    "cells": (UNION, 100_000),
    "heads": ("attention a { heads 13 attend window(radius = head) | global(first(head)) }", 9),
    "long": (f"attention a(b = 1) {{ attend {' | '.join(STEPS)} }}", 20),
    "wide": (f"attention a {{ attend where({' or '.join(DISTANCES)}) }}", 9),
    "stack": (STACK, 9),
    "layers": (f"attention a {{ layers 200 attend full layer {ODD} {{ attend self }} }}", 9),
}


@pytest.mark.parametrize(("text", "n"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_no_text_is_cut_off_or_in_the_way(text: str, n: int) -> None:
    drawing = sheet(drawn(text, n))
    placed = boxes(drawing)
    for number, (said, left, top, right, bottom) in enumerate(placed):
        assert 0 <= left, said
        assert right <= drawing.width <= WIDEST, said
        assert bottom <= drawing.height, said
        for other, x, y, to_x, to_y in placed[:number]:
            assert left >= to_x or right <= x or top >= to_y or bottom <= y, (said, other)


def test_very_many_terms_are_one() -> None:
    text = " | ".join(f"where(q == k + {i})" for i in range(MOST_TERMS + 1))
    found = drawn(f"attention a {{ attend {text} }}", 40)
    assert found.terms == (text,)
    assert found.plots[0].tally.edges == sum(40 - i for i in range(MOST_TERMS + 1))


def test_more_terms_than_colours() -> None:
    found = drawn(*LAYOUTS["long"])
    assert len(found.terms) > len(TERMS)
    text = svg(sheet(found), "", "")
    assert "other terms" in text
    ((read, _),) = painted(text, 20)
    np.testing.assert_array_equal(read, attnspec.parse(LAYOUTS["long"][0]).mask(20))


# --- PNG -----------------------------------------------------------------------------------------


def test_a_png_shows_each_pair(tmp_path: Path) -> None:
    from matplotlib.image import imread

    n = 40
    found = drawn(WINDOW, n)
    path = tmp_path / "x.png"
    path.write_bytes(png(sheet(found), "a", "about"))
    pixels = imread(path)
    colour = np.array(list(bytes.fromhex(COLOURS["term0"][1:]))) / 255
    square = next(p["square"] for p in data_of(html(found))["plots"])
    # the plot stands below the header, at a place that its cells give away
    blue: np.ndarray = np.all(np.abs(pixels[..., :3] - colour) < 0.01, axis=-1)
    size = 2 * square[2]
    rows, columns = np.flatnonzero(blue.any(axis=1)), np.flatnonzero(blue.any(axis=0))
    top, left = rows[0], columns[columns >= 2 * (24 + square[0])][0]
    centres = np.arange(n) * size + size // 2
    read = blue[np.ix_(top + centres, left + centres)]
    np.testing.assert_array_equal(read, attnspec.parse(WINDOW).mask(n))
    assert b"Date" not in path.read_bytes()


def test_settings_of_a_user_change_no_byte() -> None:
    import matplotlib

    drawing = sheet(drawn(UNION, 12))
    plain = png(drawing, "a", "b")
    changed: Any = {"font.size": 30, "savefig.bbox": "tight", "axes.facecolor": "red"}
    with matplotlib.rc_context(changed):
        assert png(drawing, "a", "b") == plain
    assert png(sheet(drawn(WINDOW, 12)), "a", "b") != plain


def test_pairs_are_drawn_on_axes_of_a_user() -> None:
    from matplotlib.figure import Figure as Canvas

    spec = attnspec.parse("attention a { heads 2 attend full head 1 { attend self } }")
    axes = Canvas().subplots()
    assert spec.plot(6, axes, head=1) is axes
    shown: Any = axes.images[0].get_array()
    np.testing.assert_array_equal(shown[..., 3] > 0, spec.mask(6, head=1))
    assert axes.get_title() == "a"


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnspec.show.png.find_spec", lambda name: None)
    spec = attnspec.parse(WINDOW)
    for ask in (lambda: spec.plot(4), lambda: spec.show(4).save(tmp_path / "x.png")):
        with pytest.raises(attnspec.AttnSpecError, match=r'pip install "attnspec\[plot\]"'):
            ask()
    spec.show(4).save(tmp_path / "x.svg")


# --- the page ------------------------------------------------------------------------------------


def test_a_page_asks_for_nothing_and_can_be_heard() -> None:
    page = html(drawn(STACK, 9))
    assert not re.search(r"src=|href=|url\(|@import|fetch\(", page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page
    assert page.count('role="img"') == page.count("<desc>") == page.count("<figure>") == 2
    assert "<title>a</title>" in page
    assert "{{" not in page


def test_every_paint_has_a_dark_side() -> None:
    page = html(drawn(WINDOW, 9))
    dark = page[page.index("prefers-color-scheme: dark") : page.index("@media print")]
    assert [name for name in COLOURS if f".{name} {{ fill: #" not in dark] == []


def test_text_of_a_spec_stays_text() -> None:
    text = "attention a { attend where(q < k and k <= q + 3) | self }"
    page = html(drawn(text, 9))
    assert "where(q &lt; k and k &lt;= q + 3)" in page
    assert data_of(page)["terms"] == ["where(q < k and k <= q + 3)", "self"]


NODE = """
const [page, cells] = [require("fs").readFileSync(0, "utf8"), JSON.parse(process.argv[1])];
const data = page.match(/id="data">(.*?)<\\/script>/s)[1], said = {}, handlers = {};
const width = Number(page.match(/<figure>[^]*?viewBox="0 0 ([0-9.]+) /)[1]);
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


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


@needs_node
def test_arrows_go_from_cell_to_cell() -> None:
    page = html(drawn(UNION, 12))
    keys = ["ArrowUp", "ArrowLeft", "ArrowDown", "ArrowRight"]
    moved = heard(page, [(0, 1), *keys, "Tab"])
    # the first row has none above it
    assert moved == heard(page, [(0, 1), (0, 1), (0, 0), (1, 0), (1, 1), (1, 1)])
    assert len(set(moved)) == 4


@needs_node
@pytest.mark.parametrize(
    ("text", "n", "expected"),
    [
        (
            UNION.replace(" | random(keys = 2, seed = 1)", ""),
            12,
            {
                (9, 8): "query 9 reads key 8 by window(radius = 2)\n"
                "query 9 reads 7 keys: 0..1, 7..11",
                (0, 1): "query 0 reads key 1 by window(radius = 2) and global(first(2))\n"
                "query 0 reads 12 keys: 0..11",
                (9, 3): "query 9 does not read key 3\nquery 9 reads 7 keys: 0..1, 7..11",
            },
        ),
        (
            SPECS["hybrid"],
            12,
            {
                (9, 0): "query 9 reads key 0 by `linear` alone\n"
                "query 9 reads 5 keys: 5..9, the others by `linear`",
                (0, 9): "key 9 is later than query 0 (causal)\n"
                "query 0 reads 1 key: 0, the others by `linear`",
            },
        ),
        (
            "attention a { causal attend window(before = 9, after = 0) }",
            1024,
            {
                (0, 0): "queries 0..7, keys 0..7: 36 of 36 pairs (100 %)"
                " by window(before = 9, after = 0)",
                (9, 0): "queries 72..79, keys 0..7: no pairs",
                (0, 9): "queries 0..7, keys 72..79: all later (causal)",
            },
        ),
        (
            "attention a { sequence grid(2, 3) attend axial }",
            6,
            {
                (4, 1): "query 4 (1, 1) reads key 1 (0, 1) by axial\n"
                "query 4 (1, 1) reads 4 keys: 1, 3..5"
            },
        ),
    ],
    ids=["union", "hybrid", "cells", "grid"],
)
def test_what_is_said_of_a_cell(text: str, n: int, expected: dict[tuple[int, int], str]) -> None:
    assert heard(html(drawn(text, n)), list(expected)) == list(expected.values())


# --- files ---------------------------------------------------------------------------------------

KINDS = [".svg", ".html", ".png"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.attn").write_text(UNION)
    return tmp_path


@pytest.mark.parametrize("suffix", KINDS)
def test_the_same_spec_gives_the_same_bytes(suffix: str, folder: Path) -> None:
    paths = [Path(f"{i}{suffix}") for i in range(2)]
    for path in paths:
        done = run("a.attn", "-n", "20", "-o", str(path))
        assert (done.exit_code, done.stdout, done.stderr) == (0, "", f"wrote {path}\n")
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("suffix", KINDS)
def test_what_exists_is_kept_unless_it_is_a_picture(suffix: str, folder: Path) -> None:
    path = folder / f"x{suffix}"
    path.write_text("mine")
    done = run("a.attn", "-o", str(path))
    assert (done.exit_code, path.read_text()) == (3, "mine")
    assert "--force writes over it" in done.stderr
    assert run("a.attn", "-o", str(path), "--force").exit_code == 0
    before = path.read_bytes()
    assert run("a.attn", "-n", "9", "-o", str(path)).exit_code == 0
    assert path.read_bytes() != before
    assert sorted(p.name for p in folder.iterdir()) == ["a.attn", path.name]


@pytest.mark.parametrize("name", ["x.pdf", "x", "-", "", "x.svg.gz", ".svg"])
def test_other_suffixes_are_refused(name: str, folder: Path) -> None:
    done = run("a.attn", "-o", name)
    assert done.exit_code == 2
    assert ".png, .svg or .html" in done.stderr
    assert [p.name for p in folder.iterdir()] == ["a.attn"]


def test_suffixes_may_be_large(folder: Path) -> None:
    assert run("a.attn", "-o", "X.SVG").exit_code == 0
    ElementTree.fromstring(Path("X.SVG").read_text())


def test_files_that_cannot_be_written(folder: Path) -> None:
    Path("folder.svg").mkdir()
    for name in ("folder.svg", "none/x.svg", "a.attn/x.svg"):
        done = run("a.attn", "-o", name, "--force")
        assert done.exit_code == 3, name
        assert name in done.stderr
    assert sorted(p.name for p in folder.iterdir()) == ["a.attn", "folder.svg"]
    shutil.copy("a.attn", "spec.svg")
    done = run("spec.svg", "-o", "spec.svg", "--force")
    assert done.exit_code == 2
    assert "the spec itself" in done.stderr
    assert Path("spec.svg").read_text() == UNION


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["--layer", "1"], 2), (["--input", "x=1"], 2), (["-n", "2147483647"], 4)],
)
def test_requests_that_do_not_fit_leave_no_file(
    arguments: list[str], status: int, folder: Path
) -> None:
    assert run("a.attn", "-o", "x.svg", *arguments).exit_code == status
    assert [p.name for p in folder.iterdir()] == ["a.attn"]


def test_svg_and_html_load_neither_torch_nor_matplotlib(folder: Path) -> None:
    script = (
        "import sys\nfrom attnspec.cli import main\n"
        "for name in ('x.svg', 'x.html'):\n"
        "    main(['show', 'a.attn', '-o', name], standalone_mode=False)\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'sympy', 'matplotlib')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path("x.html").exists()


def test_a_place_where_nothing_can_be_written_is_said(folder: Path) -> None:
    picture = attnspec.parse("attention a { attend window(radius = 1) }").show(4)
    with pytest.raises(FileNotFoundError, match=r"cannot be written there, No such .*none.x\.svg"):
        picture.save(folder / "none" / "x.svg")
    (folder / "x.svg").mkdir()
    with pytest.raises(OSError, match=r"cannot be written there, .*x\.svg"):
        picture.save(folder / "x.svg")
