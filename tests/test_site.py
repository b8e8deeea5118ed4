"""The guide as a site: which pages there are, where their links lead, and nothing of a network."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mkdocs.utils.yaml import yaml_load

from attnspec.examples.gallery import pictures
from benchmarks.readme_tables import TABLES, filled

ROOT = Path(__file__).resolve().parent.parent


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = loaded()

OWN = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
"""Pages that stand in docs/ themselves."""


def listed(nav: list[Any]) -> Iterator[str]:
    """The pages of a navigation, in order."""
    for entry in nav:
        ((_, content),) = entry.items()
        if isinstance(content, list):
            yield from listed(content)
        else:
            yield content


def text_of(page: str) -> str:
    path = ROOT / str(hooks.source_of(page))
    return path.read_text(encoding="utf-8")


# --- pages ------------------------------------------------------------------------------------


def test_the_navigation_lists_the_pages_that_there_are() -> None:
    nav = yaml_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(listed(nav)) == sorted([*OWN, *hooks.TAKEN])
    assert set(OWN).isdisjoint(hooks.TAKEN)
    assert set(hooks.AWAITED) <= set(hooks.TAKEN)


def test_what_is_awaited_is_left_out_and_nothing_else() -> None:
    nav = [{"a": "a.md"}, {"b": [{"c": "c.md"}, {"d": "d.md"}]}]
    assert list(listed(list(hooks.without(nav, {"c.md"})))) == ["a.md", "d.md"]


def test_a_page_without_its_file_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hooks.TAKEN, "gone.md", "gone/README.md")
    with pytest.raises(FileNotFoundError, match=r"gone\.md from gone/README\.md"):
        hooks.taken()
    monkeypatch.setattr(hooks, "AWAITED", (*hooks.AWAITED, "gone.md"))
    assert "gone.md" not in hooks.taken()


# --- links ------------------------------------------------------------------------------------


def lost(text: str, images: set[str]) -> list[str]:
    """The links of a page's text, as it is on the site, that lead to no page."""
    pages = {*OWN, *hooks.taken(), *images}
    pages |= {f"zoo/{path.stem}.md" for path in (ROOT / "examples").glob("*.attn")}
    # code is no place for links
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)", prose)
    return [link for link in links if "://" not in link and link not in pages]


@pytest.mark.parametrize("page", sorted([*OWN, *hooks.taken()]))
def test_links_between_pages_lead_somewhere(page: str) -> None:
    images: set[str] = set()
    text = hooks.relinked(text_of(page), page, images.add)
    assert lost(text, images) == []
    assert [image for image in images if not (ROOT / image).exists()] == []


@pytest.mark.parametrize(
    ("page", "target"), [("index.md", "gone.md"), ("zoo.md", "gone.py"), ("zoo.md", "gone.attn")]
)
def test_a_link_to_nowhere_is_found(page: str, target: str) -> None:
    assert len(lost(hooks.relinked(f"[gone]({target})", page), set())) == 1


@pytest.mark.parametrize(
    ("page", "text", "wanted"),
    [
        ("zoo.md", "[full](full.attn)", "[full](zoo/full.md)"),
        ("inside.md", "[rules](../grammar/README.md#files)", "[rules](language.md#files)"),
        ("index.md", "[zoo](../examples/README.md)", "[zoo](zoo.md)"),
        ("index.md", "[on](questions.md) [up](../README.md)", "[on](questions.md) [up](index.md)"),
        ("benchmarks.md", "[timed](gpu_times.py)", "timed (`benchmarks/gpu_times.py`)"),
        ("benchmarks.md", "[`growth.py`](growth.py)", "`benchmarks/growth.py`"),
        ("benchmarks.md", "![all](results/growth.svg)", "![all](benchmarks/results/growth.svg)"),
        ("language.md", "[`where`](#where) `[a](b.md)`", "[`where`](#where) `[a](b.md)`"),
        ("index.md", "```\n[a](b.md)\n```", "```\n[a](b.md)\n```"),
        ("index.md", "[out](https://example.org/a)", "[out](https://example.org/a)"),
    ],
)
def test_a_link_is_written_for_the_site(page: str, text: str, wanted: str) -> None:
    assert hooks.relinked(text, page) == wanted


@pytest.mark.parametrize(
    ("heading", "wanted"),
    [
        ("What is built, and what is not", "what-is-built-and-what-is-not"),
        ("Speed: make bench", "speed-make-bench"),
        ("a - b", "a---b"),
    ],
)
def test_anchors_are_those_of_repositories(heading: str, wanted: str) -> None:
    assert hooks.slug(heading, "-") == wanted


def test_markdown_is_put_as_the_renderer_reads_it() -> None:
    text = "<!-- bench -->\n| `a \\| b` | c \\| d |\n"
    assert hooks.as_read_elsewhere(text) == "\n\n| `a | b` | c \\| d |\n"
    assert hooks.as_read_elsewhere("```python\n>>> 1\n```") == "```pycon\n>>> 1\n```"


# --- tables, pictures -------------------------------------------------------------------------


@pytest.mark.parametrize("page", sorted({place for place, _, _ in TABLES.values()}))
def test_measured_tables_are_current(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert filled(page, text) == text


def test_a_stale_table_and_a_lone_marker_are_noticed() -> None:
    text = "<!-- brief -->\nold\n<!-- /brief -->\n"
    assert filled("README.md", text) != text
    with pytest.raises(ValueError, match=r"README\.md must have `<!-- brief -->`"):
        filled("README.md", "<!-- brief -->")


def test_pictures_of_the_zoo() -> None:
    names = ("window", "longformer_inputs", "performer", "dsa", "neighborhood_2d")
    drawn = pictures(ROOT / "examples" / f"{name}.attn" for name in names)
    found = {path.stem: picture for path, picture in drawn.items()}
    assert [name for name, picture in found.items() if picture is None] == ["performer"]
    # 64 positions do not show a window of 512
    assert "n = 64" not in str(found["window"])
    assert "n = 64" in str(found["dsa"])
    text = "| [window](zoo/window.md) | a | b |\n| [performer](zoo/performer.md) | c | d |"
    assert hooks.with_pictures(text, lambda image: found[Path(image).stem] is not None) == (
        "| ![who reads whom in window](zoo/window.svg) [window](zoo/window.md) | a | b |\n"
        "| [performer](zoo/performer.md) | c | d |"
    )


# --- the whole site ---------------------------------------------------------------------------


class Loaded(HTMLParser):
    """What a page loads by itself: scripts, style sheets, pictures; not where its links lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "srcset", "data") or (tag == "link" and name == "href"):
                self.found.append(value or "")


def of_a_network(text: str) -> list[str]:
    return [each for each in Loaded(text).found if re.match(r"(\w+:)?//", each)]


IMPORTED = re.compile(r"(url\(|@import)\s*[\"']?(https?:)?//")
"""The same of a style sheet."""


def test_what_a_page_loads_from_a_network_is_found() -> None:
    page = """<link href="https://a.org/a.css"><script src="//b.org/b.js"></script>
        <img src="c.svg"><a href="https://d.org">d</a>"""
    assert of_a_network(page) == ["https://a.org/a.css", "//b.org/b.js"]
    assert IMPORTED.search('@import "https://a.org/a.css"')
    assert IMPORTED.search("src: url(../a.woff2)") is None


@pytest.mark.slow
def test_the_site_is_built_strictly_and_needs_no_network(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = {path.name for path in tmp_path.glob("*.html")}
    assert {f"{Path(page).stem}.html" for page in (*OWN, *hooks.taken())} <= written
    for path in tmp_path.rglob("*.html"):
        assert of_a_network(path.read_text(encoding="utf-8")) == [], path.name
    for path in tmp_path.rglob("*.css"):
        assert IMPORTED.search(path.read_text(encoding="utf-8")) is None, path.name
    assert "zoo/longformer.svg" in (tmp_path / "zoo.html").read_text(encoding="utf-8")
    assert (tmp_path / "search" / "search_index.json").exists()
