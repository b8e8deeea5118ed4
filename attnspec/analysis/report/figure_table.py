"""The figures of a report: their names, what they are called, and how each is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attnspec.analysis.counting import graph_heads
from attnspec.analysis.counting.degrees import degrees_of
from attnspec.analysis.counting.figures import PAIRS
from attnspec.analysis.quality import Figure, Unknown
from attnspec.analysis.report import figure_graph
from attnspec.analysis.report.figure_costs import (
    break_even,
    cost,
    eviction,
    kv_cache,
    kv_cache_bytes,
)
from attnspec.graphs.stack import Bound

if TYPE_CHECKING:
    from attnspec.analysis.report.inquiry import Inquiry

LONGEST_REACH = 16_384
"""Distances of all pairs are printed up to this length without being asked for."""

LONGEST_SPECTRUM = 4096
"""Spectra are printed up to this length without being asked for."""

REACH = frozenset("depth diameter path_length universal".split())
SPECTRUM = frozenset("spectral_gap mixing_steps diameter_bound".split())


@dataclass(frozen=True)
class Entry:
    """A figure: its name, its title in print, the group it stands in, and how it is found.

    `of` raises Unknown with a reason where it is not known. `kind` says how it is printed.
    """

    name: str
    title: str
    group: str
    of: Callable[[Inquiry], Figure[Any]]
    kind: str = "number"


# --- counts ---------------------------------------------------------------------------------------


def _counted(name: str) -> Callable[[Inquiry], Figure[Any]]:
    """What is counted of the pairs of all heads."""

    def of(report: Inquiry) -> Figure[Any]:
        bound = _bound(report)
        return Figure(PAIRS[name](bound, report.n) if report.n else 0)

    return of


def _bound(report: Inquiry) -> Bound:
    # raises Unknown where the pairs are not known
    _ = report.graphs
    return report.stack.bound(report.n)


def _degrees(report: Inquiry) -> list[np.ndarray]:
    return [degrees_of(relation, report.n) for _, _, relation in report.graphs]


def _mean_degree(report: Inquiry) -> Figure[Any]:
    density = report.figure("density")
    if isinstance(density, Unknown):
        raise density
    return Figure(density.value * report.n)


def _readers(report: Inquiry) -> Figure[Any]:
    return Figure(max((counts.readers for counts in report.per_graph), default=0))


def _min_readers(report: Inquiry) -> Figure[Any]:
    return Figure(min((counts.min_readers for counts in report.per_graph), default=0))


def _empty_rows(report: Inquiry) -> Figure[Any]:
    return _over_slots(report, "empty_rows")


def _unread_keys(report: Inquiry) -> Figure[Any]:
    return _over_slots(report, "unread_keys")


def _over_slots(report: Inquiry, name: str) -> Figure[Any]:
    graphs = report.per_graph
    if not report.n:
        return Figure(0)
    slots = (index for row in _bound(report).slots for index in row)
    return Figure(sum(getattr(graphs[index], name) for index in slots))


def _rows_nonempty(report: Inquiry) -> Figure[Any]:
    return Figure(all(bool((found > 0).all()) for found in _degrees(report)))


def _causal(report: Inquiry) -> Figure[Any]:
    from attnspec.analysis.reach.leaks import leak

    if not report.n:
        return Figure(True)
    found = leak(report.stack, report.n)
    if found.value is None:
        return Figure(True, found.quality, found.note)
    where = f", where {found.value.where}" if found.value.where else ""
    note = f"query {found.value.query} reads the later key {found.value.key}{where}"
    return Figure(False, found.quality, note)


def _stable(report: Inquiry) -> Figure[Any]:
    from attnspec.analysis.growth.stable import ENOUGH, EVERY, difference, is_stable

    program = report.program
    if is_stable(program):
        fixed = program.fixed_length is not None
        return Figure(True, note="the grid has one length" if fixed else "proven for every n")
    longest = min(max(report.n, EVERY), ENOUGH)
    found = difference(program, longest)
    if found is None:
        return Figure(True, "estimate", f"not proven, the same at lengths up to {longest:,}")
    term = found.fault.term
    return Figure(False, note=f"{found.what}: `{term if len(term) <= 32 else term[:31] + '…'}`")


def _symmetric(report: Inquiry) -> Figure[Any]:
    from attnspec.analysis.reach.mirrored import asymmetry

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


def _order(report: Inquiry) -> Figure[Any]:
    from attnspec.analysis.growth.order import order

    _require_positions(report)
    return _or_unknown(order(report.stack, report.n, report.elaborated))


def _edges_formula(report: Inquiry) -> Figure[Any]:
    from attnspec.analysis.growth.order import edges_formula

    _require_positions(report)
    return _or_unknown(edges_formula(report.stack, report.n))


def _require_positions(report: Inquiry) -> None:
    if not report.n:
        raise Unknown("there is no position")


def _or_unknown(found: Figure[Any]) -> Figure[Any]:
    if found.value is None:
        raise Unknown(found.note)
    return found


# --- reach ----------------------------------------------------------------------------------------


def _reach(name: str) -> Callable[[Inquiry], Figure[Any]]:
    def of(report: Inquiry) -> Figure[Any]:
        from attnspec.analysis.reach import reach

        if report.influence.unknown is not None:
            raise Unknown(report.influence.unknown)
        if not report.n:
            return Figure(0)
        found: Figure[Any] = getattr(reach, name)(report.influence, report.n)
        notes = [found.note, graph_heads.mechanism_note(report)]
        return replace(found, note="; ".join(note for note in notes if note))

    return of


ENTRIES: tuple[Entry, ...] = (
    Entry("edges", "pairs", "reads", _counted("edges"), "count"),
    Entry("density", "density", "reads", _counted("density"), "share"),
    Entry("degree", "keys of a query, most", "reads", _counted("degree"), "count"),
    Entry("min_degree", "keys of a query, fewest", "reads", _counted("min_degree"), "count"),
    Entry("mean_degree", "keys of a query, mean", "reads", _mean_degree),
    Entry("graph_edges", "pairs of graph heads", "reads", graph_heads.counted("edges"), "count"),
    Entry("graph_density", "density of these", "reads", graph_heads.counted("density"), "share"),
    Entry(
        "graph_degree",
        "keys of a query there, most",
        "reads",
        graph_heads.counted("degree"),
        "count",
    ),
    Entry(
        "graph_min_degree",
        "keys of a query there, fewest",
        "reads",
        graph_heads.counted("min_degree"),
        "count",
    ),
    Entry("readers", "readers of a key, most", "reads", _readers, "count"),
    Entry("min_readers", "readers of a key, fewest", "reads", _min_readers, "count"),
    Entry("empty_rows", "queries without a key", "reads", _empty_rows, "count"),
    Entry("unread_keys", "keys that nobody reads", "reads", _unread_keys, "count"),
    Entry("unread_share", "read by no other", "reads", figure_graph.unread_share, "share"),
    Entry("rows_nonempty", "every query has a key", "reads", _rows_nonempty, "truth"),
    Entry("causal", "causal", "reads", _causal, "truth"),
    Entry("stable", "the same rows at every n", "reads", _stable, "truth"),
    Entry("symmetric", "symmetric", "reads", _symmetric, "truth"),
    Entry("order", "order", "grows", _order, "formula"),
    Entry("edges_formula", "pairs at n", "grows", _edges_formula, "formula"),
    Entry("depth", "layers until all pairs are joined", "reaches", _reach("depth"), "never"),
    Entry("diameter", "diameter", "reaches", _reach("diameter"), "never"),
    Entry("path_length", "mean path", "reaches", _reach("path_length"), "never"),
    Entry("star", "star in every layer", "reaches", figure_graph.star, "truth"),
    Entry("universal", "universal approximator", "reaches", figure_graph.universal, "truth"),
    Entry("spectral_gap", "spectral gap", "mixes", figure_graph.spectral_gap),
    Entry("mixing_steps", "steps to mix", "mixes", figure_graph.mixing_steps, "never"),
    Entry("diameter_bound", "diameter by the gap", "mixes", figure_graph.diameter_bound, "never"),
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

OF = {entry.name: entry.of for entry in ENTRIES}
"""By the name of a figure what finds it."""

GROUPS = {
    "reads": "What it reads",
    "grows": "How it grows",
    "reaches": "What it reaches",
    "mixes": "How it mixes, pairs taken both ways",
    "costs": "What one layer costs, forward",
    "generation": "What generation holds",
}


def default_names(report: Inquiry) -> tuple[str, ...]:
    """The figures that are printed without being asked for: those that are soon found, and say
    something of this spec."""
    left_out: frozenset[str] = frozenset()
    if not graph_heads.are_mixed(report.program):
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
