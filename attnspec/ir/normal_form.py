"""The normal form of a program: what two spellings of one meaning have in common.

rewrite:
    ~~g                ->  g
    transpose(transpose(g)) -> g
    a - b              ->  a & ~b
    a | (b | c)        ->  a | b | c, operands sorted, each once; the same of `&`
    g | full, g & full ->  full, g
    layer, head        ->  their numbers, where the spec declares how many there are
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attnspec.ir.program import (
    ArgumentValue,
    Compound,
    InputRef,
    Leaf,
    Program,
    Term,
    TokenCompound,
    Tokens,
)
from attnspec.ir.scalars import Scalar, by_value, fold

_FULL = Leaf("full", ())


def normalise(program: Program) -> Program:
    """The same pairs for every n, in normal form; idempotent."""
    attends = [
        replace(each, graph=None if each.graph is None else normal_term(each.graph))
        for each in program.attends
    ]
    distinct = dict.fromkeys(attends)
    place = {attend: number for number, attend in enumerate(distinct)}
    index = [place[attend] for attend in attends]
    rows = {row: tuple(index[slot] for slot in row) for row in set(program.slots)}
    slots = tuple(rows[row] for row in program.slots)
    return replace(
        program,
        attends=tuple(distinct),
        slots=slots,
        claims=tuple(
            replace(claim, terms=tuple(map(normal_term, claim.terms))) for claim in program.claims
        ),
    )


def normal_term(term: Term) -> Term:
    """The normal form of one term."""
    if isinstance(term, Leaf):
        arguments = (
            (x, normal_term(y) if isinstance(y, Leaf | Compound) else y) for x, y in term.arguments
        )
        return replace(term, arguments=tuple(arguments))
    parts = tuple(normal_term(child) for child in term.terms)
    if term.op == "-":
        outside = (_negated(part) for part in parts[1:])
        return normal_term(Compound("&", (parts[0], *outside), span=term.span))
    if term.op == "~":
        return _negated(parts[0])
    if term.op == "transpose":
        inner = parts[0]
        if isinstance(inner, Compound) and inner.op == "transpose":
            return inner.terms[0]
    if term.op not in ("|", "&"):
        return replace(term, terms=parts)
    flat: dict[Term, None] = {}
    for part in parts:
        same = isinstance(part, Compound) and part.op == term.op
        flat.update(dict.fromkeys(part.terms if same and isinstance(part, Compound) else (part,)))
    if _FULL in flat:
        if term.op == "|":
            return _FULL
        if len(flat) > 1:
            del flat[_FULL]
    ordered = sorted(flat, key=lambda part: repr(map_scalars(part, by_value)))
    return ordered[0] if len(ordered) == 1 else replace(term, terms=tuple(ordered))


def _negated(term: Term) -> Term:
    if isinstance(term, Compound) and term.op == "~":
        return term.terms[0]
    return Compound("~", (term,))


def substitute(term: Term, values: dict[str, int | float | bool]) -> Term:
    """The term with symbols replaced by numbers and constant parts computed."""
    return map_scalars(term, lambda scalar: fold(scalar, values))


def map_scalars(term: Term, change: Callable[[Scalar], Scalar]) -> Term:
    """The term with every scalar changed."""
    if isinstance(term, Leaf):
        arguments = tuple((name, map_value(value, change)) for name, value in term.arguments)
        return replace(term, arguments=arguments)
    by = None if term.by is None else change(term.by)
    return replace(term, terms=tuple(map_scalars(child, change) for child in term.terms), by=by)


def map_value(value: ArgumentValue, change: Callable[[Scalar], Scalar]) -> ArgumentValue:
    """An argument with every scalar changed."""
    match value:
        case str() | InputRef():
            return value
        case Tokens(kind, scalars):
            return Tokens(kind, tuple(change(scalar) for scalar in scalars))
        case TokenCompound(op, terms):
            return TokenCompound(op, tuple(map_value(term, change) for term in terms))  # type: ignore[misc]
        case Leaf() | Compound():
            return map_scalars(value, change)
        case tuple():
            return tuple(x if isinstance(x, InputRef) else change(x) for x in value)
        case _:
            return change(value)
