"""What the compiler says to its user: diagnostics with a code, a place and a way out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from attnspec.text.source import Span

Severity = Literal["error", "warning", "note"]

SHOWN = 20
"""The most diagnostics that one rendering shows; the rest are counted."""


@dataclass(frozen=True)
class Diagnostic:
    """One message.

    `code` is its entry in the catalogue (`attnspec explain CODE`); `message` states what was
    required, then what was found; `span` is None only where there is no text to point at (a missing
    file). `notes` add facts, `help` says what to write instead, `related` points at other places
    ("first defined here").
    """

    code: str
    message: str
    span: Span | None
    severity: Severity = "error"
    notes: tuple[str, ...] = ()
    help: str | None = None
    related: tuple[tuple[str, Span], ...] = ()

    def __str__(self) -> str:
        return render_one(self)

    def __repr__(self) -> str:
        return f"<{self.severity} {self.code}: {self.message}>"

    def to_dict(self) -> dict[str, object]:
        """Plain data for `--json`: code, severity, message, file, line, column, notes, help."""
        place = _place(self.span)
        return {
            "code": self.code,
            "severity": self.severity,
            "message": self.message,
            **place,
            "notes": list(self.notes),
            "help": self.help,
            "related": [{"message": text, **_place(span)} for text, span in self.related],
        }


class AttnSpecError(ValueError):
    """Everything that this package raises on purpose."""


class SpecError(AttnSpecError):
    """A spec, or a file it needs, is wrong. `diagnostics` says where and what to do."""

    def __init__(self, diagnostics: Sequence[Diagnostic] | Diagnostic) -> None:
        if isinstance(diagnostics, Diagnostic):
            diagnostics = [diagnostics]
        self.diagnostics: tuple[Diagnostic, ...] = tuple(in_order(diagnostics))
        super().__init__(render(self.diagnostics))

    def __reduce__(self) -> tuple[type[SpecError], tuple[tuple[Diagnostic, ...]]]:
        return type(self), (self.diagnostics,)


class InternalError(AttnSpecError):
    """A defect of the compiler itself; the message asks for a report."""

    def __init__(self, message: str) -> None:
        super().__init__(
            f"{message}\nthis is a defect of attnspec, not of your spec: please report it"
        )


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The word that the user most likely meant, or None."""
    candidates = sorted(set(words))
    folded = {candidate.lower(): candidate for candidate in reversed(candidates)}
    if word.lower() in folded:
        return folded[word.lower()]
    matches = get_close_matches(word.lower(), list(folded), n=1, cutoff=0.65)
    return folded[matches[0]] if matches else None


ELSEWHERE: Mapping[str, str] = {
    "sliding": "window",
    "sliding_window": "window",
    "local": "window",
    "band": "window",
    "swa": "window",
    "atrous": "dilated",
    "chunk": "block",
    "chunked": "block",
    "prefix_lm": "prefix",
    "dense": "full",
    "identity": "self",
    "diagonal": "self",
    "hash": "lsh",
    "reformer": "lsh",
    "routing": "cluster",
    "kmeans": "cluster",
    "natten": "neighborhood",
    "performer": "favor",
    "nystromformer": "nystrom",
    "fnet": "fourier",
    "elu": "linear",
    "h": "head",
    "seq_len": "n",
    "dilation": "step",
    "stride": "step",
}
"""What papers and other libraries call things that have another name here."""


def did_you_mean(word: str, words: Iterable[str]) -> str | None:
    """The help line "did you mean `x`?", or None where nothing is near."""
    words = list(words)
    usual = ELSEWHERE.get(word.lower())
    match = usual if usual in words else nearest(word, words)
    return f"did you mean `{match}`?" if match else None


def hinted(message: str, word: str, words: Iterable[str]) -> str:
    """A message with that behind it, where something is near."""
    hint = did_you_mean(word, words)
    return f"{message}: {hint}" if hint else message


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in the notation of the language: `0..3, 7`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}..{b}" for a, b in parts)


def count_of(number: int, one: str, many: str = "") -> str:
    """A number of things: `1 layer`, `2 layers`."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def as_written(value: object) -> str:
    """A value as the language writes it: `true`, `8`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def from_to(low: int, high: int) -> str:
    """`3`, or `3 to 9`."""
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def three_digits(number: float) -> str:
    """A number to three digits, or whole where it has more before the point."""
    rounded = float(f"{number:.3g}")
    return f"{number:,.0f}" if abs(rounded) >= 1000 else f"{number:.3g}"


def time_text(seconds: float) -> str:
    """A time to three digits, in the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{three_digits(seconds * 1e6)} us"


def first_line(error: Exception, most: int = 200) -> str:
    """The type of an error of another library, and the first line of its message, cut at `most`
    characters."""
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line[:most]}"


def in_order(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Sorted by place, without repetitions."""
    unique = {
        (d.code, d.message, d.span and (d.span.source.name, d.span.start, d.span.end)): d
        for d in diagnostics
    }

    def key(d: Diagnostic) -> tuple[str, int, int, str, str]:
        if d.span is None:
            return ("", -1, -1, d.code, d.message)
        return (d.span.source.name, d.span.start, d.span.end, d.code, d.message)

    return sorted(unique.values(), key=key)


def render(diagnostics: Iterable[Diagnostic]) -> str:
    """Plain text of several diagnostics, at most `SHOWN`, ending with a count of the rest."""
    ordered = list(diagnostics)
    parts = [render_one(d) for d in ordered[:SHOWN]]
    if len(ordered) > SHOWN:
        parts.append(f"... and {len(ordered) - SHOWN} more")
    return "\n\n".join(parts)


def render_one(diagnostic: Diagnostic) -> str:
    """`file:line:column: error[CODE]: message`, the line, a caret, notes, places and help."""
    head = f"{diagnostic.severity}[{diagnostic.code}]: {diagnostic.message}"
    lines = []
    if diagnostic.span is None:
        lines.append(head)
    else:
        lines.append(f"{_where(diagnostic.span)}: {head}")
        lines.extend(_excerpt(diagnostic.span))
    lines.extend(f"  note: {note}" for note in diagnostic.notes)
    for text, span in diagnostic.related:
        lines.append(f"  {_where(span)}: {text}")
        lines.extend(_excerpt(span))
    if diagnostic.help:
        lines.append(f"  help: {diagnostic.help}")
    return "\n".join(lines)


def _where(span: Span) -> str:
    return f"{span.source.name}:{span.line}:{span.column}"


def _place(span: Span | None) -> dict[str, object]:
    if span is None:
        return {"file": None, "line": None, "column": None, "end_line": None, "end_column": None}
    end_line, end_column = span.source.line_column(span.end)
    return {
        "file": span.source.name,
        "line": span.line,
        "column": span.column,
        "end_line": end_line,
        "end_column": end_column,
    }


_WIDTH = 100


def _excerpt(span: Span) -> list[str]:
    """The line under `span` with carets; a long line is cut to a window around the place."""
    text = span.source.line_text(span.line)
    column = span.column - 1
    length = max(1, min(span.end - span.start, len(text) - column))
    first = 0
    if len(text) > _WIDTH:
        first = max(0, column - _WIDTH // 3)
        text = ("…" if first else "") + text[first : first + _WIDTH]
        column -= first - (1 if first else 0)
        length = max(1, min(length, len(text) - column))
    number = str(span.line)
    shown = "".join(
        c if c.isprintable() else ("\t" if c == "\t" else "\N{REPLACEMENT CHARACTER}") for c in text
    )
    pad = "".join("\t" if c == "\t" else " " for c in shown[:column])
    return [f"  {number} | {shown}", f"  {' ' * len(number)} | {pad}{'^' * length}"]
