"""From lark's tree to `nodes`: with an explicit stack, so no input can exhaust Python's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lark import Token, Tree

from attnspec.grammar import nodes
from attnspec.grammar.scanner import too_deep
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import SpecError
from attnspec.text.source import Source, Span


class Piece(NamedTuple):
    """What a word or a rule became, and where it stands: a word its text, a list of elements a
    tuple, an expression in brackets the expression alone, whose own place is inside them."""

    value: Any
    span: Span


class _Frame(NamedTuple):
    rule: str
    children: Iterator[Tree[Token] | Token]
    pieces: list[Piece]
    depth: int


_LEVELS = frozenset("attention parameters scope chain prefix call range members list index".split())
"""The rules that make a tree deeper."""


def build(tree: Tree[Token], source: Source) -> Any:
    """The syntax tree of a text that the grammar accepts, a file or an expression.

    Raises SpecError (A191) where the tree would be more than `LIMITS.nesting` levels deep.
    """
    stack = [_Frame(str(tree.data), iter(tree.children), [], 0)]
    while True:
        frame = stack[-1]
        child = next(frame.children, None)
        if isinstance(child, Token):
            frame.pieces.append(_word(child, source))
        elif child is not None:
            rule = str(child.data)
            depth = frame.depth + (rule in _LEVELS)
            if depth > LIMITS.nesting:
                raise SpecError(too_deep(_first_word(child, source).span))
            stack.append(_Frame(rule, iter(child.children), [], depth))
        else:
            stack.pop()
            span = Span(source, 0, len(source.text))
            if frame.rule != "file":
                span = frame.pieces[0].span.to(frame.pieces[-1].span)
            value = _RULES[frame.rule](frame.pieces, span)
            if not stack:
                return value
            stack[-1].pieces.append(Piece(value, span))


def _word(token: Token, source: Source) -> Piece:
    start = token.start_pos or 0
    return Piece(str(token), Span(source, start, start + len(token)))


def _first_word(tree: Tree[Token], source: Source) -> Piece:
    child: Tree[Token] | Token = tree
    while not isinstance(child, Token):
        child = child.children[0]
    return _word(child, source)


# --- a function for each rule of the grammar: its pieces, and the place of all of them ------------


def _name(p: list[Piece], span: Span) -> nodes.Name:
    return nodes.Name(p[0].value, span=span)


def _import(p: list[Piece], span: Span) -> nodes.Import:
    names = tuple(_name([name], name.span) for name in p[3::2])
    return nodes.Import(p[1].value[1:-1], names, span=span, path_span=p[1].span)


def _definition(p: list[Piece], span: Span) -> nodes.Graph | nodes.Attention:
    graph = p[0].value == "graph"
    kind: type[nodes.Graph] | type[nodes.Attention] = nodes.Graph if graph else nodes.Attention
    parameters = p[2].value if len(p) == 4 + graph else ()
    return kind(p[1].value, parameters, p[-1].value, span=span, name_span=p[1].span)


def _parameter(p: list[Piece], span: Span) -> nodes.Parameter:
    default = p[2].value if len(p) > 1 else None
    return nodes.Parameter(p[0].value, default, span=span, name_span=p[0].span)


def _input(p: list[Piece], span: Span) -> nodes.Input:
    arguments = p[4].value if len(p) > 4 else ()
    name, kind = p[1], p[3]
    return nodes.Input(
        name.value, kind.value, arguments, span=span, name_span=name.span, kind_span=kind.span
    )


def _setting(p: list[Piece], span: Span) -> nodes.Setting:
    value = p[1].value if len(p) > 1 else None
    return nodes.Setting(p[0].value, value, span=span, keyword_span=p[0].span)


def _require(p: list[Piece], span: Span) -> nodes.Require:
    at, since = p[2].value if len(p) > 2 else (None, None)
    return nodes.Require(p[1].value, at, since, span=span)


def _places(
    p: list[Piece], span: Span
) -> tuple[tuple[nodes.Integer, ...] | None, nodes.Expression | None]:
    """The lengths of `at`, and the bound of `for`: one of them."""
    if p[0].value == "for":
        return None, p[3].value
    return tuple(_integer([size], size.span) for size in p[3::2]), None


def _chain(p: list[Piece], span: Span) -> nodes.Chain:
    operands, operators = p[::2], p[1::2]
    return nodes.Chain(
        tuple(operand.value for operand in operands),
        tuple(operator.value for operator in operators),
        span=span,
        operator_spans=tuple(operator.span for operator in operators),
    )


def _integer(p: list[Piece], span: Span) -> nodes.Integer:
    text = p[0].value
    return nodes.Integer(int(text.replace("_", "")), written=text, span=span)


def _argument(p: list[Piece], span: Span) -> nodes.Argument:
    if len(p) == 1:
        return nodes.Argument(None, p[0].value, span=span)
    return nodes.Argument(p[0].value, p[2].value, span=span, name_span=p[0].span)


def _list(p: list[Piece], span: Span) -> tuple[Any, ...]:
    return tuple(piece.value for piece in p if not isinstance(piece.value, str))


_RULES: dict[str, Callable[[list[Piece], Span], Any]] = {
    "file": lambda p, span: nodes.File(_list(p, span), span=span),
    "import": _import,
    "graph": _definition,
    "attention": _definition,
    "parameters": _list,
    "parameter": _parameter,
    "body": _list,
    "let": lambda p, span: nodes.Let(p[1].value, p[3].value, span=span, name_span=p[1].span),
    "input": _input,
    "setting": _setting,
    "scope": lambda p, span: nodes.Scope(
        p[0].value, p[1].value, p[2].value, span=span, items_span=p[1].span
    ),
    "set": _list,
    "require": _require,
    "places": _places,
    "chain": _chain,
    "prefix": lambda p, span: nodes.Prefix(p[0].value, p[1].value, span=span),
    "integer": _integer,
    "real": lambda p, span: nodes.Real(float(p[0].value), written=p[0].value, span=span),
    "boolean": lambda p, span: nodes.Boolean(p[0].value == "true", span=span),
    "name": _name,
    "attribute": lambda p, span: nodes.Attribute(_name(p[:1], p[0].span), p[2].value, span=span),
    "call": lambda p, span: nodes.Call(p[0].value, p[1].value, span=span, name_span=p[0].span),
    "arguments": _list,
    "argument": _argument,
    "group": lambda p, span: p[1].value,
    "range": lambda p, span: nodes.Range(p[0].value, p[2].value, span=span),
    "members": lambda p, span: nodes.Members(_list(p, span), span=span),
    "list": lambda p, span: nodes.List(_list(p, span), span=span),
    "index": lambda p, span: nodes.Index(p[0].value, p[2].value, span=span),
}
