"""Specs between two sequences, at lengths of both: m queries and n keys."""

from __future__ import annotations

from dataclasses import replace

from attnspec.ir.api_checks import length_of
from attnspec.ir.normal_form import map_scalars, map_value
from attnspec.ir.program import Attend, Crossing, Program
from attnspec.ir.scalars import Apply, Scalar, Symbol
from attnspec.text.diagnostics import AttnSpecError

QUERIES = "m"
"""The name of the number of queries, in a spec that says `cross`."""


def crossed(program: Program, n: int, m: int | None = None) -> tuple[Program, int]:
    """The program for m queries and n keys, m = n where it is None, and the length that holds both.

    Of a spec that says no `cross` it is the program itself, and n. Raises AttnSpecError where such
    a one is given m.
    """
    if not program.cross:
        if m is not None:
            raise AttnSpecError(
                f"`m` can be given only for a spec with `cross`, got m = {m}: `{program.name}` has"
                " one sequence, so leave `m` out"
            )
        return program, length_of(n)
    n = length_of(n)
    lengths = Crossing(n if m is None else length_of(m, QUERIES), n)
    return replace(program, crossing=lengths), lengths.length


def evened(program: Program) -> Program:
    """A spec with `cross` where both sequences have n positions: one about a single sequence."""
    if not program.cross:
        return program
    attends = tuple(_attend(attend) for attend in program.attends)
    claims = tuple(
        replace(
            claim,
            terms=tuple(map_scalars(term, _even) for term in claim.terms),
            value=None if claim.value is None else _even(claim.value),
        )
        for claim in program.claims
    )
    return replace(program, attends=attends, claims=claims, cross=False, crossing=None)


def _attend(attend: Attend) -> Attend:
    scores = tuple(
        replace(score, arguments=tuple((name, _even(value)) for name, value in score.arguments))
        for score in attend.scores
    )
    mechanism = attend.mechanism
    if mechanism is not None:
        sizes = tuple((name, map_value(value, _even)) for name, value in mechanism.arguments)
        mechanism = replace(mechanism, arguments=sizes)
    return replace(
        attend,
        graph=None if attend.graph is None else map_scalars(attend.graph, _even),
        mechanism=mechanism,
        scale=None if attend.scale is None else _even(attend.scale),
        scores=scores,
    )


def _even(scalar: Scalar) -> Scalar:
    """The scalar with n in place of m."""
    match scalar:
        case Symbol(name) if name == QUERIES:
            return Symbol("n")
        case Apply(op, args):
            return Apply(op, tuple(_even(arg) for arg in args))
        case _:
            return scalar
