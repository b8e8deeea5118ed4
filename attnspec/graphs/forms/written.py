"""Terms as they are written in the language, for messages: names, parameters and imports are gone,
so that what a size reads is in sight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields

from attnspec.grammar import nodes
from attnspec.grammar.printer import level_of, print_expression
from attnspec.graphs.patterns import BY_NAME
from attnspec.ir.parameters import Parameter
from attnspec.ir.program import Compound, InputRef, Leaf, Mechanism, Term, TokenCompound, Tokens
from attnspec.ir.scalars import FUNCTIONS, NEGATED, SCORE_FUNCTIONS, Apply, Scalar, Symbol
from attnspec.text.source import Source, Span

_NOWHERE = Span(Source("", ""), 0, 0)


def written_scalar(scalar: Scalar) -> str:
    """A scalar or predicate."""
    return print_expression(_node(scalar))


def written_leaf(leaf: Leaf) -> str:
    """A pattern with the arguments that are not its defaults."""
    return print_expression(_node(leaf))


def written(term: Term) -> str:
    """A graph."""
    return print_expression(_node(term))


def written_mechanism(mechanism: Mechanism) -> str:
    """A mechanism with those of its arguments that are not plain numbers or options."""
    sizes = [(x, y) for x, y in mechanism.arguments if isinstance(y, Symbol | Apply)]
    return print_expression(_call(mechanism.name, sizes))


def _node(value: object) -> nodes.Expression:
    """The syntax of a term, a token set, a scalar or an option."""
    match value:
        case bool():
            return nodes.Boolean(value, span=_NOWHERE)
        case int():
            return nodes.Integer(value, span=_NOWHERE)
        case float():
            return nodes.Real(value, span=_NOWHERE)
        case Apply("within", (place, first, last)):
            return _joined("in", [place, nodes.Range(_node(first), _node(last), span=_NOWHERE)])
        case Apply("one_of", (place, *members)):
            return _joined("in", [place, nodes.Members(tuple(map(_node, members)), span=_NOWHERE)])
        case Apply("item", (index, *items)):
            numbers = nodes.List(tuple(map(_node, items)), span=_NOWHERE)
            return nodes.Index(numbers, _node(index), span=_NOWHERE)
        case Apply("neg" | "not" as op, (only,)) | Compound("~" as op, (only,)):
            return nodes.Prefix("-" if op == "neg" else op, _node(only), span=_NOWHERE)
        case TokenCompound("~", (only,)):
            return nodes.Prefix("~", _node(only), span=_NOWHERE)
        case Apply(op, args) if op in FUNCTIONS or op in SCORE_FUNCTIONS:
            return _call(op, [("", arg) for arg in args])
        case Compound("transpose" | "shift" as op, (term,), by):
            return _call(op, [("", term), *([] if by is None else [("by", by)])])
        case Apply(op, parts) | Compound(op, parts) | TokenCompound(op, parts):
            return _joined(op, parts)
        case Tokens("positions", values):
            pairs = zip(map(_node, values[::2]), map(_node, values[1::2]), strict=True)
            ends = (x if x == y else nodes.Range(x, y, span=_NOWHERE) for x, y in pairs)
            return _call("positions", [("", each) for each in ends])
        case Tokens(kind, values):
            kept = values[:1] if kind == "every" and values[1] == 0 else values
            return _call(kind, [("", each) for each in kept])
        case Leaf():
            return _leaf(value)
        case nodes.Node():
            return value  # type: ignore[return-value]
        case _:
            # a length has no position that it is read at
            name = value.name if isinstance(value, Symbol | InputRef) else str(value)
            return nodes.Name(name.removesuffix("()"), span=_NOWHERE)


def _call(name: str, arguments: Iterable[tuple[str, object]]) -> nodes.Call:
    given = (nodes.Argument(x or None, _node(y), span=_NOWHERE) for x, y in arguments)
    return nodes.Call(name, tuple(given), span=_NOWHERE, name_span=_NOWHERE)


def _joined(op: str, parts: Iterable[object]) -> nodes.Chain:
    """Operands of one operator; those of one level group from the left, powers from the right."""
    first, *others = map(_node, parts)
    operators = (op,) * len(others)
    chain = nodes.Chain((first, *others), operators, span=_NOWHERE)
    if not isinstance(first, nodes.Chain) or op in (*NEGATED, "in", "**"):
        return chain
    if level_of(first) != level_of(chain):
        return chain
    both = (*first.operands, *others), (*first.operators, *operators)
    return nodes.Chain(*both, span=_NOWHERE)


def _leaf(leaf: Leaf) -> nodes.Expression:
    values, arguments = dict(leaf.arguments), list[tuple[str, object]]()
    for entry in fields(BY_NAME[leaf.pattern]):  # type: ignore[arg-type]
        parameter: Parameter = entry.metadata["parameter"]
        value = values.get(entry.name)
        # the predicate beside inputs has their names
        if value is None or parameter.kind == "inputs":
            continue
        if entry.default is MISSING or value != entry.default:
            each = value if isinstance(value, tuple) else (value,)
            arguments += [("" if parameter.positional else entry.name, part) for part in each]
    word = BY_NAME[leaf.pattern].word or leaf.pattern
    return _call(word, arguments) if arguments else nodes.Name(word, span=_NOWHERE)
