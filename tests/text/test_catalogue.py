"""Every code of the catalogue: its bad example gives it where it is marked, the good one not."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from goldens import Golden
from package_map import ROOT

import attnspec
from attnspec import Diagnostic, SpecError

ENTRIES: dict[str, dict[str, str]] = {
    code: fields
    for path in (ROOT / "attnspec" / "text" / "catalogue").glob("*.toml")
    for code, fields in tomllib.loads(path.read_text(encoding="utf-8")).items()
}


def marked(text: str) -> tuple[str, int, int]:
    """A text without its marks, and where they stood."""
    before, _, rest = text.partition("«")
    inside, _, after = rest.partition("»")
    return before + inside + after, len(before), len(before + inside)


def said(text: str) -> Sequence[Diagnostic]:
    """Everything that reading, elaborating and checking say of a text."""
    try:
        spec = attnspec.parse(text)
    except SpecError as error:
        return error.diagnostics
    return spec.check()


def misplaced(code: str, bad: str) -> str | None:
    """What is wrong with an entry's bad example, or None."""
    text, start, end = marked(bad)
    diagnostics = said(text)
    if [d.code for d in diagnostics] != [code]:
        return f"gives {[str(d) for d in diagnostics]}"
    span = diagnostics[0].span
    place = span and (span.start, span.end)
    return None if place == (start, end) else f"is at {place}, marked {(start, end)}"


BAD = {code: entry["bad"] for code, entry in sorted(ENTRIES.items()) if "bad" in entry}


@pytest.mark.parametrize("code", BAD)
def test_the_bad_example_gives_its_code_at_the_marked_place(code: str) -> None:
    assert misplaced(code, BAD[code]) is None


def test_a_wrong_mark_is_noticed() -> None:
    assert marked("ab«cd»e") == ("abcde", 2, 4)
    assert marked("ab«»") == ("ab", 2, 2)
    assert misplaced("A201", BAD["A201"].replace("«w", "w«"))
    assert misplaced("A201", BAD["A206"])


@pytest.mark.parametrize("code", [code for code in ENTRIES if "good" in ENTRIES[code]])
def test_the_good_example_is_accepted(code: str) -> None:
    problems = [each for each in said(ENTRIES[code]["good"]) if each.severity == "error"]
    # examples of syntax may name what nobody has defined
    assert [each for each in problems if each.code < "A2" or code >= "A2"] == []


def test_bad_bytes_give_their_code(tmp_path: Path) -> None:
    for code, entry in ENTRIES.items():
        if "bad_bytes" in entry:
            (tmp_path / "bad.attn").write_bytes(bytes.fromhex(entry["bad_bytes"]))
            with pytest.raises(SpecError) as caught:
                attnspec.load(tmp_path / "bad.attn")
            assert [each.code for each in caught.value.diagnostics] == [code]


def test_every_code_in_the_source_is_in_the_catalogue_and_used() -> None:
    used = {
        code
        for folder in ("attnspec", "grammar", "backends")
        for path in (ROOT / folder).rglob("*.py")
        for code in re.findall(r'"(A\d{3})"', path.read_text(encoding="utf-8"))
    }
    assert sorted(ENTRIES) == sorted(used)
    for entry in ENTRIES.values():
        assert len({"bad", "bad_bytes", "untestable"} & entry.keys()) == 1


def test_messages_follow_the_style_and_are_as_approved(golden: Golden) -> None:
    """Each as users see it."""
    shown = [said(marked(bad)[0])[0] for bad in BAD.values()]
    for diagnostic in shown:
        for words in (diagnostic.message, diagnostic.help or ""):
            assert not words.endswith(".")
            assert "invalid" not in words.lower()
            # quotes are closed, and none stands inside another
            assert words.count("`") % 2 == 0
            assert "``" not in words
            assert not re.search(r"__|\$", words.split("U+")[0])
        assert diagnostic.message[0] in "`'\"" or not diagnostic.message[0].isupper()
    text = "\n".join(map(str, shown))
    golden("".join(c if c == "\n" or c.isprintable() else ascii(c)[1:-1] for c in text) + "\n")
