"""The guide as a site: which pages there are, where their links lead, and nothing of a network."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hooks
import pytest
from mkdocs.utils.yaml import yaml_load
from package_map import ROOT

from attnspec.examples.gallery import pictures
from benchmarks.plots import draw
from benchmarks.readme_tables import RESULTS, TABLES, filled

OWN = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
"""Pages that stand in docs/ themselves."""


def listed(nav: list[Any]) -> Iterator[str]:
    """The pages of a navigation, in order."""
    for entry in nav:
        ((_, content),) = entry.items()
        yield from listed(content) if isinstance(content, list) else [content]


def test_the_navigation_lists_the_pages_that_there_are() -> None:
    nav = yaml_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(listed(nav)) == sorted([*OWN, *hooks.TAKEN])
    # what is awaited is left out and nothing else
    assert set(hooks.AWAITED) <= set(hooks.TAKEN)
    assert set(hooks.TAKEN) - set(hooks.taken()) <= set(hooks.AWAITED)
    some = [{"a": "a.md"}, {"b": [{"c": "c.md"}, {"d": "d.md"}]}]
    assert list(listed(list(hooks.without(some, {"c.md"})))) == ["a.md", "d.md"]


def lost(text: str, images: set[str]) -> list[str]:
    """The links of a page's text, as it is on the site, that lead to no page."""
    pages = {*OWN, *hooks.taken(), *images}
    pages |= {f"zoo/{path.stem}.md" for path in (ROOT / "examples").glob("*.attn")}
    # code has no links
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)", prose)
    return [link for link in links if "://" not in link and link not in pages]


@pytest.mark.parametrize("page", sorted([*OWN, *hooks.taken()]))
def test_links_between_pages_lead_somewhere(page: str) -> None:
    images: set[str] = set()
    text = (ROOT / str(hooks.source_of(page))).read_text(encoding="utf-8")
    assert lost(hooks.relinked(text, page, images.add), images) == []
    assert [image for image in images if not (ROOT / image).exists()] == []
    assert len(lost(hooks.relinked("[a](gone.md) [b](gone.attn)", page), set())) == 2


@pytest.mark.parametrize(
    ("page", "text", "wanted"),
    [
        ("zoo.md", "[full](full.attn)", "[full](zoo/full.md)"),
        ("inside.md", "[rules](../grammar/README.md#files)", "[rules](language.md#files)"),
        ("index.md", "[on](questions.md) [up](../README.md)", "[on](questions.md) [up](index.md)"),
        ("benchmarks.md", "[timed](gpu.py)", "timed (`benchmarks/gpu.py`)"),
        ("benchmarks.md", "[`growth.py`](growth.py)", "`benchmarks/growth.py`"),
        ("benchmarks.md", "![all](results/growth.svg)", "![all](benchmarks/results/growth.svg)"),
        ("language.md", "[`where`](#where) `[a](b.md)`", "[`where`](#where) `[a](b.md)`"),
        ("index.md", "```\n[a](b.md)\n```", "```\n[a](b.md)\n```"),
        ("index.md", "[out](https://example.org/a)", "[out](https://example.org/a)"),
    ],
)
def test_a_link_is_written_for_the_site(page: str, text: str, wanted: str) -> None:
    assert hooks.relinked(text, page) == wanted


def test_markdown_is_put_as_the_renderer_reads_it() -> None:
    text = "<!-- bench -->\n| `a \\| b` | c \\| d |\n"
    assert hooks.as_read_elsewhere(text) == "\n\n| `a | b` | c \\| d |\n"
    assert hooks.as_read_elsewhere("```python\n>>> 1\n```") == "```pycon\n>>> 1\n```"
    assert hooks.slug("What is built, and what is not", "-") == "what-is-built-and-what-is-not"
    assert hooks.slug("a - b", "-") == "a---b"


@pytest.mark.parametrize("page", sorted({place for place, _, _ in TABLES.values()}))
def test_measured_tables_are_current(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert filled(page, text) == text


def test_plots_are_current(tmp_path: Path) -> None:
    figures = json.loads((RESULTS / "bench.json").read_text(encoding="utf-8"))
    drawn = {path.name: path.read_bytes() for path in draw(figures, tmp_path)}
    assert {path.name: path.read_bytes() for path in RESULTS.glob("*.svg")} == drawn
    figures["efficiency"]["rows"][0]["eta_forward"] += 0.1
    (stale, *_) = draw(figures, tmp_path)
    assert stale.read_bytes() != drawn[stale.name]


def test_a_stale_table_and_a_lone_marker_are_noticed() -> None:
    text = "<!-- brief -->\nold\n<!-- /brief -->\n"
    assert filled("README.md", text) != text
    with pytest.raises(ValueError, match=r"README\.md must have `<!-- brief -->`"):
        filled("README.md", "<!-- brief -->")


def test_the_zoo_has_pictures_where_there_are_pairs() -> None:
    drawn = pictures(ROOT / "examples" / f"{name}.attn" for name in ("dsa", "performer"))
    shown = {path.stem: picture is not None for path, picture in drawn.items()}
    assert shown == {"dsa": True, "performer": False}
    text = "| [dsa](zoo/dsa.md) | a |\n| [performer](zoo/performer.md) | c |"
    assert hooks.with_pictures(text, lambda image: shown[Path(image).stem]) == (
        "| ![who reads whom in dsa](zoo/dsa.svg) [dsa](zoo/dsa.md) | a |\n"
        "| [performer](zoo/performer.md) | c |"
    )


NETWORK = re.compile(
    r"""<(?!a\b)[^>]*\b(?:src|srcset|data|href)=["'](?:\w+:)?//|(?:url\(|@import)\s*["']?(?:https?:)?//"""
)
"""What a page or a style sheet loads by itself, not where links lead."""


@pytest.mark.slow
def test_the_site_is_built_strictly_and_needs_no_network(tmp_path: Path) -> None:
    for text in (
        '<link href="https://a.org/a.css">',
        '<script src="//b.org/b.js">',
        "url(//a.woff)",
    ):
        assert NETWORK.search(text)
    assert not NETWORK.search('<img src="c.svg"><a href="https://d.org">d</a> url(../a.woff2)')
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in (*OWN, *hooks.taken()):
        assert (tmp_path / page).with_suffix(".html").exists()
    for path in (*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")):
        assert NETWORK.search(path.read_text(encoding="utf-8")) is None, path.name
    assert "zoo/longformer.svg" in (tmp_path / "zoo.html").read_text(encoding="utf-8")
