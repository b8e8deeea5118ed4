"""The meaning of words and operators."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from attnspec.elaborate import terms
from attnspec.elaborate.calls import IN_CONDITIONS, IN_GRAPH, IN_SCORE, SIZES, call, require_free
from attnspec.elaborate.foreign_words import meant, undefined
from attnspec.elaborate.names import POSITIONS, SCALARS, TOKEN_SETS, Hybrid, Value, kind_of, type_of
from attnspec.elaborate.scope import Failed, Scope, each, meaning
from attnspec.grammar import nodes
from attnspec.graphs.grid import AXES
from attnspec.graphs.predicates.inputs import reading
from attnspec.ir.crossing import QUERIES
from attnspec.ir.program import Compound, InputRef, Leaf, Mechanism, Term
from attnspec.ir.scalars import NEGATED, SCORE, SCORE_FUNCTIONS, Apply, Scalar, Symbol
from attnspec.text.diagnostics import did_you_mean, nearest
from attnspec.text.source import Span

T = TypeVar("T")

_SETS = ("|", "&", "-", "~")
_CLAIMED = "`{0}` compares graphs only in the statement `require`"
_ALONE = {
    "|": "write `GRAPH + MECHANISM`: the graph's pairs get exact weights, others the mechanism's",
    "&": "a mechanism needs no `&`: `causal` hides later keys, and `key_padding_mask` padding",
    "+": "two mechanisms need heads of their own",
    "-": "remove the mechanism: it has no pairs that could be taken away",
}
"""What to write instead of a mechanism under an operator."""


OUTSIDE = "write `let {0} = …` above each use and outside of blocks, or make `{0}` a parameter"
NO_NUMBERS = ("inf", "infinity", "nan", "none", "null")
"""What other languages have for numbers that a spec does not have."""

# --- words ---------------------------------------------------------------------------------------


@meaning.register(nodes.Integer)
@meaning.register(nodes.Real)
@meaning.register(nodes.Boolean)
def number(node: nodes.Integer | nodes.Real | nodes.Boolean, scope: Scope) -> Scalar:
    """What is written out."""
    return node.value


@meaning.register(nodes.Name)
def word(node: nodes.Name, scope: Scope) -> Value:
    """What a bare word stands for."""
    name, work, module = node.name, scope.work, scope.module
    if scope.score and name == SCORE:
        require_free(node, scope)
        return Symbol(SCORE)
    if name in scope.names:
        scope.used.add(name)
        value = scope.names[name]
        if value is None:
            raise Failed
        if scope.predicate and isinstance(value, InputRef) and value.kind == "length":
            return reading(value.name, "")
        return value
    if name in SCALARS:
        return _scalar_word(node, scope)
    if name == QUERIES and work.cross is not None:
        return Symbol(name)
    if scope.predicate and name in POSITIONS:
        return Symbol(name)
    if name in module.broken:
        raise Failed
    if name in scope.callable:
        return call(nodes.Call(name, (), span=node.span, name_span=node.span), scope, bare=True)
    if name in POSITIONS:
        what = f"`{name}`, the position of a {'query' if name == 'q' else 'key'},"
        scope.fail("A205", f"{what} {IN_CONDITIONS}", node.span, help=SIZES)
    words = [*scope.names, *SCALARS, "true", "false"]
    advice: str | None
    if scope.predicate:
        advice = did_you_mean(name, [*words, *POSITIONS]) or _in_predicates(name)
    else:
        if not scope.numbers and not scope.wanted:
            words += [*work.callable, *module.graphs, *work.mechanisms]
        # a name of the spec itself is nearer than a word of another system
        similar = scope.numbers or nearest(name, scope.names) is not None
        hint = None if similar else meant(name, scope)
        advice = hint or did_you_mean(name, words)
        if scope.wanted and (hint or advice is None):
            declared = f"declare it: `input {name}: {scope.wanted}`"
            advice = declared if hint is None or "input " in hint else f"{hint}; or {declared}"
    if name == QUERIES:
        counts = "`m`, the number of queries, has a value only in a spec with `cross`"
        advice = counts if advice is None or scope.predicate else f"{advice}; {counts}"
    elif name == SCORE or name in SCORE_FUNCTIONS:
        advice = IN_SCORE.format(name)
    scope.fail("A201", undefined(name, scope), node.span, help=advice or _defined(name, scope))


def _defined(name: str, scope: Scope) -> str:
    """How a name gets a meaning that is near nothing else."""
    if name.lower() in NO_NUMBERS:
        return f"there is no `{name}`: write a number, or `n` for the length of the sequence"
    if scope.default:
        return f"define `{name}` as a parameter before this one, or write its value here"
    if scope.expanding:
        return IN_GRAPH.format(scope.expanding[-1].name, name)
    if re.search(rf"\blet {re.escape(name)}\b", scope.module.source.text):
        return OUTSIDE.format(name)
    return f"define `{name}` before its use: as a parameter, or by `let {name} = …`"


def _scalar_word(node: nodes.Name, scope: Scope) -> Scalar:
    name, work = node.name, scope.work
    if name not in ("layers", "heads"):
        return Symbol(name)
    if name in work.broken:
        raise Failed
    if name in work.pending:
        later, advice = work.pending[name], "write a number here"
        if isinstance(later.value, nodes.Integer):
            moved = "" if scope.default else "move that statement up, or "
            advice = f"{moved}write `{later.value.value}` here"
        message = f"`{name}` is used before the statement `{later.span.text}` gives it a value"
        scope.fail("A207", message, node.span, help=advice)
    if name == "layers":
        return 1 if work.layers is None else work.layers
    if work.heads is None:
        message = "`heads` has no value: the spec does not say how many there are"
        scope.fail("A207", message, node.span, help="add `heads N` above it")
    return work.heads


@meaning.register(nodes.Attribute)
def coordinate(node: nodes.Attribute, scope: Scope) -> Symbol:
    """What `q.row` stands for."""
    shown, grid = f"{node.base.name}.{node.attribute}", scope.work.grid
    if node.base.name not in POSITIONS:
        message = f"only `q` and `k` have coordinates such as `q.row`, got `{shown}`"
        scope.fail("A205", message, node.span)
    if not scope.predicate:
        scope.fail("A205", f"`{shown}` {IN_CONDITIONS}", node.span, help=SIZES)
    if grid is None:
        if "sequence" in scope.work.broken:
            raise Failed
        if not any(node.attribute in names for names in AXES.values()):
            message = f"`{shown}` is not defined: a position on a grid has time, row and col"
            scope.fail("A209", message, node.span, help=f"write `{node.base.name}` alone")
        message = f"`{shown}` needs positions on a grid"
        scope.fail("A208", message, node.span, help="add `sequence grid(H, W)`")
    names = AXES[len(grid)]
    if node.attribute not in names:
        message = f"a position of this grid has {', '.join(names)}, not `{node.attribute}`"
        advice = did_you_mean(node.attribute, names) or "`grid(T, H, W)` has time, row and col"
        scope.fail("A209", message, node.span, help=advice)
    return Symbol(shown)


_POSITION = re.compile(r"[A-Za-z]|(q|k|kv)_\w+|\w*(query|key|idx|index|pos)\w*", re.IGNORECASE)
"""What other languages call a position."""


def _in_predicates(name: str) -> str | None:
    """What a predicate calls what another language calls otherwise."""
    if name in AXES[3]:
        return (
            f"on a grid write `q.{name}` or `k.{name}`; for other positions declare"
            f" `input {name}: numbers` and write `{name}(q)` or `{name}(k)`"
        )
    if _POSITION.fullmatch(name):
        return "write `q` for the query's position, `k` for the key's, `x(k)` for an input `x`"
    return None


# --- operators -----------------------------------------------------------------------------------


@meaning.register(nodes.Prefix)
def prefix(node: nodes.Prefix, scope: Scope) -> Value:
    """What `-x`, `~g` or `not p` stands for."""
    operand, span = meaning(node.operand, scope), node.operand.span
    kind, stands = kind_of(operand), f"the operand of `{node.operator}`"
    if node.operator == "~":
        if kind in ("tokens", "input"):
            tokens = terms.as_tokens(operand, span, scope)
            return terms.token_compound("~", (tokens,), node.span, scope)
        term = _graph(operand, span, scope, stands)
        terms.known_now(term, node.span, scope, "under `~`")
        return terms.compound("~", (term,), node.span, scope)
    if kind == "graph" and node.operator == "not":
        message = f"{stands} must be a comparison, got a graph"
        scope.fail("A310", message, span, help="`~` is the complement of a graph")
    terms.require(operand, "scalar", span, scope, stands)
    wanted = "boolean" if node.operator == "not" else "number"
    terms.typed(operand, wanted, node.operator, span, scope)  # type: ignore[arg-type]
    op = "not" if node.operator == "not" else "neg"
    return terms.folded(Apply(op, (operand,)), node.span, scope)  # type: ignore[arg-type]


def _graph(value: Value, span: Span, scope: Scope, what: str) -> Term:
    terms.require(value, "graph", span, scope, what)
    return value  # type: ignore[return-value]


@meaning.register(nodes.Chain)
def chain(node: nodes.Chain, scope: Scope) -> Value:
    """What operands joined by operators of one level stand for."""
    if node.operators[0] == "in":
        return _membership(node, scope)
    if node.operators[0] == "subset":
        scope.fail("A312", _CLAIMED.format("subset"), node.operator_spans[0])
    operands = each(node.operands, lambda operand: meaning(operand, scope))
    kinds = {kind_of(operand) for operand in operands}
    if kinds == {"scalar"}:
        return _scalar_chain(node, operands, scope)  # type: ignore[arg-type]
    if kinds & {"mechanism", "hybrid"}:
        return _hybrid(node, operands, scope)
    if scope.predicate:
        _require_read(node, operands, scope)
    for operator, span in zip(node.operators, node.operator_spans, strict=False):
        if operator not in _SETS:
            verb = "compares" if operator in NEGATED else "joins"
            joined = "comparisons" if operator in ("and", "or") else "numbers"
            if operator == "+":
                joined = "two numbers, or a graph and a mechanism"
            message = f"`{operator}` {verb} {joined}, got {_listed(operands)}"
            if operator == "==" and kinds == {"graph"}:
                message = _CLAIMED.format(operator)
            advice = "a comment starts with `#`" if operator == "//" else None
            if scope.predicate and "graph" in kinds:
                counts = ", which counts as 1 or 0" * scope.score
                advice = f"write a condition in its place, such as `(abs(q - k) <= 2)`{counts}"
            elif operator in ("+", "*", "and", "or") and kinds <= {"graph", "tokens", "input"}:
                advice = "join two graphs, or two token sets, by `|`, `&` or `-`"
            scope.fail("A312", message, span, help=advice)
    placed = list(zip(operands, (part.span for part in node.operands), strict=True))
    if "graph" not in kinds:
        sets = [terms.as_tokens(operand, span, scope) for operand, span in placed]
        return _joined(node, sets, lambda op, of: terms.token_compound(op, of, node.span, scope))
    beside = "what is joined with a graph"
    graphs = [_graph(operand, span, scope, beside) for operand, span in placed]
    for operator, term, (_, span) in zip(node.operators, graphs[1:], placed[1:], strict=True):
        if operator == "-":
            terms.known_now(term, span, scope, "on the right of `-`")
    return _joined(node, graphs, lambda op, of: terms.compound(op, of, node.span, scope))


def _require_read(node: nodes.Chain, operands: Sequence[Value], scope: Scope) -> None:
    """Refuse an input of which a predicate does not say where it is read."""
    for operand, part in zip(operands, node.operands, strict=True):
        if isinstance(operand, InputRef):
            reader = "score" if scope.score else "where"
            message = f"`{reader}` cannot use the input `{operand.name}` without a position"
            scope.fail("A310", message, part.span, help=terms.read_by(operand, scope))


def _listed(values: Sequence[Value]) -> str:
    """What several operands are, in words."""
    *most, last = map(terms.described, values)
    return f"{', '.join(most)} and {last}"


def _joined(node: nodes.Chain, some: Sequence[T], join: Callable[[str, tuple[T, ...]], T]) -> T:
    """Operands joined from the left, those of one operator in a row together."""
    group = [some[0]]
    for index, operator in enumerate(node.operators):
        group.append(some[index + 1])
        if node.operators[index + 1 : index + 2] != (operator,):
            group = [join(operator, tuple(group))]
    return group[0]


def _hybrid(node: nodes.Chain, operands: Sequence[Value], scope: Scope) -> Hybrid:
    span = node.operator_spans[0] if node.operator_spans else node.span
    match node.operators, operands:
        case ("+",), [Mechanism() as mechanism, Leaf() | Compound() as graph]:
            pass
        case ("+",), [Leaf() | Compound() as graph, Mechanism() as mechanism]:
            pass
        case _:
            kinds = [kind_of(operand) for operand in operands]
            operator = node.operators[0]
            name = next((x.name for x in operands if isinstance(x, Mechanism)), "")
            message = f"`{name}` is a mechanism, which is joined by `+` alone, not by `{operator}`"
            if "hybrid" in kinds:
                message = f"`{operator}` cannot stand beside a graph with a mechanism"
            if "+" in node.operators:
                message = f"`+` adds one mechanism to one graph, got {_listed(operands)}"
                message += " without brackets" * (kinds.count("graph") > 1)
            advice = _ALONE.get(operator)
            if kinds.count("mechanism") + kinds.count("hybrid") == 1 and "graph" in kinds:
                if "hybrid" in kinds or len(kinds) > 2:
                    shown = operator if operator in _SETS else "|"
                    advice = f"first join all graphs, then add the mechanism: `(A {shown} B) + M`"
            elif "tokens" in kinds:
                advice = "make a graph of the token set: `columns(T)`"
            scope.fail("A701", message, span, help=advice)
    declaration = scope.work.mechanisms[mechanism.name]
    alone = declaration.alone(dict(mechanism.arguments))
    if alone:
        able = sorted(name for name, m in scope.work.mechanisms.items() if m.combines)
        advice = f"use one of {', '.join(able)}, or give the mechanism heads of its own"
        if declaration.combines:
            advice = f"without that argument `{mechanism.name}` can be added"
        message = f"`{mechanism.name}` {alone}, so it cannot be added to a graph"
        scope.fail("A702", message, span, help=advice)
    return Hybrid(graph, mechanism)


def _scalar_chain(node: nodes.Chain, values: Sequence[Scalar], scope: Scope) -> Scalar:
    operators, span = node.operators, node.span
    first, wanted = operators[0], "boolean" if operators[0] in ("and", "or") else "number"
    if wanted == "number":
        for operator, place in zip(operators, node.operator_spans, strict=False):
            if operator in ("|", "&"):
                message = f"`{operator}` joins two graphs or two token sets, got {_listed(values)}"
                word = "or" if operator == "|" else "and"
                advice = f"comparisons are joined by `{word}`: `q > 0 {word} k > 0`"
                scope.fail("A312", message, place, help=advice if scope.predicate else None)
        if first in ("==", "!=") and type_of(values[0]) == "boolean":
            wanted = "boolean"
    for value, part in zip(values, node.operands, strict=True):
        terms.typed(value, wanted, first, part.span, scope)
    if first in ("and", "or"):
        return terms.folded(Apply(first, tuple(values)), span, scope)
    if first in NEGATED:
        pairs = zip(operators, values, values[1:], strict=False)
        links = tuple(terms.folded(Apply(op, (a, b)), span, scope) for op, a, b in pairs)
        return terms.folded(links[0] if len(links) == 1 else Apply("and", links), span, scope)
    result = values[0]
    for operator, value in zip(operators, values[1:], strict=True):
        result = terms.folded(Apply(operator, (result, value)), span, scope)
    return result


def _membership(node: nodes.Chain, scope: Scope) -> Scalar:
    def one(part: nodes.Expression) -> Scalar:
        value = terms.scalar(part, scope, "an operand of `in`")
        terms.typed(value, "number", "in", part.span, scope)
        return value

    value, where = one(node.operands[0]), node.operands[1]
    match where:
        case nodes.Range(first, last):
            op, items = "within", (first, last)
        case nodes.Members(items):
            op = "one_of"
        case _:
            message = "`in` needs a range `a..b` or a set `{1, 2, 4}` after it"
            word = where.name if isinstance(where, nodes.Call) else ""
            advice = f"without `where`, write `columns({word}(…))`" if word in TOKEN_SETS else None
            scope.fail("A311", message, where.span, help=advice)
    return terms.folded(Apply(op, (value, *each(items, one))), node.span, scope)
