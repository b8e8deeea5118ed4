"""Every code of the catalogue: its bad example gives it where it is marked, the good one not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attnspec.grammar.parser import parse
from attnspec.spec import Spec
from attnspec.text.catalogue import Entry, catalogue, marked
from attnspec.text.diagnostics import Diagnostic, SpecError
from attnspec.text.source import Source

ENTRIES = catalogue()
PACKAGE = Path(__file__).parents[2]
FOLDERS = ("attnspec", "grammar", "backends")


def found(text: str) -> list[Diagnostic]:
    """Everything that reading, elaborating and checking say of a text."""
    try:
        spec = Spec(Source("spec.attn", text))
    except SpecError as error:
        return list(error.diagnostics)
    return spec.check()


def misplaced(entry: Entry) -> str | None:
    """What is wrong with an entry's bad example, or None."""
    text, start, end = marked(entry.bad or "")
    diagnostics = found(text)
    if [d.code for d in diagnostics] != [entry.code]:
        return f"{entry.code}: gives {[str(d) for d in diagnostics]}"
    span = diagnostics[0].span
    if span is None or (span.start, span.end) != (start, end):
        place = span and (span.start, span.end, span.text)
        return f"{entry.code}: is at {place}, marked {(start, end, text[start:end])}"
    return None


LATER = [entry for entry in ENTRIES.values() if entry.code >= "A2" or entry.code in ("A194",)]


@pytest.mark.parametrize("entry", [e for e in LATER if e.bad], ids=lambda e: e.code)
def test_the_bad_example_gives_its_code_at_the_marked_place(entry: Entry) -> None:
    assert misplaced(entry) is None


def test_a_wrong_mark_is_noticed() -> None:
    entry = ENTRIES["A201"]
    moved = Entry(**{**vars(entry), "bad": (entry.bad or "").replace("«w", "w«")})
    assert "marked" in (misplaced(moved) or "")
    other = Entry(**{**vars(entry), "bad": ENTRIES["A206"].bad})
    assert "gives" in (misplaced(other) or "")


@pytest.mark.parametrize("entry", list(ENTRIES.values()), ids=lambda e: e.code)
def test_the_good_example_is_accepted(entry: Entry) -> None:
    if entry.good is None:
        pytest.skip("nothing to show")
    if entry in LATER:
        assert [d for d in found(entry.good) if d.severity == "error"] == []
    else:
        assert parse(Source("spec.attn", entry.good)).items


def codes_in_source() -> set[str]:
    return {
        code
        for folder in FOLDERS
        for path in (PACKAGE / folder).rglob("*.py")
        for code in re.findall(r'"(A\d{3})"', path.read_text(encoding="utf-8"))
    }


def test_every_code_in_the_source_is_in_the_catalogue_and_used() -> None:
    assert codes_in_source() == set(ENTRIES)


def test_every_entry_has_an_example_or_says_why_not() -> None:
    without = [e.code for e in ENTRIES.values() if not e.bad and not e.untestable]
    assert [code for code in without if not getattr(ENTRIES[code], "bad_bytes", None)] == []


def test_messages_follow_the_style() -> None:
    for entry in LATER:
        if entry.bad:
            for diagnostic in found(marked(entry.bad)[0]):
                assert not diagnostic.message.endswith("."), diagnostic.message
                assert "invalid" not in diagnostic.message.lower()
                assert diagnostic.message[0] in "`'\"" or not diagnostic.message[0].isupper()
