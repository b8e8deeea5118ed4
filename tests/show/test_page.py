"""The page in a real browser: pointed at and read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import browser
import numpy as np
import pytest
from browser import Browser
from sweeps import checkered

import attnspec
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
    shown.run("document.querySelector('figure > svg').focus()")
    shown.press("ArrowRight")
    assert shown.text("#said").startswith("query 0 reads key 1 by window(radius = 1)")


@needs_browser
def test_two_sequences_have_a_page(shown: Browser, tmp_path: Path) -> None:
    spec = attnspec.parse("attention a { cross attend where(q * n < (k + 2) * m) }")
    spec.show(12, m=5).save(tmp_path / "a.html")
    shown.open(tmp_path / "a.html")
    shown.run("document.querySelector('figure > svg').focus()")
    for key in ["ArrowDown"] * 9 + ["ArrowRight"] * 20:
        shown.press(key)
    assert shown.text("#said").startswith("query 4 reads key 11 by where(")
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
        background = shown.run("getComputedStyle(document.body).backgroundColor")
        assert (numbers(background)[0] < 60) is dark
        assert shown.complaints() == []
    finally:
        shown.ask("Emulation.setDeviceMetricsOverride", width=1200, **metrics)


@needs_browser
def test_what_can_be_used_has_a_name(shown: Browser, tmp_path: Path) -> None:
    shown.open(saved(*spec_of("stack"), tmp_path))
    found = shown.ask("Accessibility.getFullAXTree")["nodes"]
    pictures = [
        node.get("name", {}).get("value", "")
        for node in found
        if node.get("role", {}).get("value") in ("image", "img")
    ]
    assert len(pictures) == len(set(pictures)) >= 2
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
