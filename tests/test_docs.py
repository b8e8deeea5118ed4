"""What pages, docstrings and golden files show is what happens."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import re
from pathlib import Path

import pytest
from goldens import EVERY_ITEM, Golden, golden_stem, orphans
from package_map import MODULES
from reference_tables import refreshed
from transcripts import ROOT, Block, blocks, replayed, run_python, save

import attnspec

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
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, object] = {}
    for number, block in enumerate(blocks(read(page))):
        if block.kind == "attn":
            save(block, tmp_path)
            for name in re.findall(r"^attention (\w+)", block.text, re.MULTILINE):
                spec = attnspec.parse(block.text, name=name)
                assert [d for d in spec.check() if d.severity == "error"] == []
        elif block.kind == "console":
            assert replayed(block, tmp_path) == block.text
        else:
            with contextlib.chdir(tmp_path):
                run_python(block, names, f"{page}, block {number}")


def test_a_wrong_example_on_a_page_is_noticed(tmp_path: Path) -> None:
    (block,) = blocks("```console\n$ echo right\nwrong\n```\n")
    assert replayed(block, tmp_path) != block.text
    with pytest.raises(ValueError, match="Expected"):
        run_python(Block("python", ">>> 1 + 1\n3\n", 0, 0), {}, "page")
    table = "<!-- codes -->\nold\n<!-- /codes -->\n"
    assert refreshed(table) != table


@pytest.mark.parametrize("module", [x for x in MODULES if ">>> " in MODULES[x].read_text("utf-8")])
def test_examples_in_docstrings_give_what_they_say(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module))
    assert (found.failed, found.attempted > 0) == (0, True)


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_are_current(page: str) -> None:
    assert refreshed(read(page)) == read(page)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", read(page))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (folder / link).exists()] == []


def test_no_golden_file_is_an_orphan(request: pytest.FixtureRequest) -> None:
    items = request.config.stash[EVERY_ITEM]
    stems = [golden_stem(item) for item in items if "golden" in getattr(item, "fixturenames", ())]
    # a single test asked for by name leaves its neighbours uncollected
    whole = [] if any("::" in arg for arg in request.config.args) else [i.path for i in items]
    assert orphans(Path(__file__).parent / "golden", stems, whole) == []


def test_golden_files_are_compared_to_the_byte_and_orphans_found(tmp_path: Path) -> None:
    folder, stem = tmp_path / "golden", Path("test_a") / "test_x[0.5]"
    with pytest.raises(pytest.fail.Exception, match="--update-golden"):
        Golden(folder / stem, update=False)("text\n")
    Golden(folder / stem, update=True)("text\n")
    Golden(folder / stem, update=False)("text\n")
    with pytest.raises(AssertionError):
        Golden(folder / stem, update=False)("text")
    for name in ("test_a/test_y.txt", "test_gone/test_z.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (tmp_path / "test_a.py").touch()
    found = [path.stem for path in orphans(folder, [stem], [tmp_path / "test_a.py"])]
    assert found == ["test_y", "test_z"]
    # nothing is said about a file whose tests were not collected
    assert [path.stem for path in orphans(folder, [], [])] == ["test_z"]


LONGEST_SENTENCE, LONGEST_PARAGRAPH = 30, 600
"""In words, and in characters: five lines."""

_CODE_AND_LINKS = re.compile(r"(`)[^`]*`|!?\[([^\]]*)\]\([^)]*\)")


def paragraphs(text: str) -> list[str]:
    """The prose of a page, list entries by themselves; code in a sentence is one word."""
    text = re.sub(r"^```.*?^```$|<!-- (\w+) -->.*?<!-- /\1 -->", "\n", text, flags=re.M | re.S)
    found = re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. |\|))", text)
    kept = (part.strip() for part in found if not part.strip().startswith(("|", "#", "<!--")))
    plain = (_CODE_AND_LINKS.sub(lambda m: "Code" if m[1] else m[2], part) for part in kept)
    return [" ".join(part.replace("**", "").split()) for part in plain if part]


def too_long(text: str) -> list[str]:
    found = [part for part in paragraphs(text) if len(part) > LONGEST_PARAGRAPH]
    for part in paragraphs(text):
        sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z\"(\[])|(?<=:)\s+", part)
        found += [each for each in sentences if len(each.split()) > LONGEST_SENTENCE]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_sentences_and_paragraphs_are_short(page: str) -> None:
    assert too_long(read(page)) == []


def test_a_long_sentence_and_a_long_paragraph_are_noticed() -> None:
    words = "one `two three` [four](five.md) " * 11
    assert too_long(f"# Page\n\n- {words}.\n") != []
    assert too_long(f"{words}: {words}. " * 9) != []
    assert too_long(f"```\n{words}\n```\n\n| {words} |\n\n- Short. {words[:60]}.") == []


def test_each_example_stands_on_one_page() -> None:
    places: dict[str, list[str]] = {}
    for page in PAGES:
        for block in blocks(read(page)):
            if block.kind == "attn":
                body = re.sub(r"#.*|\s+", " ", block.text).strip()
                places.setdefault(body, []).append(page)
    assert len(places) > 30
    assert [pages for pages in places.values() if len(pages) > 1] == []
