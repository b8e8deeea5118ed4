"""The statements of an attention, scope by scope."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from attnspec.elaborate import terms
from attnspec.elaborate.arguments import check_constant, values_of
from attnspec.elaborate.clauses import claims_of, normalizer_of, score_of
from attnspec.elaborate.cross import require_across, require_one_sequence
from attnspec.elaborate.names import (
    INPUT_KINDS,
    INPUTS,
    RESERVED,
    SCALARS,
    TOKEN_SETS,
    Hybrid,
    Value,
    type_of,
)
from attnspec.elaborate.scope import Failed, Scope, each, meaning
from attnspec.elaborate.slots import Ruling, Rulings, Where
from attnspec.elaborate.terms import count, integer, known, require, scalar
from attnspec.grammar import nodes
from attnspec.graphs.relation import DataDependent
from attnspec.ir.crossing import QUERIES
from attnspec.ir.parameters import Parameter
from attnspec.ir.program import Claim, Input, InputRef, Mechanism, Term, leaves
from attnspec.ir.scalars import Scalar
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import did_you_mean
from attnspec.text.source import Span

SCALE = Parameter("real", "what scores are multiplied by")

_TOP = ("layers", "heads", "sequence", "extra_tokens", "causal", "cross")

S = TypeVar("S", nodes.Let, nodes.Input, nodes.Setting)


@dataclass
class Statements:
    """What the body of one attention says.

    `places` are where the names in scope were defined, `said` where statements about the whole
    attention stand, by keyword.
    """

    rulings: Rulings = field(default_factory=Rulings)
    claims: list[Claim] = field(default_factory=list)
    lets: list[nodes.Let] = field(default_factory=list)
    places: dict[str, Span] = field(default_factory=dict)
    said: dict[str, Span] = field(default_factory=dict)

    def body(self, attention: nodes.Attention, scope: Scope) -> None:
        """Everything an attention says; errors are collected, statement by statement."""
        # counts first: scopes and arguments anywhere may refer to them
        for statement in attention.body:
            match statement:
                case nodes.Let():
                    self._guarded(self._let, statement, scope)
                case nodes.Input():
                    self._guarded(self._input, statement, scope)
                case nodes.Setting() if statement.keyword in _TOP:
                    self._guarded(self._top, statement, scope)
        work = scope.work
        everywhere = Where(frozenset(range(work.layers or 1)), frozenset(range(work.heads or 1)))
        slots = len(everywhere.layers) * len(everywhere.heads)
        if slots > LIMITS.slots:
            message = f"layers times heads may be at most {LIMITS.slots:,}, got {slots:,}"
            work.collector.add("A194", message, attention.name_span)
            return
        self._scope(attention.body, scope, everywhere, top=True)
        for statement in attention.body:
            if isinstance(statement, nodes.Require):
                try:
                    self.claims.extend(claims_of(statement, scope))
                except Failed:
                    continue

    def _guarded(self, elaborate: Callable[[S, Scope], None], statement: S, scope: Scope) -> None:
        try:
            elaborate(statement, scope)
        except Failed:
            if isinstance(statement, nodes.Setting):
                scope.work.broken.add(statement.keyword)
            else:
                scope.names.setdefault(statement.name, None)
        if isinstance(statement, nodes.Setting):
            scope.work.pending.pop(statement.keyword, None)

    def _scope(
        self, body: Sequence[nodes.Statement], scope: Scope, where: Where, top: bool
    ) -> None:
        for statement in body:
            try:
                self._statement(statement, scope, where, top)
            except Failed:
                continue

    def _statement(self, statement: nodes.Statement, scope: Scope, where: Where, top: bool) -> None:
        match statement:
            case nodes.Scope():
                self._enter(statement, scope, where)
            case nodes.Let() if not top:
                self._guarded(self._let, statement, scope)
            case nodes.Setting() if statement.keyword not in _TOP:
                self._setting(statement, scope, where)
            case nodes.Input() | nodes.Require() | nodes.Setting() if not top:
                word = getattr(statement, "keyword", type(statement).__name__.lower())
                message = f"`{word}` is about the whole attention, not about some layers or heads"
                advice = "move it out of the `layer` and `head` blocks"
                scope.fail("A405", message, statement.span, help=advice)

    # --- names ---------------------------------------------------------------------------------

    def define(self, name: str, span: Span, scope: Scope, value: Value) -> None:
        """Give a name its meaning; refuses reserved words and names that are taken."""
        if name in RESERVED:
            message = f"`{name}` is a reserved word and cannot be a name"
            scope.fail("A204", message, span)
        if name == QUERIES and scope.work.cross is not None:
            message = f"`{name}` is the number of queries in a spec with `cross`: use another name"
            scope.fail("A204", message, span, related=(("`cross` stands here", scope.work.cross),))
        if name in self.places:
            # which of the two is meant is not known: what uses the name says nothing more
            scope.names[name] = None
            scope.work.collector.add_twice(name, span, self.places[name])
            raise Failed
        self.places[name] = span
        scope.names[name] = value

    def _let(self, statement: nodes.Let, scope: Scope) -> None:
        value = meaning(statement.value, scope)
        self.define(statement.name, statement.name_span, scope, value)
        self.lets.append(statement)

    def _input(self, statement: nodes.Input, scope: Scope) -> None:
        kind = statement.kind
        if kind not in INPUT_KINDS:
            notes = (
                "at each position `tokens` is true or false, `ids` a label, `numbers` a number",
                "`length` is one number of positions for each sequence, as in `prefix(length)`",
                "`choices`, `scores`, `buckets` choose keys; `pairs` are numbers for `score`",
            )
            message = f"the kind of an input must be one of {', '.join(INPUT_KINDS)}, got `{kind}`"
            advice = did_you_mean(kind, INPUT_KINDS)
            scope.fail("A212", message, statement.kind_span, notes=notes, help=advice)
        takes = INPUTS[kind][1]
        sizes: dict[str, int] = {}
        for argument in statement.arguments:
            if argument.name is None or argument.name not in takes or sizes:
                allowed = "".join(f"one argument, `{name} = …`" for name in takes) or "no arguments"
                message = f"an input of kind `{kind}` takes {allowed}"
                scope.fail("A302", message, argument.span)
            name, least = argument.name, takes[argument.name].least or 0
            sizes[name] = count(argument.value, scope, f"`{name}`", least, 2**31 - 1)
        self.define(statement.name, statement.name_span, scope, InputRef(statement.name, kind))
        scope.work.inputs[statement.name] = Input(statement.name, kind, **sizes)

    # --- statements about the whole attention --------------------------------------------------

    def _top(self, statement: nodes.Setting, scope: Scope) -> None:
        keyword, value, work = statement.keyword, statement.value, scope.work
        if keyword in self.said:
            first = (f"the first `{keyword}` is here", self.said[keyword])
            scope.fail("A406", f"`{keyword}` is given twice", statement.span, related=(first,))
        self.said[keyword] = statement.keyword_span
        if keyword != "cross" and work.cross is not None:
            require_one_sequence(statement, scope)
        if keyword == "causal":
            work.causal = statement.keyword_span
        if value is None:
            return
        if keyword == "layers":
            work.layers = count(value, scope, "`layers`", 1, LIMITS.layers)
        elif keyword == "heads":
            work.heads = count(value, scope, "`heads`", 1, LIMITS.layers)
        elif keyword == "extra_tokens":
            work.extra_tokens = count(value, scope, "`extra_tokens`", 0, 2**31 - 1)
        else:
            work.grid = _grid(value, scope)

    # --- scopes and what stands in them --------------------------------------------------------

    def _enter(self, block: nodes.Scope, scope: Scope, where: Where) -> None:
        kind, work = block.kind, scope.work
        if where.depth >= LIMITS.scopes:
            message = f"blocks may be nested at most {LIMITS.scopes} deep"
            scope.fail("A197", message, block.span)
        if f"{kind}s" in work.broken:
            raise Failed
        many = work.layers if kind == "layer" else work.heads
        if many is None:
            message = f"`{kind}` needs to know how many {kind}s there are"
            scope.fail("A401", message, block.items_span, help=f"add `{kind}s N`")
        chosen = _chosen(block, scope, many)
        if not chosen:
            message = f"this block covers no {kind}: with `{kind}s 1` there is only {kind} 0"
            scope.fail("A403", message, block.items_span)
        layers = where.layers & chosen if kind == "layer" else where.layers
        heads = where.heads & chosen if kind == "head" else where.heads
        if not layers or not heads:
            message = f"this block covers no {kind}: the block around it covers other {kind}s"
            scope.fail("A403", message, block.items_span, help="move it out of that block")
        before = dict(self.places)
        inner = Where(layers, heads, where.depth + 1, block.span)
        self._scope(block.body, scope.child(), inner, top=False)
        self.places = before

    def _setting(self, statement: nodes.Setting, scope: Scope, where: Where) -> None:
        value, span, rulings = statement.value, statement.span, self.rulings
        if value is None:
            return
        match statement.keyword:
            case "attend":
                rulings.attends.append(Ruling(_attended(value, scope), where, span))
            case "scale":
                scale = scalar(value, scope, "`scale`")
                if type_of(scale) == "boolean":
                    scope.fail("A314", "`scale` must be a number, got a comparison", value.span)
                check_constant(SCALE, "scale", scale, value.span, scope)
                rulings.scales.append(Ruling(scale, where, span))
            case "score":
                rulings.scores.append(Ruling(score_of(value, scope), where, span))
            case _:
                rulings.normalizers.append(Ruling(normalizer_of(value, scope), where, span))


def _grid(value: nodes.Expression, scope: Scope) -> tuple[Scalar, ...]:
    if not isinstance(value, nodes.Call) or value.name != "grid":
        message = "`sequence` takes `grid(H, W)` or `grid(T, H, W)`"
        scope.fail("A316", message, value.span, help="positions on a line need no `sequence`")
    if len(value.arguments) not in (2, 3) or any(a.name for a in value.arguments):
        message = "a grid is `grid(H, W)` or `grid(T, H, W)`, two or three sizes without names"
        scope.fail("A316", message, value.span)

    def extent(argument: nodes.Argument) -> Scalar:
        length = integer(argument.value, scope, "a size of the grid")
        if isinstance(length, int) and not 1 <= length < 2**31:
            message = f"a size of the grid must be between 1 and 2**31 - 1, got {length}"
            scope.fail("A306", message, argument.value.span)
        return length

    return tuple(each(value.arguments, extent))


_REST = ("default", "else", "other", "others", "otherwise", "remaining", "rest")
"""What people call the layers or heads that no block names."""


def _chosen(block: nodes.Scope, scope: Scope, count: int) -> frozenset[int]:
    """The layers or heads that a scope names."""
    words = {
        "even": frozenset(range(0, count, 2)),
        "odd": frozenset(range(1, count, 2)),
        "all": frozenset(range(count)),
    }
    kind = block.kind

    def index(node: nodes.Expression) -> int:
        value = known(node, scope, f"a {kind}")
        if not 0 <= value < count:
            message = f"a {kind} must be between 0 and {count - 1}, got {value}"
            note = f"the spec says `{kind}s {count}`, and {kind}s are numbered from 0"
            last = f"counted from the end, {value} is `{kind} {count + value}`"
            advice = last if -count <= value < 0 else None
            scope.fail("A402", message, node.span, notes=(note,), help=advice)
        return value

    def one(item: nodes.Expression) -> frozenset[int]:
        if isinstance(item, nodes.Call) and item.name == "every":
            return _every(item, kind, scope, count)
        bare = item.name if isinstance(item, nodes.Name) else ""
        if bare in words:
            return words[bare]
        other = *SCALARS, *TOKEN_SETS, *words, *scope.work.patterns, *scope.module.graphs
        if bare and bare not in scope.names and bare not in other:
            sets = f"write numbers from 0 to {count - 1}, or `even`, `odd`, `every(2)` or `all`"
            advice = did_you_mean(bare, words) or sets
            if bare in _REST:
                advice = f"write an `attend` outside of the blocks: it is for all other {kind}s"
            scope.fail("A201", f"`{bare}` is not defined", item.span, help=advice)
        if meant := meant_as_range(item):
            scope.fail("A307", f"a {kind} is a number, not arithmetic", item.span, help=meant)
        ends = (item.first, item.last) if isinstance(item, nodes.Range) else (item, item)
        low, high = (index(end) for end in ends)
        if low > high:
            terms.empty_range(low, high, item.span, scope)
        return frozenset(range(low, high + 1))

    return frozenset().union(*each(block.items, one))


def _every(node: nodes.Call, kind: str, scope: Scope, count: int) -> frozenset[int]:
    """The layers or heads of `every(3, offset = 1)`."""
    settings, spans = values_of(node, scope, TOKEN_SETS["every"])
    if "step" not in settings:
        scope.fail("A303", "`every` needs its `step`: `every(3)`", node.span)
    for name, value in settings.items():
        if not isinstance(value, int):
            terms.not_fixed(f"`{name}`", value, spans[name], scope)
    layers = frozenset(range(settings.get("offset", 0), count, settings["step"]))  # type: ignore[arg-type]
    if not layers:
        first = settings["offset"]
        message = f"`every` starts at {kind} {first}, and the last {kind} is {count - 1}"
        scope.fail("A403", message, node.span)
    return layers


def meant_as_range(item: nodes.Expression) -> str | None:
    """The way out where a layer or head is written as `5-3` or `1+1`; None for all else."""
    if not isinstance(item, nodes.Chain) or item.operators not in (("+",), ("-",)):
        return None
    numbers = sorted(each.value for each in item.operands if isinstance(each, nodes.Integer))
    if len(numbers) < 2:
        return None
    low, high = numbers
    if item.operators == ("+",):
        both = f", or `{low}, {high}` for both layers or heads" if low < high else ""
        return f"write `{low + high}`{both}"
    return f"write `{low}..{high}` for a range, `{low}, {high}` for both"


def _attended(node: nodes.Expression, scope: Scope) -> tuple[Term | None, Mechanism | None]:
    value = meaning(node, scope)
    require_across(value, node.span, scope)
    if isinstance(value, Hybrid):
        _require_form(value.mechanism, scope)
        _require_alone(value.graph, node.span, scope, beside=True)
        return value.graph, value.mechanism
    if isinstance(value, Mechanism):
        _require_form(value, scope)
        return None, value
    require(value, "graph", node.span, scope, "what is attended")
    _require_alone(value, node.span, scope)  # type: ignore[arg-type]
    return value, None  # type: ignore[return-value]


def _require_alone(graph: Term, span: Span, scope: Scope, beside: bool = False) -> None:
    """Refuse what is attended with other graphs, or under `causal`, and can only stand alone; and
    beside a mechanism what changes more than pairs."""
    for leaf in leaves(graph):
        pattern = scope.work.patterns[leaf.pattern]
        if not issubclass(pattern, DataDependent):
            continue
        why, place = pattern.alone(dict(leaf.arguments)), leaf.span or span
        if why and (beside or leaf is not graph):
            message = f"`{leaf.pattern}` {why}, so it cannot be combined with anything else"
            scope.fail("A703", message, place, help=f"give `{leaf.pattern}` heads of its own")
        if why and scope.work.causal is not None:
            related = (("the spec is causal", scope.work.causal),)
            message = f"`{leaf.pattern}` {why}, so it cannot be causal"
            scope.fail("A704", message, place, related=related)
        if beside and not pattern.beside(dict(leaf.arguments)):
            message = (
                f"a graph that is added to a mechanism may only choose pairs, and this"
                f" `{leaf.pattern}` also weighs them"
            )
            advice = "use `topk`, or `lsh` without `combine` and `multiplicity`"
            scope.fail("A703", message, place, help=advice)


def _require_form(mechanism: Mechanism, scope: Scope) -> None:
    """Refuse a mechanism that has not the form, causal or not, that the spec asks for."""
    declaration, causal = scope.work.mechanisms[mechanism.name], scope.work.causal
    if causal is not None and not declaration.causal:
        message = f"`{mechanism.name}` has no causal form: {declaration.why_not_causal}"
        related = (("the spec is causal", causal),)
        able = ", ".join(sorted(name for name, m in scope.work.mechanisms.items() if m.causal))
        advice = f"mechanisms with a causal form: {able}"
        scope.fail("A704", message, mechanism.span, related=related, help=advice)
    why = declaration.only_causal(dict(mechanism.arguments))
    if causal is None and why:
        message = f"`{mechanism.name}` needs a causal spec here: {why}"
        scope.fail("A704", message, mechanism.span, help="add the statement `causal`")
