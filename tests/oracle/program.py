"""The oracle's tree of a spec that the package has read: its program, node by node.

Nodes are known by the names of their classes and fields, so that no module of the package is
imported here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache, reduce
from typing import Any

from oracle import tree
from oracle.tree import Attention, Node, Scope, Statement, name, number


class Unknown(Exception):
    """The oracle has no meaning of its own for a spec."""


@cache
def attention_of(program: Any) -> Attention:
    """The tree of a program; raises Unknown."""
    if program.cross:
        raise Unknown("two sequences")
    layers, heads = program.layers, program.heads
    body: list[Statement] = []
    for layer in range(layers or 1):
        inner: list[Statement] = []
        for head in range(heads or 1):
            said = tuple(_statements(program.attend(layer, head)))
            inner += said if heads is None else [Scope("head", (head,), str(head), said)]
        body += inner if layers is None else [Scope("layer", (layer,), str(layer), tuple(inner))]
    return Attention(
        body=tuple(body),
        inputs=tuple(tree.Input(x.name, x.kind, x.at_most, x.size) for x in program.inputs),
        causal=program.causal,
        layers=layers,
        heads=heads,
        grid=tuple(map(scalar, program.grid or ())),
        extra_tokens=program.extra_tokens,
        claims=tuple(map(_claim, program.claims)),
    )


def _statements(attend: Any) -> Iterator[Node]:
    parts = []
    if attend.graph is not None:
        parts.append(graph(attend.graph))
    if attend.mechanism is not None:
        parts.append(Node("mechanism", (attend.mechanism.name, *_named(attend.mechanism))))
    yield Node("attend", (parts[0] if len(parts) == 1 else Node("g+", tuple(parts)),))
    if attend.scale is not None:
        yield Node("scale", (scalar(attend.scale),))
    for each in attend.scores:
        slopes = (Node("slopes", tuple(each.slopes)),) if each.slopes else ()
        yield Node("score", (each.name, *(slopes or _named(each))))
    yield Node("normalize", (attend.normalize,))


def _named(part: Any) -> list[Node]:
    return [Node("arg", (called, _value(value))) for called, value in part.arguments]


def _value(value: Any) -> Node:
    match parts_of(value):
        case ("str",):
            return name(value)
        case "InputRef", called, _:
            return name(called)
        case "Leaf" | "Compound", *_:
            return graph(value)
        case _:
            return scalar(value)


def parts_of(node: Any) -> tuple[Any, ...]:
    """The name of a node's class, and what its fields say but for its place in the text."""
    names = (each.name for each in fields(node) if each.compare) if is_dataclass(node) else ()
    return (type(node).__name__, *(getattr(node, name) for name in names))


def scalar(value: Any) -> Node:
    """A number, a name or an operation."""
    match parts_of(value):
        case "Symbol", called:
            return name(called)
        case "Apply", ("neg" | "not" | "and" | "or") as op, args:
            parts = tuple(map(scalar, args))
            return (
                Node(op, parts) if len(parts) < 3 else reduce(lambda a, b: Node(op, (a, b)), parts)
            )
        case "Apply", "within", args:
            return Node("in_range", tuple(map(scalar, args)))
        case "Apply", "one_of", args:
            return Node("in_set", tuple(map(scalar, args)))
        case "Apply", op, args if op[0].isalpha():
            return Node("call", (op, *map(scalar, args)))
        case "Apply", op, args:
            return Node(op, tuple(map(scalar, args)))
        case _:
            return number(value)


def tokens(term: Any) -> Node:
    """A token set."""
    match parts_of(term):
        case "InputRef", called, _:
            return Node("tokens", (called,))
        case "TokenCompound", "~", terms:
            return Node("t~", (tokens(terms[0]),))
        case "TokenCompound", op, terms:
            return reduce(lambda a, b: Node(f"t{op}", (a, b)), map(tokens, terms))
        case "Tokens", "positions", values:
            ends = [scalar(each) for each in values]
            pairs = zip(ends[::2], ends[1::2], strict=True)
            return Node("positions", tuple(Node("range", pair) for pair in pairs))
        case _:
            return Node(term.kind, tuple(map(scalar, term.values)))


def graph(term: Any) -> Node:
    """A pattern, or an operation on graphs."""
    match parts_of(term):
        case "Compound", "shift", terms, by:
            return Node("shift", (graph(terms[0]), scalar(by)))
        case "Compound", "transpose", terms, _:
            return Node("transpose", (graph(terms[0]),))
        case "Compound", "~", terms, _:
            return Node("g~", (graph(terms[0]),))
        case "Compound", op, terms, _:
            return reduce(lambda a, b: Node(f"g{op}", (a, b)), map(graph, terms))
        case _:
            return _pattern(term)


def _pattern(leaf: Any) -> Node:
    called, given = leaf.pattern, dict(leaf.arguments)
    match called:
        case "global" | "rows" | "columns":
            positional = [tokens(given["tokens"])]
        case "where" | "where_inputs":
            called, positional = "where", [scalar(given["predicate"])]
        case "neighborhood":
            extents: Any = given["extents"]
            positional = [scalar(each) for each in extents]
        case "same" | "prefix" | "chosen":
            positional = [_value(*given.values())]
        case _:
            return Node("pattern", (called, *_named(leaf)))
    return Node("pattern", (called, *(Node("arg", ("", each)) for each in positional)))


def _claim(claim: Any) -> tree.Claim:
    at = claim.at or ()
    if claim.terms:
        kind = "subset" if claim.kind == "subset" else "same"
        return tree.Claim(Node(kind, tuple(map(graph, claim.terms))), at)
    if claim.kind == "reach":
        return tree.Claim(Node("reach", (scalar(claim.value),)), at)
    if claim.compare is not None:
        return tree.Claim(Node("figure", (claim.kind, claim.compare, scalar(claim.value))), at)
    return tree.Claim(Node("flag", (claim.kind,)), at)
