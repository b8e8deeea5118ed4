"""Scalar expressions: sizes that may depend on n, and the predicates of `where`.

A scalar is a number, a `Symbol` or an `Apply`. One evaluator serves Python numbers and numpy arrays
alike, with Python's integer semantics (`//` floors, `%` takes the divisor's sign); nothing of
Python is ever evaluated from text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import and_, floordiv, mod, or_, truediv
from typing import TypeAlias, cast

import numpy as np

Value: TypeAlias = "int | float | bool | np.ndarray"


@dataclass(frozen=True)
class Symbol:
    """A name whose value comes later: `n`, `head`, `layer`, or in predicates `q`, `k`, `q.row` …"""

    name: str


@dataclass(frozen=True)
class Apply:
    """An operator or function of scalars; `op` is a key of `OPERATIONS`."""

    op: str
    args: tuple[Scalar, ...]

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """The names of the symbols in it, kept: they are asked for at every length."""
        return tuple(name for arg in self.args for name in symbols(arg))


Scalar: TypeAlias = "int | float | bool | Symbol | Apply"

LARGEST = 2**62
"""Sizes and intermediate integers stay below this, so that int64 arrays never wrap."""


class ScalarError(ValueError):
    """An expression has no value here: division by zero, root of a negative number, overflow."""


def _is_array(*values: Value) -> bool:
    return any(isinstance(v, np.ndarray) for v in values)


def _nonzero(divisor: Value) -> None:
    if np.any(np.equal(divisor, 0)) if isinstance(divisor, np.ndarray) else divisor == 0:
        raise ScalarError("division by zero")


def _dividing(divide: Callable[[Value, Value], Value]) -> Callable[[Value, Value], Value]:
    def divided(a: Value, b: Value) -> Value:
        _nonzero(b)
        return divide(a, b)

    return divided


def _power(a: Value, b: Value) -> Value:
    if isinstance(a, int) and isinstance(b, int):
        if b < 0:
            _nonzero(a)
            return float(a) ** b
        large = a not in (0, 1, -1) and b * math.log2(abs(a)) > 62
        return checked(2 * LARGEST if large else int(a**b))
    if np.any(np.less(b, 0)):
        _nonzero(a)
        a = np.asarray(a, dtype=float)
    try:
        result = a**b
    except OverflowError:
        raise ScalarError("a result is not finite") from None
    if isinstance(result, complex):
        raise ScalarError("a fractional power of a negative number")
    return cast(Value, result)


def _isqrt(x: Value) -> Value:
    if np.any(np.less(x, 0)):
        raise ScalarError("the root of a negative number")
    if not isinstance(x, np.ndarray):
        return math.isqrt(math.floor(x))
    root: np.ndarray = np.floor(np.sqrt(x.astype(float))).astype(np.int64)
    root -= root * root > x
    root += (root + 1) * (root + 1) <= x
    return root


def _sqrt(x: Value) -> Value:
    if np.any(np.less(x, 0)):
        raise ScalarError("the root of a negative number")
    return np.sqrt(x.astype(float)) if isinstance(x, np.ndarray) else math.sqrt(x)


def _log2(x: Value) -> Value:
    if np.any(np.less_equal(x, 0)):
        raise ScalarError("the logarithm of a number that is not positive")
    if isinstance(x, np.ndarray):
        # one routine for single numbers and arrays: vectorised logarithms differ in the last bit
        return np.vectorize(math.log2, otypes=[float])(x) if x.size else x.astype(float)
    return math.log2(x)


def _rounding(many: np.ufunc, one: Callable[[float], int]) -> Callable[[Value], Value]:
    return lambda x: many(x).astype(np.int64) if isinstance(x, np.ndarray) else one(x)


def _extreme(many: np.ufunc, few: Callable[..., Value]) -> Callable[..., Value]:
    return lambda *values: reduce(many, values) if _is_array(*values) else few(values)


def _item(index: Value, *items: Value) -> Value:
    count = len(items)
    if isinstance(index, float) or getattr(index, "dtype", None) is np.dtype(float):
        raise ScalarError("the index of a list must be a whole number")
    outside = np.extract(np.less(index, 0) | np.greater_equal(index, count), index)
    if len(outside):
        raise ScalarError(f"the index of a list must be 0 to {count - 1}, got {outside[0]}")
    if not _is_array(index, *items):
        return items[cast(int, index)]
    result = np.asarray(items[0])
    for place, item in enumerate(items):
        result = np.where(np.equal(index, place), item, result)
    return result


def _one_of(x: Value, *members: Value) -> Value:
    if isinstance(x, np.ndarray) and x.dtype != object and not _is_array(*members):
        return np.isin(x, np.array(members))
    return reduce(or_, [x == member for member in members]) if members else x != x


OPERATIONS: dict[str, Callable[..., Value]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _dividing(truediv),
    "//": _dividing(floordiv),
    "%": _dividing(mod),
    "**": _power,
    "neg": lambda a: -a,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "and": lambda *values: reduce(and_, values),
    "or": lambda *values: reduce(or_, values),
    "not": lambda a: a ^ True,
    "within": lambda x, first, last: (first <= x) & (x <= last),
    "one_of": _one_of,
    "item": _item,
    "isqrt": _isqrt,
    "sqrt": _sqrt,
    "log2": _log2,
    "ceil": _rounding(np.ceil, math.ceil),
    "floor": _rounding(np.floor, math.floor),
    "min": _extreme(np.minimum, min),
    "max": _extreme(np.maximum, max),
    "abs": abs,
    "tanh": np.tanh,
    "exp": np.exp,
    "log": np.log,
}
"""What an `Apply` may do; the functions of the language are among them by their own names."""

NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
"""The comparisons, each with the one that holds where it does not."""

TURNED = {">": "<", ">=": "<="}
"""What these say, with their sides in the other order."""

TRUTHS = frozenset((*NEGATED, "within", "one_of", "and", "or", "not"))
"""What is true or false."""

FUNCTIONS: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("isqrt", "sqrt", "log2", "ceil", "floor"), (1, 1)),
    **dict.fromkeys(("min", "max"), (1, None)),
    "abs": (1, 1),
}
"""The functions of the language with their least and most arguments (None = any number)."""

SCORE_FUNCTIONS: dict[str, tuple[int, int | None]] = {"tanh": (1, 1), "exp": (1, 1), "log": (1, 1)}
"""Those that `score` has beside them."""

SCORE = "s"
"""The score so far, in `score`."""

PAIR = "(q, k)"
"""What the name of a symbol ends with that is an input's number of a pair, in `score`."""


OPERATORS = frozenset("+ - * / // % neg == != < <= > >= and or not within one_of abs".split())
"""Those that are operators of Python, and so mean the same for arrays of its integers."""


_WHOLE = frozenset("+ - * // % neg min max abs item".split())
"""Operations that make whole numbers of whole numbers."""


def evaluate(scalar: Scalar, values: Mapping[str, Value]) -> Value:
    """The value of a scalar; raises ScalarError where it has none."""
    match scalar:
        case Symbol(name):
            return values[name]
        case Apply(op, args):
            operands = [evaluate(arg, values) for arg in args]
            if not _is_array(*operands):
                return checked(OPERATIONS[op](*operands))
            # what is too large is refused by whoever reads the array, in the words of the language
            with np.errstate(over="ignore", invalid="ignore"):
                return OPERATIONS[op](*operands)
        case _:
            return scalar


def evaluate_exactly(scalar: Scalar, values: Mapping[str, Value]) -> Value:
    """The same where numbers may not fit in 64 bits: arrays hold Python's integers."""
    match scalar:
        case Symbol(name):
            value = values[name]
            return value.astype(object) if isinstance(value, np.ndarray) else value
        case Apply(op, args):
            operands = [evaluate_exactly(arg, values) for arg in args]
            work = OPERATIONS[op]
            if _is_array(*operands) and op not in OPERATORS:
                work = np.frompyfunc(work, len(operands), 1)
            with np.errstate(over="ignore", invalid="ignore"):
                result = work(*operands)
            if not isinstance(result, np.ndarray):
                return checked(result)
            if result.dtype == object:
                for beyond in result[~(np.abs(result) <= LARGEST)]:
                    checked(beyond)
            return result
        case _:
            return scalar


def checked(result: Value) -> Value:
    """The result of an operation; raises ScalarError for a single number that is too large."""
    if isinstance(result, int) and abs(result) > LARGEST:
        raise ScalarError("an integer is beyond 2**62; compute with smaller ones, say by `min(…)`")
    if isinstance(result, float) and not math.isfinite(result):
        raise ScalarError("a result is not finite")
    return result


def fold(scalar: Scalar, values: Mapping[str, Value]) -> Scalar:
    """The scalar with the given symbols replaced and whatever became constant computed."""
    match scalar:
        case Symbol(name):
            value = values.get(name, scalar)
            return value if not isinstance(value, np.ndarray) else scalar
        case Apply(op, args):
            folded = tuple(fold(arg, values) for arg in args)
            if any(isinstance(arg, Symbol | Apply) for arg in folded):
                return Apply(op, folded)
            result = evaluate(Apply(op, folded), {})
            return result if not isinstance(result, np.ndarray) else Apply(op, folded)
        case _:
            return scalar


def symbols(scalar: Scalar) -> tuple[str, ...]:
    """The names of all symbols in a scalar."""
    if isinstance(scalar, Apply):
        return scalar.symbols
    return (scalar.name,) if isinstance(scalar, Symbol) else ()


def by_value(scalar: Scalar) -> Scalar:
    """The scalar with one spelling of equal numbers: 1.0 is 1."""
    if isinstance(scalar, Apply):
        return Apply(scalar.op, tuple(by_value(arg) for arg in scalar.args))
    return int(scalar) if isinstance(scalar, float) and scalar.is_integer() else scalar


def parts_of(scalar: Scalar) -> Iterator[Apply]:
    """All operations in a scalar, itself included, the inner ones first."""
    if isinstance(scalar, Apply):
        for arg in scalar.args:
            yield from parts_of(arg)
        yield scalar


def is_whole(scalar: Scalar) -> bool:
    """Whether a scalar is a whole number whatever its symbols are."""
    if isinstance(scalar, Apply):
        if scalar.op in ("isqrt", "ceil", "floor"):
            return True
        return scalar.op in _WHOLE and all(is_whole(arg) for arg in scalar.args)
    return not isinstance(scalar, float)
