"""Matching the arguments of a call with what a declaration asks, by the `Parameter` of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import NoReturn, TypeVar

from attnspec.elaborate.names import TOKEN_SETS, Value, kind_of, type_of
from attnspec.elaborate.scope import Failed, Scope, meaning
from attnspec.elaborate.terms import as_tokens, described, folded, graph, integer, known_now, scalar
from attnspec.grammar import nodes
from attnspec.graphs.bind import check_value
from attnspec.graphs.relation import Relation
from attnspec.graphs.token_sets import Data
from attnspec.ir.parameters import Parameter, RelationError
from attnspec.ir.program import ArgumentValue, Compound, InputRef, Leaf
from attnspec.ir.scalars import Scalar
from attnspec.text.diagnostics import did_you_mean
from attnspec.text.source import Span

V = TypeVar("V")


def parameters_of(declaration: type) -> dict[str, Parameter]:
    """The arguments that a pattern or mechanism takes in the language, by name."""
    return {
        entry.name: entry.metadata["parameter"]
        for entry in fields(declaration)
        if entry.metadata["parameter"].kind != "context"
    }


# --- which argument is which ---------------------------------------------------------------------


def matched(
    node: nodes.Call,
    scope: Scope,
    parameters: Mapping[str, Parameter],
    value_of: Callable[[str, nodes.Expression], V],
) -> tuple[dict[str, V], dict[str, Span]]:
    """The values given in a call by argument name, and their places."""
    positional = [name for name, p in parameters.items() if p.positional]
    values: dict[str, V] = {}
    spans: dict[str, Span] = {}
    failed = False
    for index, argument in enumerate(node.arguments):
        try:
            name = argument.name
            if name is None:
                if index >= len(positional):
                    _unnamed(node, argument, scope, parameters)
                name = positional[index]
            if name not in parameters or name in spans:
                _misplaced(node, argument, scope, parameters, name, spans)
            spans[name] = argument.value.span
            values[name] = value_of(name, argument.value)
        except Failed:
            failed = True
    if failed:
        raise Failed
    return values, spans


def _unnamed(
    node: nodes.Call, argument: nodes.Argument, scope: Scope, parameters: Mapping[str, Parameter]
) -> NoReturn:
    names = [name for name, p in parameters.items() if not p.positional]
    if not names:
        _too_many(node, argument, scope, len(parameters))
    some = parameters[names[0]].choices
    advice: str | None = f"write `{node.name}({names[0]} = {some[0] if some else '…'})`"
    notes = (f"`{names[0]}` is one of {', '.join(some)}",) if some else ()
    if _is_ambiguous(node, scope):
        advice = _readings(node, argument, scope) or advice
        notes = ("a size without a name means different things in different libraries",)
    message = f"the arguments of `{node.name}` need their names"
    scope.fail("A301", message, argument.span, notes=notes, help=advice)


def _too_many(node: nodes.Call, argument: nodes.Argument, scope: Scope, most: int) -> NoReturn:
    allowed = f"at most {most} argument{'s' * (most > 1)}, got {len(node.arguments)}"
    message = f"`{node.name}` takes {allowed if most else 'no arguments'}"
    advice: str | None = "join token sets by `|`: `first(1) | last(1)`"
    if not most:
        advice = f"write `{node.name}`, or for fewer pairs `{node.name} & block(size = 8)`"
    if most > 1 or node.name not in scope.work.callable:
        advice = None
    scope.fail("A302", message, argument.span, help=advice)


def _misplaced(
    node: nodes.Call,
    argument: nodes.Argument,
    scope: Scope,
    parameters: Mapping[str, Parameter],
    name: str,
    known: Mapping[str, Span],
) -> NoReturn:
    """Fail because an argument is unknown, or one of those that are known already."""
    span = argument.name_span or argument.span
    if name in known:
        scope.fail("A304", f"`{name}` is given twice", span)
    takes = ", ".join(f"`{name}`" for name in parameters) or "no arguments"
    ways = getattr(scope.work.patterns.get(node.name), "signatures", ())
    if {name for way in ways for name in way} == {*parameters}:
        takes = ", or ".join(" and ".join(f"`{name}`" for name in way) for way in ways)
    advice = did_you_mean(name, parameters) or (None if known else _readings(node, argument, scope))
    if "tokens" in parameters and name in TOKEN_SETS:
        advice = f"write `{node.name}({name}(…))`"
    advice = "`==` compares" if node.name == "where" else advice
    message, notes = f"`{node.name}` has no argument `{name}`", (f"it takes {takes}",)
    scope.fail("A302", message, span, notes=notes, help=advice)


def _is_ambiguous(node: nodes.Call, scope: Scope) -> bool:
    """Whether a bare size may mean several things for a pattern."""
    pattern = scope.work.patterns.get(node.name)
    return pattern is not None and len(pattern.readings(1)) > 1


def _readings(node: nodes.Call, argument: nodes.Argument, scope: Scope) -> str | None:
    """What a bare size may mean for a pattern, where it is known and that is several things."""
    if not _is_ambiguous(node, scope):
        return None
    size = scalar(argument.value, scope, f"a {node.name}'s size")
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        return None
    return "; ".join(scope.work.patterns[node.name].readings(size))


# --- whether they are all there, and fit together ------------------------------------------------


def complete(
    node: nodes.Call,
    scope: Scope,
    declaration: type,
    values: dict[str, ArgumentValue],
    spans: Mapping[str, Span],
) -> None:
    """Check that all that is required is there, and nothing that an input stands in place of; fill
    in the defaults; and check what a declaration itself asks of its arguments."""
    for instead, replaced in getattr(declaration, "replaced", {}).items():
        for name in replaced:
            if instead in values and name in values:
                message = f"the input decides `{name}`, which cannot be given as well"
                input = (("the input", spans[instead]),)
                scope.fail("A302", message, spans[name], related=input, help=f"remove `{name}`")
    parameters = parameters_of(declaration)
    _require_signature(node, scope, getattr(declaration, "signatures", None), values)
    absent = [e for e in fields(declaration) if e.name in parameters and e.name not in values]
    missing = [entry.name for entry in absent if entry.default is MISSING]
    if missing:
        needed = " and ".join(f"`{name}`" for name in missing)
        docs = tuple(f"`{name}`: {parameters[name].doc}" for name in missing)
        scope.fail("A303", f"`{node.name}` needs {needed}", node.span, notes=docs)
    values.update((entry.name, entry.default) for entry in absent if entry.default is not None)  # type: ignore[misc]
    # a graph of positions is asked where it is bound
    wrong = (
        _wrong(scope, declaration, values) if getattr(declaration, "data_dependent", True) else None
    )
    if wrong is not None:
        named = (span for name, span in spans.items() if f"`{name}`" in wrong)
        scope.fail("A306", wrong, next(named, node.span))


def _require_signature(
    node: nodes.Call,
    scope: Scope,
    signatures: Sequence[Sequence[str]] | None,
    values: Mapping[str, ArgumentValue],
) -> None:
    """Refuse arguments that are those of none of the forms of a pattern that has several."""
    present = {name for name in values if any(name in s for s in signatures or ())}
    if signatures is None or any(present == set(s) for s in signatures):
        return
    # a form that holds another one whole says nothing more
    short = [s for s in signatures if not any(set(other) < set(s) for other in signatures)]
    possible = [s for s in short if present < set(s)]
    forms = [", ".join(f"{argument} = …" for argument in s) for s in possible or short]
    ways = " or ".join(f"`{node.name}({form})`" for form in forms)
    missing = [" and ".join(f"`{a}`" for a in s if a not in present) for s in possible]
    message = f"`{node.name}` also needs {' or '.join(missing)}"
    if not possible:
        given = " and ".join(f"`{name}`" for name in values if name in present)
        message = f"`{node.name}` cannot take {given} together"
    elif not present:
        scope.fail("A303", f"`{node.name}` needs {', or '.join(missing)}", node.span)
    scope.fail("A303", message, node.span, help=f"write {ways}")


def _wrong(scope: Scope, declaration: type, values: Mapping[str, ArgumentValue]) -> str | None:
    """What a declaration itself says against its arguments, where all of them are known."""
    settings: dict[str, object] = dict(values)
    if any(entry.metadata["parameter"].context == "causal" for entry in fields(declaration)):
        settings["causal"] = scope.work.causal is not None
    for name, value in values.items():
        if isinstance(value, InputRef):
            settings[name] = Data(None, scope.work.inputs[value.name].size)
        elif isinstance(value, Leaf | Compound):
            settings[name] = Relation()
        elif not isinstance(value, int | float | str):
            return None
    try:
        declaration(**settings)
    except RelationError as error:
        return error.message
    return None


# --- the value of each ----------------------------------------------------------------------------


def values_of(
    node: nodes.Call, scope: Scope, parameters: Mapping[str, Parameter]
) -> tuple[dict[str, ArgumentValue], dict[str, Span]]:
    """The values given in a call, each as its `Parameter` asks, and their places."""
    return matched(
        node, scope, parameters, lambda name, value: _value(parameters[name], name, value, scope)
    )


def _value(parameter: Parameter, name: str, node: nodes.Expression, scope: Scope) -> ArgumentValue:
    match parameter.kind:
        case "tokens":
            return as_tokens(_named(node, "tokens", scope), node.span, scope)
        case "ids" | "length" | "choices" | "buckets":
            return _input(parameter, name, node, scope)
        case "graph":
            return _graph(name, node, scope)
        case "choice":
            return _choice(parameter, name, node, scope)
        case "predicate":
            return _predicate(node, scope)
        case "boolean" | "real":
            value = scalar(node, scope, f"`{name}`")
        case _:
            value = integer(node, scope, f"`{name}`")
    check_constant(parameter, name, value, node.span, scope)
    return value


def check_constant(
    parameter: Parameter, name: str, value: ArgumentValue, span: Span, scope: Scope
) -> None:
    """Range checks of an argument that is known already."""
    wrong = check_value(parameter, name, value) if isinstance(value, int | float) else None
    if wrong:
        scope.fail("A306", wrong, span, notes=(f"`{name}`: {parameter.doc}",))


def _named(node: nodes.Expression, kind: str, scope: Scope) -> Value:
    """What an argument stands for that may be the name of an input."""
    alone = isinstance(node, nodes.Name) and not scope.expanding
    return meaning(node, scope.child(wanted=kind) if alone else scope)


def _input(parameter: Parameter, name: str, node: nodes.Expression, scope: Scope) -> ArgumentValue:
    """An input of the kind that an argument asks for; `prefix` takes a count as well."""
    entry = _named(node, parameter.kind, scope)
    needed = f"an input of kind `{parameter.kind}`"
    if isinstance(entry, InputRef):
        if entry.kind != parameter.kind:
            message = f"{needed} is needed, got one of kind `{entry.kind}`"
            size = scope.work.inputs[entry.name].size
            has_size = size > 1 and parameter.kind in ("choices", "scores")
            kind = f"{parameter.kind}(size = {size})" if has_size else parameter.kind
            advice = f"declare it as `input {entry.name}: {kind}`"
            scope.fail("A313", message, node.span, help=advice)
        return entry
    if parameter.kind == "length" and kind_of(entry) == "scalar":
        value = integer(node, scope, f"`{name}`")
        if isinstance(value, int) and value < 0:
            scope.fail("A306", f"`{name}` must be at least 0, got {value}", node.span)
        return value
    either = " or a count" if parameter.kind == "length" else ""
    advice = f"declare one: `input x: {parameter.kind}`"
    scope.fail("A313", f"{needed}{either} is needed", node.span, help=advice)


def _graph(name: str, node: nodes.Expression, scope: Scope) -> ArgumentValue:
    """A graph that q and k do not decide."""
    value = graph(node, scope)
    known_now(value, node.span, scope, f"in `{name} = …`", by_inputs=True)
    return value


def _choice(
    parameter: Parameter, name: str, node: nodes.Expression, scope: Scope
) -> str | InputRef:
    word = node.name if isinstance(node, nodes.Name) else None
    value = scope.names.get(word or "")
    if isinstance(value, InputRef) and parameter.input and word in parameter.choices:
        message = f"`{name} = {word}` may mean the option or the input of that name"
        scope.fail("A309", message, node.span, help="give the input another name")
    if word in parameter.choices:
        return word
    if isinstance(value, InputRef) and parameter.input:
        return _input(replace(parameter, kind=parameter.input), name, node, scope)  # type: ignore[return-value]
    other = "a number" if isinstance(node, nodes.Integer | nodes.Real) else "an expression"
    either = f", or an input of kind `{parameter.input}`" if parameter.input else ""
    advice = did_you_mean(word, parameter.choices) if word else None
    message = f"`{name}` must be one of {', '.join(parameter.choices)}{either}, got {word or other}"
    scope.fail("A309", message, node.span, help=advice)


def _predicate(node: nodes.Expression, scope: Scope) -> Scalar:
    inner = scope.child(predicate=True)
    value = meaning(node, inner)
    kind = kind_of(value)
    if kind != "scalar" or type_of(value) != "boolean":  # type: ignore[arg-type]
        message = f"`where` needs a comparison, got {described(value)}"
        code, advice = "A314", "for example `where((q - k) % 2 == 0)`"
        if kind == "graph":
            code, advice = "A310", "write the graph without `where`"
        scope.fail(code, message, node.span, help=advice)
    return folded(value, node.span, inner)  # type: ignore[arg-type]
