"""Timing in turns, facts about the machine, and the file of figures."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from math import exp, log
from pathlib import Path
from time import perf_counter

import torch

import attnspec
from attnspec.spec import Spec
from benchmarks.cases import BATCH, HEADS, SIZE

Json = bool | int | float | str | None | list["Json"] | dict[str, "Json"]
"""A JSON value."""

LEAST = 0.05
"""Seconds that a subject is timed for in a round, as long as `MOST_CALLS` are not reached."""

MOST_CALLS = 8
"""Calls of one subject in a round."""

PACKAGES = ("torch", "numpy", "transformers", "local-attention")
"""Whose versions stand beside the figures."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median, the extremes, and over how many calls."""

    median: float
    least: float
    most: float
    calls: int

    def data(self) -> dict[str, Json]:
        return {**asdict(self)}


def alternate(subjects: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Time subjects in turns, so that what slows the machine for a while slows all of them.

    Every subject is called once before; short ones several times in a round.
    """
    if rounds < 1:
        raise ValueError(f"one round at least is needed, got {rounds}")
    calls = {}
    for name, subject in subjects.items():
        subject()
        start = perf_counter()
        subject()
        once = max(perf_counter() - start, 1e-9)
        calls[name] = max(1, min(MOST_CALLS, round(LEAST / once)))
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, subject in subjects.items():
            gc.collect()
            for _ in range(calls[name]):
                start = perf_counter()
                subject()
                times[name].append(perf_counter() - start)
    return {
        name: Timing(statistics.median(found), min(found), max(found), len(found))
        for name, found in times.items()
    }


def tensors(n: int, grad: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of every measurement, the same numbers each time."""
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, HEADS, n, SIZE)
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_(grad) for _ in range(3))
    return q, k, v


def planned(spec: Spec, n: int) -> dict[str, Json]:
    """What the planner chooses at n, and the seconds that it expects of all heads, forward."""
    plan = spec.plan(n)
    seconds = 0.0
    for step in plan.steps:
        heads = HEADS if step.heads is None else len(step.heads)
        seconds += heads * len(step.layers) * (step.candidates[0].seconds or 0.0)
    return {
        "backends": [step.chosen.name for step in plan.steps],
        "predicted": seconds,
        "plan": [*str(plan).splitlines()],
    }


def machine() -> dict[str, Json]:
    """The machine in general terms: nothing that names it."""
    return {
        "architecture": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
    }


def versions() -> dict[str, Json]:
    """The versions of everything that was timed."""
    found: dict[str, Json] = {
        "python": platform.python_version(),
        "attnspec": attnspec.__version__,
    }
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def missing(name: str, reason: object) -> dict[str, Json]:
    """A row without figures, and why."""
    return {"name": name, "reason": " ".join(str(reason).split()) or type(reason).__name__}


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers, at least one."""
    return exp(statistics.fmean(log(value) for value in values))


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float:
    """The slope of a straight line through the logarithms, by least squares."""
    line = statistics.linear_regression([log(n) for n in lengths], [log(value) for value in values])
    return line.slope


def read(path: Path) -> dict[str, Json]:
    """The figures in a file, {} where there is none."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} must hold an object, got {type(found).__name__}")
    return found


def write(path: Path, figures: Mapping[str, Json]) -> None:
    """Figures as JSON, whole or not at all; ValueError for a number that JSON does not have."""
    text = json.dumps(figures, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
