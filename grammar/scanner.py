"""A first reading of a text, before the grammar: words, numbers, brackets and comments.

It finds what a grammar reports badly (numbers out of range, foreign operators, a bracket that is
never closed), enforces the limits in linear time without recursion, and keeps the comments. Where a
mistake has an obvious meaning the text is mended in place, at the same length, so that the parser
can go on and find the mistakes that do not depend on it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from attnspec.limits import LIMITS
from attnspec.text.diagnostics import Diagnostic, SpecError
from attnspec.text.source import Source, Span

MAX_NAME = 64
UNQUOTED = "write names without quotes; only the path of an import is quoted"


class Word(NamedTuple):
    """One token: its kind, its place, and whether it is the first of its line."""

    kind: str
    text: str
    start: int
    end: int
    first: bool


class Comment(NamedTuple):
    """`text` from `#` on; `after` is the end of the word before; `own_line`: no word before it."""

    text: str
    start: int
    after: int
    own_line: bool


@dataclass
class Scan:
    """What the first reading found.

    `enclosing[i]` is the index of the innermost bracket that is open before word i, or -1, and its
    last element that at the end of the text;
    `closers` maps the index of an opening bracket to that of its closing one, where it has one;
    `strays` are the indices of closing brackets that close nothing; `mended` is the text for the
    parser, as long as the original.
    """

    source: Source
    mended: str = ""
    words: list[Word] = field(default_factory=list)
    comments: list[Comment] = field(default_factory=list)
    enclosing: list[int] = field(default_factory=list)
    closers: dict[int, int] = field(default_factory=dict)
    strays: set[int] = field(default_factory=set)
    problems: list[Diagnostic] = field(default_factory=list)

    def span(self, index: int) -> Span:
        """The place of word `index`; after the last word, the empty place at its end."""
        if index < len(self.words):
            return Span(self.source, self.words[index].start, self.words[index].end)
        end = self.words[-1].end if self.words else 0
        return Span(self.source, end, end)


_FOREIGN = {
    "&&": ("&", "write `and` between conditions, `&` for the intersection of graphs"),
    "||": ("|", "write `or` between conditions, `|` for the union of graphs"),
    "!": ("~", "write `not` before a condition, `~` for the complement of a graph"),
    "^": ("*", "write `**` for powers; `(a | b) - (a & b)` is the symmetric difference of graphs"),
    "=>": ("=", "write `>=` for at least, `=` between a name and its value"),
    "=<": ("<=", "write `<=`"),
    "->": ("=", "write `=` between a name and its value"),
    ":=": ("=", "write `=`"),
    "<>": ("!=", "write `!=`"),
    "===": ("==", "write `==`"),
    "!==": ("!=", "write `!=`"),
    "...": ("..", "write `a..b`; both ends are included"),
    "..=": ("..", "write `a..b`; both ends are included"),
    "..<": ("..", "write `a..b - 1`; both ends are included"),
    "++": ("+", "write `a + b`; names cannot be assigned again"),
    "+=": ("=", "names cannot be assigned again; write `let` with a new name"),
    "-=": ("=", "names cannot be assigned again; write `let` with a new name"),
    "|=": ("=", "names cannot be assigned again; write `let` with a new name"),
    "&=": ("=", "names cannot be assigned again; write `let` with a new name"),
    "*=": ("=", "names cannot be assigned again; write `let` with a new name"),
    "/=": ("!=", "write `!=` for unequal"),
}
"""Operators of other languages: what the parser reads instead, and the advice."""

_TOKEN = re.compile(
    r"""
      (?P<blank>[ \t\n]+)
    | (?P<comment>\#[^\n]*)
    | (?P<string>"[^"\n]*"?)
    | (?P<quoted>'[^'\n]*'?)
    | (?P<number>\.?[0-9](?:[eE][+-](?=[0-9])|[A-Za-z0-9_]|\.(?!\.))*)
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<foreign>"""
    + "|".join(
        re.escape(operator)
        for operator in sorted(_FOREIGN, key=len, reverse=True)
        if operator != "!"
    )
    + r"""|!(?!=))
    | (?P<operator>\.\.|\*\*|//|==|!=|<=|>=|[-+*/%|&~<>=,:.])
    | (?P<bracket>[(){}\[\]])
    | (?P<semicolon>;)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)

_OPENER = {")": "(", "}": "{", "]": "["}


def scan(source: Source) -> Scan:
    """Reads the whole text once. Problems that leave the rest readable are in `problems`.

    Raises SpecError where a limit is exceeded (A190, A191, A192), or with the first problems where
    they are `LIMITS.problems`.
    """
    text = source.text
    if len(text) > LIMITS.text_size:
        raise SpecError(
            Diagnostic(
                "A190",
                f"a text of at most {LIMITS.text_size:,} characters is required,"
                f" found {len(text):,}",
                Span(source, 0, 0),
            )
        )
    result = Scan(source)
    mended: list[str] = []
    open_brackets: list[int] = []
    prefixes = 0
    first = True
    for match in _TOKEN.finditer(text):
        kind, value, start, end = match.lastgroup or "", match.group(), match.start(), match.end()
        if kind == "blank":
            first = first or "\n" in value
            mended.append(value)
            continue
        if kind == "comment":
            after = result.words[-1].end if result.words else 0
            result.comments.append(Comment(value.rstrip(), start, after, first))
            mended.append(value)
            continue
        mended.append(_mend(result, kind, value, Span(source, start, end)))
        if kind in ("semicolon", "other"):
            continue
        index = len(result.words)
        if index >= LIMITS.words_read:
            raise SpecError(
                Diagnostic(
                    "A192",
                    f"a text has at most {LIMITS.words_read:,} words, numbers and signs,"
                    " found more",
                    Span(source, start, end),
                    help="split the spec into files and import them",
                )
            )
        prefixes = prefixes + 1 if value in ("-", "~", "not") else 0
        if prefixes > LIMITS.nesting + 1:
            raise SpecError(too_deep(Span(source, start, end)))
        result.words.append(Word(kind, value, start, end, first))
        first = False
        result.enclosing.append(open_brackets[-1] if open_brackets else -1)
        if kind == "bracket":
            _bracket(result, index, value, open_brackets)
    result.enclosing.append(open_brackets[-1] if open_brackets else -1)
    result.mended = "".join(mended)
    return result


def _bracket(result: Scan, index: int, value: str, open_brackets: list[int]) -> None:
    if value in "({[":
        if len(open_brackets) == LIMITS.nesting:
            raise SpecError(too_deep(result.span(index)))
        open_brackets.append(index)
        return
    for depth in range(len(open_brackets) - 1, -1, -1):
        opener = open_brackets[depth]
        if result.words[opener].text == _OPENER[value]:
            result.closers[opener] = index
            # brackets inside it that are still open stay without a closer
            del open_brackets[depth:]
            return
        if result.words[opener].text == "{" and not is_members(result, opener):
            break
    result.strays.add(index)


def is_members(result: Scan, opener: int) -> bool:
    """Whether an opening brace starts a set of numbers (`in {1, 2}`) rather than a body."""
    return opener > 0 and result.words[opener - 1].text == "in"


def too_deep(span: Span) -> Diagnostic:
    return Diagnostic(
        "A191",
        f"the expression is nested more than {LIMITS.nesting} levels deep",
        span,
        help="remove brackets that are not needed, or name a part with `let` or `graph`",
    )


def _mend(result: Scan, kind: str, value: str, span: Span) -> str:
    """Text of the same length that the parser reads for this token; says what is wrong with it."""
    problem = _problem(kind, value, span)
    if problem is not None:
        result.problems.append(problem)
        if len(result.problems) == LIMITS.problems:
            raise SpecError(result.problems)
    if problem is None or kind == "name":
        return value
    match kind:
        case "number":
            return (" 0" if value.startswith(".") else "0").ljust(len(value))
        case "foreign":
            return _FOREIGN[value][0].ljust(len(value))
        case "string" | "quoted" if len(value) > 1:
            return '"' + " " * (len(value) - 2) + '"'
        case _:
            return " "


def _problem(kind: str, value: str, span: Span) -> Diagnostic | None:
    """What is wrong with a token, or None."""
    match kind:
        case "number":
            return number_problem(value, span)
        case "name" if len(value) > MAX_NAME:
            message = f"a name has at most {MAX_NAME} characters, found {len(value):,}"
            return Diagnostic("A193", message, span)
        case "string" if len(value) == 1 or not value.endswith('"'):
            return Diagnostic(
                "A113",
                'expected `"` to close the string on its line, found the end of the line',
                Span(span.source, span.end, span.end),
                related=(
                    ("the string starts here", Span(span.source, span.start, span.start + 1)),
                ),
            )
        case "quoted":
            expected, advice = "text without quotes", UNQUOTED
            if span.source.text[: span.start].split()[-1:] == ["from"]:
                expected, advice = "a file path in double quotes", "write `\"` instead of each `'`"
            message = f"expected {expected}, found a single quote"
            return Diagnostic("A114", message, span, help=advice)
        case "foreign":
            message = f"expected an operator of this language, found `{value}`"
            return Diagnostic("A138", message, span, help=_FOREIGN[value][1])
        case "semicolon":
            message = "expected the next statement, found `;`"
            way_out = "delete the `;`: statements need nothing between them"
            return Diagnostic("A137", message, span, help=way_out)
        case "other":
            return _unused_character(value, span)
        case _:
            return None


def _unused_character(value: str, span: Span) -> Diagnostic:
    shown = f"`{value}`" if value.isprintable() else f"U+{ord(value):04X}"
    return Diagnostic(
        "A107",
        f"expected a word, a number or a sign of this language, found {shown}",
        span,
        help="delete it, or write the word or sign of this language that you mean",
    )


# --- numbers, and what people write instead -------------------------------------------------------


MAX_INTEGER = 2**62

_DIGITS = r"(?:0|[1-9][0-9]*(?:_[0-9]+)*)"
_INTEGER = re.compile(_DIGITS)
_REAL = re.compile(_DIGITS + r"(?:\.[0-9]+(?:_[0-9]+)*(?:[eE][+-]?[0-9]+)?|[eE][+-]?[0-9]+)")


def number_problem(value: str, span: Span) -> Diagnostic | None:
    """What keeps `value` from being a number of the language, or None."""
    if _INTEGER.fullmatch(value):
        digits = value.replace("_", "")
        # the length first: Python refuses to convert very long ones
        if len(digits) > 19 or int(digits) > MAX_INTEGER:
            return Diagnostic(
                "A111", f"an integer is at most {MAX_INTEGER:,}, found {_shortened(value)}", span
            )
        return None
    if _REAL.fullmatch(value):
        mantissa = re.split("[eE]", value)[0]
        real = float(value)
        if math.isinf(real) or (real == 0 and re.search("[1-9]", mantissa)):
            found = f"0 or between 5e-324 and 1.797e308, found {_shortened(value)}"
            return Diagnostic("A112", f"a real number is {found}", span)
        return None
    return Diagnostic(
        "A110",
        "expected a number like `12`, `1_024`, `0.5` or `1e-3`, found " + _shortened(value),
        span,
        help=_advice(value),
    )


def _shortened(value: str) -> str:
    return f"`{value}`" if len(value) <= 40 else f"`{value[:40]}` and more"


def _advice(value: str) -> str | None:
    if len(value) > 40:
        return None
    if re.fullmatch(r"0[xXoObB][0-9A-Fa-f_]+", value):
        try:
            return f"write `{int(value, 0)}`: numbers are decimal"
        except ValueError:
            return "numbers are decimal"
    if re.fullmatch(r"[0-9_]+", value):
        plain = value.replace("_", "").lstrip("0") or "0"
        zero = len(value) > 1 and value[0] == "0"
        why = "it may not begin with 0" if zero else "underscores are single, between digits"
        return f"write `{plain}`: {why}"
    if re.fullmatch(r"\.[0-9]+", value):
        return f"write `0{value}`"
    if re.fullmatch(r"[0-9]+\.", value):
        return f"write `{value}0`"
    if re.fullmatch(r"[0-9.]+[eE][+-]?", value):
        return f"write the exponent: `{value}3`"
    product = re.sub(r"^([0-9]+)([A-Za-z_][A-Za-z0-9_]*)$", r"\1 * \2", value)
    return f"start a name with a letter, or write `{product}`" if product != value else None
