"""The heads that have a graph and no mechanism: where they stand, and how many pairs they have.

A mechanism has no pairs, so that a stack with one has no number of them; the heads beside it have.
Each function raises Unknown, with the reason, where the pairs are not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnspec.analysis.counting.figures import HeadCounts
from attnspec.graphs.stack import has_mechanism
from attnspec.text.diagnostics import ranges

if TYPE_CHECKING:
    from attnspec.analysis.report.inquiry import Inquiry
    from attnspec.ir.program import Program


def note(report: Inquiry) -> str:
    """Which heads these are, "" where it is all of them."""
    if not has_mechanism(report.program):
        return ""
    return f"graph heads only: {slots_words(_rows(report.program, set(report.graph_slots)))}"


def mechanism_note(report: Inquiry) -> str:
    """What mechanisms are taken for where reach is asked for, "" where there is none."""
    program = report.program
    names = dict.fromkeys(each.name for each in program.mechanisms)
    if not names:
        return ""
    verb = "reads" if len(names) == 1 else "read"
    what = "position up to its own" if program.causal else "position"
    return f"{', '.join(f'`{name}`' for name in names)} {verb} every {what}"


def distinct(report: Inquiry) -> list[tuple[str, HeadCounts]]:
    """Each different graph: where it stands, and its counts."""
    counts = report.counts_by_head
    slots: dict[int, set[tuple[int, int]]] = {}
    for slot, index in report.indices.items():
        slots.setdefault(index, set()).add(slot)
    program = report.program
    return [(slots_words(_rows(program, group)), counts[min(group)]) for group in slots.values()]


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
        distinct_heads = tuple(head for head, meant in enumerate(row) if meant)
        if distinct_heads:
            heads.setdefault(distinct_heads, []).append(layer)
    parts = []
    for distinct_heads, layers in heads.items():
        words = []
        if len(rows) > 1 and len(layers) < len(rows):
            words.append(f"layer {ranges(layers)}")
        if len(rows[0]) > 1:
            every = len(distinct_heads) == len(rows[layers[0]])
            words.append("every head" if every else f"head {ranges(distinct_heads)}")
        parts.append(" ".join(words) or "every layer")
    return "; ".join(parts)
