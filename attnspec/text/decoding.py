"""Files and strings to `Source`: UTF-8 only, of bounded size, without characters that deceive."""

from __future__ import annotations

import errno
import os
import re
import stat
import unicodedata
from collections import deque
from functools import lru_cache
from pathlib import Path

from attnspec.limits import LIMITS
from attnspec.text.diagnostics import Diagnostic, SpecError
from attnspec.text.source import Source, Span


def read_source(path: str | os.PathLike[str], shown_name: str | None = None) -> Source:
    """The text of a file; messages call it `shown_name`, or else by its path.

    Raises SpecError: A180 to A184 where the file cannot be read, A190 where it is too large, A101
    where it is not UTF-8, A102 to A106 for characters that a spec may not hold. Never waits on a
    device or a pipe, and never reads more than `LIMITS.text_size`.
    """
    name = os.fspath(path) if shown_name is None else shown_name
    return source_of_bytes(_read_bytes(path, name), name, Path(path))


# the same text is the same source, of which a syntax tree may be kept
@lru_cache(maxsize=64)
def source_of_bytes(data: bytes, name: str, path: Path | None = None) -> Source:
    """The text of bytes, of which one more than `LIMITS.text_size` is as good as all.

    Raises SpecError as `read_source` does for what a file holds.
    """
    if len(data) > LIMITS.text_size:
        raise SpecError(_too_large(name, None))
    return _checked(Source(name, _normalised(_decoded(data, name)), path))


@lru_cache(maxsize=64)
def source_of(text: str, name: str = "<text>") -> Source:
    """A text that is not a file, normalised and checked in the same way.

    Raises SpecError as `read_source` does for what a file holds.
    """
    # a character takes a byte or more, so this bounds the work before the exact count
    size = len(text)
    if size <= LIMITS.text_size:
        size = len(text.encode("utf-8", "surrogatepass"))
    if size > LIMITS.text_size:
        raise SpecError(_too_large(name, size))
    return _checked(Source(name, _normalised(text)))


def _normalised(text: str) -> str:
    return (
        text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}").replace("\r\n", "\n").replace("\r", "\n")
    )


# --- bytes -------------------------------------------------------------------------------------

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def _read_bytes(path: str | os.PathLike[str], name: str) -> bytes:
    try:
        _require_regular(os.stat(path).st_mode, name)
        # the file may have changed since: open so that even a pipe answers at once, and look again
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        with open(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            _require_regular(status.st_mode, name)
            if status.st_size > LIMITS.text_size:
                raise SpecError(_too_large(name, status.st_size))
            return file.read(LIMITS.text_size + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(_unreadable(error, name)) from None


def _require_regular(mode: int, name: str) -> None:
    if stat.S_ISREG(mode):
        return
    kind = next((words for test, words in _KINDS if test(mode)), "something else")
    raise SpecError(Diagnostic("A182", f"a file of text is required, {name} is {kind}", None))


def _unreadable(error: OSError | ValueError, name: str) -> Diagnostic:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOENT, errno.ENOTDIR):
        advice = None
        if "{" in name:
            advice = "`attnspec.parse(text)` takes a spec's text"
        elif name.isidentifier():
            advice = (
                f"a file's name ends in `.attn`; a spec that ships is taken by its name:"
                f' `attnspec zoo {name}`, in Python `attnspec.zoo("{name}")`'
            )
        return Diagnostic("A180", f"there is no file {name}", None, help=advice)
    if number in (errno.EACCES, errno.EPERM):
        return Diagnostic(
            "A181", f"a readable file is required, no permission to read {name}", None
        )
    reason = (os.strerror(number) if number else str(error)).lower()
    return Diagnostic(
        "A183", f"a readable file is required, reading {name!r} failed: {reason}", None
    )


def _too_large(name: str, size: int | None) -> Diagnostic:
    size_text = "more" if size is None else f"{size:,}"
    return Diagnostic(
        "A190",
        f"a text of at most {LIMITS.text_size:,} bytes is required, {name} has {size_text}",
        None,
        help="split the spec into files and import them",
    )


_BYTE_ORDER_MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)


def _decoded(data: bytes, name: str) -> str:
    for mark, encoding in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            raise SpecError(
                Diagnostic(
                    "A101",
                    f"expected UTF-8 text, found a mark of {encoding} at byte 0 of {name}",
                    None,
                    help="save the file as UTF-8",
                )
            )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(_not_utf8(data, error.start, name)) from None


def _not_utf8(data: bytes, offset: int, name: str) -> Diagnostic:
    start = len(_normalised(data[:offset].decode("utf-8")))
    source = Source(name, _normalised(data.decode("utf-8", "replace")))
    latin = chr(data[offset])
    guess = f"the byte would be `{latin}` in Latin-1: " if latin.isprintable() else ""
    return Diagnostic(
        "A101",
        f"expected UTF-8 text, found byte 0x{data[offset]:02X} at byte {offset:,}",
        Span(source, start, start + 1),
        help=f"{guess}save the file as UTF-8",
    )


# --- characters --------------------------------------------------------------------------------

_SUSPECT = re.compile(
    r"""
      (?P<control>[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f]+)
    | (?P<bidirectional>[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]+)
    | (?P<unseen>[\u00a0\u00ad\u1680\u180e\u2000-\u200d\u202f\u205f-\u2064\u3000\ufeff]+)
    | (?P<other>[^\x00-\x7f])
    """,
    re.VERBOSE,
)

_PROSE = re.compile(r'(?P<string>"[^"\n]*"?)|#[^\n]*')

_FOREIGN_WORD = re.compile(r"(?:\w*[^\x00-\x7f\W])+")
"""From a foreign letter or digit to the last one of the same word."""

_CONTROLS = {
    0x00: "NULL",
    0x08: "BACKSPACE",
    0x0B: "LINE TABULATION",
    0x0C: "FORM FEED",
    0x1A: "SUBSTITUTE",
    0x1B: "ESCAPE",
    0x7F: "DELETE",
    0x85: "NEXT LINE",
}
"""Names of the control characters met in text; Unicode itself gives them none."""

_MEANT = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\u2216", "-"),
    **dict.fromkeys("\u00b7\u00d7\u2217\u22c5", "*"),
    **dict.fromkeys("\u00f7\u2044\u2215", "/"),
    **dict.fromkeys("\u00ab\u00bb\u2018\u2019\u201c\u201d", '"'),
    **dict.fromkeys("\u2282\u2286", "subset"),
    "\u2026": "..",
    "\u2208": "in",
    "\u2227": "and",
    "\u2228": "or",
    "\u00ac": "not",
    "\u2229": "&",
    "\u222a": "|",
    "\u2260": "!=",
    "\u2264": "<=",
    "\u2265": ">=",
}
"""What stands in the language for signs that editors and typesetters like better."""

_LETTERS = dict(
    zip(
        "\u0430\u0441\u0501\u0435\u0261\u04bb\u0456\u0131\u0458\u03bf\u043e\u0440\u0455\u03bd\u0445\u0443",
        "acdeghiijoopsvxy",
        strict=True,
    )
)
"""Letters of other alphabets that look like ours."""


def _checked(source: Source) -> Source:
    """The source itself; raises SpecError with every character that may not stand in it."""
    text = source.text
    prose = deque((m.start(), m.end(), m.lastgroup == "string") for m in _PROSE.finditer(text))
    problems: list[Diagnostic] = []
    end = 0
    for match in _SUSPECT.finditer(text):
        start, kind = match.start(), match.lastgroup
        while prose and prose[0][1] <= start:
            prose.popleft()
        in_prose = bool(prose) and prose[0][0] <= start
        if in_prose and (kind == "other" or (kind == "unseen" and not prose[0][2])):
            continue
        if start < end:
            continue
        word = _FOREIGN_WORD.match(text, start) if kind == "other" else None
        end = word.end() if word else match.end()
        problems.append(_problem(kind or "", Span(source, start, end)))
        if len(problems) == LIMITS.problems:
            break
    if problems:
        raise SpecError(problems)
    return source


def _named(text: str) -> str:
    """`U+00A0 NO-BREAK SPACE` for the first character, and how many more there are."""
    number = ord(text[0])
    name = unicodedata.name(text[0], _CONTROLS.get(number, ""))
    more = f" and {len(text) - 1:,} more" if len(text) > 1 else ""
    return f"U+{number:04X} {name}".rstrip() + more


def _problem(kind: str, span: Span) -> Diagnostic:
    """What is wrong with the characters at `span`; `kind` is their group in `_SUSPECT`."""
    text = span.source.text
    character = _named(span.text)
    match kind:
        case "control":
            wide = "\0" in span.text and text.count("\0") * 3 > len(text)
            return Diagnostic(
                "A102",
                f"expected text, found the control character {character}",
                span,
                help="the file looks like UTF-16: save it as UTF-8" if wide else "delete it",
            )
        case "bidirectional":
            return Diagnostic(
                "A103",
                f"expected text that reads as it is shown, found {character}",
                span,
                help="delete it: it changes the order in which text is shown, also in comments",
            )
        case "unseen":
            space = unicodedata.category(span.text[0]) == "Zs"
            return Diagnostic(
                "A104",
                f"expected plain spaces and visible characters, found {character}",
                span,
                help="write a plain space" if space else "delete it; plain spaces separate words",
            )
        case _:
            return _foreign(span)


def _foreign(span: Span) -> Diagnostic:
    """What is wrong with a sign, letter or digit outside comments that is not ASCII."""
    shown = _named(span.text[0])
    meant = "".join(_plain(character) for character in span.text)
    if meant.isascii():
        return Diagnostic(
            "A105",
            f"expected plain ASCII characters, found {shown}",
            span,
            help=f"did you mean `{meant}`?",
        )
    return Diagnostic(
        "A106",
        f"expected a name of the letters a to z, digits and underscores, found {shown}",
        span,
        help="write names in these characters; only comments and paths of imports may have others",
    )


def _plain(character: str) -> str:
    """The ASCII text that a character was meant to be, or the character."""
    if character in _MEANT or character in _LETTERS:
        return _MEANT.get(character) or _LETTERS[character]
    if unicodedata.decomposition(character).startswith("<super>"):
        return character
    return unicodedata.normalize("NFKC", character)
