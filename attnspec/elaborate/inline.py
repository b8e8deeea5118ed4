"""One self-contained file for one attention: imported graphs written out, parameters as given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from attnspec.elaborate.names import GRAPH_FUNCTIONS, METRICS
from attnspec.elaborate.scope import Module
from attnspec.grammar import nodes

Used = Mapping[tuple[int, str], tuple[nodes.Graph, Module]]

LONGEST = 60
"""The most characters of a name that a number is put behind; names have at most 64."""


def inlined(
    attention: nodes.Attention,
    parameters: Mapping[str, nodes.Expression],
    used: Used,
    module: Module,
) -> nodes.File:
    """The file that holds this attention, with these parameters, and every graph it uses."""
    names = _fresh_names(attention, used)

    def renamed(home: Module) -> dict[str, str]:
        return {
            visible: names[(id(origin), graph.name)]
            for visible, (graph, origin) in home.graphs.items()
            if (id(origin), graph.name) in names
        }

    graphs = []
    for key, (graph, home) in used.items():
        head, inner = _parameters(graph.parameters, _Names(renamed(home)), {})
        graphs.append(
            replace(graph, name=names[key], parameters=head, body=inner.expression(graph.body))
        )
    head, inner = _parameters(attention.parameters, _Names(renamed(module)), parameters)
    whole = replace(attention, parameters=head, body=inner.body(attention.body))
    return nodes.File((*graphs, whole), span=module.file.span)


def _fresh_names(attention: nodes.Attention, used: Used) -> dict[tuple[int, str], str]:
    """A name for each graph: its own, with a number behind it where that is taken."""
    # a new name must not be hidden by what stands inside a graph or the attention
    inside = {parameter.name for graph, _ in used.values() for parameter in graph.parameters}
    inside.update(parameter.name for parameter in attention.parameters)
    inside.update(_defined(attention.body))
    names: dict[tuple[int, str], str] = {}
    taken = {attention.name}
    for key, (graph, _) in used.items():
        name, number = graph.name, 2
        while name in taken or (number > 2 and name in inside):
            name, number = f"{graph.name[:LONGEST]}_{number}", number + 1
        taken.add(name)
        names[key] = name
    return names


def _defined(body: Collection[nodes.Statement]) -> set[str]:
    names: set[str] = set()
    for statement in body:
        if isinstance(statement, nodes.Let | nodes.Input):
            names.add(statement.name)
        elif isinstance(statement, nodes.Scope):
            names |= _defined(statement.body)
    return names


def _parameters(
    parameters: tuple[nodes.Parameter, ...], names: _Names, given: Mapping[str, nodes.Expression]
) -> tuple[tuple[nodes.Parameter, ...], _Names]:
    """The head of a definition, and the names as its body sees them."""
    head = []
    for parameter in parameters:
        default = given.get(parameter.name, parameter.default)
        value = None if default is None else names.expression(default)
        head.append(replace(parameter, default=value))
        names = names.hiding({parameter.name})
    return tuple(head), names


class _Names:
    """New names of graphs, and the names that stand for something else here."""

    def __init__(self, new: Mapping[str, str], hidden: frozenset[str] = frozenset()) -> None:
        self._new = new
        self._hidden = hidden

    def hiding(self, names: Collection[str]) -> _Names:
        """Inside a definition of these names."""
        return _Names(self._new, self._hidden | set(names))

    def body(self, statements: tuple[nodes.Statement, ...]) -> tuple[nodes.Statement, ...]:
        """Statements of an attention or a scope with the graphs renamed."""
        inner = self.hiding({s.name for s in statements if isinstance(s, nodes.Let | nodes.Input)})
        return tuple(inner._statement(statement) for statement in statements)

    def _statement(self, statement: nodes.Statement) -> nodes.Statement:
        match statement:
            case nodes.Let():
                return replace(statement, value=self.expression(statement.value))
            case nodes.Setting(keyword="attend", value=value) if value is not None:
                return replace(statement, value=self.expression(value))
            case nodes.Scope():
                return replace(statement, body=self.body(statement.body))
            case nodes.Require(claim=nodes.Chain() as claim):
                figures = {
                    operand.name
                    for operand in claim.operands
                    if isinstance(operand, nodes.Name) and operand.name in METRICS
                }
                return replace(statement, claim=self.hiding(figures).expression(claim))
            case _:
                return statement

    def expression(self, node: nodes.Expression) -> nodes.Expression:
        """An expression with the graphs renamed."""
        change: Callable[[nodes.Expression], nodes.Expression] = self.expression
        match node:
            case nodes.Name(name):
                return node if name in self._hidden else replace(node, name=self._name(name))
            case nodes.Call(name, arguments):
                if name not in self._new and name not in GRAPH_FUNCTIONS:
                    # nothing else takes graphs, and an option may be called like one
                    return node
                # what is called is looked up among graphs first, whatever else has its name
                arguments = tuple(replace(a, value=change(a.value)) for a in arguments)
                return replace(node, name=self._name(name), arguments=arguments)
            case nodes.Prefix(_, operand):
                return replace(node, operand=change(operand))
            case nodes.Chain(operands):
                return replace(node, operands=tuple(change(part) for part in operands))
            case _:
                # lists hold numbers, and graphs are none
                return node

    def _name(self, name: str) -> str:
        return self._new.get(name, name)
