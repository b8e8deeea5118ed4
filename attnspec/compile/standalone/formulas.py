"""Graphs as formulas of q, k and n: relations of expressions, asked whether they hold.

A term is bound as always, with sizes that depend on n, layer or head as expressions. Patterns that
look numbers up, which no operator does, say here what is written in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from operator import mul
from typing import Any, cast

import numpy as np

from attnspec.compile.standalone.expressions import (
    Expression,
    Operand,
    UndecidedError,
    alike,
    call,
    counted,
    ends_of,
    flat,
    joined,
    kind_of,
    real,
    tensor_of,
)
from attnspec.compile.standalone.page import Page, StandaloneError
from attnspec.graphs.bind import Situation, bind, bind_attended
from attnspec.graphs.counter_rng import EXPANDER, RANDOM, RANDOM_BLOCKS
from attnspec.graphs.grid import AXES, Grid
from attnspec.graphs.operators import Complement, Intersection, Shift, Transpose, Union
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.patterns.where import Where
from attnspec.graphs.predicates.inputs import (
    exact_up_to,
    inputs_read,
    reading,
    real_remainder,
)
from attnspec.graphs.relation import Relation
from attnspec.ir.intervals import bounds, reach_of
from attnspec.ir.parameters import Parameter, RelationError
from attnspec.ir.program import Crossing, Term
from attnspec.ir.scalars import LARGEST, OPERATIONS, Apply, Scalar, Symbol, fold, symbols


@dataclass(frozen=True)
class Written(Situation):
    """Where a term stands whose sizes are written down, not computed."""

    page: Page = field(kw_only=True, compare=False)

    @property
    def apart(self) -> Crossing | None:
        return self.crossing

    @property
    def values(self) -> dict[str, int | float | bool | np.ndarray]:
        return {key: each for key, each in super().values.items() if key in ("layers", "heads")}

    def value(self, scalar: Scalar, name: str) -> object:
        folded = fold(scalar, self.values)
        if not isinstance(folded, Symbol | Apply):
            return folded
        return self.page.size(name, said(folded, {}, self.page))

    def fault(self, parameter: Parameter, name: str, value: object) -> str | None:
        if not isinstance(value, Expression):
            return super().fault(parameter, name, value)
        if (
            parameter.odd
            or parameter.even
            or (parameter.kind == "integer") != (value.kind == "int")
        ):
            raise StandaloneError(f"`{name}` depends on n")
        least = -LARGEST if parameter.least is None else parameter.least
        most = LARGEST if parameter.most is None else parameter.most
        if value.low < least or value.high > most:
            self.page.require(name, value, parameter)
        return None


def formula_of(term: Term, page: Page) -> Expression:
    """Whether q reads k, as an expression of `q`, `k`, `n` and what else stands on the page.

    Raises StandaloneError for what cannot be written down.
    """
    program = page.program
    at = Written(
        n=cast(int, page.n),
        patterns={**BY_NAME, **_patterns(page)},
        layer=cast(int, Expression("layer")),
        head=cast(int, Expression("head")),
        layers=program.layers or 1,
        heads=program.heads,
        causal=program.causal,
        extra_tokens=program.extra_tokens,
        inputs=page.data(),
        page=page,
        crossing=Crossing(cast(int, page.m), cast(int, page.n)) if program.cross else None,
    )
    q, k = page.position("q"), page.position("k")
    # one that both sequences have room in
    length = call("max", page.m, page.n, low=1) if program.cross else page.n
    try:
        extents = tuple(at.value(extent, "an extent") for extent in program.grid or ())
        if any(isinstance(extent, Expression) for extent in extents):
            raise StandaloneError("the sizes of its grid depend on n")
        at = replace(at, grid=cast(tuple[int, ...], extents))
        bound = bind(term, at) if program.cross else bind_attended(term, at)
        formula: Operand = _written(bound, at.patterns).holds(q, k, cast(int, length))
    except UndecidedError as error:
        raise StandaloneError(f"a size depends on n, so `{error}` is not known") from None
    if tensor_of(formula):
        return cast(Expression, formula)
    if formula is False:
        return Expression("q != q", "bool", page.reals, level=0)
    return cast(Expression, Expression("q == q", "bool", page.reals, level=0) & formula)


def _written(relation: Relation, patterns: Mapping[str, type[Relation]]) -> Relation:
    """The same with predicates that patterns made themselves as those that take expressions."""
    if type(relation) is Where:
        arguments = {entry.name: getattr(relation, entry.name) for entry in fields(Where)}
        return patterns[Where.name](**arguments)
    if isinstance(relation, Union | Intersection):
        return replace(relation, terms=tuple(_written(term, patterns) for term in relation.terms))
    if isinstance(relation, Complement | Transpose | Shift):
        return replace(relation, term=_written(relation.term, patterns))
    return relation


# --- patterns that look numbers up ---------------------------------------------------------------


def _patterns(page: Page) -> Mapping[str, type[Relation]]:
    """The patterns whose `holds` takes no expressions, as others that do."""

    def listed(pattern: Any, q: Operand, k: Operand, purpose: int, *drawn: Operand) -> Operand:
        """Whether k is among what `drawn`, a function and its sizes, draws for q."""
        function, *sizes = drawn
        place = Expression(f"({purpose}, {flat(pattern.layer)}, {flat(pattern.head)})")
        causal = (True,) * getattr(pattern, "causal", False)
        table = page.table(function, *sizes, pattern.seed, place, *causal)
        return call("listed", table, Expression("h", tensor=page.reals), q, k, kind="bool")

    def blocks(self: Any, q: Operand, k: Operand, n: Operand) -> Operand:
        drawn = "distinct", -(-n // self.size), self.blocks
        return listed(self, q // self.size, k // self.size, RANDOM_BLOCKS, *drawn)

    def where(self: Any, q: Operand, k: Operand, n: Operand) -> Operand:
        values, allowed = {"q": q, "k": k}, cast(Operand, True)
        for side, position in tuple(values.items()):
            # the coordinates that a predicate asks for, and which pairs of them there are
            if any(text.startswith(f"{side}.") for text in symbols(self.predicate)):
                grid = Grid(self.extents, self.extra_tokens)
                allowed = allowed & grid.inside(position)
                axes = zip(AXES[len(self.extents)], grid.coordinates(position), strict=True)
                values.update({f"{side}.{axis}": at for axis, at in axes})
        read = inputs_read(self.predicate)
        for name, data in zip(read, getattr(self, "inputs", ()), strict=True):
            values[reading(name, "").name] = data.values
            for side in "qk":
                values[reading(name, side).name] = data.values[..., values[side]]
            _ask(self.predicate, name, page)
        formula = said(self.predicate, values, page)
        if not read:
            page.most = min(page.most, _most(self.predicate, values, page))
        return formula & allowed

    patterns: dict[str, Callable[..., Operand]] = {
        "powers": lambda self, q, k, n: call("is_power", abs(q - k), self.base, n, kind="bool"),
        "random": lambda self, q, k, n: listed(self, q, k, RANDOM, "distinct", n, self.keys),
        "random_blocks": blocks,
        "expander": lambda self, q, k, n: listed(self, q, k, EXPANDER, "cycles", n, self.degree),
        "where": where,
        "where_inputs": where,
    }
    return {
        name: type(name, (BY_NAME[name],), {"holds": holds}) for name, holds in patterns.items()
    }


def _ask(predicate: Scalar, read: str, page: Page) -> None:
    """Notes what a predicate needs an input to be, so that its numbers are exact."""
    if real_remainder(predicate, ()) is not None:
        raise StandaloneError(f"`//` or `%` divides a real number made from `{read}`")
    most, whole = page.numbers.get(read, (None, False))
    try:
        room = exact_up_to(predicate, int(page.n.high))
    except RelationError as error:
        raise StandaloneError(str(error)) from None
    if room is not None:
        most = min(room, room if most is None else most)
    page.numbers[read] = most, whole or real_remainder(predicate, (read,)) is not None


def _most(predicate: Scalar, values: Mapping[str, Operand], page: Page) -> int:
    """The longest sequence, MOST or a power of two, of which every number of a predicate fits."""
    read = {name: said(Symbol(name), values, page) for name in symbols(predicate)}
    ranges = {name: bounds(value, {}) for name, value in read.items()}
    most = int(page.n.high)
    while reach_of(predicate, ranges) > LARGEST:
        most = 1 << (most.bit_length() - 1 if most & (most - 1) else most.bit_length() - 2)
        if most < 2 or page.program.fixed_length is not None:
            raise StandaloneError("integers in its `where` do not fit in 64 bits")
        ranges = {
            key: ends if key in ("layer", "head") else (ends[0], np.minimum(ends[1], most))
            for key, ends in ranges.items()
        }
    return most


# --- scalars -------------------------------------------------------------------------------------


def said(scalar: Scalar, values: Mapping[str, Operand], page: Page) -> Operand:
    """A scalar as an expression of its symbols' values."""
    if isinstance(scalar, Symbol):
        return values[scalar.name] if scalar.name in values else page.symbol(scalar.name)
    if not isinstance(scalar, Apply):
        return scalar
    if values and not any(text in values for text in symbols(scalar)):
        # of a predicate, or a score, what is the same for all pairs
        operand = said(scalar, {}, page)
        return page.size("size", operand) if isinstance(operand, Expression) else operand
    args = tuple(said(arg, values, page) for arg in scalar.args)
    found = _applied(scalar.op, args, page)
    if kind_of(found) == "bool" or not isinstance(found, Expression):
        return found
    low, high = ends_of(scalar.op, *args)
    return replace(found, low=max(low, found.low), high=min(high, found.high))


def _applied(op: str, args: tuple[Operand, ...], page: Page) -> Operand:
    """What an operation makes of operands."""
    match op:
        case "//" | "%" | "/":
            low, high = ends_of("max", args[1])
            # of scores IEEE says what a division by 0 gives
            if low <= 0 <= high and not (page.scores and op == "/" and tensor_of(*args)):
                raise StandaloneError(f"the divisor `{flat(args[1])}` may be 0")
            return joined(op, *args)
        case "min" | "max":
            return reduce(lambda a, b: _extreme(op, a, b), args)
        case "**":
            return _power(args[0], args[1], page)
        case "item":
            return _item(args[0], args[1:], page)
        case "ceil" | "floor":
            return _rounded(op, args[0], page)
        case "sqrt" | "isqrt" | "log2" | "log" | "exp" | "tanh":
            return _function(op, args[0], page)
        case _:
            return OPERATIONS[op](*args)


def _extreme(op: str, a: Operand, b: Operand) -> Operand:
    """The lesser or greater of two operands."""
    if not isinstance(a, Expression) and not isinstance(b, Expression):
        return OPERATIONS[op](a, b)
    if not tensor_of(a, b):
        return call(op, a, b, kind="real" if "real" in (kind_of(a), kind_of(b)) else "int")
    a, b, kind = alike(a, b)
    if tensor_of(a) and tensor_of(b):
        return call(f"torch.{op}imum", a, b, kind=kind)
    clamp = ".clamp_max" if op == "min" else ".clamp_min"
    return call(clamp, *((a, b) if tensor_of(a) else (b, a)), kind=kind)


def _power(x: Operand, power: Operand, page: Page) -> Operand:
    constant = isinstance(power, int) and power >= 0
    if kind_of(x) in ("number", "score") and constant:
        # as it is computed elsewhere, to the last bit
        return reduce(mul, [x] * power) if power else x * 0 + 1
    if not (constant or page.scores) and tensor_of(x, power):
        raise StandaloneError("the exponent of a power of positions is not a fixed number")
    whole = kind_of(x) == "int" and kind_of(power) == "int"
    if whole and ends_of("max", power)[0] < 0:
        if not tensor_of(x, power):
            raise StandaloneError(f"the exponent `{flat(power)}` may be negative")
        x, power, whole = real(x), real(power), False
    return replace(joined("**", x, power), kind="int" if whole else "real")


def _item(index: Operand, items: Sequence[Operand], page: Page) -> Operand:
    """What a list has at an index."""
    low, high = ends_of("max", index)
    inside = low >= 0 and high < len(items)
    if not (inside or (page.scores and tensor_of(index))):
        raise StandaloneError(f"the index `{flat(index)}` may be outside a list of {len(items)}")
    listed = Expression(f"({', '.join(map(flat, items))}{',' * (len(items) == 1)})")
    kind = "real" if "real" in map(kind_of, items) else "int"
    if not tensor_of(index):
        if tensor_of(*items):
            raise StandaloneError("a list of numbers of pairs is read by the layer or n")
        return Expression(f"{listed.text}[{flat(index)}]", kind)
    if not inside:
        page.inside.append((index >= 0) & (index < len(items)))
        index = call(".clamp", index, 0, len(items) - 1)
    if not tensor_of(*items):
        return page.listed(listed.text, index, kind)
    found = items[0]
    for place, each in enumerate(items[1:], 1):
        one, other, kind = alike(each, found)
        found = call("torch.where", index == place, one, other, kind=kind)
    return found


def _rounded(op: str, x: Operand, page: Page) -> Operand:
    if kind_of(x) in ("int", "bool"):
        return counted(x)
    if not tensor_of(x):
        return call(f"math.{op}", x)
    rounded = call(f"torch.{op}", x, kind=kind_of(x))
    # of an input, a predicate compares what may be no number
    return rounded if kind_of(x) == "number" and not page.scores else call(".long", rounded)


LEAST = {"log2": 1, "log": 1, "sqrt": 0, "isqrt": 0}
"""The least whole number of which functions have a value."""


def _function(op: str, x: Operand, page: Page) -> Operand:
    """Roots, logarithms and what else makes reals, with the values that the language gives them."""
    least = ends_of("max", x)[0]
    if least < LEAST.get(op, least) and not (page.scores and tensor_of(x)):
        raise StandaloneError(f"`{op}({flat(x)})` may have no value")
    if not tensor_of(x):
        if op != "isqrt":
            return call(f"math.{op}", x, kind="real")
        whole = call("math.floor", x) if kind_of(x) == "real" else x
        return call("math.isqrt", whole)
    if op == "isqrt" and (page.scores or kind_of(x) == "int"):
        return call("isqrt", x)
    if op == "sqrt" or page.scores:
        return call(f"torch.{op}", real(counted(x)), kind="score" if page.scores else "real")
    raise StandaloneError(f"the last bits of `{op}` of positions differ between machines")
