"""What scores become: `score` statements as expressions, the named ones among them.

Backends ask what is added, what a block of scores becomes, and the expressions themselves; no name.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from attnspec.ir.scalars import NEGATED, PAIR, SCORE, Apply, Scalar, Symbol, parts_of, symbols

S, HEAD, DISTANCE = Symbol(SCORE), Symbol("head"), Apply("-", (Symbol("q"), Symbol("k")))

TABLE = "[]"
"""What the name of a symbol ends with that is a learned table, a row for each head: the operation
`entry` reads it. `steps` counts how many of some ascending numbers a whole number reaches."""

_FINITE = frozenset(
    "+ - * // % neg min max abs item isqrt floor ceil == != < <= > >= entry steps".split()
)
"""Operations of positions that give no infinity."""


@dataclass(frozen=True)
class Scores:
    """Statements that apply to the scaled score one after the other, each what it becomes: of the
    score so far, positions, heads, inputs and learned tables. False without any."""

    statements: tuple[Scalar, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.statements)

    @cached_property
    def added(self) -> Scalar | None:
        """The finite number added to the score, free of it; None where something else is done."""
        total: Scalar = 0
        for value in self.statements:
            more = _added(value)
            if more is None or not {each.op for each in parts_of(value)} <= _FINITE:
                return None
            total = more if total == 0 else Apply("+", (total, more))
        return total

    @property
    def bends(self) -> bool:
        """Whether more is done to scores than adding numbers."""
        return bool(self) and self.added is None

    @cached_property
    def symbols(self) -> frozenset[str]:
        """All that is read."""
        return frozenset(name for value in self.statements for name in symbols(value))

    @cached_property
    def everywhere(self) -> bool:
        """Whether they are numbers also where no pair is, at any positions."""
        parts = [part for value in self.statements for part in parts_of(value)]
        return all(
            part.op in _FINITE - {"item", "//", "%"} | {"tanh"}
            or (part.op == "/" and not symbols(part.args[1]))
            or set(symbols(part)) <= {HEAD.name}
            for part in parts
        )

    @property
    def placed(self) -> bool:
        """Whether positions are read."""
        return not self.symbols.isdisjoint("qk")

    @cached_property
    def by_distance(self) -> bool:
        """Whether no more is read of a pair than q - k."""
        return all(map(goes_by_distance, self.statements))

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of learned tables."""
        return tuple(sorted(x.removesuffix(TABLE) for x in self.symbols if x.endswith(TABLE)))

    @property
    def pairs(self) -> tuple[str, ...]:
        """The names of the inputs that have a number of each pair."""
        return tuple(sorted(x.removesuffix(PAIR) for x in self.symbols if x.endswith(PAIR)))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of all inputs that are read."""
        return tuple(sorted({x.partition("(")[0] for x in self.symbols if x.endswith(")")}))


UNCHANGED = Scores()
"""Those of a spec without `score`."""


def _added(value: Scalar) -> Scalar | None:
    """What a statement adds to the score, which it reads once."""
    match value:
        case Symbol(name) if name == SCORE:
            return 0
        case Apply("+" | "-" as op, (first, second)):
            if SCORE not in symbols(second):
                rest, more = _added(first), second if op == "+" else Apply("neg", (second,))
            elif op == "+" and SCORE not in symbols(first):
                rest, more = _added(second), first
            else:
                return None
            return more if rest == 0 else rest and Apply("+", (rest, more))
        case _:
            return None


def goes_by_distance(value: Scalar) -> bool:
    """Whether an expression reads no more of a pair than q - k."""
    match value:
        case Symbol(name):
            return name not in ("q", "k") and not name.endswith(("(q)", "(k)", PAIR))
        case Apply(op, (Symbol(one), Symbol(other))) if {one, other} == {"q", "k"}:
            return op == "-" or op in NEGATED
        case Apply(_, args):
            return all(map(goes_by_distance, args))
        case _:
            return True


# --- named statements -----------------------------------------------------------------------------


NAMED: dict[str, Scalar] = {
    "softcap": Apply("*", (Symbol("cap"), Apply("tanh", (Apply("/", (S, Symbol("cap"))),)))),
    "alibi": Apply("-", (S, Apply("*", (Symbol("slope"), Apply("abs", (DISTANCE,)))))),
    "bias": Apply("+", (S, Symbol("bias"))),
}
"""What scores become by `score softcap(cap)`, by `score alibi()` with the slope of a head, and by
`score bias()` with the learned number of a pair."""


def bias(buckets: int, max_distance: int, two_sided: bool, table: str) -> Scalar:
    """The number of a pair in T5's table; later keys have its upper half if there are two sides."""
    side = buckets // 2 if two_sided else buckets
    far = Apply("abs", (DISTANCE,)) if two_sided else Apply("max", (DISTANCE, 0))
    bucket = Apply("steps", (far, *thresholds(side, max_distance)))
    if two_sided:
        bucket = Apply("+", (bucket, Apply("*", (side, Apply("<", (DISTANCE, 0))))))
    return Apply("entry", (Symbol(f"{table}{TABLE}"), bucket))


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slopes of ALiBi (Press et al. 2021) as its code has them: geometric for a power of two;
    else those of the power below, then every other one of twice as many."""
    power = 1 << (heads.bit_length() - 1)
    eighths = [8 * (head + 1) for head in range(power)]
    eighths += [8 * head + 4 for head in range(heads - power)]
    return tuple(2.0 ** (-each / power) for each in eighths)


def thresholds(buckets: int, max_distance: int) -> list[int]:
    """The least distance of every bucket but the first, for one direction."""
    exact = buckets // 2
    if exact == 0:
        return []
    wide = buckets - exact
    # in whole numbers the least x with (x / exact)^wide >= (max_distance / exact)^step
    far = range(exact, max(exact, max_distance))
    least = [max_distance**step * exact ** (wide - step) for step in range(1, wide)]
    places = (bisect_left(far, x, key=lambda distance: distance**wide) for x in least)
    return [*range(1, exact + 1), *(exact + place for place in places)]
