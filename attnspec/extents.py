"""The grid that a program's positions stand on, at one length."""

from __future__ import annotations

from math import prod

from attnspec.bind import BindError, Situation, integer_of
from attnspec.diagnostics import AttnSpecError, Diagnostic, SpecError
from attnspec.ir import Program
from attnspec.patterns import BY_NAME


def extents_of(program: Program, n: int) -> tuple[int, ...]:
    """The extents of the grid at n positions, () for a line.

    Raises SpecError where an extent is no integer, AttnSpecError where n is not its size.
    """
    if program.grid is None:
        return ()
    layers = 1 if program.layers is None else program.layers
    at = Situation(n=n, patterns=BY_NAME, layers=layers, heads=program.heads)
    try:
        extents = tuple(integer_of(e, at, "an extent of the grid", None) for e in program.grid)
    except BindError as error:
        raise SpecError(Diagnostic("A320", error.message, None)) from None
    cells = prod(extents)
    if min(extents) < 1 or cells + program.extra_tokens != n:
        extra = f" and {program.extra_tokens} extra tokens" if program.extra_tokens else ""
        shape = " x ".join(str(extent) for extent in extents)
        raise AttnSpecError(
            f"the grid of `{program.name}` has {shape} = {cells} cells{extra}, got n = {n}"
        )
    return extents
