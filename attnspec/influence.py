"""What may reach what where mechanisms stand: the graph of a spec without their formulas.

A factorisation has no pairs of its own, but every position that it mixes can be felt in every
output: a kernel's sums, projected keys, landmarks, a Fourier transform are latents that all
positions write and read. As far as reach goes it is the full graph, or in its causal form `causal`.
The graph of `GRAPH + MECHANISM` adds nothing to that.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from attnspec.ir import Attend, Leaf, Program

if TYPE_CHECKING:
    from attnspec.spec import Spec


def has_mechanism(program: Program) -> bool:
    """Whether a head computes a mechanism."""
    return any(attend.mechanism is not None for attend in program.attends)


def influence(spec: Spec) -> Spec:
    """The same layers and heads with the graph of what each mechanism lets through in its place."""
    if not has_mechanism(spec.program):
        return spec
    every = tuple(_lets_through(attend) for attend in spec.program.attends)
    found = copy(spec)
    # what is computed once for a spec is not that of this one
    found.__dict__.clear()
    program = replace(spec.program, attends=every)
    found._elaborated = replace(spec._elaborated, program=program)
    return found


def _lets_through(attend: Attend) -> Attend:
    if attend.mechanism is None:
        return attend
    return Attend(Leaf("full", (), span=attend.mechanism.span), span=attend.span)
