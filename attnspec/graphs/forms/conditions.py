"""Conditions on a pair, their conjunctions and unions of those: what follows from what, always.

Sizes may depend on n. What is said to follow does so for every n; not all that follows is seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import TypeAlias

from attnspec.graphs.forms.properties import asks_for_cells, reads_itself
from attnspec.ir.program import ArgumentValue, Leaf, Term, Tokens
from attnspec.ir.scalars import Apply, Scalar, fold, symbols
from attnspec.limits import LIMITS


@dataclass(frozen=True)
class Within:
    """q - k <= most, or with `later` k - q <= most; of blocks of a `size` q // size - k // size in
    place of q - k, and likewise. `natural` where `most` is never below zero."""

    most: Scalar
    later: bool
    size: Scalar = 1
    natural: bool = field(default=False, compare=False)

    @property
    def steady(self) -> bool:
        """Whether the same pairs fulfil it at every n."""
        return not _read_length(self.most, self.size)

    @property
    def reach(self) -> float:
        """What q - k, or with `later` k - q, is at most."""
        if not isinstance(self.most, int | float) or not _is_size(self.size):
            return inf
        # blocks that are c apart hold positions at most (c + 1) * size - 1 apart
        return self.most if self.size == 1 else (self.most + 1) * self.size - 1  # type: ignore[operator]


@dataclass(frozen=True)
class Multiple:
    """`step` divides q - k, or, unless `wanted`, does not."""

    step: Scalar
    wanted: bool = True

    @property
    def steady(self) -> bool:
        """Whether the same pairs fulfil it at every n."""
        return not _read_length(self.step)


@dataclass(frozen=True)
class Ends:
    """The last `cells` positions of every `stride`."""

    stride: Scalar
    cells: Scalar


@dataclass(frozen=True)
class Among:
    """The query, side "q", or the key, "k", is one of some positions, or, unless `wanted`, not."""

    side: str
    members: ArgumentValue | Ends
    wanted: bool = True

    @property
    def steady(self) -> bool:
        """Whether the same pairs fulfil it at every n."""
        match self.members:
            case Tokens(kind, values):
                return kind != "last" and not _read_length(*values)
            case Ends(stride, cells):
                return not _read_length(stride, cells)
            case _:
                return True


@dataclass(frozen=True)
class Held:
    """A pattern, or an operator that is not taken apart, that holds or, unless `wanted`, does not.

    `context` is what else its pairs depend on: layer, head, grid, whether the spec is causal.
    """

    term: Term
    context: tuple[object, ...]
    wanted: bool


Condition: TypeAlias = Within | Multiple | Among | Held
Conjunction: TypeAlias = frozenset[Condition]
Form: TypeAlias = frozenset[Conjunction]
"""A union of conjunctions; the empty conjunction is every pair, the empty union none."""

EVERY_PAIR: Form = frozenset([frozenset()])


class TooMany(Exception):
    """A form would have more than `LIMITS.terms` conjunctions."""


def contained(first: Form, second: Form) -> bool:
    """Whether it is plain that every pair of the first is one of the second, for every n."""
    return all(any(_implies(one, other) for other in second) for one in first)


def equal(first: Form, second: Form) -> bool:
    """Whether it is plain that two graphs have the same pairs for every n."""
    return contained(first, second) and contained(second, first)


# --- conjunctions ---------------------------------------------------------------------------------


def joined(parts: list[Form]) -> Form:
    """The union; raises TooMany."""
    union: Form = frozenset().union(*parts)
    return _bounded(union)


def crossed(parts: list[Form]) -> Form:
    """The intersection; raises TooMany."""
    answer = EVERY_PAIR
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
    if len(form) > LIMITS.terms:
        raise TooMany
    return form


def complement(form: Form) -> Form:
    """All other pairs; raises TooMany."""
    return crossed([frozenset(frozenset([_not(one)]) for one in each) for each in form])


def _not(one: Condition) -> Condition:
    if not isinstance(one, Within):
        return replace(one, wanted=not one.wanted)
    # q - k > m says k - q <= -m - 1
    return Within(plus(fold(Apply("neg", (one.most,)), {}), -1), not one.later, one.size)


def _simplified(conjunction: Conjunction) -> Conjunction | None:
    """The same with one number for each size on each side; None where no pair is left."""
    kept: set[Condition] = set()
    bounds = [one for one in conjunction if isinstance(one, Within)]
    for later, size in sorted({(one.later, one.size) for one in bounds}, key=repr):
        side = [one for one in bounds if (one.later, one.size) == (later, size)]
        numbers = [one.most for one in side if isinstance(one.most, int | float)]
        if numbers:
            kept.add(Within(min(numbers), later, size))
        # one that follows from the number says nothing more
        others = [one for one in side if not isinstance(one.most, int | float)]
        kept.update(one for one in others if not any(_entails(other, one) for other in kept))
    rest = [one for one in conjunction if not isinstance(one, Within)]
    kept.update(rest)
    low, high = _limits(frozenset(kept))
    if low > high or any(_not(one) in kept for one in rest):
        return None
    return frozenset(kept)


def _limits(conjunction: Conjunction) -> tuple[float, float]:
    """The least and the greatest q - k that the numbers of a conjunction allow."""
    bounds = [one for one in conjunction if isinstance(one, Within)]
    low = -min((one.reach for one in bounds if one.later), default=inf)
    return low, min((one.reach for one in bounds if not one.later), default=inf)


def merged(form: Form) -> Form:
    """The same pairs: bands that touch are one, what another conjunction holds is left out."""
    rest = set(form)
    merging = True
    while merging:
        merging = False
        for one in sorted(rest, key=repr):
            for other in sorted(rest - {one}, key=repr):
                both = _one_band(one, other)
                if both is not None:
                    rest -= {one, other}
                    rest.add(both)
                    merging = True
                    break
            if merging:
                break
    return frozenset(one for one in rest if not _absorbed(one, rest))


def _one_band(one: Conjunction, other: Conjunction) -> Conjunction | None:
    """The union of two bands of whole distances that touch, all other conditions being equal."""
    rest = _but_numbers(one)
    if rest != _but_numbers(other):
        return None
    (low, high), (lower, higher) = sorted([_limits(one - rest), _limits(other - rest)])
    if lower > high + 1:
        return None
    high = max(high, higher)
    ends = []
    if high != inf:
        ends.append(Within(int(high), False))
    if low != -inf:
        ends.append(Within(int(-low), True))
    return rest | frozenset(ends)


def _but_numbers(conjunction: Conjunction) -> Conjunction:
    return frozenset(
        one
        for one in conjunction
        if not (isinstance(one, Within) and one.size == 1 and isinstance(one.most, int | float))
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
    if isinstance(wanted, Within):
        if low == high == 0 and wanted.natural:
            return True
        far = -low if wanted.later else high
        # a distance of m crosses at most ceil(m / size) borders
        numbers = isinstance(wanted.most, int | float) and _is_size(wanted.size) and far < inf
        return numbers and -(-far // wanted.size) <= wanted.most  # type: ignore[operator]
    if low != 0 or high != 0 or not wanted.wanted:
        return False
    # a query and itself
    if isinstance(wanted, Held) and isinstance(wanted.term, Leaf):
        return reads_itself(wanted.term) and not asks_for_cells(wanted.term)
    return isinstance(wanted, Multiple)


def _entails(one: Condition, wanted: Condition) -> bool:
    """Whether one condition is never without another."""
    if one == wanted:
        return True
    match one, wanted:
        case Within(), Within() if (one.later, one.size) == (wanted.later, wanted.size):
            least = wanted.natural and isinstance(one.most, int | float) and one.most <= 0
            return least or _at_most(one.most, wanted.most)
        case Multiple(), Multiple() if one.wanted == wanted.wanted:
            steps = (one.step, wanted.step) if one.wanted else (wanted.step, one.step)
            return all(map(_is_size, steps)) and steps[0] % steps[1] == 0  # type: ignore[operator]
        case Among(), Among() if (one.side, one.wanted) == (wanted.side, wanted.wanted):
            sets = (one.members, wanted.members) if one.wanted else (wanted.members, one.members)
            return _inside(*sets)
        case _:
            return False


def _inside(few: ArgumentValue | Ends, many: ArgumentValue | Ends) -> bool:
    """Whether a set of positions lies in another of its kind, by their sizes."""
    match few, many:
        case Ends(), Ends():
            return few.stride == many.stride and _at_most(few.cells, many.cells)
        case Tokens("first" | "last"), Tokens() if few.kind == many.kind:
            return _at_most(few.values[0], many.values[0])
        case _:
            return False


def _is_size(size: object) -> bool:
    """Whether a size is a number, and one that there may be."""
    return isinstance(size, int) and size > 0


def _read_length(*sizes: Scalar) -> bool:
    return any("n" in symbols(size) for size in sizes)


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
