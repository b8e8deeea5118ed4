"""Syntax tree to canonical text: `parse(print_file(t)) == t`, and printing twice changes nothing.

Four spaces of indent, one statement per line, a blank line between items, the fewest brackets that
keep the tree. Comments and single blank lines between statements stay where they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import assert_never

from attnspec.grammar import nodes
from attnspec.grammar.parser import parse
from attnspec.text.diagnostics import InternalError
from attnspec.text.source import Source

WIDTH = 100
INDENT = 4

_LOOSEST_FIRST = (
    ("or",),
    ("and",),
    ("not",),
    ("==", "!=", "<", "<=", ">", ">=", "in", "subset"),
    ("|",),
    ("&",),
    ("+", "-"),
    ("*", "/", "//", "%"),
    ("sign",),
    ("**",),
    ("atom",),
)
_LEVELS = {op: level for level, ops in enumerate(_LOOSEST_FIRST) for op in ops}
"""How tightly each operator binds."""

_NOT, _SUM, _SIGNED, _POWER, _ATOM = (_LEVELS[op] for op in ("not", "+", "sign", "**", "atom"))
_RANGE = -1


def print_expression(expression: nodes.Expression) -> str:
    """The expression on one line."""
    match expression:
        case nodes.Integer(value) | nodes.Real(value):
            # `4_096` and `1e-3` stay as somebody has written them
            return expression.written or repr(value)
        case nodes.Boolean(value):
            return "true" if value else "false"
        case nodes.Name(name):
            return name
        case nodes.Attribute(base, attribute):
            return f"{base.name}.{attribute}"
        case nodes.Call(name, arguments):
            return name + _arguments(arguments)
        case nodes.Prefix("not", operand):
            return "not " + _within(operand, _NOT)
        case nodes.Prefix(operator, operand):
            return operator + _within(operand, _SIGNED)
        case nodes.Chain():
            operands = _operands(expression)
            rest = zip(expression.operators, operands[1:], strict=True)
            return operands[0] + "".join(f" {operator} {operand}" for operator, operand in rest)
        case nodes.Range(first, last):
            return f"{_within(first, _SUM)}..{_within(last, _SUM)}"
        case nodes.Members(items):
            return "{" + ", ".join(_within(item, _SUM) for item in items) + "}"
        case nodes.List(items):
            return "[" + ", ".join(map(print_expression, items)) + "]"
        case nodes.Index(base, index):
            return f"{_within(base, _ATOM)}[{print_expression(index)}]"
        case _:
            assert_never(expression)


def level_of(expression: nodes.Expression) -> int:
    """How tightly the outermost operator of an expression binds."""
    match expression:
        case nodes.Chain(_, operators):
            return _LEVELS[operators[0]]
        case nodes.Prefix(operator, _):
            return _NOT if operator == "not" else _SIGNED
        case nodes.Range():
            return _RANGE
        case nodes.Integer(value) | nodes.Real(value) if value < 0:
            return _SIGNED
        case _:
            return _ATOM


def _within(expression: nodes.Expression, loosest: int) -> str:
    """The expression, in brackets if it binds more loosely than its place allows."""
    text = print_expression(expression)
    return f"({text})" if level_of(expression) < loosest else text


def _operands(chain: nodes.Chain) -> list[str]:
    level = level_of(chain)
    if level == _POWER:
        base, exponent = chain.operands
        return [_within(base, _ATOM), _within(exponent, _SIGNED)]
    first = _within(chain.operands[0], level + 1)
    rest = zip(chain.operators, chain.operands[1:], strict=True)
    return [first, *(_operand(operator, operand, level + 1) for operator, operand in rest)]


def _operand(operator: str, operand: nodes.Expression, loosest: int) -> str:
    if operator == "in" and isinstance(operand, nodes.Range):
        return print_expression(operand)
    return _within(operand, loosest)


def _arguments(arguments: Sequence[nodes.Argument]) -> str:
    return "(" + ", ".join(_argument(argument) for argument in arguments) + ")"


def _argument(argument: nodes.Argument) -> str:
    value = print_expression(argument.value)
    return value if argument.name is None else f"{argument.name} = {value}"


# --- files -------------------------------------------------------------------------------------


def canonical(source: Source) -> str:
    """The canonical text; raises InternalError rather than let it say anything else than before."""
    tree = parse(source)
    text = print_file(tree)
    if parse(Source(source.name, text)) != tree:
        raise InternalError(f"{source.name}: the canonical text says something else")
    return text


def print_file(file: nodes.File) -> str:
    """The whole file, ending with a line end; "" for a file of nothing."""
    lines: list[str] = []
    previous: nodes.Item | None = None
    for item in file.items:
        both_imports = isinstance(previous, nodes.Import) and isinstance(item, nodes.Import)
        if previous is not None and not (both_imports and not item.comments):
            lines.append("")
        lines.extend(_item(item))
        previous = item
    if file.closing:
        lines.extend([""] if file.items else [])
        lines.extend(file.closing)
    return "".join(f"{line}\n" for line in lines)


def _item(item: nodes.Item) -> Iterator[str]:
    yield from item.comments
    match item:
        case nodes.Import(path, names):
            line = f'from "{path}" import ' + ", ".join(name.name for name in names)
            yield from _with_comment([line], item.trailing)
        case nodes.Graph(name, parameters, body):
            yield from _with_comment(_defined(f"graph {name}", parameters, body), item.trailing)
        case nodes.Attention(name, parameters, _):
            yield from _braced(item, _head(f"attention {name}", parameters, " {"), 0)
        case _:
            assert_never(item)


def _defined(
    start: str, parameters: Sequence[nodes.Parameter], body: nodes.Expression
) -> list[str]:
    *head, last = _head(start, parameters, " =")
    return [*head, *_layout(last, body, 0, hanging=True)]


def _head(start: str, parameters: Sequence[nodes.Parameter], end: str) -> list[str]:
    """The name and parameters of an item, one parameter per line where a line is too short."""
    shown = [_parameter(parameter) for parameter in parameters]
    line = f"{start}({', '.join(shown)}){end}" if shown else start + end
    if len(line) <= WIDTH or not shown:
        return [line]
    return [f"{start}(", *(f"{' ' * INDENT}{parameter}," for parameter in shown), f"){end}"]


def _parameter(parameter: nodes.Parameter) -> str:
    if parameter.default is None:
        return parameter.name
    return f"{parameter.name} = {print_expression(parameter.default)}"


def _braced(node: nodes.Attention | nodes.Scope, head: list[str], indent: int) -> Iterator[str]:
    """`head`, which ends with the opening brace, the statements, and the closing brace."""
    if not (node.body or node.closing or node.trailing):
        yield from _with_comment([*head[:-1], head[-1] + "}"], node.ending)
        return
    yield from _with_comment(head, node.trailing)
    for statement in node.body:
        yield from _statement(statement, indent + INDENT)
    yield from _indented(node.closing, indent + INDENT)
    yield from _with_comment([" " * indent + "}"], node.ending)


def _statement(statement: nodes.Statement, indent: int) -> Iterator[str]:
    yield from _indented(statement.comments, indent)
    pad = " " * indent
    match statement:
        case nodes.Let(name, value):
            lines = _layout(f"{pad}let {name} =", value, indent, hanging=True)
        case nodes.Input(name, kind, arguments):
            lines = [f"{pad}input {name}: {kind}{_arguments(arguments) if arguments else ''}"]
        case nodes.Setting(keyword, value):
            lines = [pad + keyword]
            if value is not None:
                lines = _layout(pad + keyword, value, indent, hanging=False)
        case nodes.Require(claim, at, since):
            end = "" if at is None else " at n = " + ", ".join(map(print_expression, at))
            end += "" if since is None else f" for n >= {_within(since, _SUM)}"
            lines = _layout(f"{pad}require", claim, indent, hanging=False, end=end)
        case nodes.Scope(kind, items, _):
            shown = ", ".join(_set_item(item) for item in items)
            yield from _braced(statement, [f"{pad}{kind} {shown} {{"], indent)
            return
        case _:
            assert_never(statement)
    yield from _with_comment(lines, statement.trailing)


def _set_item(item: nodes.Expression) -> str:
    return print_expression(item) if isinstance(item, nodes.Range) else _within(item, _SUM)


def _layout(
    start: str, value: nodes.Expression, indent: int, *, hanging: bool, end: str = ""
) -> list[str]:
    """`start value end` on one line, or, too long, one operand of its outermost chain per line.

    The operands stand under each other, behind `start`; if `hanging`, below it.
    """
    line = f"{start} {print_expression(value)}{end}"
    if len(line) <= WIDTH or not isinstance(value, nodes.Chain):
        return [line]
    column = indent + INDENT + 2 if hanging else len(start) + 1
    first, *rest = _operands(value)
    lines = [start, " " * column + first] if hanging else [f"{start} {first}"]
    for operator, operand in zip(value.operators, rest, strict=True):
        lines.append(f"{operator} ".rjust(column) + operand)
    lines[-1] += end
    return lines


def _indented(comments: Sequence[str], indent: int) -> Iterator[str]:
    for comment in comments:
        yield " " * indent + comment if comment else ""


def _with_comment(lines: list[str], comment: str | None) -> list[str]:
    return lines if comment is None else [*lines[:-1], f"{lines[-1]}  {comment}"]
