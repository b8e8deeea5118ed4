"""Specs as trees of their own, and the text they are written as."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

Part: TypeAlias = "Node | int | float | str"


@dataclass(frozen=True)
class Node:
    """An expression: a kind, and its parts.

    Scalars: `number value`, `name x`, `neg a`, `+ - * / // % **`, `call f a…`.
    Predicates: comparisons, `chain a < b <= c`, `and`, `or`, `not`, `in_range x a b`,
    `in_set x a…`. Token sets: `first c`, `last c`, `every s o…`, `positions`, `range a b`,
    `t| t& t- t~`, `tokens x`.
    Graphs: `pattern name arg…`, `g| g& g- g~`, `transpose g`, `shift g by`, `graph x arg…`.
    Mechanisms: `mechanism name arg…`, `g+ graph mechanism`. Arguments: `arg name value`, the name
    empty where the argument has none.
    """

    kind: str
    parts: tuple[Part, ...] = ()

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(part for part in self.parts if isinstance(part, Node))

    def walk(self) -> Iterator[Node]:
        yield self
        for node in self.nodes:
            yield from node.walk()

    def named(self, name: str) -> Node | None:
        """The value of an argument."""
        for node in self.nodes:
            if node.kind == "arg" and node.parts[0] == name:
                return node.nodes[0]
        return None


def number(value: int | float | bool) -> Node:
    return Node("number", (value,))


def name(text: str) -> Node:
    return Node("name", (text,))


def pattern(called: str, *positional: Node, **named: Node | int) -> Node:
    """A pattern with its arguments."""
    arguments = [Node("arg", ("", each)) for each in positional]
    for key, value in named.items():
        arguments.append(Node("arg", (key, value if isinstance(value, Node) else number(value))))
    return Node("pattern", (called, *arguments))


@dataclass(frozen=True)
class Scope:
    """`layer SET { … }` or `head SET { … }`; of several members, as `written`."""

    which: str
    members: tuple[int, ...]
    written: str
    body: tuple[Statement, ...]


Statement: TypeAlias = "Scope | Node"
"""A scope, or `attend g`, `scale s`, `score NAME arg…`, `normalize NAME`."""


@dataclass(frozen=True)
class Named:
    """`graph NAME(parameters) = body`: what its parameters are at the call stands in the call."""

    name: str
    parameters: tuple[str, ...]
    body: Node


@dataclass(frozen=True)
class Input:
    name: str
    kind: str
    at_most: int | None = None
    size: int = 1


@dataclass(frozen=True)
class Claim:
    """A claim at lengths, or at every length where there are none.

    `expr` is `figure name op value`, `flag name`, `reach layers`, or `subset a b`, `same a b`.
    """

    expr: Node
    at: tuple[int, ...] = ()


@dataclass(frozen=True)
class Attention:
    """One attention, and the parameters that are set from outside."""

    body: tuple[Statement, ...]
    parameters: tuple[tuple[str, Node], ...] = ()
    overrides: tuple[tuple[str, int], ...] = ()
    graphs: tuple[Named, ...] = ()
    lets: tuple[tuple[str, Node], ...] = ()
    inputs: tuple[Input, ...] = ()
    causal: bool = False
    layers: int | None = None
    heads: int | None = None
    grid: tuple[Node, ...] = ()
    extra_tokens: int = 0
    claims: tuple[Claim, ...] = ()

    def statements(self) -> Iterator[Node]:
        """Every statement, those in scopes included."""
        yield from _statements(self.body)

    def expressions(self) -> Iterator[Node]:
        """Every expression, those that are part of another left out."""
        yield from (value for _, value in (*self.parameters, *self.lets))
        yield from (graph.body for graph in self.graphs)
        yield from self.grid
        yield from self.statements()
        yield from (claim.expr for claim in self.claims)

    def words(self) -> set[str]:
        """The patterns, mechanisms, changes and operators, with `causal WORD` under `causal`."""
        found = set()
        for top in self.expressions():
            for node in top.walk():
                first = node.parts[0] if node.parts else ""
                written = node.kind in ("pattern", "mechanism", "score", "normalize")
                found.add(str(first) if written else node.kind)
        return found | {f"causal {word}" for word in found if self.causal}


def _statements(body: tuple[Statement, ...]) -> Iterator[Node]:
    for statement in body:
        if isinstance(statement, Scope):
            yield from _statements(statement.body)
        else:
            yield statement


_LEVELS = {
    "or": 0,
    "and": 1,
    "not": 2,
    **dict.fromkeys(("==", "!=", "<", "<=", ">", ">=", "chain", "in_range", "in_set"), 3),
    "g|": 4,
    "t|": 4,
    "g&": 5,
    "t&": 5,
    **dict.fromkeys(("+", "-", "g-", "t-", "g+"), 6),
    **dict.fromkeys(("*", "/", "//", "%"), 7),
    **dict.fromkeys(("neg", "g~", "t~"), 8),
    "**": 9,
}
_ATOM = 10


def level(node: Node) -> int:
    """How tightly an expression holds together; atoms most."""
    if node.kind == "number" and isinstance(node.parts[0], int | float) and node.parts[0] < 0:
        return _LEVELS["neg"]
    return _LEVELS.get(node.kind, _ATOM)


def expression(node: Node) -> str:
    """The text of an expression with no brackets but those it needs."""
    kind, nodes = node.kind, node.nodes
    match kind:
        case "number":
            value = node.parts[0]
            return str(value).lower() if isinstance(value, bool) else repr(value)
        case "name" | "tokens":
            return str(node.parts[0])
        case "arg":
            given = expression(nodes[0])
            return f"{node.parts[0]} = {given}" if node.parts[0] else given
        case "range":
            return f"{_in(nodes[0], 6)}..{_in(nodes[1], 6)}"
        case "pattern" | "graph" | "call" | "mechanism":
            called = str(node.parts[0])
            if not nodes and kind in ("pattern", "graph"):
                return called
            return f"{called}({', '.join(map(expression, nodes))})"
        case "first" | "last" | "positions" | "transpose":
            return f"{kind}({', '.join(map(expression, nodes))})"
        case "every":
            offset = f", offset = {expression(nodes[1])}" if len(nodes) > 1 else ""
            return f"every({expression(nodes[0])}{offset})"
        case "shift":
            return f"shift({expression(nodes[0])}, by = {expression(nodes[1])})"
        case "not":
            return f"not {_in(nodes[0], 2)}"
        case "neg" | "g~" | "t~":
            return ("-" if kind == "neg" else "~") + _in(nodes[0], 8)
        case "in_range":
            return f"{_in(nodes[0], 4)} in {_in(nodes[1], 6)}..{_in(nodes[2], 6)}"
        case "in_set":
            return f"{_in(nodes[0], 4)} in {{{', '.join(_in(each, 6) for each in nodes[1:])}}}"
        case "chain":
            a, first, b, second, c = node.parts
            assert isinstance(a, Node)
            assert isinstance(b, Node)
            assert isinstance(c, Node)
            return f"{_in(a, 4)} {first} {_in(b, 4)} {second} {_in(c, 4)}"
        case "**":
            return f"{_in(nodes[0], _ATOM)} ** {_in(nodes[1], 8)}"
        case "==" | "!=" | "<" | "<=" | ">" | ">=":
            return f"{_in(nodes[0], 4)} {kind} {_in(nodes[1], 4)}"
        case "g+":
            # a graph beside a mechanism stands in brackets, if it is a difference
            return f"{_in(nodes[0], 7)} + {expression(nodes[1])}"
        case _:
            mine = _LEVELS[kind]
            word = kind[1:] if kind[0] in "gt" else kind
            return f"{_in(nodes[0], mine)} {word} {_in(nodes[1], mine + 1)}"


def _in(node: Node, least: int) -> str:
    written = expression(node)
    return written if level(node) >= least else f"({written})"


def statement_text(node: Node) -> str:
    match node.kind:
        case "attend" | "scale":
            return f"{node.kind} {expression(node.nodes[0])}"
        case "score":
            return f"score {node.parts[0]}({', '.join(map(expression, node.nodes))})"
        case _:
            return f"normalize {node.parts[0]}"


def claim_text(claim: Claim) -> str:
    expr = claim.expr
    match expr.kind:
        case "figure":
            figure, compare = expr.parts[:2]
            said = f"{figure} {compare} {_in(expr.nodes[0], 4)}"
        case "flag":
            said = str(expr.parts[0])
        case "reach":
            said = f"reach(layers = {expression(expr.nodes[0])})"
        case _:
            word = "subset" if expr.kind == "subset" else "=="
            said = f"{_in(expr.nodes[0], 4)} {word} {_in(expr.nodes[1], 4)}"
    at = f" at n = {', '.join(map(str, claim.at))}" if claim.at else ""
    return f"require {said}{at}"


def text(spec: Attention) -> str:
    """The spec as a file of one attention, called `a`."""
    lines = []
    for graph in spec.graphs:
        parameters = f"({', '.join(graph.parameters)})" if graph.parameters else ""
        lines.append(f"graph {graph.name}{parameters} = {expression(graph.body)}")
    given = ", ".join(f"{called} = {expression(value)}" for called, value in spec.parameters)
    lines.append(f"attention a{f'({given})' if given else ''} {{")
    lines += [f"    layers {spec.layers}"] if spec.layers is not None else []
    lines += [f"    heads {spec.heads}"] if spec.heads is not None else []
    if spec.grid:
        lines.append(f"    sequence grid({', '.join(map(expression, spec.grid))})")
    lines += [f"    extra_tokens {spec.extra_tokens}"] if spec.extra_tokens else []
    lines += ["    causal"] if spec.causal else []
    for entry in spec.inputs:
        promise = f"(at_most = {entry.at_most})" if entry.at_most is not None else ""
        lines.append(f"    input {entry.name}: {entry.kind}{promise}")
    lines += [f"    let {called} = {expression(value)}" for called, value in spec.lets]
    lines += _body(spec.body, 1)
    lines += [f"    {claim_text(claim)}" for claim in spec.claims]
    return "\n".join([*lines, "}"]) + "\n"


def _body(body: tuple[Statement, ...], depth: int) -> list[str]:
    lines = []
    for statement in body:
        if isinstance(statement, Scope):
            lines.append("    " * depth + f"{statement.which} {statement.written} {{")
            lines += _body(statement.body, depth + 1)
            lines.append("    " * depth + "}")
        else:
            lines.append("    " * depth + statement_text(statement))
    return lines
