"""Conditions on a pair, their conjunctions and unions of those: what follows from what, always.

Sizes may depend on n. What is said to follow does so for every n; not all that follows is seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from attnspec.graphs.forms.properties import asks_for_cells, reads_itself
from attnspec.ir.program import Leaf, Term, Tokens
from attnspec.ir.scalars import Apply, Scalar, fold

MOST = 64
"""The most conjunctions of one form; of what has more nothing is proven."""


@dataclass(frozen=True)
class Within:
    """q - k <= most, or with `later` k - q <= most; `natural` where `most` is never below zero."""

    most: Scalar
    later: bool
    natural: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Held:
    """A pattern, or an operator that is not taken apart, that holds or, unless `wanted`, does not.

    `context` is what else its pairs depend on: layer, head, grid, whether the spec is causal.
    """

    term: Term
    context: tuple[object, ...]
    wanted: bool


Condition: TypeAlias = Within | Held
Conjunction: TypeAlias = frozenset[Condition]
Form: TypeAlias = frozenset[Conjunction]
"""A union of conjunctions; the empty conjunction is every pair, the empty union none."""


class TooMany(Exception):
    """A form would have more than MOST conjunctions."""


def contained(first: Form, second: Form) -> bool:
    """Whether it is plain that every pair of the first is one of the second, for every n."""
    return all(any(_implies(one, other) for other in second) for one in first)


def equal(first: Form, second: Form) -> bool:
    """Whether it is plain that two graphs have the same pairs for every n."""
    return contained(first, second) and contained(second, first)


# --- conjunctions ---------------------------------------------------------------------------------


def joined(parts: list[Form]) -> Form:
    """The union; raises TooMany."""
    found: Form = frozenset().union(*parts)
    return _bounded(found)


def crossed(parts: list[Form]) -> Form:
    """The intersection; raises TooMany."""
    answer: Form = frozenset([frozenset()])
    for part in parts:
        answer = _bounded(
            frozenset(
                both
                for one in answer
                for other in part
                if (both := _simplified(one | other)) is not None
            )
        )
    return answer


def _bounded(form: Form) -> Form:
    if len(form) > MOST:
        raise TooMany
    return form


def complement(form: Form) -> Form:
    """All other pairs; raises TooMany."""
    return crossed([frozenset(frozenset([_not(one)]) for one in each) for each in form])


def _not(one: Condition) -> Condition:
    if isinstance(one, Held):
        return Held(one.term, one.context, not one.wanted)
    # q - k > m says k - q <= -m - 1
    return Within(plus(fold(Apply("neg", (one.most,)), {}), -1), not one.later)


def _simplified(conjunction: Conjunction) -> Conjunction | None:
    """The same with one number on each side; None where no pair is left."""
    kept: set[Condition] = set()
    for later in (False, True):
        side = [one for one in conjunction if isinstance(one, Within) and one.later == later]
        numbers = [one.most for one in side if isinstance(one.most, int | float)]
        if numbers:
            kept.add(Within(min(numbers), later))
        # one that follows from the number says nothing more
        others = [one for one in side if not isinstance(one.most, int | float)]
        kept.update(one for one in others if not any(_entails(other, one) for other in kept))
    held = [one for one in conjunction if isinstance(one, Held)]
    kept.update(held)
    low, high = _limits(frozenset(kept))
    if low > high or any(_not(one) in kept for one in held):
        return None
    return frozenset(kept)


def _limits(conjunction: Conjunction) -> tuple[float, float]:
    """The least and the greatest q - k that the numbers of a conjunction allow."""
    low, high = float("-inf"), float("inf")
    for one in conjunction:
        if isinstance(one, Within) and isinstance(one.most, int | float):
            if one.later:
                low = max(low, -one.most)
            else:
                high = min(high, one.most)
    return low, high


def merged(form: Form) -> Form:
    """The same pairs: bands that touch are one, what another conjunction holds is left out."""
    found = set(form)
    merging = True
    while merging:
        merging = False
        for one in sorted(found, key=repr):
            for other in sorted(found - {one}, key=repr):
                both = _one_band(one, other)
                if both is not None:
                    found -= {one, other}
                    found.add(both)
                    merging = True
                    break
            if merging:
                break
    return frozenset(one for one in found if not _absorbed(one, found))


def _one_band(one: Conjunction, other: Conjunction) -> Conjunction | None:
    """The union of two bands of whole distances that touch, all other conditions being equal."""
    rest = _but_numbers(one)
    if rest != _but_numbers(other):
        return None
    (low, high), (lower, higher) = sorted([_limits(one), _limits(other)])
    if lower > high + 1:
        return None
    high = max(high, higher)
    ends = []
    if high != float("inf"):
        ends.append(Within(int(high), False))
    if low != float("-inf"):
        ends.append(Within(int(-low), True))
    return rest | frozenset(ends)


def _but_numbers(conjunction: Conjunction) -> Conjunction:
    return frozenset(
        one
        for one in conjunction
        if not (isinstance(one, Within) and isinstance(one.most, int | float))
    )


def _absorbed(one: Conjunction, every: set[Conjunction]) -> bool:
    """Whether another conjunction holds all of this one; of two equal ones the first is kept."""
    return any(
        _implies(one, other) and not (_implies(other, one) and repr(one) < repr(other))
        for other in every
        if other != one
    )


# --- implications ---------------------------------------------------------------------------------


def _implies(one: Conjunction, other: Conjunction) -> bool:
    return all(_follows(one, wanted) for wanted in other)


def _follows(conjunction: Conjunction, wanted: Condition) -> bool:
    """Whether a condition holds for every pair of a conjunction."""
    if any(_entails(one, wanted) for one in conjunction):
        return True
    low, high = _limits(conjunction)
    if isinstance(wanted, Within) or not wanted.wanted or not isinstance(wanted.term, Leaf):
        return False
    if low == high == 0:
        return reads_itself(wanted.term) and not asks_for_cells(wanted.term)
    if wanted.term.pattern != "block":
        return False
    size, before, after = (dict(wanted.term.arguments)[x] for x in ("size", "before", "after"))
    if not all(isinstance(number, int) for number in (size, before, after)):
        return False
    # a distance of m crosses at most ceil(m / size) borders
    return high <= before * size and -low <= after * size  # type: ignore[operator]


def _entails(one: Condition, wanted: Condition) -> bool:
    """Whether one condition is never without another."""
    if one == wanted:
        return True
    if isinstance(one, Held) and isinstance(wanted, Held):
        if one.wanted != wanted.wanted or one.context != wanted.context:
            return False
        narrow, wide = (one.term, wanted.term) if one.wanted else (wanted.term, one.term)
        return isinstance(narrow, Leaf) and isinstance(wide, Leaf) and _inside(narrow, wide)
    if not isinstance(wanted, Within):
        return False
    if isinstance(one, Within):
        if one.later != wanted.later:
            return False
        least = wanted.natural and isinstance(one.most, int | float) and one.most <= 0
        return least or _at_most(one.most, wanted.most)
    if not one.wanted or not isinstance(one.term, Leaf) or one.term.pattern != "block":
        return False
    # blocks that are c apart hold positions at most (c + 1) * size - 1 apart
    given = dict(one.term.arguments)
    size, blocks = given["size"], given["after" if wanted.later else "before"]
    if not isinstance(size, int) or not isinstance(blocks, int):
        return False
    return _at_most((blocks + 1) * size - 1, wanted.most)


def _inside(narrow: Leaf, wide: Leaf) -> bool:
    """Whether a pattern lies in another of the same name, by their sizes."""
    if narrow.pattern != wide.pattern:
        return False
    small, large = dict(narrow.arguments), dict(wide.arguments)
    match narrow.pattern:
        case "residue":
            steps = small["step"], large["step"]
            numbers = all(isinstance(step, int) and step > 0 for step in steps)
            return numbers and steps[0] % steps[1] == 0  # type: ignore[operator]
        case "block":
            same = small["size"] == large["size"]
            return same and all(_at_most(small[x], large[x]) for x in ("before", "after"))
        case "summary":
            return small["stride"] == large["stride"] and _at_most(small["cells"], large["cells"])
        case "rows" | "columns":
            few, many = small["tokens"], large["tokens"]
            if not isinstance(few, Tokens) or not isinstance(many, Tokens):
                return False
            ends = few.kind == many.kind and few.kind in ("first", "last")
            return ends and _at_most(few.values[0], many.values[0])
        case _:
            return False


def _at_most(one: object, other: object) -> bool:
    """Whether one size is never above another."""
    (base, number), (other_base, other_number) = _offset(one), _offset(other)
    return base == other_base and number <= other_number


def _offset(size: object) -> tuple[object, float]:
    """A size as something and a number that is added to it."""
    if isinstance(size, int | float):
        return None, size
    if isinstance(size, Apply) and size.op in ("+", "-") and isinstance(size.args[1], int | float):
        base, number = _offset(size.args[0])
        return base, number + (size.args[1] if size.op == "+" else -size.args[1])
    return size, 0


def plus(scalar: Scalar, number: int) -> Scalar:
    """A size and a number more."""
    return fold(Apply("+", (scalar, number)), {}) if number else scalar
