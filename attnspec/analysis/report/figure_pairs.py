"""The figures of a report about pairs, about growth and about reach: how each is found.

Each function raises Unknown, with the reason, where its figure is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from attnspec.analysis.counting import graph_heads
from attnspec.analysis.counting.degrees import degrees_of, most_keys
from attnspec.analysis.counting.figures import PAIRS
from attnspec.analysis.growth import order as orders
from attnspec.analysis.growth.stable import difference, is_stable, unsteady_choices
from attnspec.analysis.quality import Figure, Unknown
from attnspec.analysis.reach import reach as reaches
from attnspec.analysis.reach.leaks import leak
from attnspec.analysis.reach.mirrored import asymmetry
from attnspec.analysis.spectrum import spectrum
from attnspec.graphs.across import reads_m
from attnspec.graphs.stack import Stack, has_mechanism
from attnspec.ir.crossing import evened
from attnspec.limits import LIMITS

if TYPE_CHECKING:
    from attnspec.analysis.report.inquiry import Inquiry

# --- counts ---------------------------------------------------------------------------------------


def counted(name: str, graph_heads_only: bool = False) -> Callable[[Inquiry], Figure[Any]]:
    """What is counted of the pairs of all heads, or of those that have a graph alone."""

    def of(report: Inquiry) -> Figure[Any]:
        if graph_heads_only:
            bound, note = report.bound_of_graph_heads, graph_heads.note(report)
        elif report.undecided and not has_mechanism(report.program):
            return most(name, report)
        else:
            # raises Unknown where the pairs are not known
            _ = report.graphs
            bound, note = report.stack.bound(report.length), ""
        empty = report.empty or not bound.found
        sides = report.program.crossing
        return Figure(0 if empty else PAIRS[name](bound, report.length, sides), note=note)

    return of


def mean_degree(report: Inquiry) -> Figure[Any]:
    """The mean number of keys of a query in a head."""
    density = report.figure("density")
    if isinstance(density, Unknown):
        raise density
    return replace(density, value=density.value * report.n)


def over_heads(name: str, of: Callable[[Any], int]) -> Callable[[Inquiry], Figure[Any]]:
    """Their most, fewest or sum of what is counted of each head, 0 where there is no position."""

    def found(report: Inquiry) -> Figure[Any]:
        graphs = () if report.empty else report.per_graph
        slots = () if report.empty else report.stack.bound(report.length).slots
        return Figure(of([getattr(graphs[index], name) for row in slots for index in row] or [0]))

    return found


def rows_nonempty(report: Inquiry) -> Figure[Any]:
    """Whether every query has a key in every head."""
    found = (degrees_of(relation, report.length) for _, _, relation in report.graphs)
    queries = report.stack.queries(report.length)
    return Figure(all(bool((degrees[queries] > 0).all()) for degrees in found))


def causal(report: Inquiry) -> Figure[Any]:
    """Whether no position learns of a later one."""
    if not report.length:
        return Figure(True)
    figure = leak(report.stack, report.length)
    found = figure.value
    if found is None:
        return Figure(True, figure.quality, figure.note)
    where = f", {found.where}" if found.where else ""
    note = f"query {found.query} reads the later key {found.key}{where}"
    if found.choice:
        changed = f"the choice of query {found.query} may change with token {found.key}"
        note = f"pairs: yes, choice: no; {changed}, {found.choice}"
    return Figure(False, figure.quality, note)


def stable(report: Inquiry) -> Figure[Any]:
    """Whether rows are the same pairs at every length."""
    program = report.program
    if program.cross:
        if reads_m(program):
            return Figure(False, note="the graph depends on m, the number of queries")
        return Figure(True, note="no graph depends on m, the number of queries")
    if is_stable(program):
        fixed = program.fixed_length is not None
        return Figure(True, note="the grid has one length" if fixed else "proven for every n")
    choice = unsteady_choices(program)
    if choice is not None:
        return Figure(False, note=str(choice[2]))
    longest = min(max(report.length, LIMITS.every_length), LIMITS.longest_stable)
    change = difference(program, longest)
    if change is None:
        return Figure(True, "estimate", f"not proven, the same at lengths up to {longest:,}")
    term = change.fault.term
    return Figure(False, note=f"{change.what}: `{term if len(term) <= 32 else term[:31] + '…'}`")


def symmetric(report: Inquiry) -> Figure[Any]:
    """Whether every graph is its own mirror image."""
    if report.queries != report.n:
        raise Unknown(f"there are {report.queries:,} queries and {report.n:,} keys")
    certain = True
    for layer, head, relation in report.graphs:
        position, sure = asymmetry(relation, report.length)
        if position is not None:
            return Figure(False, "exact", f"layer {layer}, head {head}")
        certain &= sure
    if certain:
        return Figure(True)
    return Figure(True, "estimate", "by random sums, wrong with a probability below 2**-60")


# --- growth ---------------------------------------------------------------------------------------


def order(report: Inquiry) -> Figure[Any]:
    """How fast the edges grow; of two sequences where both are as long."""
    if report.empty:
        raise Unknown("there is no position")
    program, stack = report.program, report.stack
    if program.cross or stack.known:
        # what tensors of one length decided says nothing of others
        stack = Stack(evened(program) if program.cross else program, stack.inputs)
    # a length at which graphs are examined; claims there of every length hold beyond it, too
    found = orders.order(stack, min(report.n, LIMITS.positions), report.elaborated)
    if found.value is None:
        raise Unknown(found.note)
    if program.cross:
        return replace(found, note="; ".join(filter(None, [found.note, "where m = n"])))
    return found


# --- reach ----------------------------------------------------------------------------------------


def reach(name: str) -> Callable[[Inquiry], Figure[Any]]:
    """How a figure of `analysis.reach.reach` is found."""

    def of(report: Inquiry) -> Figure[Any]:
        if report.influence.unknown is not None:
            raise Unknown(report.influence.unknown)
        if not report.length:
            return Figure(0)
        figure: Figure[Any] = getattr(reaches, name)(report.influence, report.length)
        notes = [figure.note, graph_heads.mechanism_note(report)]
        if report.undecided:
            notes.append("at least, as if tensors could choose any pair that is allowed")
            figure = replace(figure, quality="bound")
        return replace(figure, note="; ".join(note for note in notes if note))

    return of


def spectral_gap(report: Inquiry) -> Figure[Any]:
    """1 - |second eigenvalue| of the union of all layers and heads, every pair taken both ways;
    raises Unknown where the pairs are not known."""
    _ = report.graphs
    if not report.length:
        raise Unknown("there is no position")
    return spectrum.spectral_gap(report.stack, report.length)


# --- what tensors decide --------------------------------------------------------------------------


def most(name: str, report: Inquiry) -> Figure[Any]:
    """At most so many edges, so dense, so many keys of a query; raises Unknown for other counts."""
    if name not in ("edges", "density", "degree"):
        raise Unknown(report.stack.unknown or "")
    n, queries = report.length, report.stack.queries(report.length)
    # of heads that are alike there is one array
    bounds = cache(lambda relation: np.minimum(most_keys(relation, n)[queries], report.n))
    rows = []
    for layer, row in enumerate(report.program.slots):
        for head in range(len(row)):
            relation = report.unbound.get((layer, head))
            if relation is None:
                relation = report.stack.relation(n, layer, head)
            rows.append(bounds(relation))
    edges = sum(int(row.sum()) for row in rows)
    if name == "degree":
        return Figure(max(int(row.max(initial=0)) for row in rows), "bound", "at most")
    if name == "edges":
        return Figure(edges, "bound", "at most")
    return Figure(edges / max(1, len(rows) * report.queries * report.n), "bound", "at most")


def choice(report: Inquiry) -> Figure[Any]:
    """What each choice is made by."""
    lines: dict[str, None] = {}
    for leaf in dict.fromkeys(chain.from_iterable(report.choices.values())):
        ahead = leaf.ahead(report.length)
        if leaf.given_choice and ahead is None:
            words = "given by an input"
        elif not report.program.causal and ahead is None:
            limited = leaf.most_keys(report.length) < report.length
            words = "by all tokens" if limited else "by tokens"
        else:
            words = "by what is before a query" if ahead is None else f"looks ahead: {ahead.why}"
        lines[f"{leaf.name}: {words}" + (f"; {leaf.weighs}" if leaf.weighs else "")] = None
    return Figure("\n".join(lines))


def scoring_flops(report: Inquiry) -> Figure[Any]:
    """Operations of the choices of one layer, all heads and samples; the most expensive layer."""
    n, d = report.length, report.shape.head_dim
    layers: dict[int, int] = {}
    heads = report.shape.heads_of(report.program) if report.program.heads is None else 1
    copies = report.shape.batch * heads
    words = set()
    for (layer, _), leaves in report.choices.items():
        operations = [leaf.scoring(n, d) for leaf in leaves]
        layers[layer] = layers.get(layer, 0) + copies * sum(count for count, _ in operations)
        words |= {word for _, word in operations} - {""}
    most = max(layers.values(), default=0)
    return Figure(most, "bound", "; ".join(["at most", *sorted(words)])) if most else Figure(0)
