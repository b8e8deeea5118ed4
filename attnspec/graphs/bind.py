"""From a term to a relation, once n, layer, head and the inputs are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import TYPE_CHECKING, TypeVar, cast

from attnspec.graphs.across import counts, placed
from attnspec.graphs.operators import (
    Complement,
    Intersection,
    Shift,
    Union,
    difference,
    transpose_of,
)
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.relation import Relation
from attnspec.graphs.token_sets import (
    Data,
    Every,
    First,
    InputTokens,
    Last,
    Positions,
    StandIn,
    TokenComplement,
    TokenIntersection,
    TokenSet,
    TokenUnion,
    Within,
)
from attnspec.ir.crossing import QUERIES
from attnspec.ir.parameters import Parameter, RelationError
from attnspec.ir.program import (
    Crossing,
    InputRef,
    Leaf,
    Mechanism,
    Program,
    Term,
    TokenCompound,
    Tokens,
    TokenTerm,
)
from attnspec.ir.scalars import Scalar, ScalarError, Value, evaluate, fold, symbols
from attnspec.text.diagnostics import AttnSpecError, Diagnostic, SpecError, as_written

if TYPE_CHECKING:
    from attnspec.text.source import Span

Declared = TypeVar("Declared")

_INTEGER = Parameter("integer", "")
_AT_LEAST = {least: replace(_INTEGER, least=least) for least in (0, 1)}


class BindError(AttnSpecError):
    """A size has no admissible value at this n; `span` is its place in the text, if it has one."""

    def __init__(self, message: str, span: Span | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.span = span


class LengthError(BindError):
    """The spec has no such length: its grid has another size. No term of the text is at fault."""


@contextmanager
def located(span: Span | None) -> Iterator[None]:
    """Say of a size or relation that has no answer where it stands in the text: at a place of its
    own, or else at `span`. Raises SpecError."""
    try:
        yield
    except LengthError:
        raise
    except (BindError, RelationError) as error:
        place = getattr(error, "span", None) or span
        raise SpecError(Diagnostic("A320", error.message, place)) from None


@dataclass(frozen=True)
class Situation:
    """Where a term stands: everything that its scalars and context fields may ask for.

    `inputs` maps names to `Data`; `patterns` maps names to the pattern classes that may occur.
    Between two sequences `crossing` has the lengths of both, of which n is that of the keys;
    `turned` says that queries and keys have changed places.
    """

    n: int
    patterns: Mapping[str, type[Relation]] = field(compare=False)
    layer: int = 0
    head: int = 0
    layers: int | None = None
    heads: int | None = None
    causal: bool = False
    grid: tuple[int, ...] = ()
    extra_tokens: int = 0
    inputs: Mapping[str, Data] = field(default_factory=dict, compare=False)
    crossing: Crossing | None = None
    turned: bool = False

    @property
    def apart(self) -> Crossing | None:
        """The lengths of two sequences that are not one by their numbers."""
        return None if self.crossing is None or self.crossing.even else self.crossing

    def positions(self, side: str) -> int:
        """How many positions there are of queries, "q", or of keys, "k"."""
        if self.apart is None:
            return self.n
        return self.apart.keys if (side == "k") != self.turned else self.apart.m

    @property
    def values(self) -> dict[str, Value]:
        """The symbols that scalars may use here."""
        values: dict[str, Value] = {"n": self.n, "layer": self.layer, "head": self.head}
        if self.layers is not None:
            values["layers"] = self.layers
        if self.heads is not None:
            values["heads"] = self.heads
        if self.crossing is not None:
            values[QUERIES] = self.crossing.m
        return values

    def value(self, scalar: Scalar, name: str) -> object:
        """What a scalar, the argument of a name, is worth here."""
        return evaluate(scalar, self.values)

    def shown(self, scalar: Scalar) -> str:
        """Where a scalar is evaluated, in words: n, and the layer and head where it reads them."""
        read = [
            f", {name} {self.values[name]}" for name in ("layer", "head") if name in symbols(scalar)
        ]
        return f"n = {self.n}{''.join(read)}"

    def fault(self, parameter: Parameter, name: str, value: object) -> str | None:
        """What is wrong with an argument, in words, or None."""
        return check_value(parameter, name, value)


def bind(term: Term, at: Situation) -> Relation:
    """The relation that a term denotes; raises BindError naming the argument and n."""
    if isinstance(term, Leaf):
        return _bind_leaf(term, at)
    if term.op == "transpose":
        at = replace(at, turned=not at.turned)
    terms = tuple(bind(child, at) for child in term.terms)
    match term.op:
        case "|":
            return Union(terms)
        case "&":
            return Intersection(terms)
        case "-":
            return difference(*terms)
        case "~":
            return Complement(terms[0])
        case "transpose":
            return transpose_of(terms[0])
        case _:
            by = integer_of(term.by if term.by is not None else 0, at, "by", term.span)
            return Shift(terms[0] if at.apart is None else _inside(terms[0], at), by)


def _inside(relation: Relation, at: Situation) -> Relation:
    """The pairs whose positions both sequences have."""
    rows, columns = (
        at.patterns[name](First(at.positions(side)))  # type: ignore[call-arg]
        for name, side in (("rows", "q"), ("columns", "k"))
    )
    return Intersection((relation, rows, columns))


def bind_attended(graph: Term, at: Situation) -> Relation:
    """The relation of an `attend`: the term, intersected with k <= q where the spec is causal."""
    relation = bind(graph, at)
    if at.apart is not None:
        return placed(relation, at.apart)
    return Intersection((relation, at.patterns["causal"]())) if at.causal else relation


def check_value(parameter: Parameter, name: str, value: object) -> str | None:
    """What is wrong with a constant argument, in words, or None."""
    kind = parameter.kind
    if kind == "integer":
        if isinstance(value, bool) or not isinstance(value, int):
            return f"`{name}` must be an integer, got {as_written(value)}"
    elif kind == "real":
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"`{name}` must be a number, got {as_written(value)}"
        beyond = beyond_formulas(parameter, name, value)
        if beyond is not None:
            return beyond
    elif kind == "boolean":
        if not isinstance(value, bool):
            return f"`{name}` must be true or false, got {as_written(value)}"
        return None
    elif kind == "choice":
        some = ", ".join(parameter.choices)
        wrong = f"`{name}` must be one of {some}, got {as_written(value)}"
        return None if value in parameter.choices else wrong
    else:
        return None
    if parameter.above is not None and not value > parameter.above:
        return f"`{name}` must be above {parameter.above}, got {as_written(value)}"
    if parameter.least is not None and value < parameter.least:
        return f"`{name}` must be at least {parameter.least}, got {as_written(value)}"
    if parameter.most is not None and value > parameter.most:
        return f"`{name}` must be at most {parameter.most}, got {as_written(value)}"
    if parameter.odd and value % 2 == 0:
        return f"`{name}` must be odd, got {as_written(value)}"
    if parameter.even and value % 2 == 1:
        return f"`{name}` must be even, got {as_written(value)}"
    return None


def beyond_formulas(parameter: Parameter, name: str, value: float) -> str | None:
    """What is wrong with a number that a formula computes with, in words, or None."""
    if value and not 2.0**-100 <= abs(value) <= 2.0**100:
        must = "0 or between" if parameter.above is None else "between"
        if parameter.above is None and parameter.least is None:
            must = "0 or have a magnitude between"
        return (
            f"`{name}` must be {must} 2**-100 and 2**100 (about 8e-31 and 1.3e30), got {value}:"
            " products with it leave the range of float32"
        )
    return None


def integer_of(scalar: Scalar, at: Situation, name: str, span: Span | None) -> int:
    """The integer value of a scalar here; raises BindError for anything else."""
    value = _value(scalar, at, name, span)
    wrong = at.fault(_INTEGER, name, value)
    if wrong:
        raise BindError(f"{wrong} at n = {at.n:,}", span)
    return cast(int, value)


def bind_tokens(term: TokenTerm, at: Situation, span: Span | None) -> TokenSet:
    """The token set that a term denotes here."""
    if isinstance(term, InputRef):
        return InputTokens(at.inputs[term.name])
    if isinstance(term, TokenCompound):
        parts = tuple(bind_tokens(part, at, span) for part in term.terms)
        match term.op:
            case "|":
                return TokenUnion(parts)
            case "&":
                return TokenIntersection(parts)
            case "-":
                return TokenIntersection((parts[0], *(TokenComplement(p) for p in parts[1:])))
            case _:
                return TokenComplement(parts[0])
    return _bind_listed(term, at, span)


def _bind_listed(term: Tokens, at: Situation, span: Span | None) -> TokenSet:
    names = {"first": ("count",), "last": ("count",), "every": ("step", "offset")}.get(term.kind)
    values = []
    for index, scalar in enumerate(term.values):
        name = names[index] if names else "position"
        value = integer_of(scalar, at, f"{name}` of `{term.kind}", span)
        least = 1 if name == "step" else 0
        if at.fault(_AT_LEAST[least], name, value):
            what = f"the {name} of `{term.kind}` must be at least {least}"
            raise BindError(f"{what}, got {value} at n = {at.n:,}", span)
        values.append(value)
    match term.kind:
        case "first":
            return First(values[0])
        case "last":
            return Last(values[0])
        case "every":
            return Every(*values)
        case _:
            return Positions(tuple(zip(values[::2], values[1::2], strict=True)))


def _bind_leaf(leaf: Leaf, at: Situation) -> Relation:
    if at.apart is None or not any(_ends(value) for _, value in leaf.arguments):
        return _bound(leaf, at)
    by_side = {side: _bound(leaf, at, at.positions(side)) for side in "qk"}
    sides = at.patterns[leaf.pattern].sides
    if sides in by_side:
        return by_side[sides]
    # what asks about both is the union of parts that ask about one
    parts = ((side, part) for side, each in by_side.items() for part in each.parts() or ())
    return Union(tuple(part for side, part in parts if part.sides == side))


def _ends(value: object) -> bool:
    """Whether an argument is a token set that depends on where its sequence ends."""
    if isinstance(value, TokenCompound):
        return any(map(_ends, value.terms))
    return counts(value) or (isinstance(value, InputRef) and value.kind == "tokens")


def _bound(leaf: Leaf, at: Situation, length: int | None = None) -> Relation:
    """A pattern, its token sets as they are in a sequence of that length if it is given."""
    return filled(at.patterns[leaf.pattern], leaf, at, length)


def filled(
    declaration: type[Declared], term: Leaf | Mechanism, at: Situation, length: int | None = None
) -> Declared:
    """A pattern or a mechanism with its arguments, token sets as they are in a sequence of that
    length if it is given; raises BindError for one that has no admissible value."""
    arguments = dict(term.arguments)
    bound: dict[str, object] = {}
    for entry in fields(declaration):  # type: ignore[arg-type]
        parameter: Parameter = entry.metadata["parameter"]
        if parameter.kind == "context":
            bound[entry.name] = getattr(at, parameter.context)
        elif entry.name in arguments:
            place = term.place(entry.name) if isinstance(term, Leaf) else term.span
            bound[entry.name] = bind_argument(
                parameter, entry.name, arguments[entry.name], at, place
            )
            if parameter.kind == "tokens" and length is not None:
                bound[entry.name] = Within(cast(TokenSet, bound[entry.name]), length)
    try:
        return declaration(**bound)
    except RelationError as error:
        raise BindError(f"{error} at n = {at.n:,}", term.span) from None


def bind_argument(
    parameter: Parameter, name: str, given: object, at: Situation, span: Span | None
) -> object:
    """What an argument is here; raises BindError for what is not admissible."""
    match parameter.kind:
        case "tokens":
            return bind_tokens(given, at, span)  # type: ignore[arg-type]
        case "graph":
            relation = bind(given, at)  # type: ignore[arg-type]
            return relation if at.apart is None else placed(relation, at.apart)
        case _ if isinstance(given, InputRef):
            return at.inputs[given.name]
        case "predicate":
            # at every length n is filled in anew, unless the sequence that is bound has another
            open_ = "n" if at.apart is None else ""
            values = {name: value for name, value in at.values.items() if name != open_}
            try:
                return fold(given, values)  # type: ignore[arg-type]
            except ScalarError as error:
                problem = f"no value at layer {at.layer}, head {at.head}: {error}"
                raise BindError(f"the condition of `where` has {problem}", span) from None
        case "inputs":
            return tuple(at.inputs[each.name] for each in given)  # type: ignore[attr-defined]
        case "extents":
            return tuple(integer_of(part, at, name, span) for part in given)  # type: ignore[attr-defined]
        case "choice":
            return given
        case _:
            value = _value(given, at, name, span)  # type: ignore[arg-type]
            wrong = at.fault(parameter, name, value)
            if wrong:
                raise BindError(f"{wrong} at n = {at.n:,}", span)
            return value


def _value(scalar: Scalar, at: Situation, name: str, span: Span | None) -> object:
    try:
        return at.value(scalar, name)
    except ScalarError as error:
        raise BindError(f"`{name}` has no value at {at.shown(scalar)}: {error}", span) from None
    except KeyError as error:
        raise BindError(
            f"`{name}` needs `{error.args[0]}`, which the spec does not declare", span
        ) from None


def extents_of(program: Program, n: int) -> tuple[int, ...]:
    """The extents of the grid at n positions, () for a line.

    Raises SpecError where an extent is not an integer, LengthError where n is not its size.
    """
    if program.grid is None:
        return ()
    at = Situation(n=n, patterns=BY_NAME, layers=program.layer_count, heads=program.heads)
    try:
        extents = tuple(integer_of(e, at, "an extent of the grid", None) for e in program.grid)
    except BindError as error:
        raise SpecError(Diagnostic("A320", error.message, None)) from None
    cells = prod(extents)
    if min(extents) < 0 or cells + program.extra_tokens != n:
        extra = f" and {program.extra_tokens} extra tokens" if program.extra_tokens else ""
        shape = " x ".join(str(extent) for extent in extents)
        raise LengthError(
            f"the grid of `{program.name}` has {shape} = {cells} cells{extra}, got n = {n}"
            + _one_length(program)
        )
    return extents


def _one_length(program: Program) -> str:
    """The way out where a grid has one size."""
    n = program.fixed_length
    return "" if n is None else f": n must be {n}"


def stand_ins(program: Program) -> dict[str, Data]:
    """What stands in relations for the tensors of a call, one for each input."""
    return {entry.name: StandIn(entry.name, entry.size) for entry in program.inputs}


def situation_of(
    program: Program,
    n: int,
    layer: int = 0,
    head: int = 0,
    *,
    grid: tuple[int, ...] | None = None,
    inputs: Mapping[str, Data] | None = None,
) -> Situation:
    """What the terms and scalars of one head of one layer mean at n positions.

    `grid` are the extents where they are known already. Raises as `extents_of`.
    """
    crossing = (program.crossing or Crossing(n, n)) if program.cross else None
    return Situation(
        n=n if crossing is None else crossing.keys,
        patterns=BY_NAME,
        layer=layer,
        head=head,
        layers=program.layer_count,
        heads=program.heads,
        causal=program.causal,
        grid=extents_of(program, n) if grid is None else grid,
        extra_tokens=program.extra_tokens,
        inputs=inputs or {},
        crossing=crossing,
    )
