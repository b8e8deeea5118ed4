"""Graphs as formulas of q, k and n: relations of expressions, asked whether they hold.

A term is bound as always, with sizes that depend on n, layer or head as expressions. Patterns that
look numbers up, which no operator does, say here what is written in their place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from operator import add, and_, eq, floordiv, ge, gt, le, lt, mod, mul, ne, neg, or_, sub, truediv
from typing import cast

import numpy as np

from attnspec.compile.standalone.expressions import (
    Expression,
    Operand,
    UndecidedError,
    alike,
    call,
    doubled,
    flat,
    is_tensor,
    kind_of,
    name,
)
from attnspec.compile.standalone.page import Page, StandaloneError
from attnspec.graphs.bind import Situation, bind, bind_attended
from attnspec.graphs.counter_rng import EXPANDER, RANDOM, RANDOM_BLOCKS
from attnspec.graphs.grid import AXES, Grid
from attnspec.graphs.operators import Complement, Intersection, Shift, Transpose, Union
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.patterns.expander import Expander
from attnspec.graphs.patterns.powers import Powers
from attnspec.graphs.patterns.random_ import Random
from attnspec.graphs.patterns.random_blocks import RandomBlocks
from attnspec.graphs.patterns.where import Where
from attnspec.graphs.patterns.where_inputs import WhereInputs
from attnspec.graphs.predicates.inputs import (
    exact_up_to,
    inputs_read,
    reading,
    real_remainder,
)
from attnspec.graphs.relation import Elementwise, Relation
from attnspec.ir.intervals import bounds, reach_of
from attnspec.ir.parameters import Parameter, RelationError
from attnspec.ir.program import Crossing, Program, Term
from attnspec.ir.scalars import LARGEST, Apply, Scalar, Symbol, fold


@dataclass(frozen=True)
class Written(Situation):
    """Where a term stands whose sizes are written down, not computed."""

    page: Page = field(default_factory=lambda: Page((), None), compare=False)

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
        return self.page.size(name, number_of(folded, self.page))

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


def number_of(scalar: Scalar, page: Page) -> Expression:
    """A size as an expression of n, layer and head, with its bounds."""
    found = cast(Expression, said(scalar, {}, page))
    low, high = (float(end) for end in bounds(scalar, page.ranges()))
    return replace(found, low=max(low, found.low), high=min(high, found.high))


def formula_of(term: Term, program: Program, page: Page) -> Expression:
    """Whether q reads k, as an expression of `q`, `k`, `n` and what else stands on the page.

    Raises StandaloneError for what cannot be written down.
    """
    grid = program.grid or ()
    at = Written(
        n=cast(int, page.n),
        patterns={**BY_NAME, **written_patterns(page)},
        layer=cast(int, name("layer")),
        head=cast(int, name("head")),
        layers=program.layers or 1,
        heads=program.heads,
        causal=program.causal,
        extra_tokens=program.extra_tokens,
        inputs=page.data(),
        page=page,
        crossing=Crossing(cast(int, page.m), cast(int, page.n)) if page.cross else None,
    )
    q, k = page.position("q"), page.position("k")
    # one that both sequences have room in
    length = call("max", page.m, page.n, low=1) if page.cross else page.n
    try:
        extents = tuple(at.value(extent, "an extent") for extent in grid)
        if any(isinstance(extent, Expression) for extent in extents):
            raise StandaloneError("the extents of its grid depend on n")
        object.__setattr__(at, "grid", extents)
        bound = bind(term, at) if page.cross else bind_attended(term, at)
        held: Operand = _written(bound, at.patterns).holds(q, k, cast(int, length))
    except UndecidedError as error:
        raise StandaloneError(f"a size must be known before n is: {error}") from None
    if is_tensor(held):
        return cast(Expression, held)
    always = Expression("==", (q, q), "bool", True)
    if isinstance(held, bool):
        return always if held else Expression("!=", (q, q), "bool", True)
    return cast(Expression, always & held)


def _written(relation: Relation, patterns: Mapping[str, type[Relation]]) -> Relation:
    """The same with predicates that patterns made themselves as those that take expressions."""
    if type(relation) is Where:
        given = {entry.name: getattr(relation, entry.name) for entry in fields(Where)}
        return patterns[Where.name](**given)
    if isinstance(relation, Union | Intersection):
        return replace(relation, terms=tuple(_written(term, patterns) for term in relation.terms))
    if isinstance(relation, Complement | Transpose | Shift):
        return replace(relation, term=_written(relation.term, patterns))
    return relation


# --- patterns that look numbers up ---------------------------------------------------------------


def written_patterns(page: Page) -> Mapping[str, type[Relation]]:
    """The patterns whose `holds` takes no expressions, as others that do."""

    class WrittenPowers(Powers):
        def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
            page.helpers["is_power"] = None
            return call("is_power", abs(q - k), self.base, cast(Operand, n), kind="bool")

    class WrittenRandom(Random):
        def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
            place = f"({RANDOM}, {flat(self.layer)}, {flat(self.head)})"
            causal = (True,) if self.causal else ()
            table = page.table("drawn", "distinct", n, self.keys, self.seed, name(place), *causal)
            return _listed(table, q, k)

    class WrittenRandomBlocks(RandomBlocks):
        def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
            place = f"({RANDOM_BLOCKS}, {flat(self.layer)}, {flat(self.head)})"
            rows, causal = -(-n // self.size), (True,) if self.causal else ()
            table = page.table(
                "drawn", "distinct", rows, self.blocks, self.seed, name(place), *causal
            )
            return _listed(table, q // self.size, k // self.size)

    class WrittenExpander(Expander):
        def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
            place = f"({EXPANDER}, {flat(self.layer)}, {flat(self.head)})"
            table = page.table("drawn", "cycles", n, self.degree, self.seed, name(place))
            return _listed(table, q, k)

    class WrittenWhere(Where):
        def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
            values, allowed = _values(self, {"q": q, "k": k})
            found = said(self.predicate, values, page)
            page.most = min(page.most, _most(self.predicate, page))
            return found & allowed

    class WrittenWhereInputs(WhereInputs):
        def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
            values, allowed = _values(self, {"q": q, "k": k})
            for read, data in zip(inputs_read(self.predicate), self.inputs, strict=True):
                values[reading(read, "").name] = data.values
                for side in "qk":
                    values[reading(read, side).name] = data.values[..., values[side]]
                _ask(self.predicate, read, page)
            return said(self.predicate, values, page) & allowed

    found = (WrittenPowers, WrittenRandom, WrittenRandomBlocks, WrittenExpander, WrittenWhere,
             WrittenWhereInputs)  # fmt: skip
    return {each.name: each for each in found}


def _values(
    pattern: Where | WhereInputs, positions: Mapping[str, Operand]
) -> tuple[dict[str, Operand], Operand]:
    """What positions, and the coordinates that a predicate asks for, stand for, and which pairs of
    them there are."""
    values, allowed = dict(positions), cast(Operand, True)
    for side, position in positions.items():
        if any(text.startswith(f"{side}.") for text in _symbols(pattern.predicate)):
            grid = Grid(pattern.extents, pattern.extra_tokens)
            allowed = allowed & grid.inside(position)
            axes = zip(AXES[len(pattern.extents)], grid.coordinates(position), strict=True)
            values.update({f"{side}.{axis}": at for axis, at in axes})
    return values, allowed


def _ask(predicate: Scalar, read: str, page: Page) -> None:
    """Notes what a predicate needs an input to be, so that its numbers are exact."""
    if real_remainder(predicate, ()) is not None:
        raise StandaloneError(f"what it makes of `{read}` is real, and `//` and `%` divide it")
    page.helpers["numbers"] = None
    most, whole = page.numbers.get(read, (None, False))
    try:
        room = exact_up_to(predicate, int(page.n.high))
    except RelationError as error:
        raise StandaloneError(str(error)) from None
    if room is not None:
        most = min(room, room if most is None else most)
    page.numbers[read] = most, whole or real_remainder(predicate, (read,)) is not None


def _listed(table: Expression, q: Operand, k: Operand) -> Expression:
    return call("listed", table, name("h", tensor=True), q, k, kind="bool")


def _symbols(scalar: Scalar) -> Iterator[str]:
    if isinstance(scalar, Symbol):
        yield scalar.name
    elif isinstance(scalar, Apply):
        for arg in scalar.args:
            yield from _symbols(arg)


def _most(predicate: Scalar, page: Page) -> int:
    """The longest sequence, MOST or a power of two, of which every number of a predicate fits."""
    ranges = page.ranges()
    most = int(page.n.high)
    while reach_of(predicate, ranges) > LARGEST:
        most = 1 << (most.bit_length() - 1 if most & (most - 1) else most.bit_length() - 2)
        if most < 2 or page.fixed is not None:
            raise StandaloneError("numbers of its predicate do not fit in 64 bits")
        ranges = {
            key: ends if key in ("layer", "head") else (ends[0], np.minimum(ends[1], most))
            for key, ends in ranges.items()
        }
    return most


# --- scalars -------------------------------------------------------------------------------------

_OPERATORS: dict[str, Callable[..., Operand]] = {
    "+": add, "-": sub, "*": mul, "//": floordiv, "%": mod, "/": truediv, "neg": neg,
    "==": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge,
}  # fmt: skip


def said(scalar: Scalar, values: Mapping[str, Operand], page: Page) -> Operand:
    """A scalar as an expression of its symbols' values."""
    if isinstance(scalar, Symbol):
        return values[scalar.name] if scalar.name in values else page.symbol(scalar.name)
    if not isinstance(scalar, Apply):
        return scalar
    if values and not any(text in values for text in _symbols(scalar)):
        # of a predicate, what is the same for all pairs
        found = said(scalar, {}, page)
        return page.size("size", found) if isinstance(found, Expression) else found
    args = [said(arg, values, page) for arg in scalar.args]
    match scalar.op:
        case "//" | "%" | "/":
            low, high = bounds(scalar.args[1], page.ranges())
            if low <= 0 <= high:
                raise StandaloneError(f"{flat(args[1])}, which divides, may be 0")
            return _OPERATORS[scalar.op](*args)
        case "and":
            return reduce(and_, args)
        case "or":
            return reduce(or_, args)
        case "not":
            return args[0] ^ True
        case "within":
            return (args[1] <= args[0]) & (args[0] <= args[2])
        case "one_of":
            members = [args[0] == member for member in args[1:]]
            return reduce(or_, members, False)
        case "abs":
            return abs(args[0])
        case "min" | "max":
            return reduce(lambda a, b: _extreme(scalar.op, a, b), args)
        case op if op in _OPERATORS:
            return _OPERATORS[op](*args)
        case _:
            return _function(scalar, args, page)


def _extreme(op: str, a: Operand, b: Operand) -> Operand:
    """The lesser or greater of two operands."""
    if not isinstance(a, Expression) and not isinstance(b, Expression):
        return min(a, b) if op == "min" else max(a, b)
    if not is_tensor(a) and not is_tensor(b):
        return call(op, a, b, kind="real" if "real" in (kind_of(a), kind_of(b)) else "int")
    a, b, kind = alike(a, b)
    if is_tensor(a) and is_tensor(b):
        return call(f"torch.{op}imum", a, b, kind=kind)
    if is_tensor(b):
        a, b = b, a
    return Expression(".clamp_max" if op == "min" else ".clamp_min", (a, b), kind, True)


def _function(scalar: Apply, args: list[Operand], page: Page) -> Operand:
    """Roots, powers, logarithms and roundings, with the values that the language gives them."""
    op, x = scalar.op, args[0]
    if op == "**":
        power = args[1]
        numbers = not is_tensor(x) and not is_tensor(power)
        if kind_of(x) == "number" and isinstance(power, int) and power >= 0:
            # as it is computed elsewhere, to the last bit
            return reduce(mul, [x] * power) if power else x * 0 + 1
        if numbers or (isinstance(power, int) and power >= 0):
            whole = kind_of(x) == "int" and kind_of(power) == "int"
            if whole and float(bounds(scalar.args[1], page.ranges())[0]) < 0:
                raise StandaloneError(f"{flat(power)}, which is an exponent, may be negative")
            found = cast(Expression, x**power)
            return Expression("**", found.args, "int" if whole else "real", found.tensor)
        raise StandaloneError("a power of positions has an exponent that is no number")
    if op == "item":
        raise StandaloneError("a list is read by a position, the head or n")
    if op in ("ceil", "floor"):
        if kind_of(x) == "int":
            return x
        if not is_tensor(x):
            return call(f"math.{op}", x)
        if kind_of(x) == "number":
            return call(f"torch.{op}", x, kind="number")
        return Expression(".long", (call(f"torch.{op}", x, kind="real"),), "int", True)
    if float(bounds(scalar.args[0], page.ranges())[0]) < (1 if op == "log2" else 0):
        raise StandaloneError(f"`{op}` is asked of {flat(x)}, which it may not be defined for")
    if not is_tensor(x):
        if op != "isqrt":
            return call(f"math.{op}", x, kind="real")
        low = math.isqrt(int(bounds(scalar.args[0], page.ranges())[0]))
        return call("math.isqrt", call("math.floor", x) if kind_of(x) == "real" else x, low=low)
    if op == "sqrt":
        return call("torch.sqrt", doubled(x), kind="real")
    if op == "isqrt" and kind_of(x) == "int":
        page.helpers["isqrt"] = None
        return call("isqrt", x, low=0)
    raise StandaloneError(f"`{op}` of positions differs in its last bits from machine to machine")
