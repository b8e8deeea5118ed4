"""The statements of an attention, scope by scope."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnspec.diagnostics import did_you_mean
from attnspec.elaborate.collect import Collector, Failed
from attnspec.elaborate.coverage import Ruling, Where
from attnspec.elaborate.modules import Module
from attnspec.elaborate.names import (
    BROKEN,
    INPUT_KINDS,
    RESERVED,
    Bound,
    Environment,
    type_of,
)
from attnspec.elaborate.scores import Scores
from attnspec.grammar import nodes
from attnspec.ir import Claim, Input, InputRef, Mechanism, Score, Term
from attnspec.relations import Relation
from attnspec.scalars import Scalar
from attnspec.source import Span

MOST_LAYERS = 4096
MOST_HEADS = 4096
MOST_SLOTS = 1 << 18
MOST_SCOPES = 16

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
