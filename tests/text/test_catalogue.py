"""Every code of the catalogue: its bad example gives it where it is marked, the good one not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from goldens import Golden

import attnspec
from attnspec.grammar.parser import parse
from attnspec.text.catalogue import Entry, catalogue, marked
from attnspec.text.diagnostics import Diagnostic, SpecError
from attnspec.text.source import Source

ENTRIES = catalogue()
ROOT = Path(__file__).parents[2]


def said(text: str) -> Sequence[Diagnostic]:
    """Everything that reading, elaborating and checking say of a text."""
    try:
        spec = attnspec.parse(text)
    except SpecError as error:
        return error.diagnostics
    return spec.check()


def misplaced(entry: Entry) -> str | None:
    """What is wrong with an entry's bad example, or None."""
    text, start, end = marked(entry.bad or "")
    diagnostics = said(text)
    if [d.code for d in diagnostics] != [entry.code]:
        return f"gives {[str(d) for d in diagnostics]}"
    span = diagnostics[0].span
    place = span and (span.start, span.end)
    return None if place == (start, end) else f"is at {place}, marked {(start, end)}"


BAD = [entry for entry in ENTRIES.values() if entry.bad]


@pytest.mark.parametrize("entry", BAD, ids=lambda e: e.code)
def test_the_bad_example_gives_its_code_at_the_marked_place(entry: Entry) -> None:
    assert misplaced(entry) is None


def test_a_wrong_mark_is_noticed() -> None:
    assert marked("ab«cd»e") == ("abcde", 2, 4)
    assert marked("ab«»") == ("ab", 2, 2)
    entry = ENTRIES["A201"]
    moved = Entry(**{**vars(entry), "bad": (entry.bad or "").replace("«w", "w«")})
    assert misplaced(moved)
    assert misplaced(Entry(**{**vars(entry), "bad": ENTRIES["A206"].bad}))


@pytest.mark.parametrize("entry", [e for e in ENTRIES.values() if e.good], ids=lambda e: e.code)
def test_the_good_example_is_accepted(entry: Entry) -> None:
    assert entry.good is not None
    assert parse(Source("spec.attn", entry.good)).items
    if entry.code >= "A2" or entry.code == "A194":
        assert [d for d in said(entry.good) if d.severity == "error"] == []


def test_bad_bytes_give_their_code(tmp_path: Path) -> None:
    for entry in ENTRIES.values():
        if entry.bad_bytes:
            (tmp_path / "bad.attn").write_bytes(entry.bad_bytes)
            with pytest.raises(SpecError) as caught:
                attnspec.load(tmp_path / "bad.attn")
            assert [each.code for each in caught.value.diagnostics] == [entry.code]


def test_every_code_in_the_source_is_in_the_catalogue_and_used() -> None:
    used = {
        code
        for folder in ("attnspec", "grammar", "backends")
        for path in (ROOT / folder).rglob("*.py")
        for code in re.findall(r'"(A\d{3})"', path.read_text(encoding="utf-8"))
    }
    assert list(ENTRIES) == sorted(used)
    for entry in ENTRIES.values():
        assert (entry.bad is None) == bool(entry.bad_bytes or entry.untestable)


def test_messages_follow_the_style_and_are_as_approved(golden: Golden) -> None:
    """Each as users see it."""
    shown = [said(marked(entry.bad or "")[0])[0] for entry in BAD]
    for diagnostic in shown:
        for words in (diagnostic.message, diagnostic.help or ""):
            assert not words.endswith(".")
            assert "invalid" not in words.lower()
            assert not re.search(r"__|\$", words.split("U+")[0])
        assert diagnostic.message[0] in "`'\"" or not diagnostic.message[0].isupper()
    text = "\n".join(map(str, shown))
    golden("".join(c if c == "\n" or c.isprintable() else ascii(c)[1:-1] for c in text) + "\n")
