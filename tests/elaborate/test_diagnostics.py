"""What is said of texts: the codes, places and verdicts that stand in the tables of
tests/golden/test_diagnostics, and the words there as they were approved.

An entry is `CODES: TEXT`. The text is the body of an attention, or with `CODES file:` a whole file;
« and » stand around the place of each message. Before the codes stand the verdicts on its claims.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from goldens import Golden

from attnspec.spec import parse
from attnspec.text.diagnostics import Diagnostic, SpecError

BEFORE, AFTER = "attention a { ", " }"


def said(text: str) -> tuple[list[str], Sequence[Diagnostic]]:
    """The verdicts on the claims of a text, and everything that the compiler says of it."""
    try:
        spec = parse(text)
    except SpecError as error:
        return [], error.diagnostics
    return [verdict.status for verdict in spec.verdicts], spec.check()


def plain(text: str) -> str:
    """The text on one line, what cannot be seen in it or looks like something else by its code."""
    named = {"\n": r"\n", "\r": r"\r", "\\": r"\\"}
    return "".join(named.get(c, c if " " <= c <= "~" else f"\\u{ord(c):04x}") for c in text)


def meant(escape: re.Match[str]) -> str:
    return {"n": "\n", "r": "\r", "\\": "\\"}.get(escape[1]) or chr(int(escape[1][1:], 16))


def entry(text: str, verdicts: Sequence[str], diagnostics: Sequence[Diagnostic]) -> str:
    """The line of a text with the codes and places of what is said of it."""
    marks = []
    for each in diagnostics:
        if each.span is not None:
            empty = each.span.start == each.span.end
            marks += [(each.span.end, 0, "»")] * (not empty)
            marks.append((each.span.start, 1, "«»" if empty else "«"))
    for place, _, mark in sorted(marks, reverse=True):
        text = text[:place] + mark + text[place:]
    text = "".join(c if c in "«»" else plain(c) for c in text)
    inside = text.startswith(BEFORE) and text.endswith(AFTER) and "attention" not in text[1:]
    must = " ".join((*verdicts, *(each.code for each in diagnostics))) or "accepted"
    return f"{must}: {text[len(BEFORE) : -len(AFTER)]}" if inside else f"{must} file: {text}"


def words(diagnostic: Diagnostic) -> list[str]:
    """A message without the place, which the line above shows."""
    return [
        f"{'' if diagnostic.severity == 'error' else 'warning: '}{diagnostic.message}",
        *(f"note: {note}" for note in diagnostic.notes),
        *(f"{span.line}:{span.column}: {text}" for text, span in diagnostic.related),
        *([f"help: {diagnostic.help}"] if diagnostic.help else []),
    ]


def answer(line: str) -> tuple[str, list[str]]:
    must, _, text = line.partition(": ")
    text = re.sub(r"\\(n|r|\\|u[0-9a-f]{4})", meant, re.sub("[«»]", "", text))
    text = text if must.endswith("file") else f"{BEFORE}{text}{AFTER}"
    verdicts, diagnostics = said(text)
    shown = [line for diagnostic in diagnostics for line in words(diagnostic)]
    return entry(text, verdicts, diagnostics), [
        "".join(c if c.isprintable() else plain(c) for c in line) for line in shown
    ]


@pytest.mark.parametrize("table", ["syntax", "names", "meaning", "claims"])
def test_messages(table: str, golden: Golden) -> None:
    golden.entries(answer)
