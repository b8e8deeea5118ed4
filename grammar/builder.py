"""From lark's tree to `nodes`: with an explicit stack, so no input can exhaust Python's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lark import Token, Tree

from attnspec.grammar import nodes
from attnspec.grammar.scanner import MAX_NESTING, too_deep
from attnspec.text.diagnostics import InternalError, SpecError
from attnspec.text.source import Source, Span


@dataclass(frozen=True)
class _Word:
    text: str
    span: Span


@dataclass(frozen=True)
class _Group:
    """An expression in brackets: the tree forgets them, the spans around it do not."""

    inside: nodes.Expression
    span: Span


@dataclass(frozen=True)
class _List:
    """The elements of an argument list, a body, a set: what stands between commas or braces."""

    elements: tuple[Piece, ...]
    span: Span


Node: TypeAlias = (
    nodes.File | nodes.Item | nodes.Statement | nodes.Expression | nodes.Parameter | nodes.Argument
)
Piece: TypeAlias = Node | _Word | _Group | _List

_EXPRESSIONS = (
    nodes.Integer,
    nodes.Real,
    nodes.Boolean,
    nodes.Name,
    nodes.Attribute,
    nodes.Call,
    nodes.Prefix,
    nodes.Chain,
    nodes.Range,
    nodes.Members,
)

_LEVELS = frozenset(
    {"attention", "parameters", "scope", "chain", "prefix", "call", "range", "members"}
)
"""The rules that make a tree deeper."""


@dataclass
class _Frame:
    rule: str
    children: Iterator[Tree[Token] | Token]
    pieces: list[Piece]
    depth: int


def build(tree: Tree[Token], source: Source) -> nodes.File:
    """The syntax tree of a text that the grammar accepts.

    Raises SpecError (A191) where the tree would be more than `MAX_NESTING` levels deep.
    """
    stack = [_Frame("file", iter(tree.children), [], 0)]
    while True:
        frame = stack[-1]
        child = next(frame.children, None)
        if isinstance(child, Token):
            frame.pieces.append(_word(child, source))
        elif child is not None:
            rule = str(child.data)
            depth = frame.depth + (rule in _LEVELS)
            if depth > MAX_NESTING:
                raise SpecError(too_deep(_first_word(child, source).span))
            stack.append(_Frame(rule, iter(child.children), [], depth))
        else:
            stack.pop()
            if not stack:
                return _file(frame.pieces, source)
            span = frame.pieces[0].span.to(frame.pieces[-1].span)
            stack[-1].pieces.append(_RULES[frame.rule](frame.pieces, span))


def _word(token: Token, source: Source) -> _Word:
    start = token.start_pos or 0
    return _Word(str(token), Span(source, start, start + len(token)))


def _first_word(tree: Tree[Token], source: Source) -> _Word:
    child: Tree[Token] | Token = tree
    while not isinstance(child, Token):
        child = child.children[0]
    return _word(child, source)


def _text(piece: Piece) -> _Word:
    if not isinstance(piece, _Word):
        raise InternalError(f"the parser gave a {type(piece).__name__} for a word")
    return piece


def _expression(piece: Piece) -> nodes.Expression:
    if isinstance(piece, _Group):
        return piece.inside
    if not isinstance(piece, _EXPRESSIONS):
        raise InternalError(f"the parser gave a {type(piece).__name__} for an expression")
    return piece


def _elements(piece: Piece) -> tuple[Piece, ...]:
    if not isinstance(piece, _List):
        raise InternalError(f"the parser gave a {type(piece).__name__} for a list")
    return piece.elements


def _arguments(piece: Piece) -> tuple[nodes.Argument, ...]:
    return tuple(e for e in _elements(piece) if isinstance(e, nodes.Argument))


def _head(pieces: Sequence[Piece]) -> tuple[_Word, tuple[nodes.Parameter, ...]]:
    """The name and the parameters at the start of a graph or an attention."""
    parameters: tuple[Piece, ...] = ()
    if isinstance(pieces[2], _List) and not _is_body(pieces[2]):
        parameters = pieces[2].elements
    return _text(pieces[1]), tuple(p for p in parameters if isinstance(p, nodes.Parameter))


def _is_body(piece: _List) -> bool:
    return piece.span.text.startswith("{")


def _body(piece: Piece) -> tuple[nodes.Statement, ...]:
    kinds = (nodes.Let, nodes.Input, nodes.Setting, nodes.Scope, nodes.Require)
    return tuple(e for e in _elements(piece) if isinstance(e, kinds))


# --- one function per rule of the grammar -------------------------------------------------------


def _file(pieces: Sequence[Piece], source: Source) -> nodes.File:
    kinds = (nodes.Import, nodes.Graph, nodes.Attention)
    items = tuple(piece for piece in pieces if isinstance(piece, kinds))
    return nodes.File(items, span=Span(source, 0, len(source.text)))


def _import(pieces: Sequence[Piece], span: Span) -> Piece:
    path = _text(pieces[1])
    names = tuple(nodes.Name(_text(name).text, span=name.span) for name in pieces[3::2])
    return nodes.Import(path.text[1:-1], names, span=span, path_span=path.span)


def _graph(pieces: Sequence[Piece], span: Span) -> Piece:
    name, parameters = _head(pieces)
    return nodes.Graph(
        name.text, parameters, _expression(pieces[-1]), span=span, name_span=name.span
    )


def _attention(pieces: Sequence[Piece], span: Span) -> Piece:
    name, parameters = _head(pieces)
    return nodes.Attention(name.text, parameters, _body(pieces[-1]), span=span, name_span=name.span)


def _parameter(pieces: Sequence[Piece], span: Span) -> Piece:
    name = _text(pieces[0])
    default = _expression(pieces[2]) if len(pieces) > 1 else None
    return nodes.Parameter(name.text, default, span=span, name_span=name.span)


def _let(pieces: Sequence[Piece], span: Span) -> Piece:
    name = _text(pieces[1])
    return nodes.Let(name.text, _expression(pieces[3]), span=span, name_span=name.span)


def _input(pieces: Sequence[Piece], span: Span) -> Piece:
    name, kind = _text(pieces[1]), _text(pieces[3])
    arguments = _arguments(pieces[4]) if len(pieces) > 4 else ()
    return nodes.Input(
        name.text, kind.text, arguments, span=span, name_span=name.span, kind_span=kind.span
    )


def _setting(pieces: Sequence[Piece], span: Span) -> Piece:
    keyword = _text(pieces[0])
    value = _expression(pieces[1]) if len(pieces) > 1 else None
    return nodes.Setting(keyword.text, value, span=span, keyword_span=keyword.span)


def _scope(pieces: Sequence[Piece], span: Span) -> Piece:
    items = tuple(_expression(item) for item in _elements(pieces[1]))
    return nodes.Scope(
        _text(pieces[0]).text, items, _body(pieces[2]), span=span, items_span=pieces[1].span
    )


def _require(pieces: Sequence[Piece], span: Span) -> Piece:
    at = None
    if len(pieces) > 2:
        at = tuple(e for e in _elements(pieces[2]) if isinstance(e, nodes.Integer))
    return nodes.Require(_expression(pieces[1]), at, span=span)


def _places(pieces: Sequence[Piece], span: Span) -> Piece:
    return _List(tuple(_integer([size], size.span) for size in pieces[3::2]), span)


def _chain(pieces: Sequence[Piece], span: Span) -> Piece:
    operators = [_text(piece) for piece in pieces[1::2]]
    return nodes.Chain(
        tuple(_expression(piece) for piece in pieces[::2]),
        tuple(operator.text for operator in operators),
        span=span,
        operator_spans=tuple(operator.span for operator in operators),
    )


def _prefix(pieces: Sequence[Piece], span: Span) -> Piece:
    return nodes.Prefix(_text(pieces[0]).text, _expression(pieces[1]), span=span)


def _integer(pieces: Sequence[Piece], span: Span) -> Piece:
    return nodes.Integer(int(_text(pieces[0]).text.replace("_", "")), span=span)


def _real(pieces: Sequence[Piece], span: Span) -> Piece:
    return nodes.Real(float(_text(pieces[0]).text), span=span)


def _boolean(pieces: Sequence[Piece], span: Span) -> Piece:
    return nodes.Boolean(_text(pieces[0]).text == "true", span=span)


def _name(pieces: Sequence[Piece], span: Span) -> Piece:
    return nodes.Name(_text(pieces[0]).text, span=span)


def _attribute(pieces: Sequence[Piece], span: Span) -> Piece:
    base = _text(pieces[0])
    return nodes.Attribute(nodes.Name(base.text, span=base.span), _text(pieces[2]).text, span=span)


def _call(pieces: Sequence[Piece], span: Span) -> Piece:
    name = _text(pieces[0])
    return nodes.Call(name.text, _arguments(pieces[1]), span=span, name_span=name.span)


def _argument(pieces: Sequence[Piece], span: Span) -> Piece:
    if len(pieces) == 1:
        return nodes.Argument(None, _expression(pieces[0]), span=span)
    name = _text(pieces[0])
    return nodes.Argument(name.text, _expression(pieces[2]), span=span, name_span=name.span)


def _group(pieces: Sequence[Piece], span: Span) -> Piece:
    return _Group(_expression(pieces[1]), span)


def _range(pieces: Sequence[Piece], span: Span) -> Piece:
    return nodes.Range(_expression(pieces[0]), _expression(pieces[2]), span=span)


def _members(pieces: Sequence[Piece], span: Span) -> Piece:
    items = tuple(_expression(piece) for piece in pieces if not isinstance(piece, _Word))
    return nodes.Members(items, span=span)


def _list(pieces: Sequence[Piece], span: Span) -> Piece:
    return _List(tuple(piece for piece in pieces if not isinstance(piece, _Word)), span)


_RULES: dict[str, Callable[[Sequence[Piece], Span], Piece]] = {
    "import": _import,
    "graph": _graph,
    "attention": _attention,
    "parameters": _list,
    "parameter": _parameter,
    "body": _list,
    "let": _let,
    "input": _input,
    "setting": _setting,
    "scope": _scope,
    "set": _list,
    "require": _require,
    "places": _places,
    "chain": _chain,
    "prefix": _prefix,
    "integer": _integer,
    "real": _real,
    "boolean": _boolean,
    "name": _name,
    "attribute": _attribute,
    "call": _call,
    "arguments": _list,
    "argument": _argument,
    "group": _group,
    "range": _range,
    "members": _members,
}
