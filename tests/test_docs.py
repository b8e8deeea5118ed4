"""The pages: every spec compiles, every transcript is what happens, every table is current."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from reference_tables import refreshed
from transcripts import ROOT, Block, blocks, replayed, run_python, save

import attnspec
from attnspec.elaborate import attention_names
from attnspec.text.source import Source

PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (
        *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
        *ROOT.glob("*/README.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("attnspec/*/README.md"),
        *ROOT.glob("editors/*/README.md"),
    )
    # links in the package lead to folders that stand at the top level; tools leave pages of theirs
    if path == path.resolve() and not path.parent.name.startswith(".")
)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_what_happens(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, object] = {}
    for number, block in enumerate(blocks(read(page))):
        if block.kind == "attn":
            save(block, tmp_path)
            for name in attention_names(Source(page, block.text)):
                spec = attnspec.parse(block.text, name=name)
                assert [d for d in spec.check() if d.severity == "error"] == []
        elif block.kind == "console":
            assert replayed(block, tmp_path) == block.text
        else:
            run_python(block, names, f"{page}, block {number}")


def test_a_wrong_transcript_is_noticed(tmp_path: Path) -> None:
    page = "```console\n$ echo right\nwrong\n```\n"
    (block,) = blocks(page)
    assert replayed(block, tmp_path) != block.text


def test_a_wrong_answer_in_python_is_noticed() -> None:
    with pytest.raises(ValueError, match="Expected"):
        run_python(Block("python", ">>> 1 + 1\n3\n", 0, 0), {}, "page")


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_are_current(page: str) -> None:
    assert refreshed(read(page)) == read(page)


def test_a_stale_table_is_noticed() -> None:
    page = "<!-- codes -->\nold\n<!-- /codes -->\n"
    assert refreshed(page) != page


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", read(page))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (folder / link).exists()] == []
