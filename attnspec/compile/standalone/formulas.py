"""Graphs as formulas of q, k and n: terms by their predicates, and scalars of expressions.

Sizes that depend on n, layer or head are expressions. Patterns that look numbers up, which no
operator does, say here what is written in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial, reduce
from operator import and_, mul, or_
from typing import Any, NamedTuple

import numpy as np

from attnspec.compile.standalone.expressions import (
    Expression,
    Operand,
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
from attnspec.graphs.bind import Situation, bind
from attnspec.graphs.counter_rng import EXPANDER, RANDOM, RANDOM_BLOCKS
from attnspec.graphs.forms.prelude import predicate_of_leaf
from attnspec.graphs.grid import Grid
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.predicates.inputs import exact_up_to, real_remainder
from attnspec.graphs.token_sets import member
from attnspec.ir.crossing import QUERIES
from attnspec.ir.intervals import bounds, reach_of
from attnspec.ir.parameters import Parameter, RelationError
from attnspec.ir.program import InputRef, Leaf, Term, TokenCompound, TokenTerm
from attnspec.ir.scalars import LARGEST, OPERATIONS, Apply, Scalar, Symbol, fold, symbols


class Side(NamedTuple):
    """The query or the key of a pair, and how many positions its sequence has."""

    at: Operand
    length: Expression


def formula_of(term: Term, page: Page) -> Expression:
    """Whether q reads k, as an expression of `q`, `k`, `n` and what else stands on the page.

    Raises StandaloneError for what cannot be written down.
    """
    q, k = (Side(*map(page.symbol, names)) for names in (("q", QUERIES), ("k", "n")))
    formula = _formula(term, page, q, k)
    if page.program.causal:
        formula = formula & (k.at <= q.at)
    every = Expression("q == q", "bool", page.reals, level=0)
    if formula is False:
        return every ^ True  # type: ignore[no-any-return]
    return formula if tensor_of(formula) else every & formula  # type: ignore[no-any-return]


def _formula(term: Term, page: Page, q: Side, k: Side) -> Operand:
    """Whether a pair, whose positions may have been moved or exchanged, is one of a term."""
    if isinstance(term, Leaf):
        return _leaf(term, page, q, k)
    if term.op == "transpose":
        return _formula(term.terms[0], page, k, q)
    if term.op == "shift":
        by = _size("by", term.by or 0, Parameter("integer", ""), page)
        if isinstance(by, Expression):
            raise StandaloneError(f"`by` must be a fixed number there, got `{flat(by)}`")
        if by >= 0:
            op, inside = "max", (q.at >= by) & (k.at >= by)
        else:
            op, inside = "min", (q.at < q.length + by) & (k.at < k.length + by)
        # positions outside are moved inside, where `inside` drops the answer
        ends = ((x, 0 if by >= 0 else x.length - 1) for x in (q, k))
        moved = [Side(said(Apply(op, (x.at - by, end)), {}, page), x.length) for x, end in ends]
        return inside & _formula(term.terms[0], page, *moved)
    return _joined(term.op, [_formula(each, page, q, k) for each in term.terms])


def _joined(op: str, parts: Sequence[Operand]) -> Operand:
    """`| & - ~` of truth values."""
    first, *others = parts
    if op == "~":
        return first ^ True
    if op == "-":
        return reduce(and_, (other ^ True for other in others), first)
    return reduce(or_ if op == "|" else and_, parts)


def _leaf(leaf: Leaf, page: Page, q: Side, k: Side) -> Operand:
    given: dict[str, Any] = dict(leaf.arguments)
    pattern, sides = BY_NAME[leaf.pattern], {"q": q, "k": k}
    if "tokens" in given:
        return reduce(or_, [_tokens(given["tokens"], page, sides[side]) for side in pattern.sides])
    for entry in fields(pattern):  # type: ignore[arg-type]
        parameter = entry.metadata["parameter"]
        if parameter.kind != "predicate" and isinstance(given.get(entry.name), Symbol | Apply):
            given[entry.name] = _size(entry.name, given[entry.name], parameter, page)
    if leaf.pattern in FORMULAS and not isinstance(given.get("length"), int | Expression):
        return FORMULAS[leaf.pattern](given, page, q, k)
    # sizes are named in the predicate as no symbol of the language is
    sizes = {f".{name}": x for name, x in given.items() if isinstance(x, Expression)}
    named = ((name, Symbol(f".{name}") if f".{name}" in sizes else given[name]) for name in given)
    predicate = predicate_of_leaf(replace(leaf, arguments=tuple(named)), limited=False)
    if predicate is None:
        extents = _numbers("sizes of its grid", page.program.grid, page)
        at = Situation(1, BY_NAME, grid=extents, extra_tokens=page.program.extra_tokens)
        box = ((name, _numbers(f"{name} of a box", x, page)) for name, x in given.items())
        return bind(replace(leaf, arguments=tuple(box)), at).holds(q.at, k.at, 1)
    return said(fold(predicate, {}), {"q": q.at, "k": k.at, **sizes}, page)


def _tokens(term: TokenTerm, page: Page, side: Side) -> Operand:
    if isinstance(term, InputRef):
        return page.read(term, side.at)
    if isinstance(term, TokenCompound):
        return _joined(term.op, [_tokens(each, page, side) for each in term.terms])
    names = {"every": ("step", "offset")}.get(term.kind, ("count",) * len(term.values))
    values = []
    for name, value in zip(names, term.values, strict=True):
        values.append(_size(name, value, Parameter("integer", "", least=int(name == "step")), page))
    if term.kind == "last":
        return side.at >= side.length - values[0]
    return said(fold(member(term.kind, values, side.at), {}), {}, page)


def _where(given: Mapping[str, Any], page: Page, q: Side, k: Side) -> Operand:
    """Whether a predicate holds, of positions that are cells where it asks for coordinates."""
    predicate, allowed = fold(given["predicate"], page.known), True
    values = {"q": q.at, "k": k.at}
    for side, position in tuple(values.items()):
        if any(text.startswith(f"{side}.") for text in symbols(predicate)):
            extents = _numbers("sizes of its grid", page.program.grid, page)
            grid = Grid(extents, page.program.extra_tokens)
            allowed = allowed & grid.inside(position)
            axes = zip(grid.axes, grid.coordinates(position), strict=True)
            values.update({f"{side}.{axis}": at for axis, at in axes})
    for entry in given.get("inputs", ()):
        values |= page.readings(entry, q.at, k.at)
        # what an input must be so that its numbers are exact
        if real_remainder(predicate, ()) is not None:
            raise StandaloneError(f"`//` or `%` divides a real number made from `{entry.name}`")
        most, whole = page.numbers.get(entry.name, (None, False))
        try:
            room = exact_up_to(predicate, int(page.symbol("n").high))
        except RelationError as error:
            raise StandaloneError(str(error)) from None
        if room is not None:
            most = min(room, room if most is None else most)
        whole = whole or real_remainder(predicate, (entry.name,)) is not None
        page.numbers[entry.name] = most, whole
    formula = said(predicate, values, page)
    if "inputs" not in given:
        page.most = min(page.most, _most(predicate, values, page))
    return formula & allowed


def _drawn(
    drawing: str, purpose: int, count: str, given: Mapping[str, Any], page: Page, q: Side, k: Side
) -> Operand:
    """Whether k is among what a function draws for q under a purpose, so many as an argument says,
    each of a block where there is a size."""
    row, key, keys, size = q.at, k.at, page.symbol("n"), given.get("size")
    if size is not None:
        row, key, keys = row // size, key // size, -(-keys // size)
    place = "layer, head" if given.get("per_head", True) else "0, 0"
    causal = (True,) * (page.program.causal and drawing == "distinct")
    drawn = given[count], given.get("seed", 0), Expression(f"({purpose}, {place})"), *causal
    head = Expression("h", tensor=page.reals)
    return call("listed", page.table(drawing, keys, *drawn), head, row, key, kind="bool")


FORMULAS: Mapping[str, Callable[[Mapping[str, Any], Page, Side, Side], Operand]] = {
    "powers": lambda given, page, q, k: call(
        "is_power", abs(q.at - k.at), given.get("base", 2), kind="bool"
    ),
    "random": partial(_drawn, "distinct", RANDOM, "keys"),
    "random_blocks": partial(_drawn, "distinct", RANDOM_BLOCKS, "blocks"),
    "expander": partial(_drawn, "cycles", EXPANDER, "degree"),
    "same": lambda given, page, q, k: (
        page.read(given["ids"], q.at) == page.read(given["ids"], k.at)
    ),
    "prefix": lambda given, page, q, k: k.at < page.read(given["length"]),
    "where": _where,
    "where_inputs": _where,
}
"""Patterns that have no line in the prelude, or none where an input stands for a size."""

# --- sizes ---------------------------------------------------------------------------------------


def _size(name: str, value: object, parameter: Parameter, page: Page) -> Operand:
    """A size, named and checked where it is no number yet."""
    size = fold(value, page.known)  # type: ignore[arg-type]
    if not isinstance(size, Symbol | Apply):
        return size
    shown = said(size, {}, page)
    if isinstance(shown, Expression):
        other = (parameter.kind == "integer") != (shown.kind == "int")
        if other or parameter.odd or parameter.even:
            raise StandaloneError(f"`{name}` depends on n")
        least = -LARGEST if parameter.least is None else parameter.least
        if shown.low < least or shown.high > (parameter.most or LARGEST):
            page.require(name, shown, parameter)
    return shown


def _numbers(what: str, values: Any, page: Page) -> tuple[int, ...]:
    """Extents that are numbers whatever n is."""
    extents = tuple(fold(each, page.known) for each in values or ())
    if any(isinstance(each, Symbol | Apply) for each in extents):
        raise StandaloneError(f"the {what} depend on n")
    return extents  # type: ignore[return-value]


def _most(predicate: Scalar, values: Mapping[str, Operand], page: Page) -> int:
    """The longest sequence, MOST or a power of two, of which every number of a predicate fits."""
    read = {*symbols(predicate)}
    ranges = {name: bounds(said(Symbol(name), values, page), {}) for name in read}
    most = int(page.symbol("n").high)
    while reach_of(predicate, ranges) > LARGEST:
        if most < 2 or page.program.fixed_length is not None:
            raise StandaloneError("integers in its `where` do not fit in 64 bits")
        most = 1 << (most - 1).bit_length() - 1
        for key in read - {"layer", "head"}:
            ranges[key] = ranges[key][0], np.minimum(ranges[key][1], most)
    return most


# --- scalars -------------------------------------------------------------------------------------


def said(scalar: Scalar, values: Mapping[str, Operand], page: Page) -> Operand:
    """A scalar as an expression of its symbols' values."""
    if isinstance(scalar, Symbol):
        return values[scalar.name] if scalar.name in values else page.symbol(scalar.name)
    if not isinstance(scalar, Apply):
        return scalar
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
                other = "one that is never 0"
                if low == 0 and kind_of(args[1]) == "int":
                    other = "`max(…, 1)` around it"
                raise StandaloneError(f"the divisor `{flat(args[1])}` may be 0: write {other}")
            return joined(op, *args)
        case "min" | "max":
            return reduce(partial(_extreme, op), args)
        case "**":
            return _power(args[0], args[1], page)
        case "item":
            return _item(args[0], args[1:], page)
        case "entry":
            return Expression(f"{args[0].text}[h, {flat(args[1])}]", "score", page.reals)
        case "steps":
            distances = f"torch.arange(min(n, {max(args[1:], default=0) + 1}), device=q.device)"
            steps = f"torch.tensor({[*args[1:]]}, dtype=torch.int64, device=q.device)"
            made = f"torch.bucketize({distances}, {steps}, right=True)"
            index = call(".clamp_max", args[0], max(args[1:], default=0))
            return page.made("buckets", made, f"[{index.text}]")
        case "ceil" | "floor" if kind_of(args[0]) in ("int", "bool"):
            return counted(args[0])
        case "ceil" | "floor" if not tensor_of(*args):
            return call(f"math.{op}", *args)
        case "ceil" | "floor":
            kind = kind_of(args[0])
            rounded = call(f"torch.{op}", *args, kind=kind)
            # of an input, a predicate compares what may be no number
            return rounded if kind == "number" and not page.scores else call(".long", rounded)
        case "sqrt" | "isqrt" | "log2" | "log" | "exp" | "tanh":
            return _function(op, args[0], page)
        case _:
            return OPERATIONS[op](*args)


def _extreme(op: str, a: Operand, b: Operand) -> Operand:
    if not isinstance(a, Expression) and not isinstance(b, Expression):
        return OPERATIONS[op](a, b)
    a, b, kind = alike(a, b)
    if not tensor_of(a, b):
        return call(op, a, b, kind=kind)
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
    whole = kind_of(x) == kind_of(power) == "int"
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
        raise StandaloneError(
            f"the index `{flat(index)}` may be outside a list of length {len(items)}: write one"
            f" that is always at least 0 and below {len(items)}"
        )
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
        return call("math.isqrt", call("math.floor", x) if kind_of(x) == "real" else x)
    if op == "isqrt" and (page.scores or kind_of(x) == "int"):
        return call("isqrt", x)
    if op == "sqrt" or page.scores:
        return call(f"torch.{op}", real(counted(x)), kind="score" if page.scores else "real")
    raise StandaloneError(f"the last bits of `{op}` of positions differ between machines")
