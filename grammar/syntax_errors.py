"""What the parser could not read, in the words of the language: never a rule or terminal name."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from attnspec.grammar.scanner import UNQUOTED, Scan, Word
from attnspec.text.diagnostics import Diagnostic, did_you_mean
from attnspec.text.source import Span

ITEMS = frozenset({"attention", "from", "graph"})
"""The words that start an item of a file."""

STATEMENTS = frozenset(
    "attend causal cross extra_tokens head heads input layer layers let normalize require scale"
    " score sequence".split()
)
"""The words that start a statement."""

RESERVED = frozenset({"or", "and", "not", "in", "subset", "true", "false"})
"""The words that are never names."""

_COMPARISONS = frozenset({"==", "!=", "<", "<=", ">", ">=", "in", "subset"})
_OPERATORS = _COMPARISONS | {"or", "and", "|", "&", "+", "-", "*", "/", "//", "%", "**"}
_OPERAND = frozenset({"NAME", "INTEGER", "REAL", "(", "[", "-", "~", "not", "true", "false"})
_CLOSERS = {"(": ")", "{": "}", "[": "]"}
_OPENERS = {closer: opener for opener, closer in _CLOSERS.items()}

_PHRASES = {
    "NAME": "a name",
    "INTEGER": "an integer",
    "REAL": "a number",
    "STRING": "a file path in double quotes",
    "$END": "the end of the file",
}

ROPE = "rotate q and k before the call; a rotation is no part of a spec"

_FOREIGN_WORDS = {
    "//": "`#` starts a comment",
    "bidirectional": "delete it; queries read keys on both sides unless the spec says `causal`",
    "class": "`attention NAME { … }` describes one attention",
    **dict.fromkeys(("const", "var"), "`let NAME = EXPRESSION` names a value"),
    **dict.fromkeys(
        ("def", "function", "lambda"),
        "to define a graph, write `graph NAME(a, b) = EXPRESSION` outside the attention",
    ),
    "dropout": "pass dropout in the call: `module(q, k, v, dropout_p=0.1)`",
    "for": "`layer 0..5 { … }` and `head even { … }` choose layers and heads; there are no loops",
    "if": "there is no `if`; use `layer` or `head` blocks, or a condition in `where(…)`",
    **dict.fromkeys(
        ("import", "include"),
        'to import a graph, write `from "file.attn" import NAME` outside the attention',
    ),
    "return": "`attend EXPRESSION` says what is attended to",
    **dict.fromkeys(("rope", "rotary"), ROPE),
    **dict.fromkeys(("attnspec", "version"), "a spec has no version line: delete it"),
}
"""Words that start a statement in other languages, and what does their work here."""

_CHANGES = ("alibi", "bias", "softcap")
"""What stands behind `score`."""

_COUNTS = ("heads", "layers")
"""The statements that say how many there are of what has blocks of its own."""

ALONE = ("causal", "cross")
"""The statements of one word."""


def empty_file(scan: Scan) -> Diagnostic:
    content = "only comments" if scan.comments else "an empty file"
    return Diagnostic(
        "A130",
        f"the file defines no attention: expected `attention NAME {{ … }}`, found {content}",
        Span(scan.source, 0, 0),
    )


@dataclass(frozen=True)
class _Stop:
    """Where the parser stopped.

    `word` is the word at `index`, of kind "end" after the last one; `opener` the index of the
    innermost bracket open there, or -1; `accepts` as in `unexpected`.
    """

    scan: Scan
    index: int
    word: Word
    opener: int
    accepts: frozenset[str]

    @property
    def span(self) -> Span:
        return self.scan.span(self.index)

    @property
    def found(self) -> str:
        if self.word.kind == "end":
            return "the end of the file"
        text = self.word.text
        return f"`{text}`" if len(text) <= 40 else f"`{text[:40]}` and more"

    @property
    def before(self) -> Word | None:
        return self.scan.words[self.index - 1] if self.index else None

    @property
    def after(self) -> str:
        """The text of the next word."""
        words = self.scan.words
        return words[self.index + 1].text if self.index + 1 < len(words) else ""

    def beside(self, *texts: str) -> int | None:
        """Where one of these stands before the word, inside the same round bracket."""
        words, within = self.scan.words, self.scan.enclosing
        if self.opener < 0 or words[self.opener].text != "(":
            return None
        inside = (i for i in range(self.opener, self.index) if within[i] == self.opener)
        return next((i for i in inside if words[i].text in texts), None)

    @property
    def starts_operand(self) -> bool:
        return self.word.kind in ("name", "number") or self.word.text in ("(", "~")

    def diagnostic(self, code: str, expected: str, advice: str | None = None) -> Diagnostic:
        return Diagnostic(code, f"expected {expected}, found {self.found}", self.span, help=advice)


def unexpected(scan: Scan, index: int, accepts: Collection[str]) -> Diagnostic:
    """Why the text cannot go on with word `index` (the number of words: with its end).

    `accepts` are the words and signs that could stand there, as they are written, and the names of
    open classes of words: NAME, INTEGER, REAL, STRING, $END.
    """
    end = scan.span(len(scan.words)).start
    word = scan.words[index] if index < len(scan.words) else Word("end", "", end, end, False)
    stop = _Stop(scan, index, word, scan.enclosing[index], frozenset(accepts))
    for rule in (
        _swallowed,
        _string,
        _stray,
        _unclosed,
        _end,
        _sign,
        _separator,
        _statement,
        _item,
        _operand,
    ):
        diagnostic = rule(stop)
        if diagnostic is not None:
            return diagnostic
    return stop.diagnostic("A134", expected_words(accepts), _advice(stop))


# --- the rules, each a Diagnostic or None; the first that knows wins -----------------------------


def _swallowed(stop: _Stop) -> Diagnostic | None:
    """A keyword at the start of a line, read as a name because the line before it is unfinished."""
    before = stop.before
    if before is None or not before.first or before.text not in ITEMS | STATEMENTS:
        return None
    if "or" not in stop.accepts or stop.word.text in ("", ")", "}", ","):
        return None
    return Diagnostic(
        "A133",
        f"expected an expression, found `{before.text}`",
        stop.scan.span(stop.index - 1),
        help="finish the line above, or remove the operator at the end of that line",
    )


def _string(stop: _Stop) -> Diagnostic | None:
    if stop.word.kind != "string":
        return None
    return stop.diagnostic("A114", expected_words(stop.accepts), UNQUOTED)


def _stray(stop: _Stop) -> Diagnostic | None:
    if stop.index not in stop.scan.strays:
        return None
    opener = _OPENERS[stop.word.text]
    return Diagnostic(
        "A121",
        f"expected {expected_words(stop.accepts)}, found `{stop.word.text}` without a `{opener}`",
        stop.span,
        help=f"delete it, or write the missing `{opener}` before it",
    )


def _unclosed(stop: _Stop) -> Diagnostic | None:
    """A bracket that is never closed, where an end, or what cannot stand inside it, shows it."""
    if stop.opener < 0 or stop.opener in stop.scan.closers:
        return None
    bracket = stop.scan.words[stop.opener].text
    closer = _CLOSERS[bracket]
    outside = ITEMS if bracket == "{" else ITEMS | STATEMENTS
    if closer not in stop.accepts or not (
        stop.word.kind == "end" or stop.word.text in outside | {")", "{", "}", "]"}
    ):
        return None
    return Diagnostic(
        "A120",
        f"expected `{closer}` to close the `{bracket}`, found {stop.found}",
        stop.span,
        related=_open_brackets(stop),
    )


def _end(stop: _Stop) -> Diagnostic | None:
    if stop.word.kind != "end":
        return None
    return Diagnostic(
        "A142",
        f"expected {expected_words(stop.accepts)}, found the end of the file",
        stop.span,
        related=_open_brackets(stop),
    )


def _open_brackets(stop: _Stop) -> tuple[tuple[str, Span], ...]:
    """The places of the brackets that are open and never closed, the innermost first."""
    related: list[tuple[str, Span]] = []
    opener = stop.opener
    while opener >= 0 and len(related) < 3:
        if opener not in stop.scan.closers:
            bracket = stop.scan.words[opener].text
            related.append((f"this `{bracket}` is never closed", stop.scan.span(opener)))
        opener = stop.scan.enclosing[opener]
    return tuple(related)


def _sign(stop: _Stop) -> Diagnostic | None:
    """A sign that has its place elsewhere: `=`, `..`, `{`, a second comparison."""
    text = stop.word.text
    before = stop.before.text if stop.before else ""
    if text == "=" and before in ALONE:
        return stop.diagnostic("A133", "the next statement", f"write `{before}` without a value")
    if text == "=" and before in STATEMENTS and stop.after:
        advice = "delete the `=`: a keyword and its value need nothing between them"
        if before in ("let", "input"):
            advice = f"write a name after `{before}`"
        return stop.diagnostic("A133", expected_words(stop.accepts), advice)
    if text == "=" and "==" in stop.accepts:
        return stop.diagnostic("A139", "`==` to compare", "write `==`; `=` gives a name its value")
    if text == "..":
        advice = "write one value; `in`, `layer`, `head` and unnamed arguments take a range"
        return stop.diagnostic("A140", "a single value", advice)
    if text == "{" and before == ".." and stop.index > 1:
        low = stop.scan.words[stop.index - 2].text
        advice = f"both ends of a range are written: `{low}..N`, the last one included"
        return stop.diagnostic("A140", "the end of the range", advice)
    if text == "{" and "NAME" in stop.accepts and "(" in stop.accepts:
        advice = "a list in braces stands only after `in`: `x in {1, 2, 4}`"
        if before in ("layer", "head"):
            advice = f"say which {before}s: `{before} 0..5 {{ … }}`, or `{before} all {{ … }}`"
        return stop.diagnostic("A141", "an expression", advice)
    if text in _COMPARISONS and text not in stop.accepts and stop.accepts & {"or", "and"}:
        earlier = [w.text for w in stop.scan.words[: stop.index] if w.text in _COMPARISONS]
        two = f"a {earlier[-1] if earlier else text} b and b {text} c"
        advice = f"only `<` and `<=` can be chained; write `{two}`"
        joined = stop.beside("&", "|")
        if joined is not None:
            sign = stop.scan.words[joined].text
            message = f"`{sign}` joins graphs, and cannot join comparisons"
            advice = f"write `{'and' if sign == '&' else 'or'}`"
            return Diagnostic("A143", message, stop.scan.span(joined), help=advice)
        return stop.diagnostic("A143", "a single comparison", advice)
    return None


def _separator(stop: _Stop) -> Diagnostic | None:
    """A missing `,` or `=` inside a list."""
    before = stop.before
    if before is not None and "if" in (stop.word.text, before.text) and "," in stop.accepts:
        advice = "there is no `if`: a condition stands alone, as in `where(q < k)`"
        if before.text == "if":
            # read as a name, where an expression starts
            span, message = stop.scan.span(stop.index - 1), "expected an expression, found `if`"
            return Diagnostic("A134", message, span, help=advice)
        advice += "; for conditions `b if a else c` is `a and b or not a and c`"
        return stop.diagnostic("A134", "an operator", advice)
    if "," not in stop.accepts or before is None or not stop.starts_operand:
        return None
    if stop.word.kind == "name" and stop.accepts & (STATEMENTS | {"{"}):
        return None
    if stop.word.text in ("AND", "And", "OR", "Or"):
        return None
    name = before.text
    if "=" in stop.accepts and (stop.word.kind == "number" or stop.after in (")", ",")):
        advice = f"write `{name} = {stop.word.text}`"
        if stop.word.kind == "name":
            advice += f", or `{name}, {stop.word.text}` for two arguments"
        return stop.diagnostic("A136", "`=` between a name and its value", advice)
    return stop.diagnostic("A135", "`,` between two elements", f"write `,` before {stop.found}")


def _statement(stop: _Stop) -> Diagnostic | None:
    if not stop.accepts & STATEMENTS:
        return None
    text = stop.word.text
    if text in ("at", "for") and stop.after == "n":
        advice: str | None = "a claim takes either `at n = …` or `for n >= …`, not both"
    elif text in _FOREIGN_WORDS:
        advice = _FOREIGN_WORDS[text]
    elif text.lower() in ("and", "or"):
        sign = "&" if text.lower() == "and" else "|"
        advice = f"`{sign}` joins graphs, and `{text.lower()}` joins conditions"
    elif text == ",":
        advice = "write `|` for the union of two graphs, or nothing between two statements"
    elif text in ("(", "true") and stop.before is not None and stop.before.text in ALONE:
        advice = f"write `{stop.before.text}` without {'brackets' if text == '(' else 'a value'}"
    elif text in ITEMS:
        advice = f"move `{text}` out of the attention, or write the missing `}}` before it"
    else:
        advice = _near_word(stop, stop.accepts)
        if advice is None and text in _CHANGES:
            advice = f"write `score {text}(…)`"
        elif advice is None and stop.word.kind == "name" and stop.after == "(":
            advice = f"write `attend {text}(…)`"
        elif text == "{" and stop.scan.words[stop.index - 2].text in _COUNTS:
            count = stop.scan.words[stop.index - 2].text
            advice = f"write `{count} N` for their number, and `{count[:-1]} 0 {{ … }}` for a block"
        elif advice is None and stop.word.kind == "name" and stop.after == "=":
            advice = f"write `let {text} = …`"
    starts = "a statement starts with " + ", ".join(sorted(STATEMENTS))
    return replace(
        stop.diagnostic("A132", expected_words(stop.accepts), advice),
        notes=() if advice else (starts,),
    )


def _item(stop: _Stop) -> Diagnostic | None:
    if not ITEMS <= stop.accepts:
        return None
    text = stop.word.text
    if text in STATEMENTS:
        advice: str | None = "statements stand between the braces of `attention NAME { … }`"
    else:
        advice = _FOREIGN_WORDS.get(text) or _near_word(stop, stop.accepts)
        whole = stop.scan.source.text.strip()
        if whole.endswith(".attn"):
            advice = "this is a file name, not the text of a spec; use `attnspec.load(path)`"
        elif advice is None and whole == text and stop.word.kind == "name":
            advice = "this is a name, not the text of a spec; for a spec that comes with attnspec"
            advice += f" use `attnspec.zoo({text!r})`"
    return stop.diagnostic("A131", expected_words(stop.accepts), advice)


def _operand(stop: _Stop) -> Diagnostic | None:
    if not {"NAME", "("} <= stop.accepts:
        return None
    advice = None
    if stop.word.text == "not":
        advice = "write `(not …)` with brackets here"
    elif stop.word.text == "]" and stop.before is not None and stop.before.text == "[":
        advice = "a list has at least one number: `[8, 16]`"
    elif stop.word.text == "|":
        advice = "`|` needs a graph or token set on each side; the absolute value is `abs(…)`"
    return stop.diagnostic("A133", expected_words(stop.accepts), advice)


def _advice(stop: _Stop) -> str | None:
    if stop.accepts == {"("} and stop.before is not None:
        return f"write `{stop.before.text}(…)`, or `{stop.before.text}()` without arguments"
    before = stop.before.text if stop.before else ""
    if ".." in stop.accepts and "{" in stop.accepts:
        # behind the layers or heads of a block
        if stop.word.text == ":":
            return f"a range is `{before}..N`, the last one included"
        if stop.word.text in STATEMENTS:
            return f"write the statements in braces: `{{ {stop.word.text} … }}`"
        if stop.word.text in ("and", "|", "&", "+") and stop.after.isalnum():
            return f"commas separate layers and heads: `{before}, {stop.after}`"
    if before == "sequence" and stop.word.kind == "number":
        return "delete the statement, since a call tells the length; for a grid write `grid(H, W)`"
    if before == "for" and "n" in stop.accepts:
        return "write `for n >= 64` to claim it for every length from 64 on"
    if stop.accepts == {">="} and stop.word.text == ">" and stop.after.isdecimal():
        return f"write `for n >= {int(stop.after) + 1}`"
    if stop.accepts == {">="}:
        return "write `for n >= …`, or `at n = …` for some lengths alone"
    if stop.accepts == {"n"} and stop.word.kind == "number":
        return f"write `at n = {stop.word.text}`"
    if stop.accepts == {"(", "{"} and stop.word.text == "-" and stop.before and stop.after:
        return f"names have underscores: `{stop.before.text}_{stop.after}`"
    if "NAME" in stop.accepts and stop.word.text in RESERVED:
        return f"`{stop.word.text}` is a reserved word: choose another name"
    return _near_word(stop, stop.accepts)


def _near_word(stop: _Stop, accepts: Iterable[str]) -> str | None:
    if stop.word.kind != "name":
        return None
    return did_you_mean(stop.word.text, [word for word in accepts if word.islower()])


# --- words -------------------------------------------------------------------------------------


def expected_words(accepts: Collection[str]) -> str:
    """What could stand there, for a reader: "`)`, `,` or an operator"."""
    rest = set(accepts)
    phrases = []
    if {"NAME", "("} <= rest:
        phrases.append("an expression")
        rest -= _OPERAND
    if rest & {"or", "*", "and"}:
        phrases.append("an operator")
        rest -= _OPERATORS | {"(", "[", "."}
    if len(rest & STATEMENTS) > 1:
        phrases.append("a statement")
        rest -= STATEMENTS
    phrases.extend(_PHRASES[word] for word in rest if word in _PHRASES)
    signs = [f"`{word}`" for word in rest if word not in _PHRASES]
    words = [*sorted(signs), *sorted(phrases)]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
