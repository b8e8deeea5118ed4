"""The catalogue of messages: what each code means, a text that earns it and one that does not.

The entries stand in the TOML files beside this one, by stage. A `bad` text holds « and » around the
words that the message points at (nothing between them where something is missing). The marks are
not part of the text.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from attnspec.text.diagnostics import InternalError


@dataclass(frozen=True)
class Entry:
    """One code.

    `bad` is None where no text can show the fault: then `bad_bytes` are the bytes of a file that
    does, or `untestable` says why there is no example. `good` is a text without the fault.
    """

    code: str
    summary: str
    explanation: str
    bad: str | None = None
    good: str | None = None
    bad_bytes: bytes | None = None
    untestable: str | None = None


@cache
def catalogue() -> dict[str, Entry]:
    """All entries by code, in the order of the codes."""
    entries: dict[str, Entry] = {}
    folder = resources.files("attnspec.text.catalogue")
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if not file.name.endswith(".toml"):
            continue
        for code, fields in tomllib.loads(file.read_text(encoding="utf-8")).items():
            if code in entries:
                raise InternalError(f"{code} is twice in the catalogue, again in {file.name}")
            entries[code] = _entry(code, fields)
    return dict(sorted(entries.items()))


def marked(text: str) -> tuple[str, int, int]:
    """A text without its « and », and the start and end of what they enclosed in it."""
    start, end = text.index("«"), text.index("»") - 1
    return text[:start] + text[start + 1 : end + 1] + text[end + 2 :], start, end


def _entry(code: str, fields: dict[str, str]) -> Entry:
    unknown = fields.keys() - {"summary", "explanation", "bad", "good", "bad_bytes", "untestable"}
    if unknown or not {"summary", "explanation"} <= fields.keys():
        raise InternalError(
            f"the catalogue's entry {code} has the fields {', '.join(sorted(fields))}"
        )
    hexadecimal = fields.get("bad_bytes")
    return Entry(
        code=code,
        summary=fields["summary"],
        explanation=fields["explanation"].strip(),
        bad=fields.get("bad"),
        good=fields.get("good"),
        bad_bytes=None if hexadecimal is None else bytes.fromhex(hexadecimal),
        untestable=fields.get("untestable"),
    )
