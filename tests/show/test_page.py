"""The page in a real browser: pointed at and read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from browser import Browser
from population import spec_of
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


@needs_browser
def test_all_of_it_is_done_with_keys(shown: Browser, tmp_path: Path) -> None:
    shown.open(saved(spec_of("attend window(radius = 1)"), 11, tmp_path))
    shown.run("document.querySelector('figure > svg').focus()")
    shown.press("ArrowRight")
    assert "window(radius = 1)" in shown.text("#said")
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
    path = saved(attnspec.parse(STACK), 30, tmp_path)
    metrics = {"height": 900, "deviceScaleFactor": 1, "mobile": False}
    shown.ask("Emulation.setDeviceMetricsOverride", width=width, **metrics)
    try:
        shown.open(path, dark)
        # the ratio that the accessibility guidelines ask of ordinary text
        assert shown.run(CONTRAST) >= 4.5
        page = "document.documentElement"
        assert shown.run(f"{page}.scrollWidth - {page}.clientWidth") <= 0
        background = shown.run("getComputedStyle(document.body).backgroundColor")
        assert (int(re.findall("[0-9]+", background)[0]) < 60) is dark
        assert shown.complaints() == []
    finally:
        shown.ask("Emulation.setDeviceMetricsOverride", width=1200, **metrics)


@needs_browser
def test_what_can_be_used_has_a_name(shown: Browser, tmp_path: Path) -> None:
    shown.open(saved(attnspec.parse(STACK), 30, tmp_path))
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
