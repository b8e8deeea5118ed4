"""Predicates that read run-time inputs at the query and the key, `time(q)` and `time(k)`, and
lengths, `prompt`, which are one number of a sample.

They are evaluated alike in numpy and in torch: whole numbers as int64, and float64 as soon as one
operand is real, in operations that IEEE 754 defines to the last bit. So the same pairs come out
whatever evaluates them, and what is not a number compares false.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from functools import reduce
from operator import and_, mul, or_
from typing import Any

import numpy as np

from attnspec.graphs.relation import Elementwise
from attnspec.ir.crossing import QUERIES
from attnspec.ir.intervals import Bounds, bounds, reach_of
from attnspec.ir.parameters import RelationError
from attnspec.ir.program import Term, leaves
from attnspec.ir.scalars import (
    LARGEST,
    OPERATIONS,
    PAIR,
    TRUTHS,
    Apply,
    Scalar,
    ScalarError,
    Symbol,
    parts_of,
    symbols,
)

READ = ("ids", "numbers")
"""Kinds of inputs that a predicate reads at a position."""

INEXACT = ("sqrt", "isqrt", "log2")
"""Functions that take no input: libraries differ in their last bits, or some have no value."""


def computes_in_tensors(scalar: Scalar) -> bool:
    """Whether every operation of a predicate is one of tensors, too, with the same numbers."""
    return all(
        part.op not in (*INEXACT, "item") and (part.op != "**" or isinstance(part.args[1], int))
        for part in parts_of(scalar)
    )


def reading(name: str, side: str) -> Symbol:
    """What the input of a name has at the query or the key, `side` being "q" or "k"; with "" the
    number that an input of kind `length` is."""
    return Symbol(f"{name}({side})")


def pair_reading(name: str) -> Symbol:
    """What the input of a name has of a pair."""
    return Symbol(f"{name}{PAIR}")


def inputs_read(scalar: Scalar) -> tuple[str, ...]:
    """The names of the inputs that a predicate reads, in order."""
    names = {name.partition("(")[0] for name in symbols(scalar) if name.endswith(")")}
    return tuple(sorted(names))


def reads_inputs(scalar: Scalar) -> bool:
    """Whether a predicate, or a part of one, reads an input."""
    return any(name.endswith(")") for name in symbols(scalar))


def wide(values: Elementwise) -> Elementwise:
    """The values of an input, an array or a tensor, as int64 or float64."""
    if isinstance(values, int):
        return np.int64(values)
    if is_real(values):
        return values.double() if hasattr(values, "double") else values.astype(np.float64)
    return values.long() if hasattr(values, "long") else values.astype(np.int64)


def is_real(value: Elementwise) -> bool:
    """Whether a number, an array or a tensor is, or holds, reals."""
    kind = getattr(value, "dtype", None)
    if kind is None:
        return isinstance(value, float)
    return bool(getattr(kind, "is_floating_point", getattr(kind, "kind", "") == "f"))


def real_remainder(scalar: Scalar, real: Collection[str]) -> str | None:
    """`//` or `%` of a real number in a predicate, inputs of some names being real, or None."""
    if not isinstance(scalar, Apply):
        return None
    if scalar.op in ("//", "%") and _says_real(scalar.args[0], real):
        return scalar.op
    problems = (real_remainder(part, real) for part in scalar.args)
    return next((op for op in problems if op is not None), None)


def _says_real(scalar: Scalar, real: Collection[str]) -> bool:
    match scalar:
        case Symbol(name):
            return name.partition("(")[0] in real
        case Apply("floor" | "ceil"):
            return False
        case Apply("/"):
            return reads_inputs(scalar)
        case Apply(_, args):
            halved = reads_inputs(scalar) and any(isinstance(arg, float) for arg in args)
            return halved or any(_says_real(arg, real) for arg in args)
        case _:
            return False


# --- numbers that are exact ----------------------------------------------------------------------


def require_exact(
    predicate: Scalar, n: int, ranges: Mapping[str, tuple[int, int]], m: int | None = None
) -> None:
    """Raise RelationError where whole numbers that a predicate computes may not fit in 64 bits, or
    one of them is divided by what may be 0, the inputs of some names lying between two whole
    numbers each; the others are real, and of reals nothing is asked. There are n keys, and m
    queries, n where it is None."""
    queries = n if m is None else m
    if 0 in (n, queries):
        return
    ends: dict[str, Bounds] = {}
    for symbol in symbols(predicate):
        low, high = 0, max(n, queries, COUNTED)
        if symbol in ("n", QUERIES):
            low = high = n if symbol == "n" else queries
        if symbol.endswith(")"):
            low, high = ranges.get(symbol.partition("(")[0], (0, 0))
        ends[symbol] = np.asarray(float(low)), np.asarray(float(high))
    real = frozenset(inputs_read(predicate)) - ranges.keys()
    names = ", ".join(f"`{name}`" for name in sorted(ranges) or inputs_read(predicate))
    zero = _zero_divisor(predicate, ends, real)
    if zero is not None:
        made = ", ".join(f"`{name}`" for name in inputs_read(zero) or sorted({*symbols(zero)}))
        made = made or "numbers, n, `layer` or `head`"
        raise RelationError(
            f"the divisor in `where` is made from {made}, and may be 0: write one that is never 0"
            " (if it is never negative, `max(…, 1)`)"
        )
    if _computed(predicate, ends, real) > LARGEST:
        raise RelationError(
            f"`where` computes with {names}, and a result may be above 2**62, the largest integer:"
            " write smaller numbers, pass smaller inputs, or pass a floating type, which is rounded"
        )


def exact_up_to(predicate: Scalar, n: int) -> int | None:
    """The largest power of two, 2**62 at most, that whole numbers of inputs may have in absolute
    value so that a predicate is exact at 1 and at n positions; None where it compares them as they
    are.

    Raises RelationError where there is none.
    """
    if not _computes(predicate):
        return None
    names, most = inputs_read(predicate), 1 << 62
    while True:
        try:
            for length in (1, n):
                require_exact(predicate, length, dict.fromkeys(names, (-most, most)))
        except RelationError:
            if most == 1:
                raise
            most //= 2
        else:
            return most


COUNTED = 4096
"""More layers and heads than there are."""


def computed(graph: Term) -> dict[Scalar, tuple[str, ...]]:
    """The predicates of a graph that compute with inputs, and the names of these; what is compared
    as it was given needs no room."""
    readers: dict[Scalar, tuple[str, ...]] = {}
    for leaf in leaves(graph):
        predicate = dict(leaf.arguments).get("predicate")
        if isinstance(predicate, Apply) and _computes(predicate):
            readers[predicate] = inputs_read(predicate)
    return readers


def _computes(scalar: Scalar) -> bool:
    if not isinstance(scalar, Apply) or not reads_inputs(scalar):
        return False
    return scalar.op not in TRUTHS or any(map(_computes, scalar.args))


def _computed(scalar: Scalar, ranges: Mapping[str, Bounds], real: Collection[str]) -> float:
    """A bound of the whole numbers that are computed on the way to a scalar's value."""
    if not isinstance(scalar, Apply):
        return 0.0
    if scalar.op not in TRUTHS and not _in_reals(scalar, real):
        return reach_of(scalar, ranges)
    return max(0.0, *(_computed(x, ranges, real) for x in scalar.args))


def _zero_divisor(
    scalar: Scalar, ranges: Mapping[str, Bounds], real: Collection[str]
) -> Scalar | None:
    """What divides, made of inputs or not, and may be 0, a whole number; None if nothing does."""
    if not isinstance(scalar, Apply):
        return None
    if scalar.op in ("/", "//", "%") and reads_inputs(scalar):
        by = scalar.args[1]
        if (scalar.op != "/" or reads_inputs(by)) and not _in_reals(by, real):
            low, high = bounds(by, ranges)
            if low <= 0 <= high:
                return by
    divisors = (_zero_divisor(x, ranges, real) for x in scalar.args)
    return next((each for each in divisors if each is not None), None)


def no_number(scalar: Scalar, ranges: Mapping[str, Bounds]) -> np.ndarray:
    """Where a divisor may be 0, so that what comes of it may be infinite or no number, bool."""
    missing = np.zeros((), bool)
    for part in scalar.args if isinstance(scalar, Apply) else ():
        missing = missing | no_number(part, ranges)
    if isinstance(scalar, Apply) and scalar.op == "/":
        low, high = bounds(scalar.args[1], ranges)
        missing = missing | ((low <= 0) & (high >= 0))
    return missing


def _in_reals(scalar: Scalar, real: Collection[str]) -> bool:
    """Whether a scalar is computed in float64, the inputs of some names being real."""
    match scalar:
        case Symbol(name):
            return name.partition("(")[0] in real
        case Apply(op, args):
            return op not in TRUTHS and (op == "/" or any(_in_reals(x, real) for x in args))
        case _:
            return isinstance(scalar, float)


# --- values ---------------------------------------------------------------------------------------


def evaluated(scalar: Scalar, values: Mapping[str, Elementwise]) -> Elementwise:
    """The value of a scalar whose symbols are arrays or tensors, int64 or float64; raises
    ScalarError for a division by a number that is 0."""
    with np.errstate(all="ignore"):
        return _evaluated(scalar, values)


def _evaluated(scalar: Scalar, values: Mapping[str, Elementwise]) -> Elementwise:
    match scalar:
        case Symbol(name):
            return values[name]
        case Apply(op, args):
            return _applied(op, [_evaluated(arg, values) for arg in args])
        case _:
            return scalar


def _applied(op: str, found: list[Elementwise]) -> Elementwise:
    if op == "/" or any(map(is_real, found)):
        found = [_as_real(x) for x in found]
    if op in ("/", "//", "%") and isinstance(found[1], int | float) and found[1] == 0:
        raise ScalarError("division by zero")
    match op:
        case "/":
            return found[0] / found[1]
        case "//" | "%" if any(hasattr(x, "new_full") for x in found):
            # whether a tensor holds a 0 is not asked: a trace has no numbers
            return found[0] // found[1] if op == "//" else found[0] % found[1]
        case "**":
            base, times = found[0], int(found[1])
            return reduce(mul, [base] * times) if times else base * 0 + 1
        case "and":
            return reduce(and_, found)
        case "or":
            return reduce(or_, found)
        case "one_of":
            return reduce(or_, [found[0] == each for each in found[1:]])
        case "min":
            return reduce(_lesser, found)
        case "max":
            return -reduce(_lesser, [-x for x in found])
        case "floor" | "ceil":
            (x,) = found
            return getattr(_library(x), op)(x) if is_real(x) else x
        case _:
            # what is left are operators of Python
            return OPERATIONS[op](*found)


def _as_real(x: Elementwise) -> Elementwise:
    """A number, an array or a tensor as float64, truth values as they are."""
    if not hasattr(x, "dtype"):
        return x if isinstance(x, bool) else float(x)
    return x.double() if hasattr(x, "double") else x.astype(np.float64)


def _lesser(a: Elementwise, b: Elementwise) -> Elementwise:
    """The lesser of two, no number where one of them is none."""
    where = _library(a, b).where
    return where(a <= b, a, where(b < a, b, a + b))


def _library(*values: Elementwise) -> Any:
    """numpy or torch, by what some values are of or take functions of; no import of torch here."""
    kind = next(type(x) for x in values if hasattr(x, "dtype"))
    return sys.modules["torch" if hasattr(kind, "__torch_function__") else "numpy"]
