"""What `check` says of a spec: lints, and a verdict on each claim, with a hint where one fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnspec.check.hints import with_hint
from attnspec.check.lints import choices, heads_not_declared, rows_without_keys
from attnspec.check.verdicts import LENGTHS, Verdict, evenly
from attnspec.graphs.stack import Stack
from attnspec.ir.crossing import evened
from attnspec.text.diagnostics import Diagnostic

if TYPE_CHECKING:
    from attnspec.elaborate import Elaborated


def check(spec: Elaborated, verdicts: Sequence[Verdict]) -> list[Diagnostic]:
    """Lints and claims of a spec, in the order of the text; with a hint where a claim on reach
    fails."""
    program = evened(spec.program)
    cross = spec.program.cross
    advice = "`| self` gives every query itself"
    if cross:
        advice = "`| columns(first(1))` gives every query the first key"
    empty = rows_without_keys(Stack(program), LENGTHS, advice)
    lints = [*heads_not_declared(program), *(map(evenly, empty) if cross else empty)]
    lints += choices(program, LENGTHS[-1])
    return [*lints, *(d for verdict in verdicts for d in with_hint(spec, verdict, verdicts))]
