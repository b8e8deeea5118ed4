"""What is a number of the language, and what people write instead."""

from __future__ import annotations

import math
import re

from attnspec.text.diagnostics import Diagnostic
from attnspec.text.source import Span

MAX_INTEGER = 2**63 - 1

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
                "A111",
                f"an integer is at most {MAX_INTEGER:,}, found one of {len(digits):,} digits",
                span,
            )
        return None
    if _REAL.fullmatch(value):
        mantissa = re.split("[eE]", value)[0]
        real = float(value)
        if math.isinf(real) or (real == 0 and re.search("[1-9]", mantissa)):
            return Diagnostic(
                "A112", "a number between 5e-324 and 1.8e308 is required, found one beyond it", span
            )
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
        return f"write `{plain}`: underscores stand between digits, and no zero comes first"
    if re.fullmatch(r"\.[0-9]+", value):
        return f"write `0{value}`"
    if re.fullmatch(r"[0-9]+\.", value):
        return f"write `{value}0`"
    if re.fullmatch(r"[0-9]+[A-Za-z_][A-Za-z0-9_]*", value):
        return "a name starts with a letter, and `*` is written out: `2 * x`"
    return None
