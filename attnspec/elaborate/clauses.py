"""The meaning of `require`, `score` and `normalize`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn, cast

from attnspec.elaborate.arguments import check_constant, matched
from attnspec.elaborate.cross import require_across, require_claim, require_keys, require_score
from attnspec.elaborate.names import (
    METRICS,
    NORMALIZERS,
    POSITIONS,
    PROPERTIES,
    SCALARS,
    SCORE_DEFAULTS,
    SCORES,
    Numbers,
    kind_of,
    type_of,
)
from attnspec.elaborate.scope import Failed, Scope, each, meaning
from attnspec.elaborate.terms import count, integer, not_fixed, require, scalar
from attnspec.grammar import nodes
from attnspec.grammar.printer import print_expression
from attnspec.ir.parameters import Parameter
from attnspec.ir.program import EXPRESSION, Claim, InputRef, Score
from attnspec.ir.scalars import (
    FUNCTIONS,
    SCORE,
    SCORE_FUNCTIONS,
    Apply,
    Scalar,
    Symbol,
    parts_of,
    symbols,
)
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import did_you_mean

_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}

# --- claims --------------------------------------------------------------------------------------


def claims_of(statement: nodes.Require, scope: Scope) -> list[Claim]:
    """The claims of one `require`; a chain such as `1 <= degree <= 4` makes two."""
    for length in statement.at or ():
        if not 1 <= length.value <= LIMITS.length:
            message = f"a claim is checked at lengths from 1 to 2**31 - 1, got {length.value}"
            scope.work.collector.add("A603", message, length.span)
    at = None if statement.at is None else tuple(length.value for length in statement.at)
    since = None if statement.since is None else _since(statement.since, scope)
    node = statement.claim
    claim = Claim("", print_expression(node), at, since, span=statement.span)
    match node:
        case nodes.Name(name) if name in PROPERTIES:
            require_claim(name, node.span, scope)
            return [replace(claim, kind=name)]
        case nodes.Call("reach"):
            require_claim("reach", node.span, scope)
            return [replace(claim, kind="reach", value=_layers(node, scope))]
        case nodes.Chain() if node.operators[0] in (*_FLIPPED, "subset"):
            return _comparison(node, scope, claim)
    _unknown(node, scope)


def _since(node: nodes.Expression, scope: Scope) -> int:
    """The least n of a claim `for n >= EXPR`."""
    value = integer(node, scope, "the bound in `for n >= …`")
    if not isinstance(value, int):
        named = {name for name in symbols(value) if name in ("n", "layer", "head")}
        shown = " and ".join(f"`{name}`" for name in sorted(named))
        message = (
            f"the bound in `for n >= …` must be one number for the whole claim, without {shown}"
        )
        advice = "write a number or an expression of parameters, such as `max(r, 8)`"
        scope.fail("A603", message, node.span, help=advice)
    if not 1 <= value <= LIMITS.length - 1:
        message = f"a claim is made for lengths from 1 to 2**31 - 2, got {value}"
        scope.fail("A603", message, node.span)
    return value


def _layers(node: nodes.Call, scope: Scope) -> Scalar:
    if len(node.arguments) != 1 or node.arguments[0].name != "layers":
        scope.fail("A602", "`reach` needs its argument by name: `reach(layers = L)`", node.span)
    count = node.arguments[0].value
    value = integer(count, scope, "`layers`")
    if isinstance(value, int) and value < 0:
        scope.fail("A306", f"`layers` must be at least 0, got {value}", count.span)
    return value


def _comparison(node: nodes.Chain, scope: Scope, claim: Claim) -> list[Claim]:
    figures = [
        (place, operand.name)
        for place, operand in enumerate(node.operands)
        if isinstance(operand, nodes.Name) and operand.name in METRICS
    ]
    if not figures:
        return [_about_graphs(node, scope, claim)]
    if len(figures) > 1:
        names = " and ".join(f"`{name}`" for _, name in figures)
        message = f"a claim compares one figure with a number, got {names}"
        scope.fail("A604", message, node.span, help="write one claim for each")
    ((place, name),) = figures
    require_claim(name, node.operands[place].span, scope)
    claims = []
    for index, operator in enumerate(node.operators):
        left, right = node.operands[index : index + 2]
        if place not in (index, index + 1):
            message = f"each comparison of this claim must have `{name}` on one side"
            scope.fail("A604", message, left.span.to(right.span))
        other = right if place == index else left
        value = scalar(other, scope, f"what `{name}` is compared with")
        if type_of(value) == "boolean":
            scope.fail("A314", f"`{name}` is compared with numbers", other.span)
        compare = operator if place == index else _FLIPPED.get(operator, operator)
        if name == "order" and compare != "<=":
            scope.fail("A605", "`order` is compared by `<=`", node.span)
        if compare == "subset":
            scope.fail("A605", f"`subset` compares graphs, and `{name}` is a number", node.span)
        text = print_expression(replace(node, operators=(operator,), operands=(left, right)))
        claims.append(replace(claim, kind=name, text=text, compare=compare, value=value))
    return claims


def _about_graphs(node: nodes.Chain, scope: Scope, claim: Claim) -> Claim:
    operator = node.operators[0]
    if operator not in ("subset", "==") or len(node.operands) != 2:
        _unknown(node, scope)
    terms = each(node.operands, lambda operand: meaning(operand, scope))
    if all(kind_of(term) == "scalar" for term in terms):
        _unknown(node, scope)
    for term, operand in zip(terms, node.operands, strict=True):
        require(term, "graph", operand.span, scope, f"each side of `{operator}`")
        require_across(term, operand.span, scope)
    return replace(claim, kind=operator, terms=tuple(terms))  # type: ignore[arg-type]


def _unknown(node: nodes.Expression, scope: Scope) -> NoReturn:
    words = (*PROPERTIES, *METRICS, "reach")
    candidates = [node, *node.operands] if isinstance(node, nodes.Chain) else [node]
    named = [c for c in candidates if isinstance(c, nodes.Name | nodes.Call)]
    word = named[0].name if named else ""
    spans = [c.span for c in named if isinstance(c, nodes.Name) and c.name == word]
    scope.fail(
        "A601",
        "this is not a claim: expected a property, `reach(layers = L)`, a figure compared with a"
        " number, or two graphs joined by `subset` or `==`",
        spans[0] if spans else node.span,
        notes=(f"properties: {', '.join(PROPERTIES)}", f"figures: {', '.join(METRICS)}"),
        help=_claim_meant(node, word, words),
    )


def _claim_meant(node: nodes.Expression, word: str, words: tuple[str, ...]) -> str | None:
    if isinstance(node, nodes.Call) and word in PROPERTIES:
        return f"a property has no brackets: `require {word}`"
    return did_you_mean(word, words) if word and word not in words else None


# --- scores --------------------------------------------------------------------------------------


def score_of(node: nodes.Expression, scope: Scope) -> Score:
    """What a `score` statement says."""
    if not isinstance(node, nodes.Call | nodes.Name) or not _is_change(node, scope):
        return _expression(node, scope)
    if not isinstance(node, nodes.Call) or node.name not in SCORES:
        text, known = node.name, ", ".join(SCORES)
        message = f"`score` takes {known} or an expression of the score `s`, got `{text}`"
        if text in SCORES:
            message = f"`{text}` needs its brackets"
        span = node.name_span if isinstance(node, nodes.Call) else node.span
        needed = ", ".join(f"{x} = …" for x in SCORES.get(text, ()) if x not in SCORE_DEFAULTS)
        bare = f"write `score {text}({needed})`" if text in SCORES else None
        bare = f"write `normalize {text}`" if text in NORMALIZERS else bare
        scope.fail("A317", message, span, help=bare or did_you_mean(text, SCORES))
    name, parameters = node.name, SCORES[node.name]
    require_score(name, node.span, scope)
    if name == "bias":
        _heads("`score bias` learns a table for each head", node, scope)

    def value_of(argument: str, value: nodes.Expression) -> Any:
        read = _slopes if argument == "slopes" else _argument
        return read(argument, parameters[argument], value, scope)

    settings, _ = matched(node, scope, parameters, value_of)
    for argument in parameters:
        if argument not in settings:
            if argument not in SCORE_DEFAULTS:
                scope.fail("A303", f"`{name}` needs `{argument}`", node.span)
            settings[argument] = SCORE_DEFAULTS[argument]
    slopes = settings.pop("slopes", ())
    return Score(name, tuple(sorted(settings.items())), slopes, node.span)


def _is_change(node: nodes.Call | nodes.Name, scope: Scope) -> bool:
    """Whether a statement names a change, or nothing else that there is."""
    if isinstance(node, nodes.Name):
        return node.name not in (*scope.names, *SCALARS, *POSITIONS, SCORE)
    if node.name in SCORES and isinstance(scope.names.get(node.name), InputRef):
        message = f"`{node.name}(…)` has a meaning of its own in `score`, and is also an input here"
        scope.fail("A204", message, node.name_span, help="rename the input")
    return node.name not in (*scope.names, *FUNCTIONS, *SCORE_FUNCTIONS)


def _expression(node: nodes.Expression, scope: Scope) -> Score:
    """What the score becomes, a number."""
    inner = scope.child(predicate=True, score=True)
    value = scalar(node, inner, "a score")
    for part in parts_of(value):
        args = part.args[:1] if part.op == "item" else part.args
        read = {name for each in args for name in symbols(each)}
        if SCORE in read and part.op in ("//", "%", "floor", "ceil", "isqrt", "item"):
            what = "the index of a list" if part.op == "item" else f"`{part.op}`"
            message = f"{what} cannot be computed from the score `{SCORE}`"
            scope.fail("A312", message, node.span, help="compute it from positions or inputs")
    across = [name for name in symbols(value) if name.endswith("(q)")]
    if scope.work.cross is not None and across:
        require_keys(across[0].partition("(")[0], node.span, scope)
    return Score(EXPRESSION, (("value", value),), (), node.span)


def _argument(name: str, parameter: Parameter, node: nodes.Expression, scope: Scope) -> Scalar:
    what = f"`{name}`"
    if parameter.least is not None and parameter.most is not None:
        return count(node, scope, what, parameter.least, parameter.most)
    cap = scalar(node, scope, what)
    if type_of(cap) == "boolean":
        scope.fail("A306", f"{what} must be a number, got a comparison", node.span)
    check_constant(parameter, name, cap, node.span, scope)
    return cap


def _slopes(
    name: str, parameter: Parameter, node: nodes.Expression, scope: Scope
) -> tuple[float, ...]:
    """A number for each head of the spec."""
    value = meaning(node, scope)
    require(value, "list", node.span, scope, f"`{name}`")
    items = cast(Numbers, value).items
    count = len(items)
    heads = _heads(f"`{name}` has a number for each head", node, scope, f"add `heads {count}`")
    if count != heads:
        message = f"`{name}` must have a number for each of the {heads} heads, got {count}"
        scope.fail("A306", message, node.span)
    slopes = []
    for index, item in enumerate(items):
        if isinstance(item, Symbol | Apply):
            not_fixed(f"each of `{name}`", item, node.span, scope)
        check_constant(parameter, f"{name}[{index}]", item, node.span, scope)
        slopes.append(float(item))
    return tuple(slopes)


def _heads(why: str, node: nodes.Expression, scope: Scope, advice: str | None = None) -> int:
    """How many heads a spec has that must say it."""
    heads = scope.work.heads
    if heads is None and "heads" in scope.work.broken:
        raise Failed
    if heads is None:
        message = f"{why}, and the spec does not say how many heads there are"
        scope.fail("A407", message, node.span, help=advice or "add `heads N`")
    return heads


def normalizer_of(node: nodes.Expression, scope: Scope) -> str:
    """What a `normalize` statement says."""
    if isinstance(node, nodes.Name) and node.name in NORMALIZERS:
        return node.name
    text = node.name if isinstance(node, nodes.Name | nodes.Call) else "an expression"
    message = f"`normalize` must be one of {', '.join(NORMALIZERS)}, got {text}"
    scope.fail("A309", message, node.span, help=did_you_mean(text, NORMALIZERS))
