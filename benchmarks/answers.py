"""How long answers take: counts and hops at a million positions, distances of all pairs, `check`.

Each spec is analysed in a process of its own, so that nothing is known from the one before; the
time to read it and to start the process is not counted. `attnspec check` is timed as a whole
process, with its modules compiled before.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch

from attnspec.spec import parse
from benchmarks.block_plans import FILES, spread, static_zoo
from benchmarks.cases import Settings
from benchmarks.fresh import Arguments, Run, integer, text, whole_process
from benchmarks.measuring import Json, missing

TARGETS = {"counts": 1.0, "hops": 3.0, "diameter": 2.0, "path_length": 2.0, "check": 0.5}
"""The most seconds of each answer; `counts` are `edges` and `degree`."""


CHECKS = 3
"""The most times that each file is checked: a run of all of them takes a minute."""


def measure(settings: Settings, run: Run) -> dict[str, Json]:
    """A row for each static spec of the zoo, and one for each file that is checked."""
    rows: list[Json] = []
    for name, spec in spread(static_zoo(), settings.zoo):
        stack = spec.stack()
        long, short = (stack.lengths((n,)) for n in (settings.plan_n, settings.reach_n))
        if not long or not short:
            rows.append(missing(name, f"it has no length {settings.plan_n}"))
            continue
        arguments: dict[str, Json] = {"text": spec.source, "n": long[0], "reach_n": short[0]}
        found = run("answers", {**arguments, "threads": torch.get_num_threads()})
        rows.append(
            missing(name, found["reason"]) if "reason" in found else {"name": name, **found}
        )
    return {
        "n": settings.plan_n,
        "reach_n": settings.reach_n,
        "targets": dict(TARGETS),
        "rows": rows,
        "check": checks(spread(FILES, settings.zoo), min(settings.rounds, CHECKS)),
    }


def answers_task(arguments: Arguments) -> dict[str, Json]:
    """The seconds of each answer, in the order in which they are asked for."""
    spec = parse(text(arguments, "text"))
    n, reach_n = integer(arguments, "n"), integer(arguments, "reach_n")
    report = spec.analyse(n)
    start = perf_counter()
    edges, degree = report.edges, report.degree
    counted = perf_counter()
    hops = report.hops(n - 1)
    followed = perf_counter()
    short = spec.analyse(reach_n)
    begin = perf_counter()
    diameter = short.diameter
    found = perf_counter()
    mean = short.path_length
    return {
        "n": n,
        "reach_n": reach_n,
        "counts": counted - start,
        "hops": followed - counted,
        "diameter": found - begin,
        "path_length": perf_counter() - found,
        "answers": {
            "edges": edges,
            "degree": degree,
            "most_hops": int(hops.max()),
            "diameter": diameter,
            "path_length": mean,
        },
    }


def checks(files: Sequence[Path], rounds: int) -> list[Json]:
    """For each file the median of the wall-clock seconds of `attnspec check`, in turns."""
    times: dict[Path, list[float]] = {path: [] for path in files}
    # the first run compiles the modules that are not
    for index in range(rounds + 1):
        for path in files:
            seconds = whole_process((sys.executable, "-m", "attnspec", "check", str(path)))
            if index:
                times[path].append(seconds)
    return [{"name": path.stem, "seconds": statistics.median(times[path])} for path in files]
