"""Expressions that print themselves: what formulas give that are asked with these for operands.

`holds(q, k, n)` of a relation is written with operators alone. Asked with expressions in place of
positions it answers with an expression, the formula as Python; what is known of the ranges of
numbers decides comparisons at once, so that what is always true is not written down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

WIDTH = 100
"""The longest line."""

_LEVELS = {"|": 1, "&": 2, "+": 3, "-": 3, "*": 4, "/": 4, "//": 4, "%": 4, "~": 5, "neg": 5}
_LEVELS |= dict.fromkeys(("==", "!=", "<", "<=", ">", ">=", "not"), 0) | {"**": 6}

_DECIDED: dict[str, Callable[[Expression, Expression], bool | None]] = {
    "<": lambda a, b: True if a.high < b.low else False if a.low >= b.high else None,
    "<=": lambda a, b: True if a.high <= b.low else False if a.low > b.high else None,
    "==": lambda a, b: False if a.high < b.low or a.low > b.high else None,
}
_FLIPPED = {">": "<", ">=": "<="}

_OPEN = float("inf")


class UndecidedError(Exception):
    """A formula wants to know of an expression whether it is true."""


@dataclass(frozen=True, eq=False)
class Expression:
    """An operator or a call with its operands; a name is a call of nothing.

    `kind` is "int", "real" or "bool", or "number" for what an input says, which a call makes whole
    or real and may be no number at all; `tensor` whether it is a tensor rather than a number when
    the text runs. `low` and `high` bound its values; a position is `below` the name of a length.
    """

    op: str
    args: tuple[Operand, ...] = ()
    kind: str = "int"
    tensor: bool = False
    low: float = -_OPEN
    high: float = _OPEN
    below: str = ""

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise UndecidedError(flat(self))

    def __add__(self, other: Operand) -> Operand:
        return self if _is(other, 0) else _sum(self, other)

    def __radd__(self, other: Operand) -> Operand:
        return self if _is(other, 0) else _sum(other, self)

    def __sub__(self, other: Operand) -> Operand:
        return self if _is(other, 0) else _difference(self, other)

    def __rsub__(self, other: Operand) -> Operand:
        return _difference(other, self)

    def __mul__(self, other: Operand) -> Operand:
        return self if _is(other, 1) else _arithmetic("*", self, other)

    def __rmul__(self, other: Operand) -> Operand:
        return self if _is(other, 1) else _arithmetic("*", other, self)

    def __floordiv__(self, other: Operand) -> Operand:
        if _is(other, 1):
            return self
        if isinstance(other, int) and other > 0 and self.kind == "int":
            return _arithmetic("//", self, other, self.low // other, self.high // other)
        return _arithmetic("//", self, other)

    def __rfloordiv__(self, other: Operand) -> Operand:
        return _arithmetic("//", other, self)

    def __mod__(self, other: Operand) -> Operand:
        if isinstance(other, int) and other > 0:
            inside = self.low >= 0 and self.high < other
            return self if inside else _arithmetic("%", self, other, 0, other - 1)
        return _arithmetic("%", self, other)

    def __rmod__(self, other: Operand) -> Operand:
        return _arithmetic("%", other, self)

    def __truediv__(self, other: Operand) -> Operand:
        return _arithmetic("/", self, other, kind="real")

    def __rtruediv__(self, other: Operand) -> Operand:
        return _arithmetic("/", other, self, kind="real")

    def __pow__(self, other: Operand) -> Operand:
        return _arithmetic("**", self, other)

    def __rpow__(self, other: Operand) -> Operand:
        return _arithmetic("**", other, self)

    def __neg__(self) -> Operand:
        if self.op == "-":
            return _difference(self.args[1], self.args[0])
        return Expression("neg", (self,), self.kind, self.tensor, -self.high, -self.low)

    def __abs__(self) -> Expression:
        return Expression("abs", (self,), self.kind, self.tensor, 0)

    def __eq__(self, other: Operand) -> Operand:
        same = self is other and self.kind != "number"
        return True if same else _compared("==", self, other)

    def __ne__(self, other: Operand) -> Operand:
        same = self is other and self.kind != "number"
        return False if same else _compared("!=", self, other)

    def __lt__(self, other: Operand) -> Operand:
        return _compared("<", self, other)

    def __le__(self, other: Operand) -> Operand:
        return _compared("<=", self, other)

    def __gt__(self, other: Operand) -> Operand:
        return _compared(">", self, other)

    def __ge__(self, other: Operand) -> Operand:
        return _compared(">=", self, other)

    def __and__(self, other: Operand) -> Operand:
        if isinstance(other, bool):
            return self if other else False
        return _joined("&", self, other)

    def __or__(self, other: Operand) -> Operand:
        if isinstance(other, bool):
            return True if other else self
        return _joined("|", self, other)

    __rand__, __ror__ = __and__, __or__

    def __xor__(self, other: Operand) -> Operand:
        """Other than `True` is not asked for: it is how formulas say `not`."""
        if self.op in ("~", "not"):
            return self.args[0]
        return Expression("~" if self.tensor else "not", (self,), "bool", self.tensor)

    def __getitem__(self, index: tuple[object, Operand]) -> Expression:
        """Of an input [B, n], the entry of each sample at a position."""
        return Expression("[]", (self, index[1]), self.kind, True)


Operand: TypeAlias = Any
"""An expression, or a number or truth value of Python."""


def name(
    text: str,
    kind: str = "int",
    *,
    tensor: bool = False,
    low: float = -_OPEN,
    high: float = _OPEN,
    below: str = "",
) -> Expression:
    """A name, with the bounds `low` and `high` of what it stands for."""
    return Expression(text, (), kind, tensor, low, high, below)


def call(text: str, *args: Operand, kind: str = "int", low: float = -_OPEN) -> Expression:
    """A call of a function, a tensor where an argument is one."""
    return Expression(text, args, kind, any(is_tensor(arg) for arg in args), low)


def is_tensor(operand: Operand) -> bool:
    return isinstance(operand, Expression) and operand.tensor


def kind_of(operand: Operand) -> str:
    """What an operand is: "int", "real", "bool" or "number"."""
    if isinstance(operand, Expression):
        return operand.kind
    return "bool" if isinstance(operand, bool) else "int" if isinstance(operand, int) else "real"


def doubled(operand: Operand) -> Operand:
    """A tensor of integers as one of 64-bit reals; anything else as it is."""
    if not is_tensor(operand) or operand.kind == "real" or operand.op == ".double":
        return operand
    kind = "number" if operand.kind == "number" else "real"
    return Expression(".double", (operand,), kind, True, operand.low, operand.high)


def _is(operand: Operand, number: int) -> bool:
    return not isinstance(operand, Expression) and operand == number


def _low(operand: Operand) -> float:
    return operand.low if isinstance(operand, Expression) else operand


def _high(operand: Operand) -> float:
    return operand.high if isinstance(operand, Expression) else operand


def _sum(a: Operand, b: Operand) -> Expression:
    return _arithmetic("+", a, b, _low(a) + _low(b), _high(a) + _high(b))


def _difference(a: Operand, b: Operand) -> Operand:
    if _is(a, 0) and isinstance(b, Expression):
        return -b
    return _arithmetic("-", a, b, _low(a) - _high(b), _high(a) - _low(b))


def _arithmetic(
    op: str, a: Operand, b: Operand, low: float = -_OPEN, high: float = _OPEN, kind: str = "int"
) -> Expression:
    a, b, kind = alike(a, b, kind == "real")
    return Expression(op, (a, b), kind, is_tensor(a) or is_tensor(b), low, high)


def alike(a: Operand, b: Operand, real: bool = False) -> tuple[Operand, Operand, str]:
    """Operands of one kind, and this kind: torch would take a tensor of integers and a real number
    for float32."""
    kinds = kind_of(a), kind_of(b)
    real = real or "real" in kinds
    if real:
        a, b = doubled(a), doubled(b)
    return a, b, "number" if "number" in kinds else "real" if real else "int"


def _compared(op: str, a: Operand, b: Operand) -> Operand:
    if op in _FLIPPED:
        found = _verdict(_FLIPPED[op], b, a)
    elif op == "!=":
        verdict = _verdict("==", a, b)
        found = None if verdict is None else not verdict
    else:
        found = _verdict(op, a, b)
    if found is not None:
        return found
    a, b, _ = alike(a, b)
    return Expression(op, (a, b), "bool", is_tensor(a) or is_tensor(b))


def _verdict(op: str, a: Operand, b: Operand) -> bool | None:
    """What a comparison gives whatever its operands are, None where that is not known."""
    if "number" in (kind_of(a), kind_of(b)):
        # what is no number compares false, whatever its bounds
        return None
    if (op == "<" and _is_below(a, b)) or (op == "<=" and _is_below(b, a)):
        return op == "<"
    (left, more), (right, less) = _offset(a), _offset(b)
    if left is right:
        a, b = more, less
    bounds = [name("", low=_low(each), high=_high(each)) for each in (a, b)]
    return _DECIDED[op](*bounds)


def _is_below(position: Operand, length: Operand) -> bool:
    """Whether one is a position of a sequence of that length, or of one that is no longer."""
    if not isinstance(position, Expression) or not isinstance(length, Expression):
        return False
    lengths = length.args if length.op == "max" else (length,)
    names = [each.op for each in lengths if isinstance(each, Expression)]
    return bool(position.below) and position.below in names


def _offset(operand: Operand) -> tuple[object, int]:
    """An operand as another one and a number that is added to it."""
    if isinstance(operand, Expression) and operand.op in "+-" and operand.args[1:]:
        number = operand.args[1]
        if isinstance(number, int):
            return operand.args[0], number if operand.op == "+" else -number
    return operand, 0


def _joined(op: str, a: Operand, b: Operand) -> Expression:
    return Expression(op, (a, b), "bool", is_tensor(a) or is_tensor(b))


# --- printing ------------------------------------------------------------------------------------


def flat(operand: Operand) -> str:
    """An operand in one line."""
    if not isinstance(operand, Expression):
        return repr(operand)
    op, args = operand.op, operand.args
    if not args:
        return op
    if op == "[]":
        return f"{flat(args[0])}[b, {flat(args[1])}]"
    if op.startswith("."):
        return f"{_within(args[0], 7)}{op}({', '.join(flat(arg) for arg in args[1:])})"
    if op not in _LEVELS:
        return f"{op}({', '.join(flat(arg) for arg in args)})"
    level = _LEVELS[op]
    if len(args) == 1:
        return f"{ {'neg': '-', 'not': 'not '}.get(op, op) }{_within(args[0], level)}"
    # comparisons do not chain, powers group to the right, all others to the left
    left = level if level not in (0, 6) else level + 1
    return f"{_operand(args[0], op, left)} {op} {_operand(args[1], op, level + 1)}"


def _operand(operand: Operand, op: str, level: int) -> str:
    """An operand of `|` is put in brackets if it is an `&`, for whoever reads it."""
    mixed = op == "|" and isinstance(operand, Expression) and operand.op == "&"
    return _within(operand, 3 if mixed else level)


def _within(operand: Operand, level: int) -> str:
    """An operand of an operator that binds as strongly as `level` says, in brackets if it needs
    them."""
    text = flat(operand)
    own = _LEVELS.get(operand.op, 7) if isinstance(operand, Expression) and operand.args else 7
    if not isinstance(operand, Expression) and text.startswith("-"):
        own = _LEVELS["neg"]
    return text if own >= level else f"({text})"


def lines(operand: Operand, head: str, indent: int = 4) -> list[str]:
    """`head` and the operand behind it, broken before `|` and `&` where a line is too long."""
    text = f"{' ' * indent}{head}{flat(operand)}"
    return [text] if len(text) <= WIDTH else _broken(operand, head, indent)


def _broken(operand: Operand, head: str, indent: int) -> list[str]:
    """The operands of a chain of one operator, each on lines of its own, in brackets."""
    margin = " " * indent
    if isinstance(operand, Expression) and operand.op == "~":
        return _broken(operand.args[0], f"{head}~", indent)
    found = [f"{margin}{head}("]
    if not isinstance(operand, Expression) or operand.op not in ("|", "&"):
        text = f"{margin}    {flat(operand)}"
        if len(text) > WIDTH and isinstance(operand, Expression) and len(operand.args) == 2:
            left, right = (_within(arg, 1) for arg in operand.args)
            found += [f"{margin}    {left}", f"{margin}    {operand.op} {right}"]
            return [*found, f"{margin})"]
        return [*found, text, f"{margin})"]
    for number, term in enumerate(_chain(operand, operand.op)):
        lead = f"{operand.op} " if number else ""
        text = f"{margin}    {lead}{_operand(term, operand.op, _LEVELS[operand.op] + 1)}"
        found += [text] if len(text) <= WIDTH else _broken(term, lead, indent + 4)
    return [*found, f"{margin})"]


def _chain(operand: Operand, op: str) -> list[Operand]:
    if isinstance(operand, Expression) and operand.op == op:
        return [*_chain(operand.args[0], op), operand.args[1]]
    return [operand]
