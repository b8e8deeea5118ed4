"""At most how fast the edges of a graph grow with n, from how it is written.

Growth is n**a log(n)**b, written (a, b). Sizes that depend on n have a growth, and each pattern
turns those of its arguments into a bound of its edges.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from attnspec.analysis.growth.size_growth import (
    CONSTANT,
    LINEAR,
    QUADRATIC,
    Growth,
    divisor_growth,
    over,
    size_growth,
    times,
)
from attnspec.graphs.forms.prelude import BEHIND, predicate_of_leaf
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.predicates.predicates import conjuncts, disjuncts
from attnspec.ir.linear import Combination, K, N, Q, asks_positions, combination, minus, product
from attnspec.ir.mechanisms import BY_NAME as MECHANISMS
from attnspec.ir.program import Attend, Leaf, Program, Term
from attnspec.ir.scalars import NEGATED, TURNED, Apply, Scalar, ScalarError, fold


def growth_of(program: Program) -> Growth:
    """The growth that what all heads compute does not exceed: their edges, and the operations of
    their mechanisms."""
    used = {index for row in program.slots for index in row}
    return max(_attend(program.attends[index], program.causal) for index in sorted(used))


def _attend(attend: Attend, causal: bool) -> Growth:
    parts = []
    if attend.graph is not None:
        parts.append(_term(attend.graph, causal))
    if attend.mechanism is not None:
        power, logs = MECHANISMS[attend.mechanism.name].growth
        parts.append((Fraction(power), Fraction(logs)))
    return max(parts)


def _term(term: Term, causal: bool) -> Growth:
    """The growth of the edges of a term, with `causal` of those with k <= q."""
    if isinstance(term, Leaf):
        return min(_leaf(term, causal), QUADRATIC)
    inside = causal and term.op in ("|", "&", "-")
    parts = [_term(child, inside) for child in term.terms]
    match term.op:
        case "|":
            return max(parts)
        case "&":
            return min(parts)
        case "~":
            return QUADRATIC
        case _:
            return parts[0]


def _leaf(leaf: Leaf, causal: bool) -> Growth:
    predicate = predicate_of_leaf(leaf)
    if predicate is not None:
        return predicate_growth(Apply("and", (predicate, BEHIND)) if causal else predicate)
    order = BY_NAME[leaf.pattern].order(arguments_of(leaf))
    growth = None if order is None or "tokens" in dict(leaf.arguments) else size_growth(order)
    return QUADRATIC if growth is None else growth


def arguments_of(leaf: Leaf) -> dict[str, Any]:
    """What is written, and the defaults of what is not."""
    entries = fields(BY_NAME[leaf.pattern])  # type: ignore[arg-type]
    return {entry.name: entry.default for entry in entries} | dict(leaf.arguments)


# --- predicates -----------------------------------------------------------------------------------


class _Fact(NamedTuple):
    """What a part of a predicate says: "before", q - k is no more than some size, or "after",
    k - q; "q" or "k", there are no more positions of that side; "steps", q - k is one of `cells`
    numbers modulo a size. `growth` is that of the size."""

    what: str
    growth: Growth
    cells: Growth = CONSTANT


@lru_cache(maxsize=256)
def predicate_growth(predicate: Scalar) -> Growth:
    """The growth that the pairs for which a predicate of q, k and n holds do not exceed."""
    return max(_conjunction(conjuncts(part)) for part in disjuncts(predicate))


def _conjunction(parts: Iterable[Scalar]) -> Growth:
    facts = [fact for part in parts for fact in _facts(part)]

    def said(what: str) -> list[Growth]:
        return [fact.growth for fact in facts if fact.what == what]

    apart = max(min([LINEAR, *said(side)]) for side in ("before", "after"))
    steps = [fact for fact in facts if fact.what == "steps"]
    keys = [times(max(over(apart, each.growth), CONSTANT), each.cells) for each in steps]
    return times(min([LINEAR, *said("q")]), min([apart, *keys, *said("k")]))


def _near(later: bool, limit: Scalar) -> _Fact:
    """That q - k, or with `later` k - q, is no more than a limit."""
    growth = size_growth(limit)
    return _Fact("after" if later else "before", LINEAR if growth is None else growth)


# --- what the parts say ---------------------------------------------------------------------------


def _facts(part: Scalar) -> list[_Fact]:
    """What a comparison says, nothing where that is not known."""
    if not isinstance(part, Apply):
        return []
    op, args = part.op, part.args
    if op == "not" and isinstance(args[0], Apply) and args[0].op in NEGATED:
        return _facts(Apply(NEGATED[args[0].op], args[0].args))
    if op == "within":
        ends = Apply("<=", (args[1], args[0])), Apply("<=", (args[0], args[2]))
        return [fact for end in ends for fact in _facts(end)]
    if op == "one_of":
        return _listed(args[0], args[1:])
    if op not in ("<", "<=", "==", ">", ">="):
        return []
    left, right = args
    if isinstance(left, Apply) and left.op == "%":
        return _remainder(left, op, right)
    if op in (">", ">="):
        return _facts(Apply(TURNED[op], (right, left)))
    if isinstance(left, Apply) and left.op == "abs" and op != "==":
        (inner,) = left.args
        sides = inner, Apply("neg", (inner,))
        return [fact for side in sides for fact in _facts(Apply(op, (side, right)))]
    below = _below(left, right, op == "<")
    return [*below, *_below(right, left, False)] if op == "==" else below


def _below(left: Scalar, right: Scalar, strict: bool) -> list[_Fact]:
    """What left <= right says."""
    linear = combination(Apply("-", (left, right)))
    if linear is None:
        return []
    limit = minus(0, linear.plain.rest)
    if strict:
        limit = fold(Apply("-", (limit, 1)), {})
    factor = linear.distance
    if factor in (1, -1):
        return [_near(factor < 0, limit)]
    return _blocks(linear.plain, limit) or _few(linear, strict)


def _blocks(found: Combination, limit: Scalar) -> list[_Fact]:
    """Of two quotients by one number: no further apart than so many blocks."""
    if len(found.factors) != 2:
        return []
    (one, up), (other, down) = found.factors
    if up != -down or up not in (1, -1):
        return []
    if not (isinstance(one, Apply) and isinstance(other, Apply) and one.args[1] == other.args[1]):
        return []
    later = (up if one.args[0] == Q else down) < 0
    # positions of blocks so many apart: less than that and one block
    positions = product(fold(Apply("+", (limit, 1)), {}), one.args[1])
    return [_near(later, fold(Apply("-", (positions, 1)), {}))]


def _few(found: Combination, strict: bool) -> list[_Fact]:
    """A bound of one side alone."""
    factors = dict(found.factors)
    length = factors.pop(N, 0)
    if len(factors) != 1:
        return []
    ((position, factor),) = factors.items()
    if position not in (Q, K) or (length, factor) not in ((0, 1), (1, -1)):
        return []
    # p <= -rest, and n - p <= -rest
    try:
        count = fold(Apply("+", (minus(0, found.rest), int(factor == 1) - int(strict))), {})
    except ScalarError:
        # a size that no number of the language has
        return []
    grown = size_growth(count)
    return [] if grown is None else [_Fact("q" if position == Q else "k", grown)]


def _remainder(left: Apply, op: str, right: Scalar) -> list[_Fact]:
    """What x mod s == y, < y or >= y says."""
    number, step = left.args
    if isinstance(right, Apply) and right.op == "%" and right.args[1] == step and op == "==":
        number, right = Apply("-", (number, right.args[0])), 0
    linear, gap = combination(number), divisor_growth(step)
    if asks_positions(step) or asks_positions(right) or linear is None or gap is None:
        return []
    cells = {"==": 1, "<": right, "<=": right, ">": minus(step, right), ">=": minus(step, right)}
    many = size_growth(cells[op])
    many = gap if many is None else min(many, gap)
    if linear.distance is not None:
        return [_Fact("steps", gap, many)]
    positions = [each for each, factor in linear.factors if factor in (1, -1)]
    if len(linear.factors) != 1 or positions[:1] not in ([Q], [K]):
        return []
    share = max(times(over(LINEAR, gap), many), CONSTANT)
    return [_Fact("q" if positions[0] == Q else "k", share)]


def _listed(number: Scalar, members: tuple[Scalar, ...]) -> list[_Fact]:
    """Membership in a list of numbers."""
    if not all(type(member) is int for member in members):
        return []
    if isinstance(number, Apply) and number.op == "abs":
        (number,) = number.args
    linear = combination(number)
    if linear is None or not isinstance(linear.rest, int):
        return []
    if linear.distance in (1, -1):
        return [_Fact("k", CONSTANT)]
    sides = ["q" if each == Q else "k" for each, _ in linear.factors if each in (Q, K)]
    return [_Fact(sides[0], CONSTANT)] if len(sides) == len(linear.factors) == 1 else []
