"""What a training step costs: its time, and the most memory that its tensors take."""

from __future__ import annotations

import gc
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity, profile

from attnspec.spec import Spec
from benchmarks.accuracy.tasks import Task
from benchmarks.accuracy.training import Budget, Model, steps

WARM, TIMED = 3, 20
"""Steps before any is measured, and steps whose time is taken."""


@dataclass(frozen=True)
class Costs:
    """The median seconds of a step, and the most bytes in tensors that it makes: not those of the
    model and the optimiser, but its gradients."""

    step_seconds: float
    peak_bytes: int


def costs_of(task: Task, spec: Spec) -> Costs:
    """The costs of a step."""
    torch.manual_seed(0)
    training = steps(Model(task, spec), task, Budget(WARM + TIMED + 1))
    for _ in range(WARM):
        next(training)
    seconds = []
    for _ in range(TIMED):
        start = perf_counter()
        next(training)
        seconds.append(perf_counter() - start)
    return Costs(statistics.median(seconds), peak_bytes(lambda: next(training)))


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that the tensors made while something runs take at once, as the allocator
    counts them: the same from run to run, but for some two per cent of a model's step."""
    # the profiler would report its start and its end
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")
    # what is left behind is not looked for now and then, but at no time
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            run()
    finally:
        gc.enable()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted(
        (event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"
    )
    held = most = 0
    for _, change in changes:
        held += change
        most = max(most, held)
    return most
