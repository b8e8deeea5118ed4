"""How time grows with the length: a straight line through the logarithms."""

from __future__ import annotations

from attnspec.timing import Timing, alternate
from benchmarks.cases import CASES, MECHANISMS, Settings
from benchmarks.efficiency import forward
from benchmarks.measuring import Json, exponent, planned

LONGEST = 30.0
"""Seconds for one call, as predicted, above which a length is left out."""


def measure(settings: Settings) -> dict[str, Json]:
    """A row for each pattern: time at each length, and the exponents of time and pairs."""
    timed: dict[str, dict[int, Timing]] = {name: {} for name in settings.growing}
    skipped: dict[str, list[Json]] = {name: [] for name in settings.growing}
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
    return {
        "lengths": [*settings.growth],
        "rows": [_row(name, found, skipped[name]) for name, found in timed.items()],
    }


def _row(name: str, timed: dict[int, Timing], skipped: list[Json]) -> dict[str, Json]:
    lengths = list(timed)
    seconds = [found.median for found in timed.values()]
    # a mechanism has no pairs
    pairs = CASES[name] not in MECHANISMS
    edges = [CASES[name].edges(n) for n in lengths] if pairs else []
    enough = len(lengths) > 1
    return {
        "name": name,
        "target": CASES[name].slowest,
        "lengths": [*lengths],
        "seconds": [*seconds],
        "edges": [*edges],
        "skipped": skipped,
        "exponent": exponent(lengths, seconds) if enough else None,
        "exponent_edges": exponent(lengths, edges) if enough and pairs else None,
    }
