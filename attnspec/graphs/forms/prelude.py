"""The predicate of a pattern: what `patterns/prelude.attn` and the tokens of a set say of a pair.

Whoever wants to know something of a static pattern asks its predicate, so that a pattern and the
same pairs written as `where` are known alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path

from attnspec.grammar import nodes
from attnspec.grammar.parser import parse
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.relation import Relation
from attnspec.graphs.token_sets import TokenSet, combined, member
from attnspec.ir.parameters import Parameter
from attnspec.ir.program import Leaf, TokenCompound, Tokens
from attnspec.ir.scalars import FUNCTIONS, Apply, Scalar, Symbol
from attnspec.text.diagnostics import InternalError
from attnspec.text.source import Source

PRELUDE = Path(__file__).parents[1] / "patterns" / "prelude.attn"

BEHIND = Apply("<=", (Symbol("k"), Symbol("q")))
"""The predicate of keys up to the query."""


def predicate_of_leaf(leaf: Leaf, *, limited: bool = True) -> Scalar | None:
    """The predicate of a pattern in a term, None where it has none; what would be refused, such as
    a size below its least, may be said anything of, and unless `limited` is left as it is."""
    return _predicate(leaf.pattern, dict(leaf.arguments), limited)


@lru_cache(maxsize=256)
def predicate_of(relation: Relation) -> Scalar | None:
    """The predicate of a pattern with its arguments filled in, n left open in those of `where`."""
    if relation.name not in BY_NAME or type(relation) is not BY_NAME[relation.name]:
        return None
    return _predicate(relation.name, vars(relation))


@lru_cache(maxsize=1)
def definitions() -> Mapping[str, nodes.Graph]:
    """The graphs of the prelude by their names."""
    file = parse(Source(PRELUDE.name, PRELUDE.read_text("utf-8")))
    return {item.name: item for item in file.items if isinstance(item, nodes.Graph)}


def _predicate(pattern: str, given: Mapping[str, object], limited: bool = True) -> Scalar | None:
    if pattern == "where":
        return given["predicate"]  # type: ignore[return-value]
    if "tokens" in given:
        parts = [_member(given["tokens"], Symbol(side)) for side in BY_NAME[pattern].sides]
        return combined("|", parts) if len(parts) > 1 else parts[0]
    definition = definitions().get(pattern)
    if definition is None:
        return None
    values: dict[str, Scalar] = {name: Symbol(name) for name in ("q", "k", "n")}
    least = _least(pattern)
    for parameter in definition.parameters:
        value = given.get(parameter.name)
        if value is None and parameter.default is not None:
            values[parameter.name] = _scalar(parameter.default, values)
        elif isinstance(value, int | Symbol | Apply):
            values[parameter.name] = _at_least(value, least[parameter.name]) if limited else value
        else:
            return None
    body = definition.body
    if not isinstance(body, nodes.Call) or body.name != "where":
        raise InternalError(f"`{pattern}` is not a `where` in the prelude")
    return _scalar(body.arguments[0].value, values)


def _least(pattern: str) -> dict[str, float | None]:
    """The least value of each argument of a pattern."""
    entries = fields(BY_NAME[pattern])  # type: ignore[arg-type]
    parameters: dict[str, Parameter] = {e.name: e.metadata["parameter"] for e in entries}
    return {name: parameter.least for name, parameter in parameters.items()}


def _at_least(value: Scalar, least: float | None) -> Scalar:
    """A size that is refused below its least value."""
    return value if least is None or isinstance(value, int) else Apply("max", (int(least), value))


def _member(tokens: object, position: Symbol) -> Scalar | None:
    """Whether a position is one of the tokens, None where inputs say so."""
    match tokens:
        case TokenSet():
            return tokens.predicate(position)
        case Tokens(kind, values):
            return member(kind, values, position)
        case TokenCompound(op, terms):
            return combined(op, [_member(term, position) for term in terms])
        case _:
            return None


# --- expressions ----------------------------------------------------------------------------------


def _scalar(node: nodes.Expression, values: Mapping[str, Scalar]) -> Scalar:
    """The scalar of an expression of the prelude, which says nothing that is wrong."""
    match node:
        case nodes.Integer(value) | nodes.Boolean(value):
            return value
        case nodes.Name(name):
            return values[name]
        case nodes.Call(name, arguments) if name in FUNCTIONS:
            return Apply(name, tuple(_scalar(each.value, values) for each in arguments))
        case nodes.Chain(operands, operators):
            first, *others = (_scalar(each, values) for each in operands)
            for operator, other in zip(operators, others, strict=True):
                first = Apply(operator, (first, other))
            return first
        case _:
            raise InternalError(f"the prelude has no {type(node).__name__}")
