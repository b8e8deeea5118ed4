"""The figures of a report about costs and generation: how each is found.

Each function raises Unknown, with the reason, where its figure is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from attnspec.analysis.cost.kv_cache import KeyCache, cache_of, rule_of
from attnspec.analysis.counting.graph_heads import slots_words
from attnspec.analysis.quality import Figure, Unknown
from attnspec.analysis.reach.leaks import later_pair
from attnspec.graphs.stack import Stack, has_mechanism
from attnspec.ir.crossing import evened
from attnspec.ir.mechanisms import BY_NAME as MECHANISMS
from attnspec.lower.lower import layers_of, require_built
from attnspec.lower.work import mechanism_of
from attnspec.text.diagnostics import SpecError

if TYPE_CHECKING:
    from attnspec.analysis.report.inquiry import Inquiry

# --- cost -----------------------------------------------------------------------------------------


def cost(name: str) -> Callable[[Inquiry], Figure[Any]]:
    """How a figure of `LayerCost` is found."""

    def of(report: Inquiry) -> Figure[Any]:
        _require_running(report)
        from attnspec.analysis.cost.cost import layer_cost

        at = report.stack, report.length, report.steps, report.shape, report.element
        amount = getattr(layer_cost(*at), name)
        if amount is None:
            raise Unknown(report.stack.unknown or "too many pairs to count")
        return Figure(amount, *_cost_quality(report, name))

    return of


def _cost_quality(report: Inquiry, name: str) -> tuple[Any, str]:
    if name == "useful_flops":
        return "exact", ""
    backends = ", ".join(dict.fromkeys(step.backend for step in report.steps))
    note = f"by {backends} on the CPU" if backends else "nothing to run"
    if has_mechanism(report.program):
        return "estimate", f"the products of formulas, {note}"
    if name in ("bytes", "peak_memory", "intensity"):
        return "estimate", note
    qualities = {step.quality for step in report.steps}
    if "estimate" in qualities:
        return "estimate", f"from a survey of tiles, {note}"
    if "bound" in qualities:
        return "bound", f"at most, {note}"
    return "exact", note


def _require_running(report: Inquiry) -> None:
    try:
        require_built(report.program)
    except SpecError as error:
        raise Unknown(error.diagnostics[0].message) from None


def break_even(report: Inquiry) -> Figure[Any]:
    """From which length on the plan beats dense attention."""
    from attnspec.analysis.cost import cost as costs

    _require_running(report)
    if report.program.grid is not None:
        raise Unknown("positions on a grid have one length")
    length = costs.break_even(Stack(evened(report.program)))
    if length is None:
        most = costs.longest_break(report.program)
        raise Unknown(f"dense attention is estimated to be cheaper up to n = {most:,}")
    note = "by the rates of the cost model, forward"
    if has_mechanism(report.program):
        note = "by its products, at the rate of those of dense attention, forward"
    return Figure(length, "estimate", note)


# --- generation -----------------------------------------------------------------------------------


def _caches(report: Inquiry) -> list[KeyCache]:
    later = (later_pair(relation, report.length) for _, _, relation in report.graphs)
    if not report.program.causal and any(pair is not None for pair in later):
        raise Unknown("the spec is not causal")
    return [cache_of(relation, report.length) for _, _, relation in report.graphs]


def _state(report: Inquiry) -> int | None:
    """The numbers that sums of features hold in all heads and layers, None unless every head has a
    mechanism that goes on from such sums."""
    program, n, size = report.program, max(1, report.length), 0
    if not program.causal or any(
        attend.mechanism is None
        or attend.graph is not None
        or not MECHANISMS[attend.mechanism.name].sums
        for attend in program.attends
    ):
        return None
    for (work, heads), layers in layers_of(program, program.head_count, n).items():
        mechanism = mechanism_of(work)
        width = mechanism.feature_width(report.shape.head_dim)
        # behind the sums of values that of the weights, unless nothing is divided
        divided = getattr(mechanism, "normalize", "sum") != "none"
        size += len(heads) * len(layers) * width * (report.shape.head_dim + divided)
    return size


def kv_cache(report: Inquiry) -> Figure[Any]:
    """The most keys that one head holds at one time."""
    if _state(report) is not None:
        return Figure(0, "exact", "sums of features instead")
    return Figure(max((int(cache.live.max(initial=0)) for cache in _caches(report)), default=0))


def kv_cache_bytes(report: Inquiry) -> Figure[Any]:
    """Keys and values of all heads and layers that are held at one time, or sums of features."""
    state = _state(report)
    if state is not None:
        return Figure(state * 4, "exact", "sums of features and values, in float32")
    caches = _caches(report)
    if not report.length:
        return Figure(0)
    live, rows = np.zeros(report.length, np.int64), report.stack.bound(report.length).rows
    for index, cache in enumerate(caches):
        live += sum(row.get(index, 0) for row in rows) * cache.live
    size = int(live.max(initial=0)) * 2 * report.shape.head_dim * report.element
    return Figure(size, "exact", "every head with keys and values of its own")


def eviction(report: Inquiry) -> Figure[Any]:
    """When a key may go, for each different rule where it applies."""
    if _state(report) is not None:
        return Figure("each key goes into sums of one size and is gone")
    caches = _caches(report)
    if not report.length:
        raise Unknown("there is no position")
    rules: dict[str, list[int]] = {}
    for index, cache in enumerate(caches):
        rules.setdefault(rule_of(cache.last_reader), []).append(index)
    if len(rules) == 1:
        return Figure(next(iter(rules)))
    slots = report.stack.bound(report.length).slots
    lines = []
    for rule, graphs in rules.items():
        meant = [[index in graphs for index in row] for row in slots]
        lines.append(f"{slots_words(meant)}: {rule}")
    return Figure("\n".join(lines))
