"""From text to meaning: parse, resolve names, check every argument, and build a `Program`.

All independent errors of one text come together in one `SpecError`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

# what expressions mean is registered where it is written
import attnspec.elaborate.expressions  # noqa: F401
from attnspec.elaborate.cross import cross_of
from attnspec.elaborate.imports import Loader
from attnspec.elaborate.inline import inlined
from attnspec.elaborate.names import ARTICLES, GRAPH_FUNCTIONS, TOKEN_SETS, Value, kind_of, type_of
from attnspec.elaborate.scope import Collector, Failed, Module, Scope, Stopped, Work, meaning
from attnspec.elaborate.slots import slots_of
from attnspec.elaborate.statements import Statements
from attnspec.grammar import nodes
from attnspec.grammar.parser import parse, parse_expression
from attnspec.grammar.printer import print_expression, print_file
from attnspec.graphs.patterns import BY_NAME
from attnspec.ir.mechanisms import MECHANISMS
from attnspec.ir.normal_form import normalise
from attnspec.ir.program import Attend, ParameterValue, Program
from attnspec.ir.scalars import FUNCTIONS, LARGEST
from attnspec.text.decoding import source_of
from attnspec.text.diagnostics import Diagnostic, SpecError, did_you_mean, in_order
from attnspec.text.source import Source, Span


@dataclass(frozen=True)
class Elaborated:
    """The program in normal form, its parameters as text or numbers, the self-contained file that
    says the same, and the warnings."""

    program: Program
    parameters: dict[str, ParameterValue]
    file: nodes.File
    warnings: tuple[Diagnostic, ...]

    @cached_property
    def source(self) -> str:
        """Canonical text of this attention alone, with imports written out and parameters set."""
        return print_file(self.file)

    def resized(self, parameters: Mapping[str, ParameterValue]) -> Elaborated:
        """The same text with other parameters; raises SpecError."""
        return elaborate(source_of(self.source), name=self.program.name, overrides=parameters)


def elaborate(
    source: Source,
    *,
    name: str | None = None,
    overrides: Mapping[str, ParameterValue] | None = None,
) -> Elaborated:
    """The meaning of the attention `name` (the only one if None); raises SpecError."""
    collector = Collector()
    mechanisms = {mechanism.name: mechanism for mechanism in MECHANISMS}
    patterns = {name for name, pattern in BY_NAME.items() if not pattern.word}
    builtin = frozenset({*patterns, *mechanisms, *FUNCTIONS, *TOKEN_SETS, *GRAPH_FUNCTIONS})
    try:
        module = Loader(collector, builtin).load(source)
        attention = _chosen(module, name, collector)
    except Stopped:
        raise SpecError(collector.diagnostics) from None
    pending = {
        statement.keyword: statement
        for statement in attention.body
        if isinstance(statement, nodes.Setting) and statement.keyword in ("layers", "heads")
    }
    work, statements = Work(collector, BY_NAME, mechanisms, pending), Statements()
    work.cross = cross_of(attention)
    scope = Scope(work, module)
    values: dict[str, nodes.Expression] = {}
    shown: dict[str, ParameterValue] = {}
    slots: list[tuple[Attend, ...]] = []
    try:
        values, shown = _parameters(statements, attention, dict(overrides or {}), scope)
        statements.body(attention, scope)
        slots = slots_of(statements.rulings, attention, work)
        _note_unused(statements, attention, scope)
    except Stopped:
        pass
    if collector.has_errors():
        raise SpecError([d for d in collector.diagnostics if d.severity == "error"])
    # layers that are ruled alike have one row
    rows = {id(row): row for row in slots}
    program = Program(
        name=attention.name,
        attends=tuple(dict.fromkeys(attend for row in rows.values() for attend in row)),
        slots=(),
        layers=work.layers,
        heads=work.heads,
        causal=work.causal is not None,
        grid=work.grid,
        extra_tokens=work.extra_tokens,
        inputs=tuple(work.inputs.values()),
        claims=tuple(statements.claims),
        cross=work.cross is not None,
    )
    index = {attend: number for number, attend in enumerate(program.attends)}
    numbers = {key: tuple(index[attend] for attend in row) for key, row in rows.items()}
    program = replace(program, slots=tuple(numbers[id(row)] for row in slots))
    file = inlined(attention, values, work.used_graphs, module)
    return Elaborated(normalise(program), shown, file, tuple(in_order(collector.diagnostics)))


def attention_names(source: Source) -> list[str]:
    """The names of the attentions that a text defines, in order; raises SpecError."""
    return [item.name for item in parse(source).items if isinstance(item, nodes.Attention)]


def parameter_names(source: Source, name: str | None) -> list[str]:
    """The parameters of the attention `name`, or of all of them, in order; raises SpecError."""
    attentions = [item for item in parse(source).items if isinstance(item, nodes.Attention)]
    chosen = [item for item in attentions if name in (None, item.name)]
    return list(dict.fromkeys(entry.name for item in chosen for entry in item.parameters))


def _chosen(module: Module, name: str | None, collector: Collector) -> nodes.Attention:
    """The attention of a name, the only one if None; raises SpecError."""
    names = list(module.attentions)
    if not names and not collector.has_errors():
        collector.add(
            "A213",
            "the file defines no attention",
            replace(module.file.span, start=0, end=0),
            help="add `attention NAME { attend … }`",
        )
    elif names and name is None and len(names) > 1:
        collector.add(
            "A214",
            f"this file holds {len(names)} attentions, so one must be chosen by name",
            module.attentions[names[1]].name_span,
            notes=(f"they are {', '.join(names)}",),
            help=f"`--name {names[0]}` on the command line, `name=` in Python",
        )
    elif names and name is not None and name not in names:
        collector.add(
            "A215",
            f"this file holds no attention `{name}`",
            module.attentions[names[0]].name_span,
            notes=(f"it holds {', '.join(names)}",),
            help=did_you_mean(name, names),
        )
    elif names:
        return module.attentions[name or names[0]]
    raise SpecError(collector.diagnostics)


def _parameters(
    said: Statements, attention: nodes.Attention, overrides: dict[str, ParameterValue], scope: Scope
) -> tuple[dict[str, nodes.Expression], dict[str, ParameterValue]]:
    """Bind the parameters in order; a default may use those before it."""
    collector, names = scope.work.collector, [each.name for each in attention.parameters]
    for unknown in [name for name in overrides if name not in names]:
        declared = ", ".join(f"`{name}`" for name in names) or "none"
        collector.add(
            "A216",
            f"`{attention.name}` has no parameter `{unknown}`",
            attention.name_span,
            notes=(f"its parameters: {declared}",),
            help=did_you_mean(unknown, names),
        )
    values: dict[str, nodes.Expression] = {}
    shown: dict[str, ParameterValue] = {}
    for parameter in attention.parameters:
        name, node = parameter.name, parameter.default
        try:
            if name in overrides:
                node = value_of(parameter, overrides[name], collector)
                value = bound_value(parameter, node, scope)
            elif node is not None:
                value = meaning(node, scope.child(default=True))
            else:
                message = f"the parameter `{name}` has no value"
                advice = f"give it a default, or a value: `--set {name}=…`, in Python `{name}=…`"
                scope.fail("A217", message, parameter.span, help=advice)
            said.define(name, parameter.name_span, scope, value)
            values[name] = node
            shown[name] = value if isinstance(value, int | float) else print_expression(node)
        except Failed:
            scope.names.setdefault(name, None)
    return values, shown


def _note_unused(said: Statements, attention: nodes.Attention, scope: Scope) -> None:
    places = {
        **{p.name: ("parameter", p.name_span) for p in attention.parameters},
        **{s.name: ("local name", s.name_span) for s in said.lets},
        **{s.name: ("input", s.name_span) for s in attention.body if isinstance(s, nodes.Input)},
    }
    for name, (what, span) in places.items():
        if name not in scope.used:
            message = f"the {what} `{name}` is never used"
            scope.work.collector.add("A903", message, span, severity="warning")


# --- values of parameters from outside: numbers, or texts in the language -------------------------


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
            message = f"the value of `{name}` must be one complete expression"
            message += "" if text.strip() else ", got an empty text"
            collector.fail("A218", message, Span(source, 0, len(source.text)))
    return expression


def bound_value(parameter: nodes.Parameter, node: nodes.Expression, scope: Scope) -> Value:
    """What a value stands for; Failed where its default says that another kind is needed."""
    wanted = kind_of_default(parameter)
    with explained(parameter, scope.work.collector):
        value = meaning(node, scope.child(numbers=wanted is not None))
        kind = kind_of(value)
        if wanted is None and isinstance(parameter.default, nodes.List) and kind != "list":
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
    before, described = len(collector.diagnostics), "has no default"
    if parameter.default is not None:
        kind, shown = kind_of_default(parameter), print_expression(parameter.default)
        described = (
            f"has the default `{shown}`" if kind is None else f"is {kind}, {shown} by default"
        )
    try:
        yield
    finally:
        for index in range(before, len(collector.diagnostics)):
            entry = collector.diagnostics[index]
            note = f"the parameter `{parameter.name}` {described}"
            # a value has no place for other statements
            advice = None if entry.help and "`let" in entry.help else entry.help
            notes = (*entry.notes, note)
            collector.diagnostics[index] = replace(entry, notes=notes, help=advice)


def kind_of_default(parameter: nodes.Parameter) -> str | None:
    """What kind of value the default is, where it is written out."""
    match parameter.default:
        case nodes.Integer() | nodes.Real() | nodes.Prefix("-"):
            return _NUMBER
        case nodes.Boolean():
            return _TRUTH
        case _:
            return None
