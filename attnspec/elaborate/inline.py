"""One self-contained file for one attention: imported graphs written out, parameters as given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from attnspec.elaborate.modules import Module
from attnspec.grammar import nodes

Used = Mapping[tuple[int, str], tuple[nodes.Graph, Module]]


def inlined(
    attention: nodes.Attention,
    parameters: Mapping[str, nodes.Expression],
    used: Used,
    module: Module,
) -> nodes.File:
    """The file that holds this attention, with these parameters, and every graph it uses."""
    names: dict[tuple[int, str], str] = {}
    taken = {attention.name}
    for key, (graph, _) in used.items():
        name, number = graph.name, 2
        while name in taken:
            name, number = f"{graph.name}_{number}", number + 1
        taken.add(name)
        names[key] = name

    def renamed(home: Module) -> dict[str, str]:
        return {
            visible: names[(id(origin), graph.name)]
            for visible, (graph, origin) in home.graphs.items()
            if (id(origin), graph.name) in names
        }

    graphs = [
        replace(
            graph,
            name=names[key],
            parameters=tuple(
                replace(p, default=None if p.default is None else _rename(p.default, renamed(home)))
                for p in graph.parameters
            ),
            body=_rename(graph.body, _without(renamed(home), {p.name for p in graph.parameters})),
        )
        for key, (graph, home) in used.items()
    ]
    outer = renamed(module)
    head = tuple(
        replace(p, default=parameters.get(p.name, p.default)) for p in attention.parameters
    )
    hidden = {p.name for p in attention.parameters} | {
        s.name for s in attention.body if isinstance(s, nodes.Let | nodes.Input)
    }
    body = tuple(_statement(s, outer, _without(outer, hidden)) for s in attention.body)
    whole = replace(attention, parameters=head, body=body)
    return nodes.File((*graphs, whole), span=module.file.span)


def _without(mapping: dict[str, str], hidden: set[str]) -> dict[str, str]:
    # a call is looked up among graphs in any case; only bare words can be hidden
    return {**mapping, **{f"bare {name}": "" for name in hidden}}


def _statement(
    statement: nodes.Statement, calls: dict[str, str], mapping: dict[str, str]
) -> nodes.Statement:
    match statement:
        case nodes.Let():
            return replace(statement, value=_rename(statement.value, mapping))
        case nodes.Setting() if statement.value is not None:
            return replace(statement, value=_rename(statement.value, mapping))
        case nodes.Scope():
            return replace(
                statement, body=tuple(_statement(s, calls, mapping) for s in statement.body)
            )
        case nodes.Require():
            return replace(statement, claim=_rename(statement.claim, mapping))
        case _:
            return statement


def _rename(node: nodes.Expression, names: dict[str, str]) -> nodes.Expression:
    match node:
        case nodes.Name():
            hidden = f"bare {node.name}" in names
            return node if hidden else replace(node, name=names.get(node.name, node.name))
        case nodes.Call():
            arguments = tuple(
                replace(argument, value=_rename(argument.value, names))
                for argument in node.arguments
            )
            return replace(node, name=names.get(node.name, node.name), arguments=arguments)
        case nodes.Prefix():
            return replace(node, operand=_rename(node.operand, names))
        case nodes.Chain():
            return replace(node, operands=tuple(_rename(part, names) for part in node.operands))
        case nodes.Range():
            return replace(node, first=_rename(node.first, names), last=_rename(node.last, names))
        case nodes.Members():
            return replace(node, items=tuple(_rename(item, names) for item in node.items))
        case _:
            return node
