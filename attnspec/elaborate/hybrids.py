"""What was meant where a graph of several patterns meets a mechanism without parentheses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnspec.elaborate.names import Hybrid, Value, kind_of
from attnspec.grammar import nodes
from attnspec.ir.program import Mechanism
from attnspec.text.source import Span


@dataclass(frozen=True)
class Regrouped:
    """How to write it, and the words that should be in parentheses, or stand in their way."""

    span: Span
    help: str


def regrouped(node: nodes.Chain, operands: Sequence[Value]) -> Regrouped | None:
    """`(A | B) + M` for the operands of `A | B + M` and its like; None where it is not plain that
    one graph and one mechanism are meant."""
    others = [place for place, operand in enumerate(operands) if kind_of(operand) != "graph"]
    if len(others) != 1:
        return None
    (at,) = others
    match operands[at]:
        case Hybrid(_, called):
            hybrid = _of_hybrid(node, at, called)
        case Mechanism():
            hybrid = _of_mechanism(node, at)
        case _:
            return None
    if hybrid is None:
        return None
    graphs, operators, mechanism = hybrid
    if len(graphs) < 2:
        return None
    # between graphs `+` is `|`
    words = _text(graphs[0])
    for operator, graph in zip(operators, graphs[1:], strict=True):
        words += f" {operator.replace('+', '|')} {_text(graph)}"
    return Regrouped(
        _marked(graphs, mechanism),
        f"`+` binds before `|` and `&`: write `({words}) + {_text(mechanism)}`"
        if set(operators) <= {"|", "&"}
        else f"the graph needs parentheses: write `({words}) + {_text(mechanism)}`",
    )


Parts = tuple[list[Span], list[str], Span]
"""The graphs, the operators between them, and the mechanism."""


def _of_hybrid(node: nodes.Chain, at: int, mechanism: Mechanism) -> Parts | None:
    """`A | B + M`: the operand at a place is a graph with a mechanism."""
    inner = node.operands[at]
    if not isinstance(inner, nodes.Chain) or set(node.operators) - {"|", "&"}:
        return None
    called = [_holds(part.span, mechanism.span) for part in inner.operands]
    if called not in ([True, False], [False, True]):
        # a name stands for it
        return None
    graphs = [_outer(operand) for operand in node.operands]
    graphs[at] = _outer(inner.operands[called.index(False)])
    return graphs, list(node.operators), inner.operands[called.index(True)].span


def _outer(node: nodes.Expression) -> Span:
    """Where an operand stands, with the parentheses around it."""
    span = node.span
    before, after = span.source.text[: span.start].rstrip(), span.source.text[span.end :]
    if not isinstance(node, nodes.Chain) or not before.endswith("("):
        return span
    closing = span.end + len(after) - len(after.lstrip())
    return Span(span.source, len(before) - 1, closing + 1) if after.lstrip()[:1] == ")" else span


def _text(span: Span) -> str:
    """The words of a span on one line."""
    return " ".join(span.text.split())


def _holds(span: Span, inner: Span | None) -> bool:
    if inner is None or inner.source is not span.source:
        return False
    return span.start <= inner.start and inner.end <= span.end


def _of_mechanism(node: nodes.Chain, at: int) -> Parts | None:
    """`A - B + M` or `M + A - B`: the operand at a place is a mechanism."""
    beside = at - 1 if at else 0
    if node.operators[beside] != "+" or set(node.operators) - {"+", "-"}:
        return None
    graphs = [_outer(operand) for place, operand in enumerate(node.operands) if place != at]
    operators = [operator for place, operator in enumerate(node.operators) if place != beside]
    return graphs, operators, node.operands[at].span


def _marked(graphs: Sequence[Span], mechanism: Span) -> Span:
    """The graphs as one stretch of text, or where the mechanism parts them, the mechanism."""
    start, end = graphs[0].start, graphs[-1].end
    if start < mechanism.start < end:
        return mechanism
    return Span(mechanism.source, start, end)
