"""Whether the planner chooses well: the time of its choice over that of the best backend.

Whatever cannot be the best is left as soon as that is seen, and what was left out stands in the
row: the part takes minutes, where timing every backend in full takes hours.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from time import perf_counter

import torch

from attnspec.bench.timing import Timing, turns
from attnspec.spec import Spec, parse
from benchmarks.block_plans import spread, static_zoo
from benchmarks.cases import BATCH, CASES, HEADS, SIZE, Settings
from benchmarks.measuring import Json, missing
from benchmarks.random_specs import random_text

AUTO = "auto"

HOPELESS = 10.0
"""How many times the least estimate a backend may be estimated at to be tried."""

SLOWER = 4.0
"""How many times the fastest so far a backend may take to be timed more than once."""

SPENT = 3.0
"""Seconds of timing for one spec, after which no further round begins."""

WHOLE = 240.0
"""Seconds after which no further spec begins."""

Keep = Callable[[dict[str, Json]], None]
"""Takes the figures so far."""


def measure(settings: Settings, keep: Keep) -> dict[str, Json]:
    """A row for each pattern with the seconds of every backend that does not refuse it and may be
    the best; given to `keep` after each row, so that a run that is interrupted keeps what it has.
    """
    start, n = perf_counter(), settings.choices_n
    specs = _specs(settings)
    rows: list[Json] = []
    ratios: dict[str, list[float]] = {}
    for number, (kind, name, spec) in enumerate(specs, 1):
        if perf_counter() - start > WHOLE:
            rows.append({"kind": kind, **missing(name, f"{WHOLE:.0f} s had passed before it")})
            continue
        print(f"\r{number}/{len(specs)} {name[:40]:40}", end="", file=sys.stderr, flush=True)
        row, ratio = _row(name, spec, n, settings.rounds)
        rows.append({"kind": kind, **row})
        if ratio is not None:
            ratios.setdefault(kind, []).append(ratio)
            ratios.setdefault("all", []).append(ratio)
        keep(_figures(n, rows, ratios))
    print("\r" + " " * 56 + "\r", end="", file=sys.stderr)
    return _figures(n, rows, ratios)


def _specs(settings: Settings) -> list[tuple[str, str, Spec]]:
    """What is tried: its kind, its name and the spec, the kinds in turns."""
    n = settings.choices_n
    fitting = [(name, spec) for name, spec in static_zoo() if spec.stack().lengths((n,)) == [n]]
    kinds = {
        "listed": [(name, CASES[name].spec(n)) for name in settings.choices],
        "zoo": spread(fitting, settings.zoo_choices),
        "random": [
            (f"random spec {seed}", parse(random_text(seed)))
            for seed in range(settings.random_choices)
        ],
    }
    longest = max(map(len, kinds.values()))
    return [
        (kind, *specs[place])
        for place in range(longest)
        for kind, specs in kinds.items()
        if place < len(specs)
    ]


def _figures(n: int, rows: list[Json], ratios: Mapping[str, list[float]]) -> dict[str, Json]:
    kinds = [kind for kind in ("listed", "zoo", "random", "all") if kind in ratios]
    return {
        "n": n,
        "rows": [*rows],
        "summary": {
            kind: {
                "count": len(ratios[kind]),
                "median": statistics.median(ratios[kind]),
                "worst": max(ratios[kind]),
            }
            for kind in kinds
        },
    }


def _row(name: str, spec: Spec, n: int, rounds: int) -> tuple[dict[str, Json], float | None]:
    plan = spec.plan(n)
    chosen = {step.chosen.name for step in plan.steps}
    able = [{c.backend.name for c in step.candidates if c.refusal is None} for step in plan.steps]
    predicted = _predicted(spec, n, sorted(set.intersection(*able)))
    least = min(predicted.values(), default=0.0)
    left: dict[str, Json] = {
        backend: f"estimated at {seconds / least:.0f} times the least"
        for backend, seconds in predicted.items()
        if seconds > HOPELESS * least
    }
    # the most likely first, so that the others are left early
    names = sorted(predicted.keys() - left.keys(), key=predicted.__getitem__)
    if len(names) < 2:
        others = "".join(f"; {each} is {why}" for each, why in left.items())
        return missing(name, f"only {', '.join(names) or 'different backends'}{others}"), None
    ours = AUTO if len(chosen) > 1 else next(iter(chosen))
    if ours == AUTO:
        names.insert(0, AUTO)
    seconds, slow = _timed(spec, n, names, rounds)
    best = min(seconds, key=seconds.__getitem__)
    ratio = seconds[ours] / seconds[best]
    row: dict[str, Json] = {
        "name": name,
        "spec": spec.source,
        "chosen": [*sorted(chosen)],
        "best": best,
        "seconds": {**seconds},
        "predicted": {**predicted},
        "ratio": ratio,
        "left_out": {**left, **{each: "timed once: far from the fastest" for each in slow}},
    }
    return row, ratio


def _timed(spec: Spec, n: int, names: list[str], rounds: int) -> tuple[dict[str, float], list[str]]:
    """Median seconds of a call of each backend, and which were called once more than to lay out."""
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, spec.heads or HEADS, n, SIZE)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    subjects: dict[str, Callable[[], object]] = {}
    once: dict[str, float] = {}
    with torch.no_grad():
        for backend in names:
            module = spec.compile(backend=backend)
            module(q, k, v)
            start = perf_counter()
            module(q, k, v)
            once[backend] = perf_counter() - start
            subjects[backend] = lambda module=module: module(q, k, v)  # type: ignore[misc]
        fastest = min(once.values())
        slow = [backend for backend in names if once[backend] > SLOWER * fastest]
        found: dict[str, Timing] = {}
        start = perf_counter()
        for _, found in turns({each: subjects[each] for each in names if each not in slow}, rounds):
            if perf_counter() - start > SPENT and len(found) + len(slow) == len(names):
                break
    return {**once, **{each: timing.median for each, timing in found.items()}}, slow


def _predicted(spec: Spec, n: int, names: list[str]) -> dict[str, float]:
    """Expected seconds of all heads of the first layer, by backend."""
    totals = dict.fromkeys(names, 0.0)
    for step in spec.plan(n).steps:
        if 0 not in step.layers:
            continue
        heads = HEADS if step.heads is None else len(step.heads)
        for candidate in step.candidates:
            if candidate.backend.name in totals:
                totals[candidate.backend.name] += heads * (candidate.seconds or 0.0)
    return totals
