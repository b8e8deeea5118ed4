"""The figures of a report: their names, what they are called, and how each is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attnspec.analysis import figure_graph, graph_heads
from attnspec.analysis.edges import edges_of
from attnspec.analysis.figure_costs import (
    break_even,
    cost,
    eviction,
    kv_cache,
    kv_cache_bytes,
)
from attnspec.analysis.quality import Figure
from attnspec.analysis.unknown import Unknown

if TYPE_CHECKING:
    from attnspec.analysis.report import Report

LONGEST_REACH = 16_384
"""Distances of all pairs are printed up to this length without being asked for."""

LONGEST_SPECTRUM = 4096
"""Spectra are printed up to this length without being asked for."""

REACH = frozenset("depth diameter path_length universal clustering".split())
SPECTRUM = frozenset("spectral_gap conductance mixing_steps diameter_bound ramanujan".split())


@dataclass(frozen=True)
class Entry:
    """A figure: its name, its title in print, the group it stands in, and how it is found.

    `of` raises Unknown with a reason where it is not known. `kind` says how it is printed.
    """

    name: str
    title: str
    group: str
    of: Callable[[Report], Figure[Any]]
    kind: str = "number"


# --- counts ---------------------------------------------------------------------------------------


def _edges(report: Report) -> Figure[Any]:
    if not report.n:
        return Figure(0)
    total = 0
    bound = _bound(report)
    for index, (_, _, relation) in enumerate(bound.found):
        total += sum(row.get(index, 0) for row in bound.rows) * edges_of(relation, report.n)
    return Figure(total)


def _bound(report: Report) -> Any:
    _ = report.graphs
    return report.stack.bound(report.n)


def _density(report: Report) -> Figure[Any]:
    slots = (report.spec.heads or 1) * report.spec.layers
    edges = report.figure("edges")
    if isinstance(edges, Unknown):
        raise edges
    return Figure(edges.value / (report.n * report.n * slots) if report.n else 0.0)


def _degrees(report: Report) -> list[np.ndarray]:
    from attnspec.analysis.edges import degrees_of

    return [degrees_of(relation, report.n) for _, _, relation in report.graphs]


def _degree(report: Report) -> Figure[Any]:
    return Figure(max((int(found.max()) for found in _degrees(report)), default=0))


def _min_degree(report: Report) -> Figure[Any]:
    return Figure(min((int(found.min()) for found in _degrees(report)), default=0))


def _mean_degree(report: Report) -> Figure[Any]:
    density = report.figure("density")
    if isinstance(density, Unknown):
        raise density
    return Figure(density.value * report.n)


def _readers(report: Report) -> Figure[Any]:
    return Figure(max((counts.readers for counts in report.per_graph), default=0))


def _min_readers(report: Report) -> Figure[Any]:
    return Figure(min((counts.min_readers for counts in report.per_graph), default=0))


def _empty_rows(report: Report) -> Figure[Any]:
    return _over_slots(report, "empty_rows")


def _unread_keys(report: Report) -> Figure[Any]:
    return _over_slots(report, "unread_keys")


def _over_slots(report: Report, name: str) -> Figure[Any]:
    graphs = report.per_graph
    if not report.n:
        return Figure(0)
    slots = (index for row in _bound(report).slots for index in row)
    return Figure(sum(getattr(graphs[index], name) for index in slots))


def _rows_nonempty(report: Report) -> Figure[Any]:
    return Figure(all(bool((found > 0).all()) for found in _degrees(report)))


def _causal(report: Report) -> Figure[Any]:
    from attnspec.analysis.leaks import leak

    if not report.n:
        return Figure(True)
    found = leak(report.stack, report.n)
    if found.value is None:
        return Figure(True, found.quality, found.note)
    where = f", where {found.value.where}" if found.value.where else ""
    note = f"query {found.value.query} reads the later key {found.value.key}{where}"
    return Figure(False, found.quality, note)


def _symmetric(report: Report) -> Figure[Any]:
    from attnspec.analysis.mirrored import asymmetry

    certain = True
    for layer, head, relation in report.graphs:
        found, sure = asymmetry(relation, report.n)
        if found:
            return Figure(False, "exact", f"layer {layer}, head {head}")
        certain &= sure
    if certain:
        return Figure(True)
    return Figure(True, "estimate", "by random sums, wrong with a probability below 2**-60")


# --- growth ---------------------------------------------------------------------------------------


def _order(report: Report) -> Figure[Any]:
    from attnspec.analysis.complexity import order

    return _or_unknown(order(report.stack, max(1, report.n)))


def _edges_formula(report: Report) -> Figure[Any]:
    from attnspec.analysis.complexity import edges_formula

    return _or_unknown(edges_formula(report.stack, max(1, report.n)))


def _or_unknown(found: Figure[Any]) -> Figure[Any]:
    if found.value is None:
        raise Unknown(found.note)
    return found


# --- reach ----------------------------------------------------------------------------------------


def _reach(name: str) -> Callable[[Report], Figure[Any]]:
    def of(report: Report) -> Figure[Any]:
        from attnspec.analysis import reach

        if report.influence.unknown is not None:
            raise Unknown(report.influence.unknown)
        if not report.n:
            return Figure(0)
        found: Figure[Any] = getattr(reach, name)(report.influence, report.n)
        notes = [found.note, graph_heads.mechanism_note(report)]
        return replace(found, note="; ".join(note for note in notes if note))

    return of


ENTRIES: tuple[Entry, ...] = (
    Entry("edges", "pairs", "reads", _edges, "count"),
    Entry("density", "density", "reads", _density, "share"),
    Entry("degree", "keys of a query, most", "reads", _degree, "count"),
    Entry("min_degree", "keys of a query, fewest", "reads", _min_degree, "count"),
    Entry("mean_degree", "keys of a query, mean", "reads", _mean_degree),
    Entry("graph_edges", "pairs of graph heads", "reads", graph_heads.edges, "count"),
    Entry("graph_density", "density of these", "reads", graph_heads.density, "share"),
    Entry("graph_degree", "keys of a query, most", "reads", graph_heads.degree, "count"),
    Entry(
        "graph_min_degree",
        "keys of a query, fewest",
        "reads",
        graph_heads.min_degree,
        "count",
    ),
    Entry("readers", "readers of a key, most", "reads", _readers, "count"),
    Entry("min_readers", "readers of a key, fewest", "reads", _min_readers, "count"),
    Entry("empty_rows", "queries without a key", "reads", _empty_rows, "count"),
    Entry("unread_keys", "keys that nobody reads", "reads", _unread_keys, "count"),
    Entry("unread_share", "read by no other", "reads", figure_graph.unread_share, "share"),
    Entry("rows_nonempty", "every query has a key", "reads", _rows_nonempty, "truth"),
    Entry("causal", "causal", "reads", _causal, "truth"),
    Entry("symmetric", "symmetric", "reads", _symmetric, "truth"),
    Entry("order", "order", "grows", _order, "formula"),
    Entry("edges_formula", "pairs at n", "grows", _edges_formula, "formula"),
    Entry("depth", "layers until all pairs are joined", "reaches", _reach("depth"), "never"),
    Entry("diameter", "diameter", "reaches", _reach("diameter"), "never"),
    Entry("path_length", "mean path", "reaches", _reach("path_length"), "never"),
    Entry("star", "star in every layer", "reaches", figure_graph.star, "truth"),
    Entry("universal", "universal approximator", "reaches", figure_graph.universal, "truth"),
    Entry("spectral_gap", "spectral gap", "mixes", figure_graph.spectral_gap),
    Entry("conductance", "conductance", "mixes", figure_graph.conductance),
    Entry("mixing_steps", "steps to mix", "mixes", figure_graph.mixing_steps, "never"),
    Entry("diameter_bound", "diameter by the gap", "mixes", figure_graph.diameter_bound, "never"),
    Entry("ramanujan", "eigenvalue over the best", "mixes", figure_graph.ramanujan),
    Entry("clustering", "clustering", "mixes", figure_graph.clustering),
    Entry("flops", "operations", "costs", cost("flops"), "flops"),
    Entry("useful_flops", "of these useful", "costs", cost("useful_flops"), "flops"),
    Entry("backward_flops", "operations, backward", "costs", cost("backward_flops"), "flops"),
    Entry("bytes", "traffic", "costs", cost("bytes"), "bytes"),
    Entry("peak_memory", "peak memory", "costs", cost("peak_memory"), "bytes"),
    Entry("intensity", "operations per byte", "costs", cost("intensity")),
    Entry("break_even", "cheaper than dense from n =", "costs", break_even, "count"),
    Entry("kv_cache", "keys held, most", "generation", kv_cache, "count"),
    Entry("kv_cache_bytes", "cache, all heads", "generation", kv_cache_bytes, "bytes"),
    Entry("eviction", "rule", "generation", eviction, "words"),
)

BY_NAME = {entry.name: entry for entry in ENTRIES}

NAMES = tuple(BY_NAME)

GROUPS = {
    "reads": "What it reads",
    "grows": "How it grows",
    "reaches": "What it reaches",
    "mixes": "How it mixes, pairs taken both ways",
    "costs": "What one layer costs, forward",
    "generation": "What generation holds",
}


def default_names(report: Report) -> tuple[str, ...]:
    """The figures that are printed without being asked for: those that are soon found, and say
    something of this spec."""
    left_out: frozenset[str] = frozenset()
    if not graph_heads.are_mixed(report.spec.program):
        left_out |= frozenset(graph_heads.FIGURES)
    if report.n > LONGEST_REACH:
        left_out |= REACH
    if report.n > LONGEST_SPECTRUM:
        left_out |= SPECTRUM
    return tuple(name for name in NAMES if name not in left_out)


def data_of(found: Figure[Any] | Unknown) -> dict[str, Any]:
    """A figure as plain data."""
    if isinstance(found, Unknown):
        return {"value": None, "quality": None, "note": found.reason}
    value = found.value
    if value is not None and not isinstance(value, bool | int | float | str):
        value = str(value)
    return {"value": value, "quality": found.quality, "note": found.note}
