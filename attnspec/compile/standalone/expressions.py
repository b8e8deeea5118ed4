"""Expressions as text: what formulas give that are asked with these for operands.

A predicate is computed with operators. Asked with expressions in place of positions it answers with
an expression, the formula as Python; what is known of the ranges of numbers decides comparisons at
once, so that what is always true is not written down.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any, TypeAlias

from attnspec.compile.emit import WIDTH
from attnspec.ir.intervals import bounds
from attnspec.ir.scalars import NEGATED, Apply

LEVELS = {"|": 1, "&": 2, "+": 3, "-": 3, "*": 4, "/": 4, "//": 4, "%": 4, "**": 6}
LEVELS |= dict.fromkeys(NEGATED, 0)
"""How strongly operators bind; comparisons in brackets read better."""

SIGN, ATOM = 5, 7
"""How strongly a sign binds, or an opposite; and a name, a number or a call."""

_OPEN = float("inf")

REALS = "real", "score"
"""What is known to be a real number; the score may be no number at all."""

Operand: TypeAlias = Any
"""An expression, or a number or truth value of Python."""


Operator: TypeAlias = "Callable[[Expression, Operand], Operand]"


def _operator(op: str) -> tuple[Operator, Operator]:
    """An operator, and the one whose operands are turned."""
    return lambda a, b: joined(op, a, b), lambda a, b: joined(op, b, a)


@dataclass(frozen=True, eq=False)
class Expression:
    """A text of Python, whose outermost operator binds as `level` says.

    `kind` is "int", "real", "score" or "bool", or "number" for what an input says, which a call
    makes whole or real and may be no number at all; `tensor` is empty for a number of Python, and
    of a tensor the method by which it becomes one of reals. `low` and `high` bound its values.
    """

    text: str
    kind: str = "int"
    tensor: str = ""
    low: float = -_OPEN
    high: float = _OPEN
    level: int = ATOM

    __hash__ = object.__hash__

    __add__, __radd__ = _operator("+")
    __sub__, __rsub__ = _operator("-")
    __mul__, __rmul__ = _operator("*")
    __mod__, __rmod__ = _operator("%")
    __pow__, __rpow__ = _operator("**")
    __floordiv__, __rfloordiv__ = _operator("//")
    __truediv__, __rtruediv__ = _operator("/")
    __and__, __rand__ = _operator("&")
    __or__, __ror__ = _operator("|")
    (__eq__, _), (__ne__, _), (__lt__, _), (__le__, _), (__gt__, _), (__ge__, _) = map(
        _operator, ("==", "!=", "<", "<=", ">", ">=")
    )

    def __neg__(self) -> Operand:
        if self.kind == "bool":
            return -counted(self)
        text, ends = f"-{_within(self, SIGN)}", ends_of("neg", self)
        return Expression(text, self.kind, self.tensor, *ends, level=SIGN)

    def __abs__(self) -> Expression:
        return call("abs", self, kind=self.kind)

    def __xor__(self, other: Operand) -> Operand:
        """Other than `True` is not asked for: it is how formulas say `not`."""
        sign, level = ("~", SIGN) if self.tensor else ("not ", 0)
        return Expression(f"{sign}{_within(self, level)}", "bool", self.tensor, level=level)


def joined(op: str, a: Operand, b: Operand) -> Operand:
    """An operator of two operands, or what it comes to."""
    ends = -_OPEN, _OPEN
    if op in ("&", "|"):
        for one, other in ((a, b), (b, a)):
            if isinstance(other, bool):
                return other if other is (op == "|") else one
        kind = "bool"
    elif op in NEGATED:
        low, high = ends_of(op, a, b)
        # what is not a number compares false, whatever its bounds
        if low == high and not {"number", "score"} & {kind_of(a), kind_of(b)}:
            return bool(high)
        a, b, _ = alike(a, b)
        kind = "bool"
    else:
        if _is_neutral(op, b) or (op == "%" and ends_of("//", a, b) == (0, 0)):
            return a
        if op in "+*-" and _is_neutral(op, a):
            return -b if op == "-" else b
        a, b, kind = alike(a, b, op == "/")
        ends = ends_of(op, a, b)
        if op == "%" and kind == "int" and isinstance(b, int) and b > 0:
            ends = ends[0], min(ends[1], b - 1)
    level = LEVELS[op]
    # comparisons do not chain, powers group to the right, all others to the left
    first, second = _within(a, level + (level in (0, 6))), _within(b, level + 1)
    if op == "|":
        # an `&` in it is put in brackets for whoever reads it
        first, second = (
            f"({each.text})" if isinstance(each, Expression) and each.level == 2 else text
            for each, text in ((a, first), (b, second))
        )
    return Expression(f"{first} {op} {second}", kind, tensor_of(a, b), *ends, level=level)


def _is_neutral(op: str, x: Operand) -> bool:
    return not isinstance(x, Expression) and {"+": 0, "-": 0, "*": 1, "//": 1}.get(op) == x


def ends_of(op: str, *operands: Operand) -> tuple[float, float]:
    """The least and greatest number that an operation may make; `max` of one operand is its own."""
    low, high = bounds(Apply(op, operands), {})
    return float(low), float(high)


def call(text: str, *args: Operand, kind: str = "int") -> Expression:
    """A call of a function, of a method of the first argument where the text begins with a dot; a
    tensor where an argument is one."""
    owner, args_shown = (_within(args[0], ATOM), args[1:]) if text[0] == "." else ("", args)
    shown = f"{owner}{text}({', '.join(map(flat, args_shown))})"
    return Expression(shown, kind, tensor_of(*args))


def tensor_of(*operands: Operand) -> str:
    """How the first of some operands that is a tensor becomes one of reals; empty where none is."""
    return next((x.tensor for x in operands if getattr(x, "tensor", "")), "")


def kind_of(operand: Operand) -> str:
    """What an operand is: "int", "real", "bool" or "number"."""
    if isinstance(operand, Expression):
        return operand.kind
    return "bool" if isinstance(operand, bool) else "int" if isinstance(operand, int) else "real"


def real(operand: Operand) -> Operand:
    """A tensor of whole numbers as one of reals; anything else as it is."""
    if not tensor_of(operand) or operand.kind in REALS or operand.text.endswith(operand.tensor):
        return operand
    kind = "number" if operand.kind == "number" else "real"
    text = f"{_within(operand, ATOM)}{operand.tensor}"
    return Expression(text, kind, operand.tensor, operand.low, operand.high)


def counted(operand: Operand) -> Operand:
    """A tensor of truth values as one of ones and zeros; anything else as it is."""
    if not tensor_of(operand) or operand.kind != "bool":
        return operand
    return Expression(f"{_within(operand, ATOM)}.long()", "int", operand.tensor, 0, 1)


def alike(a: Operand, b: Operand, is_real: bool = False) -> tuple[Operand, Operand, str]:
    """Operands of one kind, and this kind: torch would take a tensor of whole numbers and a real
    number of Python for float32."""
    kinds = kind_of(a), kind_of(b)
    known = "real" if is_real or "real" in kinds else "int"
    kind = next((each for each in ("score", "number") if each in kinds), known)
    if is_real or kind == "score" or "real" in kinds:
        other = [tensor_of(x) and kind_of(x) in REALS for x in (b, a)]
        a, b = (x if is_known else real(x) for x, is_known in zip((a, b), other, strict=True))
    return counted(a), counted(b), kind


def flat(operand: Operand) -> str:
    """An operand in one line."""
    return operand.text if isinstance(operand, Expression) else repr(operand)


def _within(operand: Operand, level: int) -> str:
    """An operand of an operator that binds at `level`, in brackets if it needs them."""
    text = flat(operand)
    own = operand.level if isinstance(operand, Expression) else SIGN if text[0] == "-" else ATOM
    return text if own >= level else f"({text})"


def closure(
    head: str, doc: str, sizes: Mapping[str, str], before: Sequence[str], inner: Sequence[str]
) -> str:
    """The text of a function that returns an inner one, whose head comes first; `sizes` say what
    stands for names, if they are read."""
    text, (name, *statements) = "\n".join([*before, *inner[1:]]), inner
    read = [f"{x} = {value}" for x, value in sizes.items() if re.search(rf"\b{x}\b", text)]
    found = [f"def {head}:", f'    """{doc}"""']
    found += [x for each in (*read, *before) for x in broken(each, 4)]
    found += ["", f"    def {name}:", *(x for each in statements for x in broken(each, 8))]
    return "\n".join([*found, "", f"    return {name.partition('(')[0]}"])


def broken(statement: str, indent: int) -> list[str]:
    """A statement; where it is too long for a line, its expression in brackets, on lines that begin
    with `|` or `&` as far as these are short enough."""
    indent += len(statement) - len(statement := statement.lstrip())
    margin, width = " " * indent, WIDTH - indent - 4
    if len(statement) <= width + 4:
        return [f"{margin}{statement}"]
    head = re.match(r"return |[\w(),* ]+ = |", statement)[0]  # type: ignore[index]
    glued = re.sub(r" (?![|&] )", "\0", statement.removeprefix(head))
    whole = {"width": width, "break_long_words": False, "break_on_hyphens": False}
    rows = [row for part in wrap(glued, **whole) for row in wrap(part.replace("\0", " "), **whole)]  # type: ignore[arg-type]
    return [f"{margin}{head}(", *(f"{margin}    {row}" for row in rows), f"{margin})"]
