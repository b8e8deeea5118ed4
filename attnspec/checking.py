"""What `check` says of a spec: rows without keys, empty graphs, and claims that do not hold.

A claim that follows from how the spec is written is proven for every n and every input. Any other
claim without `at` is checked at `LENGTHS`, no more; diagnostics say at which length it failed.
Claims that need figures this version does not have are reported as not checked (A609), never passed
over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from attnspec.analysis import claims
from attnspec.analysis.claims import COMPARE, shown, slot_text
from attnspec.analysis.complexity import growth_range
from attnspec.analysis.edges import total_edges
from attnspec.analysis.growth import growth_text, size_growth
from attnspec.bind import BindError, Situation, bind_attended, integer_of
from attnspec.diagnostics import AttnSpecError, Diagnostic, SpecError
from attnspec.figures import FIGURES
from attnspec.ir import Claim, Term, inputs_of, leaves
from attnspec.patterns import BY_NAME
from attnspec.proofs import is_symmetric, never_reads_later, reads_itself
from attnspec.relations import Relation, RelationError
from attnspec.scalars import ScalarError, evaluate
from attnspec.source import Span
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
    "edges degree density rows_nonempty causal reach depth diameter path_length flops bytes".split()
)
"""Claims that are checked at lengths above `LONGEST` too, as far as the graphs allow it."""


def check(spec: Spec) -> list[Diagnostic]:
    """Lints and claims of a spec, in the order of the text."""
    stack = Stack(spec)
    found = list(_rows_without_keys(stack))
    for claim in spec.program.claims:
        found.extend(_claim(claim, stack))
    return found


def _rows_without_keys(stack: Stack) -> Iterator[Diagnostic]:
    if stack.unknown:
        return
    yield from _without_length(stack)
    reported: set[int] = set()
    lengths = stack.lengths((64, 257, 1024))
    for n in reversed(lengths):
        try:
            for layer, head, relation in stack.relations(n):
                attend = stack.program.attend(layer, head)
                if attend.span is None or attend.span.start in reported:
                    continue
                slot = slot_text(stack, layer, head)
                found = _empty_rows(relation, n, attend.span, slot, n == lengths[-1])
                if found is not None:
                    reported.add(attend.span.start)
                    yield found
        except TooMuch:
            continue


def _empty_rows(
    relation: Relation, n: int, span: Span, slot: str, longest: bool
) -> Diagnostic | None:
    try:
        degrees = relation.degrees(n)
    except RelationError as error:
        message = error.message if f"n = {n}" in error.message else f"{error.message} at n = {n}"
        return Diagnostic("A320", message, span)
    empty = np.flatnonzero(degrees == 0)
    if len(empty) == 0:
        return None
    if len(empty) == n and longest:
        return Diagnostic("A902", f"this graph has no pairs at n = {n}{slot}", span, "warning")
    rows = ", ".join(str(row) for row in empty[:4]) + (", …" if len(empty) > 4 else "")
    return Diagnostic(
        "A901",
        f"{len(empty)} of {n} queries have no key{slot}: {rows}",
        span,
        "warning",
        notes=("a query without a key gets output 0 and gradient 0",),
        help="`| self` gives every query itself",
    )


def _without_length(stack: Stack) -> Iterator[Diagnostic]:
    """What is wrong at the longest length, if the spec has none of the lengths at all."""
    if stack.fixed_length() is None and not stack.lengths(LENGTHS):
        try:
            stack.bound(LENGTHS[-1])
        except SpecError as error:
            yield from error.diagnostics
        except AttnSpecError:
            # a grid of another size
            return


# --- claims -----------------------------------------------------------------------------------


def _claim(claim: Claim, stack: Stack) -> Iterator[Diagnostic]:
    if claim.kind in _PROOFS and _proven(claim, stack):
        return
    reason = stack.unknown if claim.kind not in ("subset", "==") else _unknown_terms(claim)
    if claim.kind == "causal" and reason is not None:
        yield from _causal_in_doubt(claim, stack)
        return
    if claim.kind == "order":
        yield from _order(claim, stack, reason)
        return
    if reason is not None:
        yield _unchecked(claim, reason)
        return
    lengths = stack.lengths(LENGTHS) if claim.at is None else sorted(set(claim.at))
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
        try:
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


def _causal_in_doubt(claim: Claim, stack: Stack) -> Iterator[Diagnostic]:
    """`causal` of a spec whose pairs are not all known: a leak that some input shows refutes it."""
    fixed = stack.fixed_length()
    doubt = f"{stack.unknown}"
    for n in claim.at or (LENGTHS if fixed is None else (fixed,)):
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


def _order(claim: Claim, stack: Stack, reason: str | None) -> Iterator[Diagnostic]:
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
        try:
            bound = evaluate(claim.value or 0, _situation(stack, n).values)
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
            relation.progressions(np.unique([0, n // 2, n - 1]), n) is not None
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
        empty = np.flatnonzero(relation.degrees(n) == 0)
        if len(empty):
            slot = slot_text(stack, layer, head)
            return f"query {empty[0]} has no key{slot}"
    return None


def _causal(claim: Claim, stack: Stack, n: int) -> str | None:
    return claims.causal(stack, n)


def _symmetric(claim: Claim, stack: Stack, n: int) -> str | None:
    for layer, head, _ in stack.relations(n):
        graph = stack.spec.adjacency(n, layer, head).astype(np.int8)
        q, k = (graph - graph.T > 0).nonzero()
        if len(q):
            slot = slot_text(stack, layer, head)
            return f"{q[0]} reads {k[0]}, but {k[0]} does not read {q[0]}{slot}"
    return None


def _reach(claim: Claim, stack: Stack, n: int) -> str | None:
    layers = integer_of(claim.value or 0, _situation(stack, n), "layers", claim.span)
    if layers < 0:
        raise BindError(f"`layers` must be at least 0, got {layers} at n = {n}", claim.span)
    return claims.reaches(stack, n, layers)


def _about_terms(claim: Claim, stack: Stack, n: int) -> str | None:
    at = _situation(stack, n)
    first, second = (_mask(term, at) for term in claim.terms)
    missing = first & ~second
    q, k = np.nonzero(missing)
    if len(q):
        return f"({q[0]}, {k[0]}) is only in the first graph"
    if claim.kind == "==":
        q, k = np.nonzero(second & ~first)
        if len(q):
            return f"({q[0]}, {k[0]}) is only in the second graph"
    return None


def _mask(term: Term, at: Situation) -> np.ndarray:
    relation = bind_attended(term, at)
    mask = np.zeros((at.n, at.n), bool)
    for first, last in relation.chunks(at.n):
        mask[relation.rows(first, last, at.n)] = True
    return mask


def _situation(stack: Stack, n: int) -> Situation:
    return Situation(
        n=n,
        patterns=BY_NAME,
        layers=stack.spec.layers,
        heads=stack.spec.heads,
        causal=stack.program.causal,
        grid=stack.spec.grid(n),
        extra_tokens=stack.program.extra_tokens,
    )


def _figure(claim: Claim, stack: Stack, n: int) -> str | None:
    value = _value(claim, stack, n)
    found = FIGURES[claim.kind](stack, n)
    if COMPARE[claim.compare or "=="](found, value):
        return None
    return f"it is {shown(found)}, compared with {shown(value)}"


def _distance(claim: Claim, stack: Stack, n: int) -> str | None:
    value = _value(claim, stack, n)
    return claims.compared(stack, n, claim.kind, claim.compare or "==", value)


def _value(claim: Claim, stack: Stack, n: int) -> float:
    """What a figure is compared with."""
    value = evaluate(claim.value if claim.value is not None else 0, _situation(stack, n).values)
    return value.item() if isinstance(value, np.ndarray) else value


_PROOFS: dict[str, Callable[[Term], bool]] = {
    "causal": never_reads_later,
    "rows_nonempty": reads_itself,
    "symmetric": is_symmetric,
}

_CHECKS: dict[str, Callable[[Claim, Stack, int], str | None]] = {
    "causal": _causal,
    "rows_nonempty": _rows_nonempty,
    "symmetric": _symmetric,
    "reach": _reach,
    "subset": _about_terms,
    "==": _about_terms,
    **dict.fromkeys(FIGURES, _figure),
    **dict.fromkeys(("depth", "diameter", "path_length"), _distance),
}
