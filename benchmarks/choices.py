"""Whether the planner chooses well: the time of its choice over that of the best backend."""

from __future__ import annotations

import statistics

import torch

from attnspec.spec import Spec, parse
from attnspec.stack import Stack
from attnspec.timing import alternate
from benchmarks.block_plans import spread, static_zoo
from benchmarks.cases import BATCH, CASES, HEADS, SIZE, Settings
from benchmarks.measuring import Json, missing
from benchmarks.random_specs import random_text

AUTO = "auto"

ROUNDS = 3
"""Rounds at most: here a backend may be many times slower than it needs to be."""

HOPELESS = 20.0
"""How many times the least estimate a backend may be estimated at to be tried."""


def measure(settings: Settings) -> dict[str, Json]:
    """A row for each pattern with the seconds of every backend that does not refuse it, and is not
    estimated to be hopeless."""
    n = settings.choices_n
    fitting = [(name, spec) for name, spec in static_zoo() if Stack(spec).lengths((n,)) == [n]]
    kinds = {
        "listed": [(name, CASES[name].spec(n)) for name in settings.choices],
        "zoo": spread(fitting, settings.zoo_choices),
        "random": [
            (f"random spec {seed}", parse(random_text(seed)))
            for seed in range(settings.random_choices)
        ],
    }
    rows: list[Json] = []
    summary: dict[str, Json] = {}
    every: list[float] = []
    for kind, specs in kinds.items():
        ratios = []
        for name, spec in specs:
            row, ratio = _row(name, spec, n, min(ROUNDS, settings.rounds))
            rows.append({"kind": kind, **row})
            if ratio is not None:
                ratios.append(ratio)
        every += ratios
        if ratios:
            summary[kind] = _summary(ratios)
    if every:
        summary["all"] = _summary(every)
    return {"n": n, "rows": rows, "summary": summary}


def _summary(ratios: list[float]) -> dict[str, Json]:
    return {"count": len(ratios), "median": statistics.median(ratios), "worst": max(ratios)}


def _row(name: str, spec: Spec, n: int, rounds: int) -> tuple[dict[str, Json], float | None]:
    plan = spec.plan(n)
    chosen = {step.chosen.name for step in plan.steps}
    able = [{c.backend.name for c in step.candidates if c.refusal is None} for step in plan.steps]
    names = sorted(set.intersection(*able))
    predicted = _predicted(spec, n, names)
    least = min(predicted.values(), default=0.0)
    names = [name for name in names if predicted[name] <= HOPELESS * least]
    if len(names) < 2:
        return missing(name, f"no choice: {', '.join(names) or 'different backends'}"), None
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, spec.heads or HEADS, n, SIZE)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    modules = {backend: spec.compile(backend=backend) for backend in names}
    if len(chosen) > 1:
        modules[AUTO] = spec.compile()
    with torch.no_grad():
        timed = alternate(
            {
                backend: lambda module=module: module(q, k, v)  # type: ignore[misc]
                for backend, module in modules.items()
            },
            rounds,
        )
    ours = AUTO if len(chosen) > 1 else next(iter(chosen))
    best = min(timed, key=lambda backend: timed[backend].median)
    ratio = timed[ours].median / timed[best].median
    seconds: dict[str, Json] = {backend: found.median for backend, found in timed.items()}
    row: dict[str, Json] = {
        "name": name,
        "spec": spec.source,
        "chosen": [*sorted(chosen)],
        "best": best,
        "seconds": seconds,
        "predicted": {**predicted},
        "ratio": ratio,
    }
    return row, ratio


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
