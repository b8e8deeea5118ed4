"""The heads that have a graph and no mechanism: where they stand, and how many pairs they have.

A mechanism has no pairs, so that a stack with one has no number of them; the heads beside it have.
Each function raises Unknown, with the reason, where the pairs are not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnspec.analysis.edges import counts_of, edges_of
from attnspec.analysis.head_counts import HeadCounts, head_counts
from attnspec.analysis.quality import Figure
from attnspec.analysis.unknown import Unknown
from attnspec.influence import has_mechanism
from attnspec.planning import numbers
from attnspec.relations import RelationError

if TYPE_CHECKING:
    from attnspec.analysis.report import Report
    from attnspec.ir import Program

FIGURES = ("graph_edges", "graph_density", "graph_degree", "graph_min_degree")
"""The figures of these heads, which say nothing new where every head has a graph."""


def graph_slots(program: Program) -> tuple[tuple[int, int], ...]:
    """The layers and heads without a mechanism."""
    return tuple(
        (layer, head)
        for layer, row in enumerate(program.slots)
        for head, index in enumerate(row)
        if program.attends[index].mechanism is None
    )


def are_mixed(program: Program) -> bool:
    """Whether some heads have a mechanism and others a graph alone."""
    return has_mechanism(program) and bool(graph_slots(program))


def indices(report: Report) -> dict[tuple[int, int], int]:
    """The graph of each of these heads, as the bound of `Report.influence` numbers them."""
    if report.influence.unknown is not None:
        raise Unknown(report.influence.unknown)
    found = graph_slots(report.spec.program)
    if not found:
        raise Unknown(report.stack.unknown or "no head has a graph")
    if not report.n:
        return {}
    slots = report.influence.bound(report.n).slots
    return {(layer, head): slots[layer][head] for layer, head in found}


def counts_by_head(report: Report) -> dict[tuple[int, int], HeadCounts]:
    """The counts of each of these heads."""
    wanted = indices(report)
    if not has_mechanism(report.spec.program):
        return {slot: report.per_graph[index] for slot, index in wanted.items()}
    try:
        counts = {
            index: head_counts(counts_of(relation, report.n))
            for index, relation in _relations(report, wanted).items()
        }
    except RelationError as error:
        raise Unknown(error.message) from None
    return {slot: counts[index] for slot, index in wanted.items()}


def _relations(report: Report, wanted: dict[tuple[int, int], int]) -> dict[int, Any]:
    if not wanted:
        return {}
    found = report.influence.bound(report.n).found
    return {index: found[index][2] for index in dict.fromkeys(wanted.values())}


def edges(report: Report) -> Figure[Any]:
    """The pairs of these heads together."""
    wanted = indices(report)
    counts = {i: edges_of(each, report.n) for i, each in _relations(report, wanted).items()}
    return Figure(sum(counts[index] for index in wanted.values()), "exact", note(report))


def density(report: Report) -> Figure[Any]:
    """The pairs as a part of n * n for each of these heads."""
    found, n = edges(report), report.n
    slots = len(graph_slots(report.spec.program))
    return replace(found, value=found.value / (n * n * slots) if n else 0.0)


def degree(report: Report) -> Figure[Any]:
    """The most keys of one query in one of these heads."""
    counts = report.counts_by_head.values()
    return Figure(max((each.degree for each in counts), default=0), "exact", note(report))


def min_degree(report: Report) -> Figure[Any]:
    """The fewest."""
    counts = report.counts_by_head.values()
    return Figure(min((each.min_degree for each in counts), default=0), "exact", note(report))


def note(report: Report) -> str:
    """Which heads these are, "" where it is all of them."""
    program = report.spec.program
    if not has_mechanism(program):
        return ""
    slots = set(graph_slots(program))
    return f"graph heads only: {slots_words(_rows(program, slots))}"


def mechanism_note(report: Report) -> str:
    """What mechanisms are taken for where reach is asked for, "" where there is none."""
    program = report.spec.program
    names = dict.fromkeys(a.mechanism.name for a in program.attends if a.mechanism is not None)
    if not names:
        return ""
    verb = "reads" if len(names) == 1 else "read"
    what = "position up to its own" if program.causal else "position"
    return f"{', '.join(f'`{name}`' for name in names)} {verb} every {what}"


def distinct(report: Report) -> list[tuple[str, HeadCounts]]:
    """Each different graph: where it stands, and its counts."""
    counts = report.counts_by_head
    slots: dict[int, set[tuple[int, int]]] = {}
    for slot, index in indices(report).items():
        slots.setdefault(index, set()).add(slot)
    program = report.spec.program
    return [(slots_words(_rows(program, found)), counts[min(found)]) for found in slots.values()]


def _rows(program: Program, slots: set[tuple[int, int]]) -> list[list[bool]]:
    return [
        [(layer, head) in slots for head in range(len(row))]
        for layer, row in enumerate(program.slots)
    ]


def slots_words(rows: Sequence[Sequence[bool]]) -> str:
    """Where some heads stand: `layer 0..3 head 1`, `every layer head 0, 2`; `rows` says for each
    layer which of its heads are meant."""
    heads: dict[tuple[int, ...], list[int]] = {}
    for layer, row in enumerate(rows):
        own = tuple(head for head, meant in enumerate(row) if meant)
        if own:
            heads.setdefault(own, []).append(layer)
    parts = []
    for own, layers in heads.items():
        words = []
        if len(rows) > 1 and len(layers) < len(rows):
            words.append(f"layer {numbers(layers)}")
        if len(rows[0]) > 1:
            every = len(own) == len(rows[layers[0]])
            words.append("every head" if every else f"head {numbers(own)}")
        parts.append(" ".join(words) or "every layer")
    return ", ".join(parts)
