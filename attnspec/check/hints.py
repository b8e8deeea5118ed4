"""What would make a claim on reach hold: one change, tried before it is named.

More pairs can mend such a claim. The graph that serves most layers and heads gets a global token,
or under `causal` powers or a stride. Where no position learns of a later one and that is not said,
saying it is all that is tried. The whole spec is read anew, and the change is named only if the
claim then holds where it was checked, and no other claim fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from textwrap import shorten

from attnspec.analysis.counting.degrees import total_edges
from attnspec.analysis.reach.leaks import leak
from attnspec.check.lints import choices, heads_not_declared, rows_without_keys
from attnspec.check.verdicts import LENGTHS, Verdict, evenly, verdict_on
from attnspec.elaborate import Elaborated, elaborate
from attnspec.graphs.stack import Stack, influence
from attnspec.ir.crossing import evened
from attnspec.ir.program import Leaf, Program
from attnspec.ir.scalars import ScalarError
from attnspec.limits import LIMITS
from attnspec.text.decoding import source_of
from attnspec.text.diagnostics import AttnSpecError, Diagnostic

FIGURES = frozenset("depth diameter path_length".split())
"""The figures that more pairs can make smaller."""


NEVER = "add pairs that lead to the key, or remove the claim"


def with_hint(
    spec: Elaborated, verdict: Verdict, verdicts: Sequence[Verdict]
) -> tuple[Diagnostic, ...]:
    """The diagnostics of a verdict, the last with a hint where one is found."""
    claim = verdict.claim
    mendable = claim.kind == "reach" or (claim.kind in FIGURES and claim.compare in ("<", "<="))
    if verdict.failed_at is None or not mendable or max(verdict.lengths) > LIMITS.every_pair:
        return verdict.diagnostics
    *others, refuted = verdict.diagnostics
    try:
        advice = refuted.help or _hint(spec, verdict, verdicts) or _weaker(spec, verdict)
    except (AttnSpecError, ScalarError):
        # the change is not a spec, or too much to count
        return verdict.diagnostics
    return (*others, replace(refuted, help=advice))


def _weaker(spec: Elaborated, verdict: Verdict) -> str:
    """What is left to do where no change was found."""
    if " never reads " in verdict.diagnostics[-1].message:
        return NEVER
    program = evened(spec.program)
    full = [replace(one, graph=Leaf("full", ()), mechanism=None) for one in program.attends]
    most = verdict_on(verdict.claim, Stack(replace(program, attends=tuple(full))))
    unit = "layers" if verdict.claim.kind in ("reach", "depth") else "steps"
    if most.failed_at is not None:
        return f"allow more {unit}: at n = {most.failed_at:,} not even `attend full` takes so few"
    return f"allow more {unit} in the claim, or add pairs to the graph"


def _hint(spec: Elaborated, failed: Verdict, verdicts: Sequence[Verdict]) -> str | None:
    """The change in words, None where it does not help; raises AttnSpecError."""
    base = elaborate(source_of(spec.source))
    program = base.program
    used = [index for row in program.slots for index in row if program.attends[index].graph]
    if not used:
        return None
    index = max(used, key=used.count)
    span, place = program.attends[index].span, spec.program.attends[index].span
    if span is None or place is None or program.attends[index].mechanism is not None:
        return None
    text = base.source
    if not program.causal and leak(Stack(influence(program)), failed.failed_at or 0).value is None:
        top = text.index("attention ")
        changed = text[:top] + text[top:].replace("{\n", "{\ncausal\n", 1)
        words = "the statement `causal`, under which no query has to read later keys"
        return _tried(program, changed, words, failed, verdicts)
    extras = ("powers", "residue(step = isqrt(n))") if program.causal else ("global(first(1))",)
    for extra in extras:
        statement = " ".join(text[span.start : span.end].split())
        shown = shorten(statement, 60, placeholder=" …")
        words = f"`| {extra}` after `{shown}` of line {place.line}"
        changed = f"{text[: span.start]}{statement} | {extra}{text[span.end :]}"
        hint = _tried(program, changed, words, failed, verdicts)
        if hint is not None:
            return hint
    return None


def _tried(
    program: Program, text: str, words: str, failed: Verdict, verdicts: Sequence[Verdict]
) -> str | None:
    """A change with its price, if the changed text fulfils its claims."""
    tried = Stack(elaborate(source_of(text)).program)
    pairs = zip(verdicts, tried.program.claims, strict=True)
    if any(_fails(before, verdict_on(claim, tried), failed) for before, claim in pairs):
        return None
    n = failed.failed_at or 0
    more = total_edges(Stack(influence(tried.program)), n)
    more -= total_edges(Stack(influence(program)), n)
    price = f"{abs(more):,} {'more' if more > 0 else 'fewer'}" if more else "no additional"
    price += " pair" if abs(more) == 1 else " pairs"
    price += " in all layers and heads" if sum(map(len, program.slots)) > 1 else ""
    return f"it holds with {words} ({price} at n = {n:,})"


def _fails(before: Verdict, after: Verdict, failed: Verdict) -> bool:
    """Whether a claim does not hold after the change: the one to be mended, or one that held."""
    if before.claim is failed.claim:
        return after.status not in ("proven", "checked")
    return after.status == "refuted" and before.status != "refuted"


def check(spec: Elaborated, verdicts: Sequence[Verdict]) -> list[Diagnostic]:
    """Lints and claims of a spec, in the order of the text, with hints for claims on reach."""
    program = evened(spec.program)
    cross = spec.program.cross
    advice = "add `| self`, and every query reads its own position"
    if cross:
        advice = "add `| columns(first(1))`, and every query reads the first key"
    empty = rows_without_keys(Stack(program), LENGTHS, advice)
    lints = [*heads_not_declared(program), *(map(evenly, empty) if cross else empty)]
    lints += choices(program, LENGTHS[-1])
    return [*lints, *(d for verdict in verdicts for d in with_hint(spec, verdict, verdicts))]
