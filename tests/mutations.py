"""Small changes of a program's meaning, found in its syntax tree: what a test should notice.

Left out are what no test can or need notice: annotations, decorators, messages of errors, constants
at the top level of a file (sizes of buffers and the like), type checks, patterns of `match` and the
promise of `zip` that both are as long.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """`source[start:end]`, in bytes, becomes `new`; `function` is the qualified name around it."""

    path: Path
    function: str
    line: int
    start: int
    end: int
    new: str

    def of(self, source: bytes) -> bytes:
        """The file with the change."""
        return source[: self.start] + self.new.encode() + source[self.end :]

    def lines(self, source: bytes) -> tuple[str, str]:
        """The lines that are changed and what they become."""
        first = source.rfind(b"\n", 0, self.start) + 1
        last = (source + b"\n").index(b"\n", self.end)
        before, after = source[first : self.start].decode(), source[self.end : last].decode()
        return source[first:last].decode(), before + self.new + after


_SWAPPED = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)),
    *((ast.In, ast.NotIn), (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv)),
    *((ast.BitAnd, ast.BitOr), (ast.LShift, ast.RShift)),
)
_OTHER: dict[type, type] = {
    **{one: other for pair in _SWAPPED for one, other in (pair, pair[::-1])},
    ast.Mod: ast.FloorDiv,
}
"""What stands in place of each operator."""

_TURNED = (ast.Sub, ast.FloorDiv, ast.Mod, ast.Div, ast.MatMult)
_DROPPED = (ast.Add, ast.Sub, ast.BitAnd, ast.BitOr, ast.Mult)

_PAIRS = (
    "min max any all minimum maximum amin amax argmin argmax floor ceil zeros ones"
    " zeros_like ones_like logical_and logical_or"
).split()
_OPPOSITE = {name: _PAIRS[at ^ 1] for at, name in enumerate(_PAIRS)}


def mutations_of(path: Path, source: bytes) -> list[Mutation]:
    """All changes of a file."""
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    found: dict[Mutation, None] = {}
    for function, part in _parts(ast.parse(source)):
        for old, new in _changes(part):
            if ast.dump(old) == ast.dump(new):
                continue
            start = starts[old.lineno - 1] + old.col_offset
            end = starts[(old.end_lineno or 0) - 1] + (old.end_col_offset or 0)
            text = ast.unparse(new) if isinstance(new, ast.stmt) else f"({ast.unparse(new)})"
            found[Mutation(path, function, old.lineno, start, end, text)] = None
    return list(found)


def _parts(node: ast.AST, name: str = "", before: str = "") -> Iterator[tuple[str, ast.AST]]:
    """What of a program a test may notice, and the qualified name around it, after `before`."""
    below: Iterable[ast.AST | None] = ast.iter_child_nodes(node)
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.keyword("strict"):
            return
        case ast.BinOp(op=ast.BitOr()) if _is_type(node):
            return
        case ast.ClassDef(own, body=body):
            name, before, below = f"{before}{own}", f"{before}{own}.", body
        case ast.FunctionDef(own, given, body):
            name, before = f"{before}{own}", f"{before}{own}.<locals>."
            below = [*given.defaults, *given.kw_defaults, *body]
        case ast.AnnAssign(value=value):
            below = [value]
        case ast.match_case(_, guard, body):
            below = [guard, *body]
        case ast.Call(ast.Name("isinstance" | "issubclass" | "cast" | "TypeVar"), given):
            below = given[:1]
    if name:
        yield name, node
    for part in below:
        if part is not None:
            yield from _parts(part, name, before)


def _is_type(node: ast.AST) -> bool:
    """Whether `A | B` is a union of types, as far as names tell."""
    named = [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
    types = ("int", "str", "float", "bool", "range")
    return bool(named) and all(each[0].isupper() or each in types for each in named)


Replaced = tuple[ast.expr | ast.stmt, ast.expr | ast.stmt]


def _changes(node: ast.AST) -> Iterator[Replaced]:
    """What may be replaced at a node, and what by."""
    match node:
        case ast.Compare(left, ops, others):
            for at, op in enumerate(ops):
                changed = [*ops[:at], _OTHER[type(op)](), *ops[at + 1 :]]
                yield node, ast.Compare(left, changed, others)
        case ast.BoolOp(op, values):
            yield node, ast.BoolOp(_OTHER[type(op)](), values)
            for at in range(len(values)):
                yield node, ast.BoolOp(op, values[:at] + values[at + 1 :])
        case ast.BinOp(left, op, right):
            if type(op) in _OTHER:
                yield node, ast.BinOp(left, _OTHER[type(op)](), right)
            if isinstance(op, _DROPPED):
                yield from ((node, left), (node, right))
            if isinstance(op, _TURNED):
                yield node, ast.BinOp(right, op, left)
        case ast.UnaryOp(ast.Not() | ast.Invert() | ast.USub(), operand):
            yield node, operand
        case ast.AugAssign(target, op, value):
            if type(op) in _OTHER:
                yield node, ast.AugAssign(target, _OTHER[type(op)](), value)
            yield node, ast.Pass()
        case ast.Expr(ast.Call()):
            yield node, ast.Pass()
        case ast.If(test) | ast.IfExp(test):
            yield test, ast.UnaryOp(ast.Not(), test)
        case ast.comprehension(ifs=tests):
            yield from ((test, ast.Constant(True)) for test in tests)
        case ast.Call(ast.Name(called) as name) if called in _OPPOSITE:
            yield name, ast.Name(_OPPOSITE[called])
        case ast.Call(ast.Attribute(owner, called) as name) if called in _OPPOSITE:
            yield name, ast.Attribute(owner, _OPPOSITE[called])
        case ast.Constant(bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(int(value)):
            yield from ((node, ast.Constant(x)) for x in (value + 1, value - 1) if x >= 0)
        case ast.Constant(float(value)):
            yield node, ast.Constant(value + 1.0)
