"""Lints: queries without a key, graphs without a pair, sizes that have no value at any length,
heads that are told apart and not declared, choices that look ahead or have nothing to choose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from attnspec.analysis.counting.degrees import degrees_of
from attnspec.analysis.reach.leaks import Leak, looks_ahead
from attnspec.check.counterexamples import slot_text
from attnspec.check.places import HEADS
from attnspec.graphs.forms.stability import bound_choice
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.relation import DataDependent, Relation
from attnspec.graphs.stack import Stack, TooMuch
from attnspec.ir.parameters import RelationError
from attnspec.ir.program import Attend, Compound, Program, symbols_of
from attnspec.text.diagnostics import AttnSpecError, Diagnostic, SpecError, count_of
from attnspec.text.source import Span


def rows_without_keys(stack: Stack, checked: tuple[int, ...], advice: str) -> Iterator[Diagnostic]:
    """Warnings of queries and graphs without pairs, `advice` being how they get one; errors where
    none of the lengths that claims are `checked` at has a graph."""
    if stack.unknown:
        return
    yield from _without_length(stack, checked)
    reported: set[int] = set()
    lengths = stack.lengths((64, 257, 1024))
    for n in reversed(lengths):
        try:
            for layer, head, relation in stack.relations(n):
                attend = stack.program.attend(layer, head)
                if attend.span is None or attend.span.start in reported:
                    continue
                slot = slot_text(stack, layer, head)
                extra = stack.program.extra_tokens if stack.program.grid else 0
                rows = _empty_rows(relation, n, attend.span, slot, n == lengths[-1], extra)
                if rows is not None:
                    reported.add(attend.span.start)
                    yield _advised(rows, stack, n, attend, advice)
        except TooMuch:
            continue


def _advised(rows: Diagnostic, stack: Stack, n: int, attend: Attend, advice: str) -> Diagnostic:
    """A warning of queries without a key with what to do, and how many other heads have some."""
    span = attend.span
    if rows.code == "A320" or span is None:
        return rows
    bound = stack.bound(n)
    empty = [
        stack.program.attend(layer, head).span == span
        and getattr(_empty_rows(relation, n, span, "", False, 0), "code", "") == "A901"
        for layer, head, relation in bound.found
    ]
    others = sum(empty[index] for row in bound.slots for index in row) - 1
    kind = "other layer" if stack.program.heads is None else "other head"
    verb = "has" if others == 1 else "have"
    more = (f"{count_of(others, kind)} {verb} queries without a key too",) if others > 0 else ()
    if rows.code == "A902" and isinstance(attend.graph, Compound) and attend.graph.op == "&":
        advice = "`A & B` keeps the pairs that are in both A and B; `A | B` has those in either"
        # `A - B` is `A & ~B` by now
        if "~" not in span.text and any(getattr(x, "op", "") == "~" for x in attend.graph.terms):
            advice = "`A - B` keeps the pairs of A that are not in B"
    return replace(rows, notes=(*rows.notes, *more), help=advice)


def heads_not_declared(program: Program) -> Iterator[Diagnostic]:
    """Warnings of patterns that differ from head to head, where nothing says how many there are."""
    if program.heads is not None:
        return
    for attend in program.attends:
        for leaf in attend.leaves:
            if "head" in symbols_of(leaf):
                yield Diagnostic(
                    "A904",
                    f"`{leaf.pattern}` depends on `head`, {HEADS}",
                    leaf.span,
                    "warning",
                    notes=("claims are about all heads, other reports about head 0 only",),
                    help="add `heads N`",
                )


def choices(program: Program, n: int) -> Iterator[Diagnostic]:
    """Warnings of choices among earlier keys that later ones may change, and of sizes that leave
    them nothing to choose at n positions."""
    choice = looks_ahead(program)
    if choice is not None:
        yield ahead_of(program, choice)
    for attend in dict.fromkeys(program.attends):
        for leaf in attend.leaves:
            if not issubclass(BY_NAME[leaf.pattern], DataDependent):
                continue
            bound = bound_choice(program, leaf, n)
            doubt = "" if bound is None else bound.doubt(n)
            if doubt:
                message = f"`{leaf.pattern}` at n = {n:,} {doubt}"
                yield Diagnostic("A906", message, leaf.span, "warning")


def ahead_of(program: Program, found: Leak) -> Diagnostic:
    """The warning of a choice that looks ahead."""
    layer, head, key = found.steps[0]
    return Diagnostic(
        "A905",
        f"position {found.query} chooses among earlier keys, and the later position {key} may"
        f" change its choice: {found.choice}",
        program.attend(layer, head).span,
        "warning",
        notes=("decoding token by token then gives other results than one call",),
        help="`topk(queries = 1, …)` and `lsh(cut = bucket, …)` choose by earlier tokens alone",
    )


def _empty_rows(
    relation: Relation, n: int, span: Span, slot: str, longest: bool, extra: int
) -> Diagnostic | None:
    try:
        degrees = degrees_of(relation, n)
    except RelationError as error:
        where = f"n = {n:,}"
        message = error.message if where in error.message else f"at {where} {error.message}"
        return Diagnostic("A320", message, span)
    empty = np.flatnonzero(degrees == 0)
    if len(empty) == 0:
        return None
    if len(empty) == n and longest:
        return Diagnostic(
            "A902",
            f"the graph is empty: no query has a key{slot} at the checked length n = {n:,}",
            span,
            "warning",
        )
    rows = ", ".join(str(row) for row in empty[:4]) + (", …" if len(empty) > 4 else "")
    rows += " (extra tokens are not on the grid)" if empty[-1] < extra else ""
    queries = "1 query has" if len(empty) == 1 else f"{len(empty):,} queries have"
    return Diagnostic(
        "A901",
        f"{queries} no key{slot} at the checked length n = {n:,}: q = {rows}",
        span,
        "warning",
        notes=("a query without a key gets output 0 and gradient 0",),
    )


def _without_length(stack: Stack, checked: tuple[int, ...]) -> Iterator[Diagnostic]:
    """What is wrong at the longest length, if the spec has none of the lengths at all."""
    if stack.program.fixed_length is None and not stack.lengths(checked):
        try:
            stack.bound(checked[-1])
        except SpecError as error:
            yield from error.diagnostics
        except AttnSpecError:
            # a grid of another size
            return
