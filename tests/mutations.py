"""Small changes of a program's meaning, found in its syntax tree: what a test should notice.

Left out are what no test can or need notice: annotations, decorators, messages of errors, constants
at the top level of a file (sizes of buffers and the like), type checks, patterns of `match`, the
promise of `zip` that both are as long, and the `samples` of patterns, which are what tests try.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """`source[start:end]` of a file, in bytes, becomes `new`; `function` is its qualified name, or
    that of the class where it stands in none."""

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
        """The lines that are changed and what they become, each without the blanks around it."""
        texts = (source.decode().splitlines(), self.of(source).decode().splitlines())
        marked = list(difflib.ndiff(*texts))
        was, becomes = (
            "\n".join(line[2:].strip() for line in marked if line.startswith(mark))
            for mark in ("- ", "+ ")
        )
        return was, becomes

    def is_real(self, source: bytes) -> bool:
        """Whether what comes out is a program, and another one."""
        try:
            changed = ast.parse(self.of(source))
        except SyntaxError:
            return False
        return ast.dump(changed) != ast.dump(ast.parse(source))


def mutations_of(path: Path, source: bytes) -> list[Mutation]:
    """All changes of a file, in the order in which they stand there."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda each: (each.start, each.end, each.new))


_COMPARED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
_OTHER: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: (r"\|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
_TURNED = (ast.Sub, ast.FloorDiv, ast.Mod, ast.Div, ast.MatMult)
_DROPPED = (ast.Add, ast.Sub, ast.BitAnd, ast.BitOr, ast.Mult)

_PAIRS = (
    "min max any all minimum maximum amin amax argmin argmax floor ceil zeros ones"
    " zeros_like ones_like logical_and logical_or"
).split()
_OPPOSITE = {name: _PAIRS[at ^ 1] for at, name in enumerate(_PAIRS)}


class _Finder(ast.NodeVisitor):
    """Collects the changes of one file."""

    def __init__(self, path: Path, source: bytes) -> None:
        self.path, self.source = path, source
        self.found: list[Mutation] = []
        # the classes and functions around, and what stands before a name there
        self._names: list[str] = []
        self._behind = ""
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        end_line, end = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[end_line - 1] + end

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self.source[start:end].decode()

    def _add(self, line: int, start: int, end: int, new: str) -> None:
        if self._names:
            function = ".".join(self._names)
            self.found.append(Mutation(self.path, function, line, start, end, new))

    def _replace(self, node: ast.expr | ast.stmt, new: str) -> None:
        self._add(node.lineno, *self._span(node), new)

    def _between(self, left: ast.expr, right: ast.expr, sign: str, new: str) -> None:
        """Replaces the operator that stands between two operands."""
        low, high = self._span(left)[1], self._span(right)[0]
        found = list(re.finditer(sign, self.source[low:high].decode()))
        if len(found) == 1:
            before = self.source[low:high].decode()[: found[0].start()].encode()
            start = low + len(before)
            line = self.source[:start].count(b"\n") + 1
            self._add(line, start, start + len(found[0][0].encode()), new)

    def _leave_out(self, node: ast.AST) -> None:
        """Words, and errors whose messages are for tests of their own."""

    visit_Raise = visit_Assert = visit_JoinedStr = _leave_out

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":
            self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_match_case(self, node: ast.match_case) -> None:
        for part in (node.guard, *node.body):
            if part is not None:
                self.visit(part)

    def _visit_named(self, name: str, parts: list[ast.expr | ast.stmt], behind: str) -> None:
        self._names.append(f"{self._behind}{name}")
        before, self._behind = self._behind, behind
        for each in parts:
            self.visit(each)
        self._behind = before
        self._names.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_named(node.name, [*node.body], "")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name == "samples":
            return
        given = [x for x in (*node.args.defaults, *node.args.kw_defaults) if x is not None]
        self._visit_named(node.name, [*given, *node.body], "<locals>.")

    def visit_Compare(self, node: ast.Compare) -> None:
        for (left, right), op in zip(
            pairwise((node.left, *node.comparators)), node.ops, strict=True
        ):
            self._between(left, right, *_COMPARED[type(op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in pairwise(node.values):
            self._between(left, right, rf"\b{word}\b", other)
        for dropped in node.values:
            rest = [f"({self._text(x)})" for x in node.values if x is not dropped]
            self._replace(node, f"({f' {word} '.join(rest)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if _is_type(node):
            return
        left, right, kind = self._text(node.left), self._text(node.right), type(node.op)
        if kind in _OTHER:
            self._between(node.left, node.right, *_OTHER[kind])
        if kind in _DROPPED:
            self._replace(node, f"({left})")
            self._replace(node, f"({right})")
        if kind in _TURNED:
            low, high = self._span(node.left)[1], self._span(node.right)[0]
            sign = self.source[low:high].decode().strip("() \n")
            self._replace(node, f"(({right}) {sign} ({left}))")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.Invert | ast.USub):
            self._replace(node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        sign, other = _OTHER.get(type(node.op), ("", ""))
        if sign and isinstance(node.target, ast.expr):
            self._between(node.target, node.value, f"{sign}=", f"{other}=")
        self._replace(node, "pass")
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._replace(node, "pass")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in self._text(node.test):
            return
        self._replace(node.test, f"not ({self._text(node.test)})")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._replace(node.test, f"not ({self._text(node.test)})")
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._replace(test, "True")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else None
        called = node.func.id if isinstance(node.func, ast.Name) else called
        if called in ("isinstance", "issubclass", "cast", "TypeVar"):
            self.visit(node.args[0])
            return
        if called in _OPPOSITE:
            _, end = self._span(node.func)
            self._add(node.func.lineno, end - len(called), end, _OPPOSITE[called])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, int):
            self._replace(node, str(node.value + 1))
            if node.value > 0:
                self._replace(node, str(node.value - 1))
        elif isinstance(node.value, float):
            self._replace(node, repr(node.value + 1.0))


def _is_type(node: ast.BinOp) -> bool:
    """Whether `A | B` is a union of types, as far as names tell."""

    def named(side: ast.expr) -> Iterator[bool]:
        for part in ast.walk(side):
            if isinstance(part, ast.Name):
                yield part.id[:1].isupper() or part.id in ("int", "str", "float", "bool", "range")

    sides = [list(named(side)) for side in (node.left, node.right)]
    return isinstance(node.op, ast.BitOr) and any(sides) and all(all(side) for side in sides)
