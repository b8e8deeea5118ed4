"""At which lengths the sizes and predicates of graphs, and the numbers beside them, have a value.

A proof goes by the form of a graph, whatever its numbers are, and so speaks only of lengths at
which they have a value: nothing is divided by zero, and every size is one that its pattern admits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import product

import numpy as np

from attnspec.graphs.bind import Situation, bind, integer_of, located
from attnspec.graphs.grid import AXES, Grid
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.stack import Stack, asks_for
from attnspec.ir.crossing import QUERIES
from attnspec.ir.intervals import Bounds, bounds
from attnspec.ir.parameters import Parameter
from attnspec.ir.program import Attend, Compound, Leaf, Program, Term, inputs_of, leaves, scalars_of
from attnspec.ir.scalars import (
    LARGEST,
    Apply,
    Scalar,
    ScalarError,
    Symbol,
    Value,
    evaluate,
    is_whole,
    parts_of,
    symbols,
)
from attnspec.limits import LIMITS
from attnspec.lower.lower import numbers_of, require_numbers
from attnspec.text.diagnostics import Diagnostic, SpecError


def _is_power(a: list[Bounds]) -> object:
    """Whether a power has a value; a base without end is what a length is refused for."""
    (least, most), (low, high) = a
    size = np.maximum(abs(least), abs(most))
    return ((least > 0) | (low >= 0)) & (np.isinf(size) | (size**high <= LARGEST))


_HAS_VALUE: dict[str, Callable[[list[Bounds]], object]] = {
    **dict.fromkeys(("/", "//", "%"), lambda a: (a[1][0] > 0) | (a[1][1] < 0)),
    **dict.fromkeys(("sqrt", "isqrt"), lambda a: a[0][0] >= 0),
    "log2": lambda a: a[0][0] > 0,
    "**": _is_power,
    "item": lambda a: (a[0][0] >= 0) & (a[0][1] < len(a) - 1),
}
"""Operations that have no value for some operands: whether they have one for all within bounds."""


def total(terms: Sequence[Term], attends: Sequence[Attend], program: Program, least: int) -> bool:
    """Whether it is plain that graphs, and what stands beside those of some attends, have values at
    every length from `least` on."""
    ranges = _ranges(program, least, np.inf)
    beside = [pair for attend in attends for pair in numbers_of(attend).items()]
    sizes = [each for term in terms for each in scalars_of(term)]
    scalars = [*(size[2] for size in sizes), *(number for _, number in beside)]
    open_sizes = (size for size in sizes if isinstance(size[2], Symbol | Apply))
    return (
        all(_has_value(part, ranges) for scalar in scalars for part in parts_of(scalar))
        and all(name == "scale" or bounds(x, ranges)[0] > 0 for name, x in beside)
        and all(_is_admitted(*size, ranges) for size in open_sizes)
    )


def fault_at(
    terms: Sequence[Term], attends: Sequence[Attend], stack: Stack, n: int
) -> Diagnostic | None:
    """The first size or predicate, or number beside those of attends, that has no value at n
    positions, or None."""
    program = stack.program
    asked = [(partial(_require_values, term, program=program), asks_for(term)) for term in terms]
    asked += [
        (partial(_require_numbers, attend), {name for x in numbers.values() for name in symbols(x)})
        for attend in attends
        if (numbers := numbers_of(attend))
    ]
    try:
        for require, names in asked:
            layers = stack.layers if "layer" in names else range(1)
            heads = range(program.head_count) if "head" in names else range(1)
            for place in product(layers, heads):
                require(at=stack.situation(n, *place))
    except SpecError as error:
        return error.diagnostics[0]
    return None


def _require_values(term: Term, program: Program, at: Situation) -> None:
    """Raise SpecError where a size or predicate has no value."""
    for owner, name, scalar in scalars_of(term):
        if isinstance(owner, Compound):
            with located(owner.span):
                integer_of(scalar, at, name, owner.span)
        elif _parameter(owner, name).kind == "predicate":
            _require_value(scalar, owner, at, program)
    for leaf in leaves(term):
        if not inputs_of(leaf):
            with located(leaf.span):
                bind(leaf, at)


def _require_numbers(attend: Attend, at: Situation) -> None:
    with located(attend.span):
        require_numbers(attend, at)


def _require_value(predicate: Scalar, leaf: Leaf, at: Situation, program: Program) -> None:
    ranges = _ranges(program, at.n, at.n)
    for name, value in at.values.items():
        ranges[name] = (np.asarray(float(value)),) * 2
    for part in parts_of(predicate):
        if not _has_value(part, ranges):
            try:
                for values in _positions(at):
                    evaluate(part, values)
            except ScalarError as error:
                message = f"the condition of `where` has no value at n = {at.n:,}: {error}"
                raise SpecError(Diagnostic("A320", message, leaf.place("predicate"))) from None


def _positions(at: Situation) -> Iterator[dict[str, Value]]:
    """What a predicate may ask for, of as many pairs as are examined."""
    everywhere = np.arange(at.n)
    count = min(at.n, max(1, LIMITS.values // at.n))
    some = np.linspace(0, at.n - 1, count, dtype=np.int64)
    for q, k in {count: ((everywhere, some), (some, everywhere)), at.n: ((some, some),)}[count]:
        values = {**at.values, "q": q[:, None], "k": k[None]}
        if at.grid:
            grid = Grid(at.grid, at.extra_tokens)
            for side, position in (("q", q[:, None]), ("k", k[None])):
                cells = zip(AXES[len(at.grid)], grid.coordinates(position), strict=True)
                values |= {f"{side}.{axis}": place for axis, place in cells}
        yield values


def _ranges(program: Program, least: float, most: float) -> dict[str, Bounds]:
    """What the symbols of a spec range over at lengths between two."""
    positions = [*"qk", *(f"{side}.{axis}" for side in "qk" for axis in AXES[3])]
    layers, heads = program.layer_count, np.inf if program.heads is None else program.heads
    ends = {
        **dict.fromkeys(("n", QUERIES), (max(1, least), most)),
        **dict.fromkeys(positions, (0, most - 1)),
        "layers": (layers, layers),
        "heads": (1 if program.heads is None else heads, heads),
        "layer": (0, layers - 1),
        "head": (0, heads - 1),
    }
    return {name: (np.asarray(low), np.asarray(high)) for name, (low, high) in ends.items()}


def _has_value(part: Apply, ranges: Mapping[str, Bounds]) -> bool:
    """Whether it is plain that an operation has a value; one that is asked of inputs is refused by
    a call where it has none."""
    judge = _HAS_VALUE.get(part.op)
    if judge is None or any(name.endswith(")") for name in symbols(part)):
        return True
    return bool(judge([bounds(arg, ranges) for arg in part.args]))


def _is_admitted(
    owner: Leaf | Compound, name: str, size: Scalar, ranges: Mapping[str, Bounds]
) -> bool:
    """Whether it is plain that an argument may have all values of a size."""
    if isinstance(owner, Compound):
        return is_whole(size)
    parameter = _parameter(owner, name)
    if parameter.kind not in ("integer", "real"):
        return True
    low, high = bounds(size, ranges)
    least = -np.inf if parameter.least is None else parameter.least
    most = np.inf if parameter.most is None else parameter.most
    whole = parameter.kind == "real" or is_whole(size)
    above = -np.inf if parameter.above is None else parameter.above
    within = bool(above < low) and bool(least <= low <= high <= most)
    return whole and not (parameter.odd or parameter.even) and within


def _parameter(owner: Leaf, name: str) -> Parameter:
    """What the language accepts for a scalar of a pattern, or of its token sets."""
    for entry in fields(BY_NAME[owner.pattern]):  # type: ignore[arg-type]
        if entry.name == name:
            parameter: Parameter = entry.metadata["parameter"]
            return parameter
    return Parameter("integer", "", least=int(name == "step"))
