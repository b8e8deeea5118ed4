"""Claims on how fast edges grow: proven from how the spec is written, else counted."""

from __future__ import annotations

from attnspec.analysis.growth.growth import growth_of
from attnspec.analysis.growth.order import counted
from attnspec.analysis.growth.size_growth import divisor_growth
from attnspec.check.places import Place, values
from attnspec.graphs.stack import Stack, TooMuch
from attnspec.ir.program import Claim
from attnspec.ir.scalars import Scalar, evaluate
from attnspec.text.diagnostics import three_digits

COUNTED = 3
"""Lengths, each four times the one before, at which edges are compared with a bound."""


def against(claim: Claim, stack: Stack, unknown: str | None, looked_at: list[int]) -> str | None:
    """Words against `order <= EXPR`, or None; edges over the bound may not grow from length to
    length. `looked_at` gets the lengths at which edges were counted.

    Raises TooMuch where nothing is known, with the reason `unknown` where pairs are, and
    AttnSpecError, ScalarError or ZeroDivisionError where a bound has no value.
    """
    if stack.program.grid is not None:
        raise TooMuch("positions on a grid have one length")
    most = growth_of(stack.program)
    open_bounds: dict[Scalar, Place] = {}
    for bound, place in values(claim, stack).items():
        allowed = divisor_growth(bound)
        if allowed is None or most > allowed:
            open_bounds[bound] = place
    if open_bounds and unknown is not None:
        raise TooMuch(unknown)
    return _by_counting(stack, open_bounds, looked_at) if open_bounds else None


def _by_counting(stack: Stack, bounds: dict[Scalar, Place], looked_at: list[int]) -> str | None:
    counts = counted(stack)
    lengths = sorted(counts)[-1 : -1 - 2 * COUNTED : -2][::-1]
    if len(lengths) < 2:
        raise TooMuch("too few lengths can be counted")
    looked_at.extend(lengths)
    for bound, place in bounds.items():
        parts = [counts[n] / float(evaluate(bound, stack.situation(n).values)) for n in lengths]
        if parts[-1] > 1.1 * parts[-2]:
            figures = ", ".join(three_digits(part) for part in parts)
            at = ", ".join(f"{n:,}" for n in lengths)
            return f"edges divided by the bound grow{place.text}: {figures} at n = {at}"
    return None
