"""What has brackets behind its name: functions, token sets, patterns, mechanisms, named graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from attnspec.elaborate import terms
from attnspec.elaborate.arguments import complete, matched, parameters_of, values_of
from attnspec.elaborate.foreign_words import meant, undefined
from attnspec.elaborate.names import POSITIONS, RESERVED, TOKEN_SETS, Numbers, Value, type_of
from attnspec.elaborate.scope import Failed, Scope, each, meaning
from attnspec.grammar import nodes
from attnspec.graphs.bind import check_value
from attnspec.graphs.grid import AXES
from attnspec.graphs.patterns.where_inputs import parted
from attnspec.graphs.predicates.inputs import INEXACT, READ, pair_reading, reading, reads_inputs
from attnspec.ir.linear import asks_positions
from attnspec.ir.parameters import Parameter
from attnspec.ir.program import InputRef, Leaf, Mechanism, Term, Tokens
from attnspec.ir.scalars import FUNCTIONS, SCORE_FUNCTIONS, Apply, Scalar, Symbol, symbols
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import did_you_mean

SIZES = "a size is the same for all queries; to vary it write, say, `where(abs(q - k) <= q // 2)`"
IN_CONDITIONS = "can stand only in `where(…)` or `score`"
IN_SCORE = "`{0}` has a meaning only in a `score` statement"
OTHER_BOXES = "for other boxes use `where`: `where(0 <= q.{0} - k.{0} < {1})` keeps {1} along `{0}`"
DILATED = "to keep every second row of a box write `& where((q.row - k.row) % 2 == 0)` behind it"
IN_GRAPH = (
    "a named graph does not know the names of the attention: add `{1}` to the parameters of `{0}`,"
    " and pass it; if `{1}` is a graph, define it by `graph {1} = …`"
)
GRAPH = "if a graph is meant, define it outside the attention: `graph {0}(x) = …`"
INPUT = "if an input is meant, declare it: `input {0}: numbers`"
_ANY = Parameter("any", "", positional=True)


@meaning.register(nodes.Call)
def call(node: nodes.Call, scope: Scope, bare: bool = False) -> Value:
    """What a call stands for; `bare` where the text has the word alone."""
    name, work, graphs = node.name, scope.work, scope.module.graphs
    binding = scope.names.get(name)
    if scope.score and name in SCORE_FUNCTIONS:
        require_free(node, scope)
        return _function(node, scope)
    if isinstance(binding, InputRef) and (scope.predicate or name not in scope.callable):
        return input_read(node, binding, scope)
    if name in scope.module.broken:
        raise Failed
    if name in graphs:
        return _named_graph(node, scope)
    if name in FUNCTIONS:
        return _function(node, scope)
    if name in TOKEN_SETS:
        return _positions(node, scope) if name == "positions" else _token_set(node, scope)
    if name == "transpose":
        return _transposed(node, scope)
    if name == "shift":
        return _shifted(node, scope)
    if name in work.callable:
        return _pattern(node, scope)
    if name in work.mechanisms:
        return _mechanism(node, scope, bare)
    if name in scope.names or name in RESERVED:
        scope.fail("A210", f"`{name}` is a value and takes no arguments", node.name_span)
    advice = meant(name, scope) or did_you_mean(name, scope.callable)
    if name in SCORE_FUNCTIONS:
        advice = IN_SCORE.format(name)
    elif advice is None and scope.expanding:
        advice = IN_GRAPH.format(scope.expanding[-1].name, name)
    elif advice is None:
        advice = (INPUT if scope.predicate else GRAPH).format(name)
    scope.fail("A201", undefined(name, scope), node.name_span, help=advice)


def _function(node: nodes.Call, scope: Scope) -> Scalar:
    def one(argument: nodes.Argument) -> Scalar:
        if argument.name is not None:
            scope.fail("A301", f"the arguments of `{node.name}` have no names", argument.span)
        value = terms.scalar(argument.value, scope, f"an argument of `{node.name}`")
        terms.typed(value, "number", node.name, argument.value.span, scope)
        return value

    least, most = {**FUNCTIONS, **SCORE_FUNCTIONS}[node.name]
    values = each(node.arguments, one)
    if len(values) < least or (most is not None and len(values) > most):
        needed = "one argument" if most == 1 else "at least one argument"
        scope.fail("A303", f"`{node.name}` takes {needed}, got {len(values)}", node.span)
    return terms.folded(Apply(node.name, tuple(values)), node.span, scope)


def _token_set(node: nodes.Call, scope: Scope) -> Tokens:
    parameters = TOKEN_SETS[node.name]
    settings, _ = values_of(node, scope, parameters)
    first, *_ = parameters
    if first not in settings:
        message = f"`{node.name}` needs `{first}`, as in `{node.name}(4)`"
        notes = (f"`{first}`: {parameters[first].doc}",)
        scope.fail("A303", message, node.span, notes=notes)
    return Tokens(node.name, tuple(settings.get(name, 0) for name in parameters))  # type: ignore[misc]


def _positions(node: nodes.Call, scope: Scope) -> Tokens:
    def ends(argument: nodes.Argument) -> tuple[Scalar, Scalar]:
        if argument.name is not None:
            scope.fail("A301", "positions have no names", argument.span)
        value = argument.value
        parts = (value.first, value.last) if isinstance(value, nodes.Range) else (value, value)
        first, last = (terms.integer(part, scope, "a position") for part in parts)
        for end in (first, last):
            if isinstance(end, int) and end < 0:
                message = f"a position must be at least 0, got {end}"
                advice = "for the last c positions write `last(c)`"
                scope.fail("A306", message, value.span, help=advice)
        if isinstance(first, int) and isinstance(last, int) and first > last:
            terms.empty_range(first, last, value.span, scope)
        return first, last

    if not node.arguments:
        scope.fail("A303", "`positions` needs positions, as in `positions(0, 8..15)`", node.span)
    return Tokens("positions", tuple(end for pair in each(node.arguments, ends) for end in pair))


def _transposed(node: nodes.Call, scope: Scope) -> Term:
    if len(node.arguments) != 1 or node.arguments[0].name:
        scope.fail("A303", "`transpose` must be written as `transpose(GRAPH)`", node.span)
    term = terms.graph(node.arguments[0].value, scope)
    terms.known_now(term, node.span, scope, "under `transpose`")
    return terms.compound("transpose", (term,), node.span, scope)


def _shifted(node: nodes.Call, scope: Scope) -> Term:
    graphs = [a for a in node.arguments if a.name is None]
    by = [a for a in node.arguments if a.name == "by"]
    if len(graphs) != 1 or len(by) != 1 or len(node.arguments) != 2:
        scope.fail("A303", "`shift` must be written as `shift(GRAPH, by = …)`", node.span)
    term = terms.graph(graphs[0].value, scope)
    terms.known_now(term, node.span, scope, "under `shift`")
    amount = terms.integer(by[0].value, scope, "`by`")
    return terms.compound("shift", (term,), node.span, scope, amount)


# --- patterns and mechanisms ---------------------------------------------------------------------


def _pattern(node: nodes.Call, scope: Scope) -> Term:
    pattern = scope.work.patterns[node.name]
    parameters = parameters_of(pattern)
    variadic = next((n for n, p in parameters.items() if p.kind == "extents"), None)
    if variadic is not None:
        extents = _extents(node, scope, parameters[variadic])
        return terms.leaf(node.name, {variadic: extents}, {}, node.span, scope)
    values, spans = values_of(node, scope, parameters)
    complete(node, scope, pattern, values, spans)
    if getattr(pattern, "needs_grid", False) and scope.work.grid is None:
        _needs_grid(node, scope)
    leaf = terms.leaf(node.name, values, spans, node.span, scope)
    variable = next((n for n, p in parameters.items() if p.kind == "predicate"), None)
    if variable is None or not reads_inputs(values[variable]):  # type: ignore[arg-type]
        return leaf
    return _of_inputs(leaf, values[variable], node, scope)  # type: ignore[arg-type]


def _of_inputs(leaf: Leaf, predicate: Scalar, node: nodes.Call, scope: Scope) -> Term:
    """A predicate that reads inputs."""
    require_exact(predicate, node, scope)
    refs = {name: InputRef(name, entry.kind) for name, entry in scope.work.inputs.items()}
    # tokens before a grid have no cell, and meet no predicate that asks for one, whatever it says
    whole = scope.work.extra_tokens > 0 and any("." in name for name in symbols(predicate))
    parts = parted(predicate, refs, whole, leaf)
    terms.spend(scope.work.weights.of(parts).size, node.span, scope.work)
    return parts


def _extents(node: nodes.Call, scope: Scope, parameter: Parameter) -> tuple[Scalar, ...]:
    def one(place: tuple[nodes.Argument, str]) -> Scalar:
        argument, axis = place
        if argument.name is not None:
            if argument.name.lower() not in ("t", "h", "w"):
                message = f"`{node.name}` has no argument `{argument.name}`"
                taken = f"it takes numbers without names: each is the {parameter.doc}"
                scope.fail("A302", message, argument.span, notes=(taken,), help=DILATED)
            message = f"`{node.name}` takes extents without names, got `{argument.name}`"
            advice = "write the numbers alone, in the order of `grid(…)`"
            scope.fail("A301", message, argument.span, help=advice)
        value = terms.integer(argument.value, scope, "an extent")
        wrong = check_value(replace(parameter, kind="integer"), "extent", value)
        if isinstance(value, int) and wrong:
            notes = (f"`extent`: {parameter.doc}",)
            box = OTHER_BOXES.format(axis, value) if value > 0 else None
            scope.fail("A306", wrong, argument.value.span, notes=notes, help=box)
        return value

    names = [*AXES.get(len(scope.work.grid or node.arguments), ()), *["row"] * len(node.arguments)]
    extents = tuple(each([*zip(node.arguments, names, strict=False)], one))
    if scope.work.grid is None:
        _needs_grid(node, scope)
    axes = len(scope.work.grid)
    if len(extents) != axes:
        message = f"`{node.name}` needs one extent for each of the grid's {axes} axes"
        scope.fail("A303", f"{message}, got {len(extents)}", node.span)
    return extents


def _needs_grid(node: nodes.Call, scope: Scope) -> NoReturn:
    if "sequence" in scope.work.broken:
        raise Failed
    message = f"`{node.name}` needs positions on a grid"
    scope.fail("A208", message, node.name_span, help="add `sequence grid(H, W)`")


def _mechanism(node: nodes.Call, scope: Scope, bare: bool) -> Mechanism:
    declaration = scope.work.mechanisms[node.name]
    parameters = parameters_of(declaration)
    values, spans = values_of(node, scope, parameters)
    complete(node, scope, declaration, values, spans)
    if bare:
        scope.fail("A206", f"`{node.name}` is a mechanism: write `{node.name}()`", node.span)
    return Mechanism(node.name, tuple(sorted(values.items())), node.span)


# --- named graphs --------------------------------------------------------------------------------


def _named_graph(node: nodes.Call, scope: Scope) -> Term:
    definition, home = scope.module.graphs[node.name]
    here = (("defined here", definition.name_span),)
    terms.spend(terms.CALL, node.span, scope.work)
    if any(each is definition for each in scope.expanding):
        chain = [each.name for each in scope.expanding]
        chain = [*chain[chain.index(definition.name) :], definition.name]
        message = f"the definition of `{node.name}` refers to itself: {' -> '.join(chain)}"
        scope.fail("A211", message, node.name_span, related=here)
    if len(scope.expanding) >= LIMITS.nesting:
        message = f"named graphs may be nested at most {LIMITS.nesting} deep"
        scope.fail("A197", message, node.name_span)
    scope.work.used_graphs[(id(home), definition.name)] = (definition, home)
    parameters = dict.fromkeys((each.name for each in definition.parameters), _ANY)
    settings, _ = matched(node, scope, parameters, lambda name, value: meaning(value, scope))
    inner = Scope(scope.work, home, dict(settings), expanding=(*scope.expanding, definition))
    for parameter in definition.parameters:
        if parameter.name not in settings and parameter.default is not None:
            inner.names[parameter.name] = meaning(parameter.default, inner.child(default=True))
    missing = [name for name in parameters if name not in inner.names]
    if missing:
        needed = ", ".join(f"`{name}`" for name in missing)
        scope.fail("A303", f"`{node.name}` needs {needed}", node.span, related=here)
    return terms.graph(definition.body, inner)


# --- lists, and inputs at positions ---------------------------------------------------------------


@meaning.register(nodes.List)
def listed(node: nodes.List, scope: Scope) -> Numbers:
    """What `[8, 16, 32]` stands for."""

    def one(part: nodes.Expression) -> Scalar:
        value = terms.scalar(part, scope, "an element of a list")
        terms.typed(value, "number", "[a, b, …]", part.span, scope)
        return value

    return Numbers(tuple(each(node.items, one)))


@meaning.register(nodes.Index)
def indexed(node: nodes.Index, scope: Scope) -> Scalar:
    """What `radii[head]` stands for."""
    index = node.index.name if isinstance(node.index, nodes.Name) else ""
    if index in POSITIONS or (index and scope.predicate and index not in scope.names):
        _read_by_position(node, scope)
    base = meaning(node.base, scope)
    if not isinstance(base, Numbers):
        message = f"only a list can be indexed by `[…]`, got {terms.described(base)}"
        read = terms.read_by(base, scope) if isinstance(base, InputRef) else None
        advice = read or "a list is written `[8, 16, 32]`"
        scope.fail("A310", message, node.base.span, help=advice)
    place = terms.integer(node.index, scope, "the index of a list")
    count = len(base.items)
    if isinstance(place, int) and not 0 <= place < count:
        message = f"the index of this list must be 0 to {count - 1}, got {place}"
        scope.fail("A306", message, node.index.span)
    if isinstance(place, int):
        return base.items[place]
    return terms.folded(Apply("item", (place, *base.items)), node.span, scope)


def _read_by_position(node: nodes.Index, scope: Scope) -> None:
    """Refuse `doc[q]`, which other languages mean for what an input has at a position."""
    name = node.base.name if isinstance(node.base, nodes.Name) else ""
    value = scope.names.get(name, InputRef(name, "ids"))
    if not name or name in ("n", *POSITIONS) or not isinstance(value, InputRef):
        return
    advice = terms.read_by(value, scope)
    if name not in scope.names:
        advice = f"declare `input {name}: ids`, and {advice}"
    message = f"square brackets read a list, not an input, got `{name}[…]`"
    scope.fail("A310", message, node.span, help=advice)


def input_read(node: nodes.Call, given: InputRef, scope: Scope) -> Symbol:
    """What `time(q)` stands for in a predicate."""
    name = node.name
    sides = [x.value.name for x in node.arguments if isinstance(x.value, nodes.Name) and not x.name]
    if given.kind == "pairs" and scope.score:
        if sides != [*POSITIONS]:
            scope.fail("A303", f"an input of pairs is read as `{name}(q, k)`", node.span)
        scope.used.add(name)
        return pair_reading(given.name)
    if given.kind not in READ:
        where = " in `where`" if scope.predicate and not scope.score else ""
        kinds = " or ".join(f"`{kind}`" for kind in READ)
        message = f"`{name}(…)`{where} needs an input of kind {kinds}, got `{given.kind}`"
        scope.fail("A313", message, node.span, help=terms.read_by(given, scope))
    if not scope.predicate:
        scope.fail("A205", f"`{name}(…)` {IN_CONDITIONS}", node.span, help=SIZES)
    if len(node.arguments) != 1 or len(sides) != 1 or sides[0] not in POSITIONS:
        message = f"an input is read only at the query, `{name}(q)`, or at the key, `{name}(k)`"
        scope.fail("A303", message, node.span, help="pass other values as a second input")
    scope.used.add(name)
    return reading(given.name, sides[0])


def require_free(node: nodes.Name | nodes.Call, scope: Scope) -> None:
    """Refuse another meaning of a word that `score` has one for."""
    if node.name in scope.names:
        message = f"`{node.name}` has a meaning of its own in `score`"
        span = node.name_span if isinstance(node, nodes.Call) else node.span
        advice = "give the parameter, local name or input another name"
        scope.fail("A204", message, span, help=advice)


def require_exact(value: Scalar, node: nodes.Expression, scope: Scope) -> None:
    """Refuse what a predicate cannot do with what it reads: it would not be the same everywhere."""
    if not isinstance(value, Apply) or not reads_inputs(value):
        return
    op, args = value.op, value.args
    if op in ("and", "or", "not"):
        for part in args:
            require_exact(part, node, scope)
        return
    problem = _inexact(value)
    if problem is not None:
        help = "compute the value before the call, and pass the result as the input"
        scope.fail("A312", f"in a condition that reads an input, {problem}", node.span, help=help)


def _inexact(value: Scalar) -> str | None:
    """What a comparison of inputs, or a part of it, does that numpy and torch may not do alike."""
    if not isinstance(value, Apply):
        return None
    op, args = value.op, value.args
    if not (reads_inputs(value) or asks_positions(value)):
        # known before any pair is examined
        return None
    if op in INEXACT:
        return f"`{op}` cannot be used: its result may differ between libraries, or not exist"
    if op in ("//", "%") and (reads_inputs(args[1]) or asks_positions(args[1])):
        return f"the divisor of `{op}` must not depend on `q`, `k` or an input"
    if op in ("//", "%") and type_of(args[1]) != "integer":
        return f"the divisor of `{op}` must be an integer"
    if op == "**" and not (isinstance(args[1], int) and 0 <= args[1] <= 8):
        return "the exponent of `**` must be a fixed integer from 0 to 8"
    if op == "item":
        return "the index of a list must depend only on `layer`, `head` and `n`"
    return next((reason for part in args if (reason := _inexact(part))), None)
