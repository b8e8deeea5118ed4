"""What `check` says of a spec: lints, and a verdict on each claim.

A claim that follows from how the spec is written is proven for every n and every input. Any other
claim without `at` is checked at `LENGTHS`, no more; diagnostics say at which length it failed.
What cannot be checked is reported (A609), never passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from attnspec import graph_claims, reach_proofs
from attnspec.analysis import claims
from attnspec.analysis.claims import COMPARE, shown, slot_text
from attnspec.analysis.complexity import growth_range
from attnspec.analysis.differences import row_text
from attnspec.analysis.edges import degrees_of, total_edges
from attnspec.analysis.growth import growth_text, size_growth
from attnspec.bind import BindError, integer_of
from attnspec.diagnostics import AttnSpecError, Diagnostic, SpecError
from attnspec.figures import FIGURES
from attnspec.influence import has_mechanism, influence
from attnspec.ir import Claim, Term, inputs_of, leaves
from attnspec.lints import rows_without_keys
from attnspec.patterns import BY_NAME
from attnspec.probes import probes
from attnspec.proofs import is_symmetric, never_reads_later, reads_itself
from attnspec.scalars import ScalarError, evaluate
from attnspec.stack import Stack, TooMuch

if TYPE_CHECKING:
    from attnspec.spec import Spec

LENGTHS = (1, 2, 64, 257, 1024)
"""The lengths at which a claim about every n is checked."""

LONGEST = 4096
"""Claims that need all pairs of a graph written out are checked up to this length."""

GROWTH = (16_384, 65_536, 262_144)
"""The lengths between which `order` compares the edges of graphs with closed forms."""

GROWTH_LOOKED_INTO = (256, 1024, 4096)
"""The same for graphs whose pairs must be looked at."""

_LONG = frozenset(
    "edges degree density rows_nonempty causal reach depth diameter path_length flops bytes subset"
    " ==".split()
)
"""Claims that are checked at lengths above `LONGEST` too, as far as the graphs allow it."""


@dataclass(frozen=True)
class Verdict:
    """What is known of one claim: proven for every n, or checked at `lengths`; where it is refuted,
    `failed_at` says at which of them first, None where that is no matter of a length."""

    claim: Claim
    status: Literal["proven", "checked", "refuted", "unchecked"]
    lengths: tuple[int, ...] = ()
    failed_at: int | None = None
    diagnostics: tuple[Diagnostic, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """As plain data."""
        return {
            "claim": self.claim.text,
            "status": self.status,
            "lengths": list(self.lengths),
            "failed_at": self.failed_at,
        }


def check(spec: Spec) -> list[Diagnostic]:
    """Lints and claims of a spec, in the order of the text; with advice where a claim on reach
    fails."""
    lints = rows_without_keys(Stack(spec), LENGTHS)
    return [*lints, *(d for verdict in spec.verdicts for d in _explained(spec, verdict))]


def judge(spec: Spec) -> list[Verdict]:
    """A verdict on each claim of a spec, in the order of the text."""
    stack = Stack(spec)
    return [verdict_on(claim, stack) for claim in spec.program.claims]


def _explained(spec: Spec, verdict: Verdict) -> tuple[Diagnostic, ...]:
    """The diagnostics of a verdict, with advice where one is found."""
    if verdict.failed_at is None:
        return verdict.diagnostics
    # a claim that fails is rare, and what looks for repairs takes long to load
    from attnspec.advice import advice_for, repairable, words

    if not repairable(verdict.claim):
        return verdict.diagnostics
    advice = advice_for(spec, verdict)
    *others, refuted = verdict.diagnostics
    advised, notes = words(advice)
    return (*others, replace(refuted, help=advised, notes=notes))


# --- claims -----------------------------------------------------------------------------------


def verdict_on(claim: Claim, stack: Stack) -> Verdict:
    """What is known of one claim."""
    # a mechanism has pairs as far as it lets something through
    felt = Stack(influence(stack.spec), stack.inputs) if has_mechanism(stack.program) else stack
    if claim.kind in _OF_REACH:
        stack = felt
    if claim.at is not None:
        lengths = tuple(sorted(set(claim.at)))
    else:
        lengths = () if claim.kind == "order" else tuple(felt.lengths(LENGTHS))
    followed = _follows(claim, stack)
    looked_at: list[int] = []
    found = tuple(dict.fromkeys(_claim(claim, stack, lengths, followed, looked_at)))
    codes = {d.code for d in found}
    if codes - {"A609"}:
        failed = looked_at[-1] if looked_at and "A606" in codes else None
        return Verdict(claim, "refuted", lengths, failed, found)
    if codes:
        return Verdict(claim, "unchecked", lengths, None, found)
    if followed or (claim.kind == "order" and not looked_at):
        return Verdict(claim, "proven")
    return Verdict(claim, "checked", tuple(looked_at))


def _follows(claim: Claim, stack: Stack) -> bool:
    """Whether a claim follows from how the spec is written."""
    if claim.kind in ("subset", "=="):
        return graph_claims.proven(claim, stack.program)
    if claim.kind in _PROOFS:
        return _proven(claim, stack)
    return reach_proofs.proven(claim, stack)


def _claim(
    claim: Claim, stack: Stack, lengths: tuple[int, ...], followed: bool, looked_at: list[int]
) -> Iterator[Diagnostic]:
    """What is wrong with a claim, or keeps it from being checked; `looked_at` gets the lengths at
    which that was seen."""
    about_graphs = claim.kind in ("subset", "==")
    if followed and not about_graphs:
        return
    reason = stack.unknown if not about_graphs else _unknown_terms(claim)
    if claim.kind in _OF_COST and has_mechanism(stack.program):
        # formulas say what mechanisms cost, or what is missing
        reason = None
    if claim.kind == "causal" and reason is not None:
        yield from _causal_in_doubt(claim, stack, looked_at)
        return
    if claim.kind == "order":
        yield from _order(claim, stack, reason, looked_at)
        return
    if reason is not None:
        if not followed:
            yield _unchecked(claim, reason)
        return
    if not lengths:
        listed = ", ".join(f"{n:,}" for n in LENGTHS)
        yield _unchecked(claim, f"the spec has none of the lengths {listed}")
    elif claim.at is None and stack.program.grid is None and len(lengths) < len(LENGTHS):
        missing = ", ".join(f"{n:,}" for n in LENGTHS if n not in lengths)
        yield _unchecked(claim, f"a size has no value at n = {missing}")
    for n in lengths:
        if n > LONGEST and claim.kind not in _LONG:
            yield _unchecked(claim, f"lengths above {LONGEST:,} are not looked into, got n = {n:,}")
            continue
        looked_at.append(n)
        try:
            if followed:
                # graphs that have no size at some length are no graphs there
                graph_claims.relations(claim, stack.situation(n))
                continue
            counterexample = _CHECKS[claim.kind](claim, stack, n)
        except TooMuch as error:
            yield _unchecked(claim, str(error))
            continue
        except SpecError as error:
            yield from error.diagnostics
            return
        except (AttnSpecError, ScalarError) as error:
            yield Diagnostic("A608", f"`{claim.text}` cannot be checked: {error}", claim.span)
            return
        if counterexample is not None:
            yield _refuted(claim, n, counterexample)
            return


def _causal_in_doubt(claim: Claim, stack: Stack, looked_at: list[int]) -> Iterator[Diagnostic]:
    """`causal` of a spec whose pairs are not all known: a leak that some input shows refutes it."""
    fixed = stack.fixed_length()
    doubt = f"{stack.unknown}"
    for n in claim.at or (LENGTHS if fixed is None else (fixed,)):
        looked_at.append(n)
        try:
            counterexample = claims.causal(stack, n)
        except TooMuch as error:
            doubt = str(error)
            continue
        except AttnSpecError:
            # a size without a value at this n, or a grid of another length
            continue
        if counterexample is not None:
            yield _refuted(claim, n, counterexample)
            return
        doubt = ""
    if doubt:
        yield _unchecked(claim, doubt)


def _refuted(claim: Claim, n: int, counterexample: str) -> Diagnostic:
    message = f"`{claim.text}` does not hold at n = {n}: {counterexample}"
    return Diagnostic("A606", message, claim.span)


def _proven(claim: Claim, stack: Stack) -> bool:
    if claim.kind == "causal" and stack.program.causal:
        # a mechanism without a causal form was refused before
        return True
    if claim.kind == "symmetric" and stack.program.causal:
        # k <= q is intersected with every graph, and is not symmetric
        return False
    if claim.kind == "rows_nonempty" and stack.program.extra_tokens:
        # patterns on a grid leave out the tokens before it
        return False
    graphs = [attend.graph for attend in stack.program.attends]
    return all(graph is not None and _PROOFS[claim.kind](graph) for graph in graphs) and not any(
        attend.mechanism for attend in stack.program.attends
    )


def _order(
    claim: Claim, stack: Stack, reason: str | None, looked_at: list[int]
) -> Iterator[Diagnostic]:
    """Growth as it follows from how the spec is written, else judged by counting: edges over the
    bound may not grow from length to length."""
    if stack.program.grid is not None:
        yield _unchecked(claim, "positions on a grid have one length")
        return
    allowed, known = size_growth(claim.value or 0), growth_range(stack)
    if allowed is not None and known.high <= allowed:
        return
    if allowed is not None and reason is None and known.low > allowed:
        message = f"`{claim.text}` does not hold: the edges grow as {growth_text(known.low)}"
        yield Diagnostic("A606", message, claim.span)
        return
    if reason is not None:
        yield _unchecked(claim, reason)
        return
    parts = []
    growth = GROWTH if _in_closed_form(stack, GROWTH) else GROWTH_LOOKED_INTO
    for n in growth:
        looked_at.append(n)
        try:
            bound = evaluate(claim.value or 0, stack.situation(n).values)
            parts.append(total_edges(stack, n) / float(bound))
        except TooMuch as error:
            yield _unchecked(claim, str(error))
            return
        except (AttnSpecError, ScalarError, ZeroDivisionError) as error:
            yield Diagnostic("A608", f"`{claim.text}` cannot be checked: {error}", claim.span)
            return
    if parts[-1] > 1.1 * parts[-2]:
        figures = ", ".join(f"{part:.3g}" for part in parts)
        lengths = ", ".join(f"{n:,}" for n in growth)
        yield Diagnostic(
            "A606",
            f"`{claim.text}` does not hold: edges over the bound grow, {figures} at n = {lengths}",
            claim.span,
        )


def _in_closed_form(stack: Stack, lengths: tuple[int, ...]) -> bool:
    """Whether the edges can be counted without looking at pairs."""
    try:
        return all(
            relation.progressions(probes(n, 3), n) is not None
            for n in lengths
            for _, _, relation in stack.bound(n).found
        )
    except AttnSpecError:
        return False


def _unchecked(claim: Claim, reason: str) -> Diagnostic:
    return Diagnostic("A609", f"`{claim.text}` is not checked: {reason}", claim.span, "warning")


def _unknown_terms(claim: Claim) -> str | None:
    for term in claim.terms:
        if inputs_of(term):
            return "its pairs depend on run-time inputs"
        for leaf in leaves(term):
            if getattr(BY_NAME[leaf.pattern], "data_dependent", False):
                return f"`{leaf.pattern}` is decided by the data"
    return None


def _rows_nonempty(claim: Claim, stack: Stack, n: int) -> str | None:
    for layer, head, relation in stack.relations(n):
        empty = np.flatnonzero(degrees_of(relation, n) == 0)
        if len(empty):
            slot = slot_text(stack, layer, head)
            return f"query {empty[0]} has no key{slot}"
    return None


def _symmetric(claim: Claim, stack: Stack, n: int) -> str | None:
    for layer, head, _ in stack.relations(n):
        graph = stack.spec.mask(n, layer, head)
        one_way = graph & ~graph.T
        if one_way.any():
            q, k = divmod(int(one_way.argmax()), n)
            return f"{q} reads {k}, but {k} does not read {q}{slot_text(stack, layer, head)}"
    return None


def _reach(claim: Claim, stack: Stack, n: int) -> str | None:
    layers = integer_of(claim.value or 0, stack.situation(n), "layers", claim.span)
    if layers < 0:
        raise BindError(f"`layers` must be at least 0, got {layers} at n = {n}", claim.span)
    return claims.reaches(stack, n, layers)


def _about_graphs(claim: Claim, stack: Stack, n: int) -> str | None:
    return graph_claims.counterexample(claim, stack.situation(n))


def _figure(claim: Claim, stack: Stack, n: int) -> str | None:
    value = _value(claim, stack, n)
    found = FIGURES[claim.kind](stack, n)
    if COMPARE[claim.compare or "=="](found, value):
        return None
    too_many = claim.kind == "degree" and claim.compare in ("<", "<=")
    row = _longest_row(stack, n) if too_many else ""
    return f"it is {shown(found)}, compared with {shown(value)}{row}"


def _longest_row(stack: Stack, n: int) -> str:
    """The first row with the most keys, as `: query 9 reads 0..9 in head 1`."""
    most = max(
        stack.bound(n).found, key=lambda each: int(degrees_of(each[2], n).max()), default=None
    )
    if most is None:
        return ""
    layer, head, relation = most
    query = int(degrees_of(relation, n).argmax())
    return f": query {query} reads {row_text(relation, query, n)}{slot_text(stack, layer, head)}"


def _distance(claim: Claim, stack: Stack, n: int) -> str | None:
    value = _value(claim, stack, n)
    return claims.compared(stack, n, claim.kind, claim.compare or "==", value)


def _value(claim: Claim, stack: Stack, n: int) -> float:
    """What a figure is compared with."""
    value = evaluate(claim.value if claim.value is not None else 0, stack.situation(n).values)
    return value.item() if isinstance(value, np.ndarray) else value


_PROOFS: dict[str, Callable[[Term], bool]] = {
    "causal": never_reads_later,
    "rows_nonempty": reads_itself,
    "symmetric": is_symmetric,
}

_OF_REACH = ("reach", "depth", "diameter", "path_length")
"""Claims about what is felt, also through mechanisms."""

_OF_COST = ("flops", "bytes")

_CHECKS: dict[str, Callable[[Claim, Stack, int], str | None]] = {
    "causal": lambda claim, stack, n: claims.causal(stack, n),
    "rows_nonempty": _rows_nonempty,
    "symmetric": _symmetric,
    "reach": _reach,
    "subset": _about_graphs,
    "==": _about_graphs,
    **dict.fromkeys(FIGURES, _figure),
    **dict.fromkeys(("depth", "diameter", "path_length"), _distance),
}
