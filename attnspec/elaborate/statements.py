"""The statements of an attention, scope by scope."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np

from attnspec.elaborate.clauses import Scores
from attnspec.elaborate.collect import Collector, Failed
from attnspec.elaborate.imports import Module
from attnspec.elaborate.names import BROKEN, INPUT_KINDS, RESERVED, Bound, Environment, type_of
from attnspec.grammar import nodes
from attnspec.graphs.bind import check_value
from attnspec.graphs.relation import Relation
from attnspec.ir.normal_form import substitute
from attnspec.ir.parameters import Parameter
from attnspec.ir.program import (
    Attend,
    Claim,
    Compound,
    Input,
    InputRef,
    Leaf,
    Mechanism,
    Score,
    Term,
    leaves,
    symbols_of,
)
from attnspec.ir.scalars import Scalar, ScalarError, Value, fold, symbols
from attnspec.text.diagnostics import did_you_mean
from attnspec.text.source import Span

MOST_LAYERS = 4096
MOST_HEADS = 4096
MOST_SLOTS = 1 << 18
MOST_SCOPES = 16

SCALE = Parameter("real", "what scores are multiplied by")

_TOP = ("layers", "heads", "sequence", "extra_tokens", "causal")

Attended = tuple[Term | None, Mechanism | None]


class Statements(Scores):
    """Walks the body of one attention and collects what it says."""

    def __init__(
        self,
        collector: Collector,
        module: Module,
        patterns: Mapping[str, type[Relation]],
        mechanisms: Mapping[str, type],
    ) -> None:
        super().__init__()
        self.collector = collector
        self.module = module
        self.patterns = patterns
        self.mechanisms = mechanisms
        self.layers: int | None = None
        self.heads: int | None = None
        self.grid_rank: int | None = None
        self.grid: tuple[Scalar, ...] | None = None
        self.extra_tokens = 0
        self.causal: Span | None = None
        self.inputs: dict[str, InputRef] = {}
        self.declared: dict[str, Input] = {}
        self.attends: list[Ruling[Attended]] = []
        self.scales: list[Ruling[Scalar]] = []
        self.scores: list[Ruling[Score]] = []
        self.normalizers: list[Ruling[str]] = []
        self.claims: list[Claim] = []
        self.lets: list[nodes.Let] = []
        self._places: dict[str, Span] = {}
        self._said: dict[str, Span] = {}
        self._blocks = 0

    @property
    def everywhere(self) -> Where:
        """All layers and heads that the spec distinguishes."""
        return Where(
            frozenset(range(1 if self.layers is None else self.layers)),
            frozenset(range(1 if self.heads is None else self.heads)),
        )

    def expect(self, attention: nodes.Attention) -> None:
        """Note which counts an attention will declare: they have no value before that."""
        self.pending = {
            statement.keyword
            for statement in attention.body
            if isinstance(statement, nodes.Setting) and statement.keyword in ("layers", "heads")
        }

    def body(self, attention: nodes.Attention, env: Environment) -> None:
        """Everything an attention says; errors are collected, statement by statement."""
        # counts first: scopes and arguments anywhere may refer to them
        for statement in attention.body:
            if isinstance(statement, nodes.Let):
                self._guarded(self._let, statement, env)
            elif isinstance(statement, nodes.Input):
                self._guarded(self._input, statement, env)
            elif isinstance(statement, nodes.Setting) and statement.keyword in _TOP:
                self._guarded(self._top, statement, env)
        slots = len(self.everywhere.layers) * len(self.everywhere.heads)
        if slots > MOST_SLOTS:
            self.collector.add(
                "A194",
                f"layers times heads may be at most {MOST_SLOTS:,}, got {slots:,}",
                attention.name_span,
            )
            return
        self._scope(attention.body, env, self.everywhere, top=True)
        for statement in attention.body:
            if isinstance(statement, nodes.Require):
                try:
                    self.claims.extend(self.claim(statement, env))
                except Failed:
                    continue

    def _guarded(self, elaborate, statement, env: Environment) -> None:  # type: ignore[no-untyped-def]
        try:
            elaborate(statement, env)
        except Failed:
            if isinstance(statement, nodes.Let | nodes.Input):
                env.names.setdefault(statement.name, BROKEN)
            elif isinstance(statement, nodes.Setting):
                self.broken.add(statement.keyword)
        if isinstance(statement, nodes.Setting):
            self.pending.discard(statement.keyword)

    def _scope(
        self, body: Sequence[nodes.Statement], env: Environment, where: Where, top: bool
    ) -> None:
        for statement in body:
            try:
                self._statement(statement, env, where, top)
            except Failed:
                continue

    def _statement(
        self, statement: nodes.Statement, env: Environment, where: Where, top: bool
    ) -> None:
        match statement:
            case nodes.Scope():
                self._enter(statement, env, where)
            case nodes.Let() if not top:
                self._guarded(self._let, statement, env)
            case nodes.Setting() if statement.keyword not in _TOP:
                self._setting(statement, env, where)
            case nodes.Input() | nodes.Require() | nodes.Setting() if not top:
                word = (
                    statement.keyword
                    if isinstance(statement, nodes.Setting)
                    else ("input" if isinstance(statement, nodes.Input) else "require")
                )
                self.collector.fail(
                    "A405",
                    f"`{word}` is about the whole attention and cannot stand inside a scope",
                    statement.span,
                )
            case _:
                return

    # --- names ---------------------------------------------------------------------------------

    def define(self, name: str, span: Span, env: Environment, bound: Bound) -> None:
        """Give a name its meaning; refuses reserved words and names that are taken."""
        self.check_name(name, span)
        if name in self._places:
            # which of the two is meant is not known: what uses the name says nothing more
            env.names[name] = BROKEN
            self.collector.fail(
                "A203",
                f"`{name}` is defined twice",
                span,
                related=(("first defined here", self._places[name]),),
            )
        self._places[name] = span
        env.names[name] = bound

    def check_name(self, name: str, span: Span) -> None:
        """Refuse a word of the language as a name."""
        if name in RESERVED:
            self.collector.fail(
                "A204", f"`{name}` is a word of the language and cannot be a name", span
            )

    def _let(self, statement: nodes.Let, env: Environment) -> None:
        bound = self.expression(statement.value, env)
        self.define(statement.name, statement.name_span, env, bound)
        self.lets.append(statement)

    def _input(self, statement: nodes.Input, env: Environment) -> None:
        if statement.kind not in INPUT_KINDS:
            self.collector.fail(
                "A212",
                f"the kind of an input is one of {', '.join(INPUT_KINDS)}, got `{statement.kind}`",
                statement.kind_span,
                notes=("`tokens` marks positions, `ids` numbers them, `length` counts them",),
                help=did_you_mean(statement.kind, INPUT_KINDS),
            )
        at_most: int | None = None
        for argument in statement.arguments:
            if argument.name != "at_most" or statement.kind != "tokens" or at_most is not None:
                self.collector.fail(
                    "A302",
                    "an input takes no argument but `at_most`, and that only once, for `tokens`",
                    argument.span,
                )
            at_most = self.count(argument.value, env, "`at_most`", 0, 2**31 - 1)
        reference = InputRef(statement.name, statement.kind)
        self.define(
            statement.name, statement.name_span, env, Bound("input", reference, statement.span)
        )
        self.inputs[statement.name] = reference
        self.declared[statement.name] = Input(statement.name, statement.kind, at_most)

    # --- statements about the whole attention --------------------------------------------------

    def _top(self, statement: nodes.Setting, env: Environment) -> None:
        keyword = statement.keyword
        if keyword in self._said:
            self.collector.fail(
                "A406",
                f"`{keyword}` is said twice",
                statement.span,
                related=(("first said here", self._said[keyword]),),
            )
        self._said[keyword] = statement.keyword_span
        value = statement.value
        if value is None:
            self.causal = statement.keyword_span
        elif keyword == "layers":
            self.layers = self.count(value, env, "`layers`", 1, MOST_LAYERS)
        elif keyword == "heads":
            self.heads = self.count(value, env, "`heads`", 1, MOST_HEADS)
        elif keyword == "extra_tokens":
            self.extra_tokens = self.count(value, env, "`extra_tokens`", 0, 2**31 - 1)
        else:
            self._sequence(value, env)

    def _sequence(self, value: nodes.Expression, env: Environment) -> None:
        if not isinstance(value, nodes.Call) or value.name != "grid":
            self.collector.fail(
                "A316",
                "a sequence is `grid(H, W)` or `grid(T, H, W)`",
                value.span,
                help="without `sequence` positions form a line",
            )
        if len(value.arguments) not in (2, 3) or any(a.name for a in value.arguments):
            self.collector.fail("A316", "a grid has two or three extents without names", value.span)

        def extent(argument: nodes.Argument) -> Scalar:
            scalar = self.integer(argument.value, env, "an extent")
            if isinstance(scalar, int) and not 1 <= scalar < 2**31:
                self.collector.fail(
                    "A306",
                    f"an extent must be at least 1 and below 2**31, got {scalar}",
                    argument.value.span,
                )
            return scalar

        self.grid = tuple(self.each(value.arguments, extent))
        self.grid_rank = len(self.grid)

    # --- scopes and what stands in them --------------------------------------------------------

    def _enter(self, scope: nodes.Scope, env: Environment, where: Where) -> None:
        if where.depth >= MOST_SCOPES:
            self.collector.fail(
                "A197", f"scopes may be nested at most {MOST_SCOPES} deep", scope.span
            )
        if f"{scope.kind}s" in self.broken:
            raise Failed
        if scope.kind == "head" and self.heads is None:
            self.collector.fail(
                "A401",
                "`head` needs a spec that says how many heads there are",
                scope.items_span,
                help="add `heads N`",
            )
        if scope.kind == "layer" and self.layers is None:
            self.collector.fail(
                "A401",
                "`layer` needs a spec that says how many layers there are",
                scope.items_span,
                help="add `layers N`",
            )
        count = (self.layers if scope.kind == "layer" else self.heads) or 0
        chosen = self._set(scope, env, count)
        if not chosen:
            self.collector.fail(
                "A403",
                f"this scope covers no {scope.kind}: `{scope.kind}s {count}` has no odd number",
                scope.items_span,
            )
        self._blocks += 1
        layers = where.layers & chosen if scope.kind == "layer" else where.layers
        heads = where.heads & chosen if scope.kind == "head" else where.heads
        if not layers or not heads:
            self.collector.add(
                "A403",
                f"this scope covers no {scope.kind}, because a scope around it leaves them out",
                scope.items_span,
            )
            return
        inner = env.child()
        before = dict(self._places)
        self._scope(
            scope.body, inner, Where(layers, heads, where.depth + 1, self._blocks), top=False
        )
        self._places = before

    def _set(self, scope: nodes.Scope, env: Environment, count: int) -> frozenset[int]:
        words = {
            "even": frozenset(range(0, count, 2)),
            "odd": frozenset(range(1, count, 2)),
            "all": frozenset(range(count)),
        }
        first = scope.items[0]
        if len(scope.items) == 1 and isinstance(first, nodes.Name) and first.name in words:
            return words[first.name]

        def one(item: nodes.Expression) -> frozenset[int]:
            bare = item.name if isinstance(item, nodes.Name) else ""
            if bare.lower() in words and bare not in env.names:
                self.collector.fail(
                    "A201",
                    f"`{bare}` is not defined",
                    item.span,
                    help=did_you_mean(bare, words),
                )
            if meant := meant_as_range(item):
                self.collector.fail("A307", f"a {scope.kind} is no sum", item.span, help=meant)
            ends = (item.first, item.last) if isinstance(item, nodes.Range) else (item, item)
            low, high = (self._index(end, env, scope.kind, count) for end in ends)
            if low > high:
                self.collector.fail("A307", f"the range {low}..{high} is empty", item.span)
            return frozenset(range(low, high + 1))

        return frozenset().union(*self.each(scope.items, one))

    def _index(self, node: nodes.Expression, env: Environment, kind: str, count: int) -> int:
        value = self.integer(node, env, f"a {kind}")
        if not isinstance(value, int):
            self.collector.fail(
                "A315",
                f"a {kind} must be known when the spec is compiled, so it cannot use n",
                node.span,
            )
        if not 0 <= value < count:
            self.collector.fail(
                "A402",
                f"a {kind} must be between 0 and {count - 1}, got {value}",
                node.span,
                notes=(f"the spec says `{kind}s {count}`; they count from 0",),
            )
        return value

    def _setting(self, statement: nodes.Setting, env: Environment, where: Where) -> None:
        value = statement.value
        if value is None:
            return
        span = statement.span
        match statement.keyword:
            case "attend":
                self.attends.append(Ruling(self._attended(value, env), where, span))
            case "scale":
                scale = self.scalar(value, env, "`scale`")
                if type_of(scale) == "boolean":
                    self.collector.fail(
                        "A314", "`scale` must be a number, got a comparison", value.span
                    )
                self.check_constant(SCALE, "scale", scale, value.span)
                self.scales.append(Ruling(scale, where, span))
            case "score":
                self.scores.append(Ruling(self.score(value, env), where, span))
            case _:
                self.normalizers.append(Ruling(self.normalizer(value), where, span))

    def _attended(self, value: nodes.Expression, env: Environment) -> Attended:
        bound = self.expression(value, env)
        match bound.kind:
            case "graph":
                return bound.value, None  # type: ignore[return-value]
            case "mechanism":
                self._causal_form(bound.value)  # type: ignore[arg-type]
                return None, bound.value  # type: ignore[return-value]
            case "hybrid":
                graph, mechanism = bound.value  # type: ignore[misc]
                self._causal_form(mechanism)
                return graph, mechanism
            case _:
                self.require(bound, "graph", value.span, "what is attended")
                raise Failed

    def _causal_form(self, mechanism: Mechanism) -> None:
        declaration = self.mechanisms[mechanism.name]
        if self.causal is not None and not declaration.causal:
            self.collector.fail(
                "A704",
                f"`{mechanism.name}` has no causal form: {declaration.why_not_causal}",
                mechanism.span,
                related=(("the spec is causal", self.causal),),
            )
        why = declaration.only_causal(dict(mechanism.arguments))
        if self.causal is None and why:
            message = f"`{mechanism.name}` has the causal form alone here: {why}"
            self.collector.fail("A704", message, mechanism.span, help="write `causal`")


V = TypeVar("V")

MOST_CLASHES = 50
"""More than are shown; the search for them ends there."""


@dataclass(frozen=True)
class Where:
    """The layers and heads that a scope covers, and how deep it is nested."""

    layers: frozenset[int]
    heads: frozenset[int]
    depth: int = 0
    block: int = 0


@dataclass(frozen=True)
class Ruling(Generic[V]):
    """A value with the scope it holds in and the statement that says so."""

    value: V
    where: Where
    span: Span


def resolve(
    rulings: list[Ruling[V]], layers: int, heads: int, what: str, collector: Collector
) -> list[list[Ruling[V] | None]]:
    """The ruling of each layer and head, None where there is none."""
    # number of the ruling that holds, -1 for none; outer scopes first, so that inner ones win
    table = np.full((layers, heads), -1)
    clashes = 0
    for number, ruling in sorted(enumerate(rulings), key=lambda pair: pair[1].where.depth):
        cells = np.ix_(sorted(ruling.where.layers), sorted(ruling.where.heads))
        for other in sorted({*table[cells].flat}) if clashes < MOST_CLASHES else []:
            if other >= 0 and rulings[other].where.depth == ruling.where.depth:
                inside = np.argwhere(table[cells] == other)[0]
                layer = sorted(ruling.where.layers)[inside[0]]
                head = sorted(ruling.where.heads)[inside[1]]
                _clash(rulings[other], ruling, layer, head, what, collector)
                clashes += 1
        table[cells] = number
    found = [*rulings, None]
    return [[found[number] for number in row] for row in table.tolist()]


def _clash(
    first: Ruling[V], second: Ruling[V], layer: int, head: int, what: str, collector: Collector
) -> None:
    collector.add(
        "A404",
        f"two `{what}` of the same depth claim layer {layer}, head {head}",
        second.span,
        related=(("the other one stands here", first.span),),
        help="narrow one of the scopes",
    )


def ranges(numbers: list[int]) -> str:
    """Numbers in the notation of the language: `0..3, 7`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}..{b}" for a, b in parts)


def meant_as_range(item: nodes.Expression) -> str | None:
    """The way out where a layer or head is written as `5-3` or `1+1`; None for all else."""
    if not isinstance(item, nodes.Chain) or item.operators not in (("+",), ("-",)):
        return None
    numbers = sorted(each.value for each in item.operands if isinstance(each, nodes.Integer))
    if len(numbers) < 2:
        return None
    low, high = numbers
    return f"write `{low}..{high}` for a range, `{low}, {high}` for both"


Place = dict[str, int]


def slots_of(
    work: Statements, attention: nodes.Attention, collector: Collector
) -> list[list[Attend]]:
    """One entry for each layer and head; nothing if there are errors."""
    layers = 1 if work.layers is None else work.layers
    heads = 1 if work.heads is None else work.heads
    if collector.has_errors():
        return []
    attends = resolve(work.attends, layers, heads, "attend", collector)
    scales = resolve(work.scales, layers, heads, "scale", collector)
    normalizers = resolve(work.normalizers, layers, heads, "normalize", collector)
    groups: dict[Where, list[Ruling[Score]]] = {}
    for ruling in work.scores:
        groups.setdefault(ruling.where, []).append(ruling)
    stacked = [
        Ruling(tuple(r.value for r in group), where, group[0].span)
        for where, group in groups.items()
    ]
    scores = resolve(stacked, layers, heads, "score", collector)
    _uncovered(attends, work, attention, collector)
    if collector.has_errors():
        return []
    slot = _Slot(work, collector)
    rows: list[list[Attend]] = []
    for layer in range(layers):
        row: list[Attend] = []
        for head, attended in enumerate(attends[layer]):
            if attended is not None:
                place = {
                    **({} if work.layers is None else {"layer": layer}),
                    **({} if work.heads is None else {"head": head}),
                }
                scale, normal = scales[layer][head], normalizers[layer][head]
                row.append(slot.attend(place, attended, scale, normal, scores[layer][head]))
        rows.append(row)
    return rows


class _Slot:
    """Fills in layer and head, for every combination of statements once."""

    def __init__(self, work: Statements, collector: Collector) -> None:
        self._work = work
        self._collector = collector
        self._asked: dict[int, frozenset[str]] = {}
        self._made: dict[tuple[object, ...], Attend] = {}

    def attend(
        self,
        place: Place,
        ruling: Ruling[Attended],
        scale: Ruling[Scalar] | None,
        normal: Ruling[str] | None,
        scores: Ruling[tuple[Score, ...]] | None,
    ) -> Attend:
        """What one head does by the statements that rule it."""
        asked = self._symbols(ruling, ruling.value[0])
        if scale is not None:
            asked = asked | self._symbols(scale, scale.value)
        matters = {name: number for name, number in place.items() if name in asked}
        rulings = (ruling, scale, normal, scores)
        key = (*(id(one) for one in rulings), *matters.items())
        if key not in self._made:
            self._made[key] = self._attend(matters, *rulings)
        return self._made[key]

    def _symbols(self, ruling: Ruling[Attended] | Ruling[Scalar], value: object) -> frozenset[str]:
        if id(ruling) not in self._asked:
            found: set[str] = set()
            if isinstance(value, Leaf | Compound):
                found = symbols_of(value)
            elif value is not None:
                found = set(symbols(value))  # type: ignore[arg-type]
            self._asked[id(ruling)] = frozenset(found)
        return self._asked[id(ruling)]

    def _attend(
        self,
        place: Place,
        ruling: Ruling[Attended],
        scale: Ruling[Scalar] | None,
        normal: Ruling[str] | None,
        scores: Ruling[tuple[Score, ...]] | None,
    ) -> Attend:
        graph, mechanism = ruling.value
        factor = None if scale is None else scale.value
        changes = () if scores is None else scores.value
        where = ", ".join(f"{name} {number}" for name, number in place.items())
        values: Mapping[str, Value] = dict(place)
        try:
            if graph is not None and place:
                self._work.copied(graph, ruling.span)
                graph = substitute(graph, dict(place))
                for leaf in leaves(graph):
                    self._check(leaf, where)
            if factor is not None:
                factor = fold(factor, values)
        except ScalarError as error:
            message = f"an expression has no value at {where}: {error}"
            self._collector.add("A308", message, ruling.span)
        if mechanism is not None:
            if graph is None:
                self._without_scores(mechanism, changes, normal)
            elif normal is not None and normal.value != "softmax":
                self._misplaced(
                    mechanism,
                    f"beside `{mechanism.name}` the weights of a graph are those of a softmax,"
                    f" not of `normalize {normal.value}`",
                    normal.span,
                )
            if factor is not None and scale is not None:
                self._scaled(mechanism, graph is None, factor, scale.span)
        return Attend(
            graph=graph,
            mechanism=mechanism,
            scale=factor,
            scores=changes,
            normalize=normal.value if normal else "softmax",
            span=ruling.span,
        )

    def _misplaced(self, mechanism: Mechanism, message: str, span: Span | None) -> None:
        related = () if mechanism.span is None else (("the mechanism", mechanism.span),)
        self._collector.add("A705", message, span or mechanism.span, related=related)

    def _without_scores(
        self, mechanism: Mechanism, scores: tuple[Score, ...], normal: Ruling[str] | None
    ) -> None:
        message = f"changes the scores of a graph; `{mechanism.name}` has none"
        if scores:
            self._misplaced(mechanism, f"`score` {message}", scores[0].span)
        elif normal is not None:
            self._misplaced(mechanism, f"`normalize` {message}", normal.span)

    def _scaled(self, mechanism: Mechanism, alone: bool, factor: Scalar, span: Span | None) -> None:
        declaration = self._work.mechanisms[mechanism.name]
        takes = declaration.takes_scale(dict(mechanism.arguments))
        if alone and not takes:
            message = f"the formula of `{mechanism.name}` takes no `scale`"
            self._misplaced(mechanism, message, span)
        elif takes and isinstance(factor, int | float) and factor <= 0:
            message = f"`{mechanism.name}` takes the root of `scale`, which is {factor:g}"
            self._misplaced(mechanism, message, span)

    def _check(self, leaf: Leaf, where: str) -> None:
        """Ranges of arguments that layer and head have made known."""
        given = dict(leaf.arguments)
        for entry in fields(self._work.patterns[leaf.pattern]):  # type: ignore[arg-type]
            parameter: Parameter = entry.metadata["parameter"]
            value = given.get(entry.name)
            if isinstance(value, int | float):
                wrong = check_value(parameter, entry.name, value)
                if wrong:
                    self._collector.add("A306", f"{wrong} at {where}", leaf.place(entry.name))


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
