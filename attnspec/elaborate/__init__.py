"""From text to meaning: parse, resolve names, check every argument, and build a `Program`.

All independent errors of one text come together in one `SpecError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from attnspec.diagnostics import Diagnostic, SpecError, did_you_mean
from attnspec.elaborate.collect import Collector, Failed
from attnspec.elaborate.coverage import Ruling, Where, ranges, resolve
from attnspec.elaborate.inline import inlined
from attnspec.elaborate.modules import Loader, Module
from attnspec.elaborate.names import BROKEN, GRAPH_FUNCTIONS, TOKEN_SETS, Environment
from attnspec.elaborate.statements import Attended, Statements
from attnspec.grammar import nodes
from attnspec.grammar.parser import parse
from attnspec.grammar.printer import print_expression
from attnspec.ir import Attend, Mechanism, Program, Score, symbols_of
from attnspec.mechanisms import MECHANISMS
from attnspec.normalise import normalise, substitute
from attnspec.patterns import BY_NAME
from attnspec.scalars import FUNCTIONS, Scalar, ScalarError, fold
from attnspec.source import Source

ParameterValue = int | float | bool | str
"""A parameter from outside; a string is an expression of the language."""


@dataclass(frozen=True)
class Elaborated:
    """The program in normal form, its parameters as text or numbers, the self-contained file that
    says the same, and the warnings."""

    program: Program
    parameters: dict[str, ParameterValue]
    file: nodes.File
    warnings: tuple[Diagnostic, ...]


def elaborate(
    source: Source,
    *,
    name: str | None = None,
    overrides: Mapping[str, ParameterValue] | None = None,
) -> Elaborated:
    """The meaning of the attention `name` (the only one if None); raises SpecError."""
    collector = Collector()
    mechanisms = {mechanism.name: mechanism for mechanism in MECHANISMS}
    builtin = frozenset({*BY_NAME, *mechanisms, *FUNCTIONS, *TOKEN_SETS, *GRAPH_FUNCTIONS})
    module = Loader(collector, builtin).load(source)
    attention = _chosen(module, name, collector)
    work = Statements(collector, module, BY_NAME, mechanisms)
    env = Environment()
    given, shown = _parameters(work, attention, dict(overrides or {}), env)
    work.body(attention, env)
    slots = _slots(work, attention, collector)
    _unused(work, attention, module, env, collector)
    if collector.has_errors():
        raise SpecError([d for d in collector.diagnostics if d.severity == "error"])
    program = Program(
        name=attention.name,
        attends=tuple(dict.fromkeys(attend for row in slots for attend in row)),
        slots=(),
        layers=work.layers,
        heads=work.heads,
        causal=work.causal is not None,
        grid=work.grid,
        extra_tokens=work.extra_tokens,
        inputs=tuple(work.declared.values()),
        claims=tuple(work.claims),
    )
    index = {attend: number for number, attend in enumerate(program.attends)}
    program = replace(program, slots=tuple(tuple(index[a] for a in row) for row in slots))
    file = inlined(attention, given, work.used_graphs, module)
    return Elaborated(normalise(program), shown, file, tuple(collector.diagnostics))


def attention_names(source: Source) -> list[str]:
    """The names of the attentions that a text defines, in order; raises SpecError."""
    return [item.name for item in parse(source).items if isinstance(item, nodes.Attention)]


def _chosen(module: Module, name: str | None, collector: Collector) -> nodes.Attention:
    names = list(module.attentions)
    start = module.file.span
    if not names:
        if not collector.has_errors():
            place = replace(start, start=0, end=0)
            collector.add(
                "A213",
                "no attention defined",
                place,
                help="a spec holds at least one `attention name { attend … }`",
            )
        raise SpecError(collector.diagnostics)
    if name is None:
        if len(names) > 1:
            second = module.attentions[names[1]]
            collector.add(
                "A214",
                f"this file holds {len(names)} attentions, so one must be chosen by name",
                second.name_span,
                notes=(f"they are {', '.join(names)}",),
                help=f"`--name {names[0]}` on the command line, `name=` in Python",
            )
            raise SpecError(collector.diagnostics)
        return module.attentions[names[0]]
    if name not in module.attentions:
        collector.add(
            "A215",
            f"this file holds no attention `{name}`",
            None,
            notes=(f"it holds {', '.join(names)}",),
            help=did_you_mean(name, names),
        )
        raise SpecError(collector.diagnostics)
    return module.attentions[name]


def _parameters(
    work: Statements,
    attention: nodes.Attention,
    overrides: dict[str, ParameterValue],
    env: Environment,
) -> tuple[dict[str, nodes.Expression], dict[str, ParameterValue]]:
    """Bind the parameters in order; a default may use those before it."""
    names = [parameter.name for parameter in attention.parameters]
    for unknown in [name for name in overrides if name not in names]:
        known = ", ".join(f"`{name}`" for name in names) or "none"
        work.collector.add(
            "A216",
            f"`{attention.name}` has no parameter `{unknown}`",
            attention.name_span,
            notes=(f"its parameters: {known}",),
            help=did_you_mean(unknown, names),
        )
    given: dict[str, nodes.Expression] = {}
    shown: dict[str, ParameterValue] = {}
    for parameter in attention.parameters:
        try:
            node = parameter.default
            if parameter.name in overrides:
                node = _override(parameter, overrides[parameter.name], work)
            if node is None:
                work.collector.fail(
                    "A217",
                    f"the parameter `{parameter.name}` has no value",
                    parameter.span,
                    help=f"give it a default, or set it: `--set {parameter.name}=…`",
                )
            bound = work.expression(node, env)
            work.define(parameter.name, parameter.name_span, env, bound)
            given[parameter.name] = node
            constant = bound.value if isinstance(bound.value, int | float) else None
            shown[parameter.name] = print_expression(node) if constant is None else constant
        except Failed:
            env.names.setdefault(parameter.name, BROKEN)
    return given, shown


def _override(
    parameter: nodes.Parameter, value: ParameterValue, work: Statements
) -> nodes.Expression:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    label = f"<{parameter.name}>"
    frame = "attention a { let x = "
    try:
        file = parse(Source(label, f"{frame}{text}\n}}"))
        (item,) = file.items
        (statement,) = item.body if isinstance(item, nodes.Attention) else ()
    except (SpecError, ValueError):
        work.collector.fail(
            "A218",
            f"the value of `{parameter.name}` must be a number or an expression, got {text!r}",
            parameter.name_span,
        )
    if not isinstance(statement, nodes.Let):
        work.collector.fail(
            "A218",
            f"the value of `{parameter.name}` must be a number or an expression, got {text!r}",
            parameter.name_span,
        )
    return statement.value


def _slots(
    work: Statements, attention: nodes.Attention, collector: Collector
) -> list[list[Attend]]:
    layers = 1 if work.layers is None else work.layers
    heads = 1 if work.heads is None else work.heads
    if collector.has_errors():
        return []
    attends = resolve(work.attends, layers, heads, "attend", collector)
    scales = resolve(work.scales, layers, heads, "scale", collector)
    normalizers = resolve(work.normalizers, layers, heads, "normalize", collector)
    groups: dict[Where, list[Ruling[Score]]] = {}
    for change in work.scores:
        groups.setdefault(change.where, []).append(change)
    stacked = [
        Ruling(tuple(change.value for change in group), where, group[0].span)
        for where, group in groups.items()
    ]
    scores = resolve(stacked, layers, heads, "score", collector)
    _uncovered(attends, work, attention, collector)
    if collector.has_errors():
        return []
    rows: list[list[Attend]] = []
    for layer in range(layers):
        row: list[Attend] = []
        for head in range(heads):
            ruling = attends[layer][head]
            score, scale, normal = (
                scores[layer][head],
                scales[layer][head],
                normalizers[layer][head],
            )
            if ruling is None:
                continue
            row.append(
                _at_slot(
                    work,
                    ruling,
                    {
                        **({} if work.layers is None else {"layer": layer}),
                        **({} if work.heads is None else {"head": head}),
                    },
                    scale,
                    score.value if score else (),
                    normal,
                    collector,
                )
            )
        rows.append(row)
    return rows


def _at_slot(
    work: Statements,
    ruling: Ruling[Attended],
    place: dict[str, int | float | bool],
    scale: Ruling[Scalar] | None,
    scores: tuple[Score, ...],
    normal: Ruling[str] | None,
    collector: Collector,
) -> Attend:
    graph, mechanism = ruling.value
    try:
        if graph is not None and {"layer", "head"} & symbols_of(graph):
            graph = substitute(graph, place)
        factor = None if scale is None else fold(scale.value, place)
    except ScalarError as error:
        where = ", ".join(f"{name} {number}" for name, number in place.items())
        collector.add("A308", f"an expression has no value at {where}: {error}", ruling.span)
        factor = None
    if mechanism is not None and graph is None:
        _only_softmax(mechanism, scores, normal, collector)
    return Attend(
        graph=graph,
        mechanism=mechanism,
        scale=factor,
        scores=scores,
        normalize=normal.value if normal else "softmax",
        span=ruling.span,
    )


def _only_softmax(
    mechanism: Mechanism,
    scores: tuple[Score, ...],
    normal: Ruling[str] | None,
    collector: Collector,
) -> None:
    if scores or normal is not None:
        word, span = ("score", scores[0].span) if scores else ("normalize", normal and normal.span)
        related = () if mechanism.span is None else (("the mechanism", mechanism.span),)
        collector.add(
            "A705",
            f"`{word}` changes the scores of a graph; `{mechanism.name}` has none",
            span or mechanism.span,
            related=related,
        )


def _uncovered(
    table: list[list[Ruling[Attended] | None]],
    work: Statements,
    attention: nodes.Attention,
    collector: Collector,
) -> None:
    missing: dict[str, list[int]] = {}
    for layer, row in enumerate(table):
        heads = [head for head, ruling in enumerate(row) if ruling is None]
        if heads:
            missing.setdefault(ranges(heads), []).append(layer)
    for heads_text, layers in missing.items():
        which = []
        if work.layers is not None:
            which.append(f"layer {ranges(layers)}")
        if work.heads is not None:
            which.append(f"head {heads_text}")
        collector.add(
            "A408",
            f"nothing is attended in {', '.join(which)}" if which else "nothing is attended",
            attention.name_span,
            help="add an `attend` that covers it",
        )


def _unused(
    work: Statements,
    attention: nodes.Attention,
    module: Module,
    env: Environment,
    collector: Collector,
) -> None:
    places = {
        **{p.name: ("parameter", p.name_span) for p in attention.parameters},
        **{s.name: ("local name", s.name_span) for s in attention.body if isinstance(s, nodes.Let)},
        **{s.name: ("input", s.name_span) for s in attention.body if isinstance(s, nodes.Input)},
    }
    for name, (what, span) in places.items():
        if name not in env.used:
            collector.add("A903", f"the {what} `{name}` is never used", span, severity="warning")
