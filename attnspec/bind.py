"""From a term to a relation, once n, layer, head and the inputs are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from attnspec.algebra import Complement, Intersection, Shift, Union, difference, transpose_of
from attnspec.diagnostics import AttnSpecError
from attnspec.ir import Compound, InputRef, Leaf, Term, TokenCompound, Tokens, TokenTerm
from attnspec.relations import Parameter, Relation, RelationError
from attnspec.scalars import Scalar, ScalarError, Value, evaluate, fold
from attnspec.tokens import (
    Data,
    Every,
    First,
    InputTokens,
    Last,
    Positions,
    TokenComplement,
    TokenIntersection,
    TokenSet,
    TokenUnion,
)

if TYPE_CHECKING:
    from attnspec.source import Span


class BindError(AttnSpecError):
    """A size has no admissible value at this n; `span` is its place in the text, if it has one."""

    def __init__(self, message: str, span: Span | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.span = span


@dataclass(frozen=True)
class Situation:
    """Where a term stands: everything that its scalars and context fields may ask for.

    `inputs` maps names to `Data`; `patterns` maps names to the pattern classes that may occur.
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

    @property
    def values(self) -> dict[str, Value]:
        """The symbols that scalars may use here."""
        values: dict[str, Value] = {"n": self.n, "layer": self.layer, "head": self.head}
        if self.layers is not None:
            values["layers"] = self.layers
        if self.heads is not None:
            values["heads"] = self.heads
        return values


def bind(term: Term, at: Situation) -> Relation:
    """The relation that a term denotes; raises BindError naming the argument and n."""
    if isinstance(term, Leaf):
        return _bind_leaf(term, at)
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
            by = integer_of(term.by if term.by is not None else 0, at, "by", _span_of(term))
            return Shift(terms[0], by)


def bind_attended(graph: Term, at: Situation) -> Relation:
    """The relation of an `attend`: the term, intersected with k <= q where the spec is causal."""
    relation = bind(graph, at)
    if at.causal:
        return Intersection((relation, at.patterns["causal"]()))
    return relation


def check_value(parameter: Parameter, name: str, value: object) -> str | None:
    """What is wrong with a constant argument, in words, or None."""
    kind = parameter.kind
    if kind == "integer":
        if isinstance(value, bool) or not isinstance(value, int):
            return f"`{name}` must be an integer, got {_shown(value)}"
    elif kind == "real":
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"`{name}` must be a number, got {_shown(value)}"
    elif kind == "boolean":
        if not isinstance(value, bool):
            return f"`{name}` must be true or false, got {_shown(value)}"
        return None
    elif kind == "choice":
        if value not in parameter.choices:
            return f"`{name}` must be one of {', '.join(parameter.choices)}, got {_shown(value)}"
        return None
    else:
        return None
    if parameter.least is not None and value < parameter.least:
        return f"`{name}` must be at least {parameter.least}, got {_shown(value)}"
    if parameter.most is not None and value > parameter.most:
        return f"`{name}` must be at most {parameter.most}, got {_shown(value)}"
    if parameter.odd and value % 2 == 0:
        return f"`{name}` must be odd, got {_shown(value)}"
    if parameter.even and value % 2 == 1:
        return f"`{name}` must be even, got {_shown(value)}"
    return None


def integer_of(scalar: Scalar, at: Situation, name: str, span: Span | None) -> int:
    """The integer value of a scalar here; raises BindError for anything else."""
    value = _value(scalar, at, name, span)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BindError(f"`{name}` must be an integer, got {_shown(value)} at n = {at.n}", span)
    return value


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
        value = integer_of(scalar, at, f"{term.kind}: {name}", span)
        least = 1 if name == "step" else 0
        if value < least:
            raise BindError(
                f"the {name} of `{term.kind}` must be at least {least}, got {value} at n = {at.n}",
                span,
            )
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
    pattern = at.patterns[leaf.pattern]
    given = dict(leaf.arguments)
    bound: dict[str, object] = {}
    for entry in fields(pattern):  # type: ignore[arg-type]
        parameter: Parameter = entry.metadata["parameter"]
        if parameter.kind == "context":
            bound[entry.name] = getattr(at, parameter.context)
        elif entry.name in given:
            bound[entry.name] = _bind_argument(
                parameter, entry.name, given[entry.name], at, leaf.place(entry.name)
            )
    try:
        return pattern(**bound)
    except RelationError as error:
        raise BindError(f"{error} at n = {at.n}", leaf.span) from None


def _bind_argument(
    parameter: Parameter, name: str, given: object, at: Situation, span: Span | None
) -> object:
    match parameter.kind:
        case "tokens":
            return bind_tokens(given, at, span)  # type: ignore[arg-type]
        case "ids" | "length" if isinstance(given, InputRef):
            return at.inputs[given.name]
        case "predicate":
            known = {name: value for name, value in at.values.items() if name != "n"}
            try:
                return fold(given, known)  # type: ignore[arg-type]
            except ScalarError as error:
                where = f"layer {at.layer}, head {at.head}"
                raise BindError(f"`where` has no value at {where}: {error}", span) from None
        case "extents":
            return tuple(integer_of(part, at, name, span) for part in given)  # type: ignore[attr-defined]
        case "choice":
            return given
        case _:
            value = _value(given, at, name, span)  # type: ignore[arg-type]
            wrong = check_value(parameter, name, value)
            if wrong:
                raise BindError(f"{wrong} at n = {at.n}", span)
            return value


def _value(scalar: Scalar, at: Situation, name: str, span: Span | None) -> object:
    try:
        return evaluate(scalar, at.values)
    except ScalarError as error:
        raise BindError(f"`{name}` has no value at n = {at.n}: {error}", span) from None
    except KeyError as error:
        raise BindError(
            f"`{name}` needs `{error.args[0]}`, which the spec does not declare", span
        ) from None


def _span_of(term: Compound) -> Span | None:
    return term.span


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
