"""Programs as plain data: what stands in an emitted module, and back again.

A scalar is a number, a name (`"n"`) or a list `[operator, argument, …]`; a pattern is
`{name: arguments}`; an operator between graphs is `{operator: [term, …]}`. Claims and places in the
text are left out: they matter to the compiler alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from attnspec.ir.program import (
    SIZED,
    ArgumentValue,
    Attend,
    Compound,
    Input,
    InputRef,
    Leaf,
    Mechanism,
    Program,
    Score,
    Term,
    TokenCompound,
    Tokens,
)
from attnspec.ir.scalars import Apply, Scalar, Symbol

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

FORMAT = 1
"""The version of plan data; a run time reads the version it knows and no other."""

OPERATORS = ("|", "&", "-", "~", "transpose", "shift")


def plan_data(program: Program, backend: str = "auto") -> dict[str, Plain]:
    """What a compiled attention is built from, and what stands in an emitted module."""
    return {"format": FORMAT, "backend": backend, "program": to_data(program)}


def fingerprint(program: Program) -> str:
    """sha256 of the normal form, as 64 hexadecimal digits; equal programs have the same."""
    return hashlib.sha256(repr(_by_value(to_data(program))).encode()).hexdigest()


def _by_value(data: Plain) -> Plain:
    """The data with one spelling of equal numbers: 1.0 is 1."""
    if isinstance(data, dict):
        return {name: _by_value(value) for name, value in data.items()}
    if isinstance(data, list):
        return [_by_value(value) for value in data]
    return int(data) if isinstance(data, float) and data.is_integer() else data


def to_data(program: Program) -> dict[str, Plain]:
    """A program as dicts, lists, strings and numbers, without its claims."""
    data: dict[str, Plain] = {
        "name": program.name,
        "layers": program.layers,
        "heads": program.heads,
        "causal": program.causal,
        "grid": None if program.grid is None else [_scalar_out(x) for x in program.grid],
        "extra_tokens": program.extra_tokens,
        "inputs": [_input_out(x) for x in program.inputs],
        "attends": [_attend_out(x) for x in program.attends],
        "slots": [list(row) for row in program.slots],
    }
    return {**data, "cross": True} if program.cross else data


def from_data(data: Mapping[str, Plain]) -> Program:
    """The program that `to_data` wrote, with no claims and no places."""
    grid = cast("list[Plain] | None", data["grid"])
    return Program(
        name=cast(str, data["name"]),
        attends=tuple(_attend_in(x) for x in _dicts(data["attends"])),
        slots=tuple(tuple(row) for row in cast("list[list[int]]", data["slots"])),
        layers=cast("int | None", data["layers"]),
        heads=cast("int | None", data["heads"]),
        causal=cast(bool, data["causal"]),
        grid=None if grid is None else tuple(_scalar_in(x) for x in grid),
        extra_tokens=cast(int, data["extra_tokens"]),
        inputs=tuple(Input(**x) for x in cast("list[dict[str, Any]]", data["inputs"])),
        cross=cast(bool, data.get("cross", False)),
    )


def _input_out(entry: Input) -> Plain:
    data: dict[str, Plain] = {"name": entry.name, "kind": entry.kind, "at_most": entry.at_most}
    return {**data, "size": entry.size} if entry.kind in SIZED else data


def _dicts(value: Plain) -> list[dict[str, Plain]]:
    return cast("list[dict[str, Plain]]", value)


def _attend_out(attend: Attend) -> Plain:
    mechanism = attend.mechanism
    return {
        "graph": None if attend.graph is None else _term_out(attend.graph),
        "mechanism": None
        if mechanism is None
        else {mechanism.name: _arguments_out(mechanism.arguments)},
        "scale": None if attend.scale is None else _scalar_out(attend.scale),
        "scores": [{x.name: _score_out(x)} for x in attend.scores],
        "normalize": attend.normalize,
    }


def _attend_in(data: Mapping[str, Plain]) -> Attend:
    mechanism = None
    if data["mechanism"] is not None:
        ((name, arguments),) = cast("dict[str, dict[str, Plain]]", data["mechanism"]).items()
        mechanism = Mechanism(name, _arguments_in(arguments))
    scores = [
        _score_in(name, arguments)
        for score in cast("list[dict[str, dict[str, Plain]]]", data["scores"])
        for name, arguments in score.items()
    ]
    return Attend(
        graph=None if data["graph"] is None else _term_in(data["graph"]),
        mechanism=mechanism,
        scale=None if data["scale"] is None else _scalar_in(data["scale"]),
        scores=tuple(scores),
        normalize=cast(str, data["normalize"]),
    )


def _score_out(score: Score) -> dict[str, Plain]:
    slopes: dict[str, Plain] = {"slopes": list(score.slopes)} if score.slopes else {}
    return {name: _scalar_out(value) for name, value in score.arguments} | slopes


def _score_in(name: str, data: Mapping[str, Plain]) -> Score:
    slopes = tuple(cast("list[float]", data.get("slopes", [])))
    scalars = [(key, _scalar_in(value)) for key, value in data.items() if key != "slopes"]
    return Score(name, tuple(scalars), slopes)


def _term_out(term: Term) -> Plain:
    if isinstance(term, Leaf):
        return {term.pattern: _arguments_out(term.arguments)}
    data: dict[str, Plain] = {term.op: [_term_out(child) for child in term.terms]}
    if term.by is not None:
        data["by"] = _scalar_out(term.by)
    return data


def _term_in(data: Plain) -> Term:
    entries = cast("dict[str, Plain]", data)
    name, content = next(iter(entries.items()))
    if name in OPERATORS:
        terms = tuple(_term_in(child) for child in cast("list[Plain]", content))
        by = entries.get("by")
        return Compound(name, terms, None if by is None else _scalar_in(by))
    return Leaf(name, _arguments_in(cast("dict[str, Plain]", content)))


def _arguments_out(arguments: Sequence[tuple[str, ArgumentValue]]) -> dict[str, Plain]:
    return {name: _argument_out(value) for name, value in arguments}


def _arguments_in(data: Mapping[str, Plain]) -> tuple[tuple[str, ArgumentValue], ...]:
    return tuple((name, _argument_in(value)) for name, value in data.items())


def _argument_out(value: ArgumentValue) -> Plain:
    match value:
        case str():
            return {"choice": value}
        case tuple():
            return {"each": [_argument_out(part) for part in value]}
        case InputRef():
            return {"input": value.name, "kind": value.kind}
        case Tokens():
            return {"tokens": value.kind, "values": [_scalar_out(x) for x in value.values]}
        case TokenCompound():
            return {"tokens": value.op, "terms": [_argument_out(part) for part in value.terms]}
        case Leaf() | Compound():
            return {"graph": _term_out(value)}
        case _:
            return _scalar_out(value)


def _argument_in(data: Plain) -> ArgumentValue:
    if not isinstance(data, dict):
        return _scalar_in(data)
    if "choice" in data:
        return cast(str, data["choice"])
    if "each" in data:
        return tuple(_argument_in(part) for part in cast("list[Plain]", data["each"]))  # type: ignore[misc]
    if "graph" in data:
        return _term_in(data["graph"])
    if "input" in data:
        return InputRef(cast(str, data["input"]), cast(str, data["kind"]))
    kind = cast(str, data["tokens"])
    if "terms" in data:
        return TokenCompound(kind, tuple(_argument_in(part) for part in _dicts(data["terms"])))  # type: ignore[misc]
    return Tokens(kind, tuple(_scalar_in(x) for x in cast("list[Plain]", data["values"])))


def _scalar_out(scalar: Scalar) -> Plain:
    match scalar:
        case Symbol(name):
            return name
        case Apply(op, args):
            return [op, *[_scalar_out(arg) for arg in args]]
        case _:
            return scalar


def _scalar_in(data: Plain) -> Scalar:
    match data:
        case str():
            return Symbol(data)
        case list():
            return Apply(cast(str, data[0]), tuple(_scalar_in(arg) for arg in data[1:]))
        case _:
            return cast("int | float | bool", data)
