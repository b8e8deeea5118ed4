"""Operations of scalars, made as simple as is plain whatever the positions are.

Constants are computed, what changes nothing is left out, and a comparison that bounds decide is
true or false. What captured tensors hold may be no number, so of it nothing is decided.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from attnspec.graphs.predicates.inputs import reads_inputs
from attnspec.ir.intervals import Bounds, bounds
from attnspec.ir.scalars import (
    NEGATED,
    TRUTHS,
    Apply,
    Scalar,
    ScalarError,
    Symbol,
    evaluate,
    is_whole,
    symbols,
)

_MIRRORED = str.maketrans("<>", "><")

FAR = 2.0**40
"""Beyond every position, head and sample."""


def applied(op: str, args: tuple[Scalar, ...]) -> Scalar:
    """An operation, done at once where that is plain."""
    if op in ("and", "or"):
        return _joined(op, args)
    if op == "not":
        return negated(args[0])
    if not any(isinstance(x, Symbol | Apply) for x in args):
        try:
            value = evaluate(Apply(op, args), {})
        except ScalarError:
            return Apply(op, args)
        return value if isinstance(value, bool | int | float) else Apply(op, args)
    unchanged = _unchanged(op, args)
    return _decided(Apply(op, args)) if unchanged is None else unchanged


def negated(condition: Scalar) -> Scalar:
    """Where a condition does not hold."""
    match condition:
        case bool():
            return not condition
        case Apply("not", (inner,)):
            return inner
        case Apply(op, args) if op in NEGATED and not reads_inputs(condition):
            return Apply(NEGATED[op], args)
    return Apply("not", (condition,))


def _joined(op: str, args: tuple[Scalar, ...]) -> Scalar:
    """Conditions under `and` or `or`, each once."""
    unit = op == "and"
    parts = dict.fromkeys(part for x in args for part in _parts(op, x) if part is not unit)
    parts = dict.fromkeys(part for part in _spanned(op, list(parts)) if part is not unit)
    if (not unit) in parts or any(negated(part) in parts for part in parts):
        return not unit
    terms = tuple(parts)
    return Apply(op, terms) if len(terms) > 1 else terms[0] if terms else unit


def _parts(op: str, scalar: Scalar) -> Iterator[Scalar]:
    yield from scalar.args if isinstance(scalar, Apply) and scalar.op == op else (scalar,)


def _spanned(op: str, parts: list[Scalar]) -> list[Scalar]:
    """Conditions of which those that bound one whole number are as few as say the same."""
    bounded: dict[Scalar, list[tuple[int, float, float]]] = {}
    for at, part in enumerate(parts):
        if (span := _span(part)) is not None:
            bounded.setdefault(span[0], []).append((at, *span[1:]))
    places: dict[int, Scalar | None] = dict(enumerate(parts))
    for number, spans in bounded.items():
        ends = sorted(span[1:] for span in spans)
        joined = ends[:1]
        for low, high in ends[1:]:
            last = joined[-1]
            if op == "and":
                joined = [(max(last[0], low), min(last[1], high))]
            elif low <= last[1] + 1:
                joined[-1] = last[0], max(last[1], high)
            else:
                joined.append((low, high))
        if len(joined) < len(ends):
            ranges = [_within(number, low, high) for low, high in joined]
            places |= {span[0]: None for span in spans}
            places |= zip((span[0] for span in spans), ranges, strict=False)
    return [part for part in places.values() if part is not None]


def _span(condition: Scalar) -> tuple[Scalar, float, float] | None:
    """A number, and the least and the greatest of the whole numbers that it may be."""
    low: float
    high: float
    match condition:
        case Apply("within", (number, int() as low, int() as high)):
            pass
        case Apply(
            "<" | "<=" | ">" | ">=" | "==" as op, (int() as end, Symbol() | Apply() as number)
        ):
            return _span(Apply(op.translate(_MIRRORED), (number, end)))
        case Apply("<" | "<=" as op, (number, int() as end)):
            low, high = -math.inf, end - (op == "<")
        case Apply(">" | ">=" as op, (number, int() as end)):
            low, high = end + (op == ">"), math.inf
        case Apply("==", (number, int() as low)):
            high = low
        case _:
            return None
    if not is_whole(number) or reads_inputs(number):
        return None
    least, most = bounds(number, natural(number))
    return number, -math.inf if low <= least else low, math.inf if high >= most else high


def _within(number: Scalar, low: float, high: float) -> Scalar:
    """Whether a number lies from a least to a greatest."""
    if low > high or (low, high) == (-math.inf, math.inf):
        return low <= high
    if low == -math.inf:
        return Apply("<=", (number, int(high)))
    if high == math.inf:
        return Apply(">=", (number, int(low)))
    if low == high:
        return Apply("==", (number, int(low)))
    return Apply("within", (number, int(low), int(high)))


def _unchanged(op: str, args: tuple[Scalar, ...]) -> Scalar | None:
    """The operand that is the result already, or a number that it always is."""
    first, last = args[0], args[-1]
    match op, first, last:
        case ("+" | "-", _, 0) | ("*" | "//" | "**", _, 1):
            return first
        case ("+", 0, _) | ("*", 1, _):
            return last
        case "%", _, 1 if is_whole(first):
            return 0
        case "-", _, Apply("neg", (inner,)):
            return applied("+", (first, inner))
        case "neg", Apply("neg", (inner,)), _:
            return inner
        case (("max" | "min"), _, _) if not reads_inputs(Apply(op, args)):
            (low, high), (least, most) = (bounds(x, natural(x)) for x in (first, last))
            if op == "min":
                (low, high), (least, most) = (-high, -low), (-most, -least)
            return first if low >= most else last if least >= high else None
    return None


def _decided(made: Apply) -> Scalar:
    """A condition, or a whole number, that bounds leave one value."""
    if reads_inputs(made) or not (made.op in TRUTHS or is_whole(made)):
        return made
    if made.op in NEGATED and made.args[0] == made.args[1]:
        return made.op in ("==", "<=", ">=")
    low, high = bounds(made, natural(made))
    if low != high or abs(low) > FAR:
        return made
    return bool(low) if made.op in TRUTHS else int(low)


def natural(scalar: Scalar) -> dict[str, Bounds]:
    """Bounds of the symbols in a scalar: no position, head or sample is below 0."""
    return {name: (np.asarray(0.0), np.asarray(FAR)) for name in symbols(scalar)}
