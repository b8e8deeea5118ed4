"""Values that parameters are given from outside: numbers, or texts in the language."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from attnspec.elaborate.names import ARTICLES, Value, kind_of, type_of
from attnspec.elaborate.scope import Collector, Failed, Scope, meaning
from attnspec.grammar import nodes
from attnspec.grammar.parser import parse_expression
from attnspec.grammar.printer import print_expression
from attnspec.ir.program import ParameterValue
from attnspec.ir.scalars import LARGEST
from attnspec.text.decoding import source_of
from attnspec.text.diagnostics import SpecError
from attnspec.text.source import Span

_NUMBER, _TRUTH = "a number", "true or false"


def value_of(
    parameter: nodes.Parameter, value: ParameterValue, collector: Collector
) -> nodes.Expression:
    """The expression that a value is; Failed, with diagnostics, for what is none."""
    name, place = parameter.name, parameter.name_span
    if isinstance(value, int) and abs(value) > LARGEST:
        collector.fail("A218", f"the value of `{name}` must lie between -2**62 and 2**62", place)
    if isinstance(value, float) and not math.isfinite(value):
        message = f"the value of `{name}` must be a finite number, got {value}"
        collector.fail("A218", message, place)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    with explained(parameter, collector):
        try:
            source = source_of(text, f"<parameter {name}>")
            expression = parse_expression(source)
        except SpecError as error:
            collector.diagnostics.extend(error.diagnostics)
            raise Failed from None
        if expression is None:
            message = f"the value of `{name}` must be one expression"
            collector.fail("A218", message, Span(source, 0, len(source.text)))
    return expression


def bound_value(parameter: nodes.Parameter, node: nodes.Expression, scope: Scope) -> Value:
    """What a value stands for; Failed where its default says that another kind is needed."""
    wanted = kind_of_default(parameter)
    with explained(parameter, scope.work.collector):
        value = meaning(node, scope.child(numbers=wanted is not None))
        kind = kind_of(value)
        if wanted is None and _is_list(parameter) and kind != "list":
            message = f"the value of `{parameter.name}` must be a list, got {ARTICLES[kind]}"
            scope.fail("A218", message, node.span, help="for example `[8, 16, 32]`")
        is_truth = kind == "scalar" and type_of(value) == "boolean"  # type: ignore[arg-type]
        if wanted is not None and (kind != "scalar" or is_truth != (wanted == _TRUTH)):
            got = "a boolean" if is_truth else ARTICLES[kind]
            message = f"the value of `{parameter.name}` must be {wanted}, got {got}"
            scope.fail("A218", message, node.span)
    return value


@contextmanager
def explained(parameter: nodes.Parameter, collector: Collector) -> Iterator[None]:
    """Add to the errors found meanwhile which parameter they are about, and of which kind."""
    before = len(collector.diagnostics)
    try:
        yield
    finally:
        for index in range(before, len(collector.diagnostics)):
            entry = collector.diagnostics[index]
            note = f"the parameter `{parameter.name}` {_described(parameter)}"
            collector.diagnostics[index] = replace(entry, notes=(*entry.notes, note))


def _described(parameter: nodes.Parameter) -> str:
    if parameter.default is None:
        return "has no default"
    kind, shown = kind_of_default(parameter), print_expression(parameter.default)
    return f"has the default `{shown}`" if kind is None else f"is {kind}, {shown} by default"


def _is_list(parameter: nodes.Parameter) -> bool:
    return isinstance(parameter.default, nodes.List)


def kind_of_default(parameter: nodes.Parameter) -> str | None:
    """What kind of value the default is, where it is written out."""
    match parameter.default:
        case nodes.Integer() | nodes.Real() | nodes.Prefix("-"):
            return _NUMBER
        case nodes.Boolean():
            return _TRUTH
        case _:
            return None
