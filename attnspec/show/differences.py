"""Two specs compared, in words."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from rich.text import Text

from attnspec.analysis.counting.differences import Pairs, row_text
from attnspec.check.compare import Comparison
from attnspec.show.panels import places
from attnspec.text.diagnostics import from_to

if TYPE_CHECKING:
    from attnspec.check.compare import Compared

MOST_SAID = 8
"""The most groups of heads that are spoken of one by one."""

_TITLE, _A, _B, _FAINT = "bold", "red", "green", "dim"


class Difference(Comparison):
    """Two specs compared at n positions, as text and in notebooks."""

    def __str__(self) -> str:
        return page(self).plain

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def page(found: Comparison, labels: Sequence[str] = ("", "")) -> Text:
    """The whole comparison; `labels` say where the specs came from."""
    text = Text()
    for side, spec, style, label in zip("ab", (found.a, found.b), (_A, _B), labels, strict=True):
        values = ", ".join(f"{name} = {value}" for name, value in spec.parameters.items())
        text.append(side, style)
        text.append(f"  {spec.program.name}" + (f"({values})" if values else ""), _TITLE)
        text.append(f"  {label}\n" if label else "\n", _FAINT)
    text.append(f"{found.lengths}\n")
    for note in found.notes:
        text.append(f"note: {note}\n")
    # what differs first
    groups = sorted(found.compared, key=lambda one: (one.equal is not False, one.equal is True))
    for one in groups[:MOST_SAID]:
        text.append("\n")
        _append(text, one, found)
    if len(groups) > MOST_SAID:
        text.append(f"\nand {len(groups) - MOST_SAID:,} more groups of heads\n", _FAINT)
    text.rstrip()
    return text


def _append(text: Text, one: Compared, found: Comparison) -> None:
    """What is to be said of some heads."""
    # "" where there is one layer and one head
    where = places(one.slots, {slot for other in found.compared for slot in other.slots})
    text.append(f"{where}: " if where else "")
    if one.alike is not None:
        text.append(one.reason)
        lasting = one.mechanisms is not None and one.mechanisms.lasting
        text.append("\n" if lasting else f", at {found.lengths}\n")
        return
    _append_pairs(text, one, found)
    if one.mechanisms is not None:
        text.append(f"  beside the graph: {one.mechanisms}\n")


def _append_pairs(text: Text, one: Compared, found: Comparison) -> None:
    if one.proven:
        text.append("the same pairs for every n, by their form")
        text.append("\n" if one.in_both is None else f": {one.in_both:,} here\n")
        return
    if one.equal is None:
        text.append(f"not compared: {one.reason}\n")
        return
    if one.equal:
        text.append(f"the same {one.in_both:,} pairs at {found.lengths}")
        if one.differ_at is not None:
            both = "" if found.m is None else "m = "
            text.append(f", but not at {both}n = {one.differ_at:,}\n")
        else:
            text.append("; their forms differ, so other lengths may too\n", _FAINT)
        return
    sides = [("only in a", one.only_in_a, _A), ("only in b", one.only_in_b, _B)]
    counts = [f"{pairs.count:,}" for _, pairs, _ in sides if pairs is not None]
    shared = f"{one.in_both:,}"
    wide = max(len(number) for number in (*counts, shared))
    text.append("they differ\n")
    for (title, pairs, style), count in zip(sides, counts, strict=True):
        text.append(f"  {title}", style)
        text.append(f"  {count:>{wide}}  {_examples(pairs)}".rstrip() + "\n")
    text.append(f"  in both    {shared:>{wide}}\n")
    firsts = [pairs.first for _, pairs, _ in sides if pairs is not None and pairs.first is not None]
    if one.relations is not None and firsts:
        query = min(firsts)
        here, there = (row_text(relation, query, found.length) for relation in one.relations)
        text.append(f"  query {query:,} reads {here} in a, {there} in b\n")


def _examples(pairs: Pairs | None) -> str:
    """`of 12 queries, 3 to 90: (3, 0), (3, 1), …`."""
    if not pairs or pairs.first is None or pairs.last is None:
        return ""
    span = from_to(pairs.first, pairs.last)
    queries = f"of {pairs.queries:,} queries, {span}" if pairs.queries > 1 else f"of query {span}"
    return f"{queries}: {pairs.shown}"
