"""`attnspec explain`: what a code means, with a text that earns it and one that does not."""

from __future__ import annotations

import textwrap

import click

from attnspec.cli import console, options
from attnspec.text.catalogue import Entry, catalogue, marked
from attnspec.text.diagnostics import hinted
from attnspec.text.source import Source, Span

WIDTH = 96


@click.command("explain", short_help="Explain the code of a message, or list all codes.")
@click.argument("code", required=False)
@options.json_option
def command(code: str | None, as_json: bool) -> None:
    """Explain a CODE that a message carries; without CODE, list them all.

    Example: attnspec explain A301
    """
    entries = catalogue()
    if code is None:
        every = entries.values()
        listing = "\n".join(f"{e.code}  {e.summary}" for e in every)
        console.answer(as_json, {"codes": [*map(to_dict, every)]}, listing)
        return
    wanted = code.strip().upper()
    wanted = f"A{wanted}" if wanted.isdecimal() else wanted
    if wanted not in entries:
        message = f"a code, as `A301` in `error[A301]`, is required, got {code!r}"
        if not any(letter.isdigit() for letter in code):
            message += "; `attnspec explain` lists them"
        raise click.UsageError(hinted(message, wanted, entries))
    console.answer(as_json, to_dict(entries[wanted]), explanation(entries[wanted]))


def explanation(entry: Entry) -> str:
    """The page about one code."""
    parts = [f"{entry.code}: {entry.summary}"]
    for paragraph in entry.explanation.split("\n\n"):
        parts.append(textwrap.fill(" ".join(paragraph.split()), min(WIDTH, console.width())))
    if entry.bad is not None:
        parts.append("wrong:\n\n" + textwrap.indent(pointed_at(entry.bad), "    "))
    if entry.good is not None and (entry.bad is not None or entry.bad_bytes is not None):
        parts.append("right:\n\n" + textwrap.indent(entry.good.strip("\n"), "    "))
    return "\n\n".join(parts)


def pointed_at(bad: str) -> str:
    """A text of the catalogue with a line of carets under the words between « and »."""
    text, start, end = marked(bad)
    span = Span(Source("", text), start, end)
    lines = text.split("\n")
    under = lines[span.line - 1]
    length = max(1, min(end - start, len(under) - span.column + 1))
    lines.insert(span.line, " " * (span.column - 1) + "^" * length)
    return "\n".join(lines).strip("\n")


def to_dict(entry: Entry) -> dict[str, object]:
    return {
        "code": entry.code,
        "summary": entry.summary,
        "explanation": entry.explanation,
        "bad": None if entry.bad is None else marked(entry.bad)[0],
        "good": entry.good,
    }
