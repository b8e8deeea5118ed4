"""The page in a real browser: pointed at, clicked, slid, typed into and read; what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import browser
import numpy as np
import pytest
from browser import Browser
from sweeps import checkered

import attnspec
from attnspec.show import reached
from attnspec.show.reached import MOST_NUMBERS, reach_of
from attnspec.spec import Spec

STACK = """attention a(r = 2) {
    causal
    layers 3
    heads 2
    layer 0 { head 0 { attend random(keys = 2, seed = 3) } head 1 { attend self } }
    layer 1 { attend columns(first(2)) | self }
    layer 2 { head 0 { attend window(before = r, after = 0) } head 1 { attend residue(step = 5) } }
}
"""

SPECS = {
    "stack": (STACK, 30),
    "window": ("attention a { attend window(radius = 1) }", 11),
    "never": ("attention a { attend residue(step = 4) }", 13),
    "two ways": ("attention a { layers 2 attend window(radius = 1) layer 0 { attend full } }", 12),
    "formula": ("attention a { causal heads 2 attend self head 1 { attend linear() } }", 9),
    "grid": ("attention a { sequence grid(4, 5) attend axial }", 20),
    "one": ("attention a { attend full }", 1),
}

needs_browser = pytest.mark.skipif(
    browser.found() is None, reason=f"needs one of {', '.join(browser.NAMES)}"
)


@pytest.fixture(scope="module")
def shown() -> Iterator[Browser]:
    if browser.found() is None:
        pytest.skip("no browser")
    with Browser() as opened:
        yield opened


def saved(spec: Spec, n: int, folder: Path) -> Path:
    path = folder / "a.html"
    spec.show(n).save(path)
    return path


def spec_of(name: str) -> tuple[Spec, int]:
    text, n = SPECS[name]
    return attnspec.parse(text), n


def numbers(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"[0-9][0-9,]*", text)]


# --- what is reached ------------------------------------------------------------------------------

ALL_PATHS = """(() => {
  const [query, key] = ["query", "key"].map(name => document.getElementById(name)), found = [];
  const n = data.n;
  for (let q = 0; q < n; q++) for (let k = 0; k < n; k++) {
    query.value = q; key.value = k;
    key.dispatchEvent(new Event("input"));
    found.push([...document.querySelectorAll("#path li")].map(item => item.innerText));
  }
  return JSON.stringify(found);
})()"""


@needs_browser
@pytest.mark.parametrize("name", [name for name in SPECS if name != "one"])
def test_paths_are_those_of_the_analysis(name: str, shown: Browser, tmp_path: Path) -> None:
    """Each step is read in its layer by its head, in no more layers than are needed."""
    spec, n = spec_of(name)
    shown.open(saved(spec, n, tmp_path))
    listed = json.loads(shown.run(ALL_PATHS))
    report = spec.analyse(n)
    influence, heads = report.influence, spec.heads or 1
    masks = {
        (layer, head): influence.mask(n, layer, head)
        for layer in range(spec.layers)
        for head in range(heads)
    }
    for query in range(n):
        hops = report.hops(query)
        for key in range(n):
            lines = listed[query * n + key]
            if query == key:
                assert lines == [lines[0]]
                assert "from the start" in lines[0]
                continue
            if hops[key] < 0:
                assert len(lines) == 1
                assert "never reads" in lines[0]
                continue
            at, above = query, int(hops[key])
            for line in lines:
                place, _, reads = line.partition(": ")
                layer = numbers(place)[0]
                # positions of a grid are written with their places
                reader, read = (numbers(part)[0] for part in reads.split(" reads "))
                own = min(layer, spec.layers - 1)
                named = re.search(r"head (\d+)", place)
                which = [int(named[1])] if named else range(heads)
                assert (reader, layer < above) == (at, True)
                assert all(masks[own, head][reader, read] for head in which)
                at, above = read, layer
            assert at == key


@needs_browser
@pytest.mark.parametrize("name", SPECS)
def test_the_slider_counts_what_is_reached(name: str, shown: Browser, tmp_path: Path) -> None:
    spec, n = spec_of(name)
    path = saved(spec, n, tmp_path)
    shown.open(path)
    report = spec.analyse(n)
    hops = np.stack([report.hops(query) for query in range(n)])
    most = int(shown.run("document.getElementById('layers').max"))
    assert most == max(1, hops.max())
    allowed = n * (n + 1) // 2 if spec.program.causal else n * n
    shown.run("document.getElementById('layers').focus()")
    for _ in range(most + 2):
        shown.press("ArrowLeft")
    for layers in range(most + 1):
        read = int(((hops >= 0) & (hops <= layers)).sum())
        assert numbers(shown.text("#share")) == [layers, read, allowed]
        drawn = shown.run(
            "[...document.querySelectorAll('.hop')].filter(path => path.style.display === '')"
            ".map(path => path.getAttribute('d')).join('')"
        )
        wide = sum(int(run) for run in re.findall(r"h(\d+)v", drawn))
        assert wide == read
        shown.press("ArrowRight")
    said = shown.run("document.getElementById('layers').getAttribute('aria-valuetext')")
    assert numbers(said) == [most]
    assert shown.complaints() == []


@needs_browser
def test_two_clicked_tokens_are_joined(shown: Browser, tmp_path: Path) -> None:
    shown.open(saved(*spec_of("stack"), tmp_path))
    left, top, size = shown.run("data.plots[0].square")
    box = shown.place("#reach > svg")
    zoom = box["width"] / shown.run("document.querySelector('#reach > svg').viewBox.baseVal.width")

    def click(row: int, column: int) -> None:
        x = box["x"] + (left + (column + 0.5) * size) * zoom
        shown.point(x, box["y"] + (top + (row + 0.5) * size) * zoom, click=True)

    click(29, 4)
    assert shown.text("#said").startswith("query 29 has read key 4 after ")
    assert shown.text("#path") == "query 29: choose a key"
    click(11, 4)
    steps = shown.text("#path").splitlines()
    assert " 29 reads " in steps[0]
    assert steps[-1].endswith(" reads 4")
    drawn = shown.run("document.querySelector('.way').getAttribute('d')")
    assert drawn.count("H") == drawn.count("V") == len(steps)
    # a third click starts anew, and Escape forgets
    click(3, 1)
    assert shown.text("#path") == "query 3: choose a key"
    shown.press("Escape")
    assert shown.text("#path") == ""
    assert shown.run("document.getElementById('query').value") == ""
    # what is no token is no query
    shown.run("document.getElementById('query').value = '99'")
    shown.run("document.getElementById('key').value = '1'")
    shown.run("document.getElementById('key').dispatchEvent(new Event('input'))")
    assert shown.text("#path") == ""


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_what_is_pointed_at_is_said(dark: bool, shown: Browser, tmp_path: Path) -> None:
    """Each cell of a picture under the pointer, by the mask; nothing is clicked."""
    spec, n = (
        attnspec.parse("attention a { causal attend window(radius = 2) | columns(first(1)) }"),
        9,
    )
    shown.open(saved(spec, n, tmp_path), dark)
    left, top, size = shown.run("data.plots[0].square")
    box = shown.place("figure > svg")
    zoom = box["width"] / shown.run("document.querySelector('figure > svg').viewBox.baseVal.width")
    mask, terms = spec.mask(n), ("window(radius = 2)", "columns(first(1))")
    for query, key in ((8, 7), (8, 0), (1, 0), (5, 2), (2, 6)):
        x, y = (at + (place + 0.5) * size for at, place in ((left, key), (top, query)))
        shown.point(box["x"] + x * zoom, box["y"] + y * zoom)
        first, second = shown.text("#said").splitlines()
        read = [str(k) for k in np.flatnonzero(mask[query])]
        if key > query:
            assert first == f"key {key} is later than query {query} (causal)"
        elif not mask[query, key]:
            assert first == f"query {query} does not read key {key}"
        else:
            by = [terms[0]] * (query - key <= 2) + [terms[1]] * (key == 0)
            assert first == f"query {query} reads key {key} by {' and '.join(by)}"
        assert second.startswith(f"query {query} reads {len(read)} keys: ")
    assert shown.complaints() == []


@needs_browser
def test_all_of_it_is_done_with_keys(shown: Browser, tmp_path: Path) -> None:
    shown.open(saved(*spec_of("window"), tmp_path))
    order = []
    for _ in range(7):
        shown.press("Tab")
        order.append(
            shown.run("document.activeElement.id || document.activeElement.parentElement.id || 'x'")
        )
    assert order[:6] == ["x", "reach", "layers", "query", "key", "forget"]
    shown.run("document.querySelector('#reach > svg').focus()")
    for key in ("ArrowDown", "ArrowDown", "Enter", "ArrowUp", "ArrowRight", "Enter"):
        shown.press(key)
    # the second row was entered as the query, the second column as the key
    assert shown.text("#said") == "query 1 has read key 1 after 0 layers"
    assert shown.text("#path").splitlines() == ["layer 0: 2 reads 1"]
    shown.run("document.querySelector('figure > svg').focus()")
    shown.press("ArrowRight")
    assert shown.text("#said").startswith("query 0 reads key 1 by window(radius = 1)")


@needs_browser
def test_long_sequences_are_counted_and_joined(shown: Browser, tmp_path: Path) -> None:
    spec, n = attnspec.parse("attention a { causal attend residue(step = 32) | self }"), 1024
    path = saved(spec, n, tmp_path)
    assert path.stat().st_size < 300_000
    shown.open(path)
    side = shown.run("data.side")
    report = spec.analyse(n)
    rows = [report.hops((row + 1) * side - 1) for row in range(n // side)]
    cells = [np.where(row < 0, n, row).reshape(-1, side).min(axis=1) for row in rows]
    read = int((np.stack(cells) <= 1).sum())
    count = n // side
    assert numbers(shown.text("#share")) == [1, read, count * (count + 1) // 2]
    for query, key, expected in ((1000, 8, 1), (1023, 1000, 0)):
        shown.run(f"document.getElementById('query').value = {query}")
        shown.run(f"document.getElementById('key').value = {key}")
        shown.run("document.getElementById('key').dispatchEvent(new Event('input'))")
        assert ("reads 8" in shown.text("#path")) == bool(expected)
        assert ("never reads" in shown.text("#path")) == (not expected)


@needs_browser
def test_graphs_that_do_not_fit_say_so(
    shown: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reached, "MOST_NUMBERS", 10)
    shown.open(saved(*spec_of("window"), tmp_path))
    assert "No paths: the graphs are more than 10 numbers" in shown.text("section")
    assert shown.run("document.getElementById('query')") is None
    shown.run("document.querySelector('#reach > svg').focus()")
    assert shown.text("#said") == "query 0 has read key 0 after 0 layers"
    assert shown.complaints() == []


@needs_browser
def test_two_sequences_have_a_page(shown: Browser, tmp_path: Path) -> None:
    spec = attnspec.parse("attention a { cross attend where(q * n < (k + 2) * m) }")
    spec.show(12, m=5).save(tmp_path / "a.html")
    shown.open(tmp_path / "a.html")
    shown.run("document.querySelector('figure > svg').focus()")
    for key in ["ArrowDown"] * 9 + ["ArrowRight"] * 20:
        shown.press(key)
    assert shown.text("#said").startswith("query 4 reads key 11 by where(")
    text = plain(tmp_path / "a.html")
    assert "Not shown: queries and keys are two sequences." in text
    assert shown.complaints() == []


# --- how it looks -------------------------------------------------------------------------------

CONTRAST = """(() => {
  const light = colour => {
    const parts = colour.match(/[0-9.]+/g).slice(0, 3).map(Number).map(part => part / 255);
    const [r, g, b] = parts.map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const back = e => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (colour !== "rgba(0, 0, 0, 0)") return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const listed = document.querySelectorAll(
    "h1, h2, p, li, label, output, text");
  return Math.min(...[...listed].filter(e => e.textContent.trim()).map(e => {
    const style = getComputedStyle(e), ink = e.tagName === "text" ? style.fill : style.color;
    const pair = [light(ink), light(back(e))];
    return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
  }));
})()"""


@needs_browser
@pytest.mark.parametrize(("dark", "width"), checkered([False, True], [380, 1200]))
def test_it_can_be_read(dark: bool, width: int, shown: Browser, tmp_path: Path) -> None:
    path = saved(*spec_of("stack"), tmp_path)
    metrics = {"height": 900, "deviceScaleFactor": 1, "mobile": False}
    shown.ask("Emulation.setDeviceMetricsOverride", width=width, **metrics)
    try:
        shown.open(path, dark)
        # the ratio that the accessibility guidelines ask of ordinary text
        assert shown.run(CONTRAST) >= 4.5
        page = "document.documentElement"
        assert shown.run(f"{page}.scrollWidth - {page}.clientWidth") <= 0
        # nothing but a margin between the pictures of a row and what follows
        gap = shown.run(
            "(bottoms => document.querySelector('section').getBoundingClientRect().top"
            " - Math.max(...bottoms))([...document.querySelectorAll('figure > svg')]"
            ".map(e => e.getBoundingClientRect().bottom))"
        )
        assert 0 <= gap < 60
        background = shown.run("getComputedStyle(document.body).backgroundColor")
        assert (numbers(background)[0] < 60) is dark
        assert shown.complaints() == []
    finally:
        shown.ask("Emulation.setDeviceMetricsOverride", width=1200, **metrics)


@needs_browser
def test_what_can_be_used_has_a_name(shown: Browser, tmp_path: Path) -> None:
    shown.open(saved(*spec_of("stack"), tmp_path))
    found = shown.ask("Accessibility.getFullAXTree")["nodes"]
    used: dict[str, list[str]] = {}
    for node in found:
        role = node.get("role", {}).get("value", "")
        used.setdefault(role, []).append(node.get("name", {}).get("value", ""))
    assert used["slider"] == ["layers"]
    assert [name.strip() for name in used["spinbutton"]] == ["query", "key"]
    assert used["button"] == ["Forget"]
    assert used["region"] == ["What is reached"]
    pictures = used.get("image", []) + used.get("img", [])
    assert len(pictures) == len(set(pictures)) >= 3
    assert all(pictures)


@needs_browser
def test_a_complaint_would_be_heard(shown: Browser, tmp_path: Path) -> None:
    path = tmp_path / "b.html"
    path.write_text("<script>missing()</script><img src='http://example.invalid/a.png'>")
    shown.open(path)
    shown.run("1")
    said = " ".join(shown.complaints())
    assert "missing is not defined" in said
    assert "example.invalid" in said


# --- what stands on it ----------------------------------------------------------------------------


def plain(path: Path) -> str:
    """The words of a page."""
    body = re.sub(r"<script.*?</script>|<style.*?</style>", "", path.read_text("utf-8"), flags=re.S)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())


def test_what_is_not_known_has_its_reason(tmp_path: Path) -> None:
    spec = attnspec.parse("attention a { input x: tokens attend global(x) require depth <= 1 }")
    for n, reason in (
        (8, ""),
        (0, "there are no positions"),
        (5000, "what is reached is shown up to n = 4,096, got 5,000"),
    ):
        spec.show(n, inputs={"x": np.zeros(n, bool)}).save(tmp_path / "a.html")
        assert (f"Not shown: {reason}." in plain(tmp_path / "a.html")) is bool(reason)


@pytest.mark.parametrize("n", [1, 13, 64])
@pytest.mark.parametrize(
    "graph",
    [
        "full",
        "self - full",
        "window(radius = 2) | residue(step = 5)",
        "random(keys = 3, seed = 1)",
        "where(q * k % 7 == 1)",
        "~block(size = 4)",
        "columns(positions(0, 3, 9..11))",
    ],
)
def test_progressions_are_the_keys(graph: str, n: int) -> None:
    spec = attnspec.parse(f"attention a {{ attend {graph} }}")
    reach = reach_of(spec.analyse(n), 1)
    (rows,) = reach.graphs
    mask = spec.mask(n)
    for query, runs in enumerate(rows):
        parts = np.array(runs, int).reshape(-1, 3)
        keys = {first + step * at for first, many, step in parts.tolist() for at in range(many)}
        assert keys == set(np.flatnonzero(mask[query]).tolist())


def test_a_page_stays_small() -> None:
    spec = attnspec.parse("attention a { attend random(keys = 60, seed = 1) | full - self }")
    reach = reach_of(spec.analyse(1024), 8)
    assert reach.no_paths or sum(len(row) for rows in reach.graphs for row in rows) <= MOST_NUMBERS
    assert reach.hops.shape == (128, 128)
