"""Values that parameters are given from outside: numbers, or texts in the language.

A text is read inside a frame in which it can be nothing but one expression; messages show the text
alone, with the places counted from its own start.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from attnspec.elaborate.collect import Collector, Failed
from attnspec.elaborate.expressions import Expressions
from attnspec.elaborate.names import ARTICLES, Bound, Environment, type_of
from attnspec.grammar import nodes
from attnspec.grammar.parser import parse
from attnspec.grammar.printer import print_expression
from attnspec.ir.program import ParameterValue
from attnspec.ir.scalars import LARGEST
from attnspec.text.decoding import source_of
from attnspec.text.diagnostics import Diagnostic, SpecError
from attnspec.text.source import Source, Span

_BEFORE, _AFTER = "attention a { let x = ", "\n}"

_NUMBER, _TRUTH = "a number", "true or false"

_OF_WORDS = re.compile("A1(0.|1.|37|38|9.)")
"""Codes of what is wrong with single words and signs, wherever they stand, and of limits."""

Node = TypeVar("Node")


def value_of(
    parameter: nodes.Parameter, value: ParameterValue, collector: Collector
) -> nodes.Expression:
    """The expression that a value is; Failed, with diagnostics, for what is none."""
    if isinstance(value, int) and abs(value) > LARGEST:
        collector.fail(
            "A218",
            f"the value of `{parameter.name}` must lie between -2**62 and 2**62",
            parameter.name_span,
        )
    if isinstance(value, float) and not math.isfinite(value):
        collector.fail(
            "A218",
            f"the value of `{parameter.name}` must be a finite number, got {value}",
            parameter.name_span,
        )
    text = str(value).lower() if isinstance(value, bool) else str(value)
    name = f"<parameter {parameter.name}>"
    with explained(parameter, collector):
        try:
            source = source_of(text, name)
            file = parse(Source(name, f"{_BEFORE}{source.text}{_AFTER}"))
        except SpecError as error:
            found = _inside(error, text, name)
            collector.diagnostics.extend(found)
            if found:
                raise Failed from None
            file = nodes.File((), span=parameter.span)
        match file.items:
            case (nodes.Attention(_, (), (nodes.Let(_, expression),)),):
                return _moved(expression, source)
        collector.fail(
            "A218",
            f"the value of `{parameter.name}` must be one expression",
            Span(source, 0, len(source.text)),
        )


def bound_value(
    parameter: nodes.Parameter, node: nodes.Expression, work: Expressions, env: Environment
) -> Bound:
    """What a value stands for; Failed where its default says that another kind is needed."""
    wanted = kind_of(parameter)
    inner = env.child()
    inner.numbers = wanted is not None
    with explained(parameter, work.collector):
        found = work.expression(node, inner)
        got = ARTICLES[found.kind]
        is_truth = found.kind == "scalar" and type_of(found.value) == "boolean"  # type: ignore[arg-type]
        if wanted is not None and (found.kind != "scalar" or is_truth != (wanted == _TRUTH)):
            work.collector.fail(
                "A218",
                f"the value of `{parameter.name}` must be {wanted},"
                f" got {'a boolean' if is_truth else got}",
                node.span,
            )
    return found


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
    kind, shown = kind_of(parameter), print_expression(parameter.default)
    return f"has the default `{shown}`" if kind is None else f"is {kind}, {shown} by default"


def kind_of(parameter: nodes.Parameter) -> str | None:
    """What kind of value the default is, where it is written out."""
    match parameter.default:
        case nodes.Integer() | nodes.Real() | nodes.Prefix("-"):
            return _NUMBER
        case nodes.Boolean():
            return _TRUTH
        case _:
            return None


def _inside(error: SpecError, text: str, name: str) -> list[Diagnostic]:
    """The diagnostics that are about the text itself rather than about the frame around it."""
    source = Source(name, text)
    found = []
    for entry in error.diagnostics:
        span = entry.span
        if span is None or not span.source.text.startswith(_BEFORE):
            found.append(entry)
        elif not _OF_WORDS.match(entry.code):
            continue
        elif span.start >= len(_BEFORE) and span.end <= len(_BEFORE) + len(text):
            related = tuple((words, _shifted(place, source)) for words, place in entry.related)
            found.append(replace(entry, span=_shifted(span, source), related=related))
    return found


def _shifted(span: Span, source: Source) -> Span:
    return Span(source, max(0, span.start - len(_BEFORE)), span.end - len(_BEFORE))


def _moved(node: Node, source: Source) -> Node:
    """A part of the tree with all its places in the text of the value alone."""
    if isinstance(node, Span):
        return _shifted(node, source)  # type: ignore[return-value]
    if isinstance(node, tuple):
        return tuple(_moved(part, source) for part in node)  # type: ignore[return-value]
    if not is_dataclass(node) or isinstance(node, type):
        return node
    changed: dict[str, Any] = {f.name: _moved(getattr(node, f.name), source) for f in fields(node)}
    return replace(node, **changed)
