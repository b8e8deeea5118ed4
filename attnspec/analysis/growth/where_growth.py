"""How fast the pairs of a predicate grow with n, from how it is written.

Of each of the conjunctions that a predicate is made of, every part says how far apart query and key
may be, by which steps, or how many positions of one side there are. An upper growth follows from
any of them; where there are no other parts, and the sizes are known, it is the growth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from attnspec.analysis.growth.size_growth import (
    CONSTANT,
    LINEAR,
    QUADRATIC,
    Growth,
    Range,
    over,
    size_growth,
    times,
)
from attnspec.graphs.predicates.predicates import conjuncts, disjuncts
from attnspec.ir.intervals import bounds
from attnspec.ir.linear import Combination, K, N, Q, asks_positions, combination, minus
from attnspec.ir.scalars import NEGATED, TURNED, Apply, Scalar, ScalarError, Symbol, fold, symbols

_UNKNOWN = Range(CONSTANT, QUADRATIC)


@dataclass(frozen=True)
class _Near:
    """q - k <= limit, or k - q <= limit for `later`; no more than that where `exact`."""

    later: bool
    limit: Scalar
    exact: bool = True


@dataclass(frozen=True)
class _Steps:
    """q - k is one of `cells` numbers modulo `step`, 0 among them where `own`."""

    step: Scalar
    cells: Growth
    own: bool


@dataclass(frozen=True)
class _Listed:
    """q - k is one of a list, 0 among them where `own`."""

    own: bool


@dataclass(frozen=True)
class _Few:
    """The queries, or the keys, are so many: some of the first `number` ones where `early`, or of
    the last ones; without `number` spread over the sequence, and early, too."""

    side: str
    count: Growth
    early: bool
    number: Scalar | None = None


@dataclass(frozen=True)
class _Most:
    """All queries, or keys, but the first `left_out` ones where `early`, or the last ones."""

    side: str
    left_out: Scalar
    early: bool

    def leaves(self, few: _Few) -> bool:
        """Whether some of a few positions are among them, from some length on."""
        if few.number is None or (few.side, few.early) != (self.side, self.early):
            return True
        if not isinstance(self.left_out, int):
            return False
        return self.left_out < few.number if isinstance(few.number, int) else few.count > CONSTANT


_Fact = _Near | _Steps | _Listed | _Few | _Most


@lru_cache(maxsize=256)
def predicate_growth(predicate: Scalar) -> Range:
    """The growth of the pairs for which a predicate of q, k and n holds."""
    found = [_conjunction(conjuncts(part)) for part in disjuncts(predicate)]
    return Range(max(part.low for part in found), max(part.high for part in found))


def _conjunction(parts: Iterable[Scalar]) -> Range:
    told = [_facts(part) for part in parts]
    facts = [fact for each in told if each is not None for fact in each]
    near = [fact for fact in facts if isinstance(fact, _Near)]
    steps = [fact for fact in facts if isinstance(fact, _Steps)]
    few = [fact for fact in facts if isinstance(fact, _Few)]
    sides = [[fact for fact in near if fact.later == later] for later in (False, True)]
    reach = [min([LINEAR, *(_size(fact.limit) for fact in side)]) for side in sides]
    keys = max(reach)
    for step in steps:
        gap = size_growth(step.step)
        if gap is not None:
            keys = min(keys, times(max(over(keys, gap), CONSTANT), step.cells))
    listed = [fact for fact in facts if isinstance(fact, _Listed)]
    keys = min([keys, *(fact.count for fact in few if fact.side == "k")])
    if listed:
        keys = CONSTANT
    queries = min([LINEAR, *(fact.count for fact in few if fact.side == "q")])
    high = times(queries, keys)
    most = [fact for fact in facts if isinstance(fact, _Most)]
    if None in told or not all(one.leaves(each) for one in most for each in few):
        return Range(CONSTANT, high)
    return Range(high if _is_reached(near, steps, few, listed) else CONSTANT, high)


def _is_reached(
    near: list[_Near], steps: list[_Steps], few: list[_Few], listed: list[_Listed]
) -> bool:
    """Whether there are as many pairs as the upper growth says."""
    limits = [fact.limit for fact in near]
    inside = all(size_growth(each) is not None and _at_least(each, 0) for each in limits)
    if few:
        # early keys, and those spread over the sequence, are behind most queries
        behind = all(fact.side == "k" and fact.early for fact in few)
        apart = len({fact.side for fact in few}) == len(few)
        late = inside and all(fact.later for fact in near)
        return apart and not steps and not listed and (not near or (behind and late))
    if listed:
        itself = inside and all(fact.own for fact in listed)
        return not steps and (itself or (len(listed) == 1 and not near))
    known = all(s.own and s.cells == CONSTANT and size_growth(s.step) is not None for s in steps)
    if inside and known and len(steps) <= 1:
        return True
    # of numbers all that matters is that some distance lies between them
    ends = {fact.later: fact.limit for fact in near if fact.exact and isinstance(fact.limit, int)}
    return not steps and len(ends) == len(near) == 2 and sum(ends.values()) >= 0


def _at_least(scalar: Scalar, least: int) -> bool:
    """Whether a size is never smaller, from some length on."""
    ranges = {name: (np.asarray(0.0), np.asarray(np.inf)) for name in symbols(scalar)}
    if "n" in ranges:
        ranges["n"] = np.asarray(1.0), np.asarray(np.inf)
    if float(bounds(scalar, ranges)[0]) >= least:
        return True
    grown = size_growth(scalar)
    return grown is not None and grown > CONSTANT and _adds_up(scalar)


def _adds_up(scalar: Scalar) -> bool:
    """Whether there is no negative number in a scalar."""
    if isinstance(scalar, Apply):
        return scalar.op != "neg" and all(map(_adds_up, scalar.args))
    return isinstance(scalar, Symbol) or scalar >= 0


def _size(limit: Scalar) -> Growth:
    found = size_growth(limit)
    return LINEAR if found is None else found


# --- what the parts say ---------------------------------------------------------------------------


def _facts(part: Scalar) -> list[_Fact] | None:
    """What a comparison says, None where that is not known."""
    if part is True:
        return []
    if not isinstance(part, Apply):
        return None
    op, args = part.op, part.args
    if op == "not" and isinstance(args[0], Apply) and args[0].op in NEGATED:
        return _facts(Apply(NEGATED[args[0].op], args[0].args))
    if op == "within":
        ends = Apply("<=", (args[1], args[0])), Apply("<=", (args[0], args[2]))
        return _all([_facts(end) for end in ends])
    if op == "one_of":
        return _listed(args[0], args[1:])
    if op in (">", ">="):
        left, right = args
        if isinstance(left, Apply) and left.op == "%":
            return _remainder(left, op, right)
        return _facts(Apply(TURNED[op], (right, left)))
    if op in ("<", "<=", "=="):
        left, right = args
        if isinstance(left, Apply) and left.op == "%":
            return _remainder(left, op, right)
        if isinstance(left, Apply) and left.op == "abs" and op != "==":
            (inner,) = left.args
            turned = Apply("neg", (inner,))
            return _all([_facts(Apply(op, (side, right))) for side in (inner, turned)])
        both = [_below(left, right, op == "<")]
        return _all([*both, _below(right, left, False)] if op == "==" else both)
    return None


def _all(parts: list[list[_Fact] | None]) -> list[_Fact] | None:
    known = [part for part in parts if part is not None]
    return [fact for part in known for fact in part] if len(known) == len(parts) else None


def _below(left: Scalar, right: Scalar, strict: bool) -> list[_Fact] | None:
    """What left <= right says."""
    found = combination(Apply("-", (left, right)))
    if found is None:
        return None
    limit = minus(0, found.plain.rest)
    if strict:
        limit = fold(Apply("-", (limit, 1)), {})
    factor = found.distance
    if factor in (1, -1):
        return [_Near(factor < 0, limit)]
    return _blocks(found.plain, limit) or _few(found, strict)


def _blocks(found: Combination, limit: Scalar) -> list[_Fact] | None:
    """Of two quotients by one number: no further apart than so many blocks."""
    if len(found.factors) != 2:
        return None
    (one, up), (other, down) = found.factors
    if up != -down or up not in (1, -1):
        return None
    if not (isinstance(one, Apply) and isinstance(other, Apply) and one.args[1] == other.args[1]):
        return None
    later = (up if one.args[0] == Q else down) < 0
    # positions of blocks so many apart: less than that and one block
    return [_Near(later, fold(Apply("-", (_times_one(limit, one.args[1]), 1)), {}), False)]


def _times_one(limit: Scalar, size: Scalar) -> Scalar:
    return fold(Apply("*", (fold(Apply("+", (limit, 1)), {}), size)), {})


def _few(found: Combination, strict: bool) -> list[_Fact] | None:
    """A bound of one side alone."""
    factors = dict(found.factors)
    length = factors.pop(N, 0)
    if len(factors) != 1:
        return None
    ((position, factor),) = factors.items()
    if position not in (Q, K) or factor not in (1, -1):
        return None
    side = "q" if position == Q else "k"
    # p <= -rest, and n - p <= -rest
    more = int(factor == 1) - int(strict)
    try:
        count = fold(Apply("+", (minus(0, found.rest), more)), {})
    except ScalarError:
        # a size that no number of the language has
        return None
    if (length == 0 and factor == 1) or (length == 1 and factor == -1):
        grown = size_growth(count)
        if grown is None or (isinstance(count, int) and count < 1):
            return None
        return [_Few(side, grown, factor == 1, count)]
    # all positions but those before or behind so many
    grown = size_growth(found.rest) if length in (0, -factor) else None
    if grown is None or grown >= LINEAR:
        return None
    return [_Most(side, minus(0, count), factor == -1)]


def _remainder(left: Apply, op: str, right: Scalar) -> list[_Fact] | None:
    """What x mod s == y, < y or >= y says."""
    number, step = left.args
    if asks_positions(step):
        return None
    if isinstance(right, Apply) and right.op == "%" and right.args[1] == step and op == "==":
        number, right = Apply("-", (number, right.args[0])), 0
    if asks_positions(right):
        return None
    found = combination(number)
    if found is None:
        return None
    cells = {"==": 1, "<": right, "<=": right, ">": minus(step, right), ">=": minus(step, right)}
    many = size_growth(cells[op])
    if many is None or (isinstance(right, int) and isinstance(step, int) and op[0] == ">"):
        many = size_growth(step)
    if many is None:
        return None
    held = (op in ("==", "<=") and right == 0) or (op in ("<", "<=") and _at_least(right, 1))
    if found.distance is not None:
        return [_Steps(step, many, held and found.plain.rest == 0)]
    gap = size_growth(step)
    positions = [each for each, factor in found.factors if factor in (1, -1)]
    if len(found.factors) != 1 or positions[:1] not in ([Q], [K]) or gap is None:
        return None
    # a remainder is at least 0 and at most step - 1
    reached = {"==": 1, ">=": 1, ">": 2}.get(op)
    some = reached is not None and _at_least(minus(step, right), reached)
    if not held and not (some and (op != "==" or _at_least(right, 0))):
        return None
    share = times(over(LINEAR, gap), min(many, gap))
    return [_Few("q" if positions[0] == Q else "k", max(share, CONSTANT), True)]


def _listed(number: Scalar, members: tuple[Scalar, ...]) -> list[_Fact] | None:
    """Membership in a list of numbers."""
    values = [member for member in members if type(member) is int]
    if len(values) < len(members):
        return None
    if isinstance(number, Apply) and number.op == "abs":
        (number,) = number.args
        values = [sign * value for value in values if value >= 0 for sign in (1, -1)]
    found = combination(number)
    if found is None or len(found.factors) > 2 or not isinstance(found.rest, int):
        return None
    apart = [value - found.rest for value in values]
    if found.distance in (1, -1) and apart:
        return [_Listed(0 in apart)]
    if len(found.factors) == 1:
        ((position, factor),) = found.factors
        # a position is a whole number from 0 on
        places = [value // factor for value in apart if value % factor == 0]
        last = max(places, default=-1)
        if position in (Q, K) and last >= 0:
            return [_Few("q" if position == Q else "k", CONSTANT, True, last + 1)]
    return None
