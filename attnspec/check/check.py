"""What `check` says of a spec: lints, and a verdict on each claim, with advice where one fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from attnspec.check.lints import choices, heads_not_declared, rows_without_keys
from attnspec.check.verdicts import LENGTHS, Verdict, evenly
from attnspec.graphs.stack import Stack
from attnspec.ir.crossing import evened
from attnspec.text.diagnostics import Diagnostic

if TYPE_CHECKING:
    from attnspec.elaborate import Elaborated


def check(spec: Elaborated, verdicts: Sequence[Verdict]) -> list[Diagnostic]:
    """Lints and claims of a spec, in the order of the text; with advice where a claim on reach
    fails."""
    program = evened(spec.program)
    cross = spec.program.cross
    advice = "`| self` gives every query itself"
    if cross:
        advice = "`| columns(first(1))` gives every query the first key"
    empty = rows_without_keys(Stack(program), LENGTHS, advice)
    lints = [*heads_not_declared(program), *(map(evenly, empty) if cross else empty)]
    lints += choices(program, LENGTHS[-1])
    return [*lints, *(d for verdict in verdicts for d in _explained(spec, verdict, verdicts))]


def _explained(
    spec: Elaborated, verdict: Verdict, verdicts: Sequence[Verdict]
) -> tuple[Diagnostic, ...]:
    """The diagnostics of a verdict, with advice where one is found."""
    if verdict.failed_at is None:
        return verdict.diagnostics
    # a claim that fails is rare, and what looks for repairs takes long to load
    from attnspec.check.repairs import advice_for, repairable, words

    if not repairable(verdict.claim):
        return verdict.diagnostics
    advice = advice_for(spec, verdict, verdicts)
    *others, refuted = verdict.diagnostics
    advised, notes = words(advice)
    return (*others, replace(refuted, help=advised, notes=notes))
