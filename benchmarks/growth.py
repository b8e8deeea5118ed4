"""How time grows with the length: a straight line through the logarithms.

Graphs whose pairs lie anywhere read rows of keys from memory in no order, which is slower the less
of them fits into the caches. Their rows are also timed alone, gathered edge by edge: the growth of
that attention does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from attnspec.bench.timing import Timing, alternate
from benchmarks.cases import CASES, HEADS, MECHANISMS, SCATTERED, SIZE, Settings
from benchmarks.efficiency import forward
from benchmarks.measuring import Json, exponent, planned, tensors

LONGEST = 30.0
"""Seconds for one call, as predicted, above which a length is left out."""

GATHERED = 1 << 14
"""Rows that are gathered in one go, into a buffer that stays in the cache."""


def measure(settings: Settings) -> dict[str, Json]:
    """A row for each pattern: time at each length, and the exponents of time and pairs."""
    timed: dict[str, dict[int, Timing]] = {name: {} for name in settings.growing}
    skipped: dict[str, list[Json]] = {name: [] for name in settings.growing}
    anywhere = [case.name for case in SCATTERED if case.name in settings.growing]
    floors: dict[str, list[float]] = {name: [] for name in anywhere}
    for n in settings.growth:
        subjects = {}
        for name in settings.growing:
            predicted = planned(CASES[name].spec(n), n)["predicted"]
            if isinstance(predicted, float) and predicted > LONGEST:
                skipped[name].append(n)
            else:
                subjects[name] = forward(CASES[name].spec(n).compile(), n)
        for name, found in alternate(subjects, settings.rounds).items():
            timed[name][n] = found
        alone = {name: gather(name, n) for name in anywhere}
        for name, found in alternate(alone, settings.rounds).items():
            floors[name].append(found.median)
    return {
        "lengths": [*settings.growth],
        "rows": [
            {
                **_row(name, found, skipped[name]),
                "exponent_gathered": _fitted(settings.growth, floors.get(name, ())),
            }
            for name, found in timed.items()
        ],
    }


def gather(name: str, n: int) -> Callable[[], object]:
    """Every key of every edge read once, head by head, and nothing else."""
    spec, (_, k, _) = CASES[name].spec(n), tensors(n)
    heads = [torch.from_numpy(spec.adjacency(n, head=head).indices) for head in range(HEADS)]
    room = torch.empty(GATHERED, SIZE)

    def run() -> object:
        for head, rows in enumerate(heads):
            for part in torch.split(rows, GATHERED):
                torch.index_select(k[0, head], 0, part, out=room[: len(part)])
        return room

    return run


def _fitted(lengths: Sequence[int], seconds: Sequence[float]) -> float | None:
    return exponent(lengths, seconds) if len(seconds) > 1 else None


def _row(name: str, timed: dict[int, Timing], skipped: list[Json]) -> dict[str, Json]:
    lengths = list(timed)
    seconds = [found.median for found in timed.values()]
    # a mechanism has no pairs
    pairs = CASES[name] not in MECHANISMS
    edges = [CASES[name].edges(n) for n in lengths] if pairs else []
    return {
        "name": name,
        "target": CASES[name].slowest,
        "lengths": [*lengths],
        "seconds": [*seconds],
        "edges": [*edges],
        "skipped": skipped,
        "exponent": _fitted(lengths, seconds),
        "exponent_edges": _fitted(lengths, edges),
    }
