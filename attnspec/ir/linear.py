"""Sums of positions with whole factors: what is plain of a comparison without a look at pairs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from attnspec.ir.scalars import Apply, Scalar, Symbol, fold, symbols

Q, K, N = Symbol("q"), Symbol("k"), Symbol("n")


@dataclass(frozen=True)
class Combination:
    """The sum of `factors` times what they stand beside, and of `rest`, which asks for no position.

    The others are q, k, n and their quotients by a number that asks for no position.
    """

    factors: tuple[tuple[Scalar, int], ...]
    rest: Scalar

    def of(self, scalar: Scalar) -> int:
        """The factor beside a scalar."""
        return dict(self.factors).get(scalar, 0)

    @property
    def distance(self) -> int | None:
        """The factor f where the sum is f (q - k) + rest, else None; n is part of the rest."""
        factors = dict(self.plain.factors)
        same = factors.keys() == {Q, K} and factors[Q] == -factors[K]
        return factors[Q] if same else None

    @property
    def plain(self) -> Combination:
        """The same with n as part of the rest."""
        rest, times = self.rest, self.of(N)
        if times:
            rest = _sum(rest, N if times == 1 else Apply("*", (times, N)))
        return Combination(tuple(pair for pair in self.factors if pair[0] != N), rest)


def product(first: Scalar, *others: Scalar) -> Scalar:
    """The product of some scalars."""
    return reduce(lambda one, other: Apply("*", (one, other)), others, first)


def combination(scalar: Scalar) -> Combination | None:
    """A scalar as a sum; None where it is none."""
    pair = _factors(scalar)
    if pair is None:
        return None
    factors, rest = pair
    kept = sorted(((each, by) for each, by in factors.items() if by), key=repr)
    return Combination(tuple(kept), rest)


def asks_positions(scalar: Scalar) -> bool:
    """Whether a scalar asks for a position or its coordinates."""
    return any(name[0] in "qk" and name[1:2] in ("", ".") for name in symbols(scalar))


def _factors(scalar: Scalar) -> tuple[dict[Scalar, int], Scalar] | None:
    if scalar in (Q, K, N):
        return {scalar: 1}, 0
    if not isinstance(scalar, Apply):
        return ({}, scalar) if not asks_positions(scalar) else None
    op, args = scalar.op, scalar.args
    if op in ("+", "-", "neg"):
        parts = [_factors(arg) for arg in args]
        present = [part for part in parts if part is not None]
        if len(present) < len(parts):
            return None
        left, right = present if op != "neg" else (({}, 0), present[0])
        sign = 1 if op == "+" else -1
        names = {**left[0], **right[0]}
        factors = {name: left[0].get(name, 0) + sign * right[0].get(name, 0) for name in names}
        return factors, _sum(left[1], right[1], "+" if sign == 1 else "-")
    if not asks_positions(scalar):
        return {}, scalar
    if op == "*":
        for by, other in (args, args[::-1]):
            inner = _factors(other) if type(by) is int else None
            if inner is not None and type(by) is int:
                rest = fold(Apply("*", (by, inner[1])), {})
                return {name: by * factor for name, factor in inner[0].items()}, rest
    if op == "//" and args[0] in (Q, K) and not asks_positions(args[1]):
        return {scalar: 1}, 0
    return None


def minus(left: Scalar, right: Scalar) -> Scalar:
    """The difference of two scalars, as short as that is plain."""
    difference = combination(Apply("-", (left, right)))
    return _sum(left, right, "-") if difference is None or difference.factors else difference.rest


def _sum(left: Scalar, right: Scalar, op: str = "+") -> Scalar:
    if right == 0:
        return left
    if op == "-" and isinstance(right, Apply) and right.op == "-" and right.args[0] == left:
        # s - (s - c) is c, whatever s is
        return right.args[1]
    return fold(Apply(op, (left, right)), {})
