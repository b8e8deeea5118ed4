"""Timing in turns: what slows the machine for a while slows all subjects."""

from __future__ import annotations

import gc
import math
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import TYPE_CHECKING

from attnspec.version import __version__

if TYPE_CHECKING:
    from attnspec.ir.serial import Plain

LEAST = 0.2
"""Seconds that a subject is timed for in a round, as long as `MOST_CALLS` are not reached."""

MOST_CALLS = 8
"""Calls of one subject in a round."""

Subjects = Mapping[str, Callable[[], object]]
"""What is timed, by name."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median, the extremes, and over how many calls."""

    median: float
    least: float
    most: float
    calls: int

    def data(self) -> dict[str, Plain]:
        """The fields as plain data."""
        return asdict(self)


def alternate(subjects: Subjects, rounds: int) -> dict[str, Timing]:
    """Time subjects in turns; ValueError unless there is a round.

    Every subject is called twice before; short ones several times in a round.
    """
    *_, (_, timings) = turns(subjects, rounds)
    return timings


def turns(
    subjects: Subjects, rounds: int, most: float = math.inf
) -> Iterator[tuple[str, dict[str, Timing]]]:
    """As `alternate`, with the name of the subject that has just been called, and what is known so
    far; after `most` seconds, and a round at least, no other is called."""
    if rounds < 1:
        raise ValueError(f"one round at least is needed, got {rounds}")
    begin, calls = perf_counter(), {}
    for name, subject in subjects.items():
        subject()
        start = perf_counter()
        subject()
        once = max(perf_counter() - start, 1e-9)
        calls[name] = max(1, min(MOST_CALLS, round(LEAST / once)))
        yield name, {}
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, subject in subjects.items():
            with _garbage_kept():
                for _ in range(calls[name]):
                    start = perf_counter()
                    subject()
                    times[name].append(perf_counter() - start)
            yield name, _timings(times)
            if all(times.values()) and perf_counter() - begin > most:
                return


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Nobody's call pays for the garbage of others. Collecting it between calls would not be fair
    either: the call that comes next finds caches and cores cold, which short ones feel most."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _timings(times: Mapping[str, list[float]]) -> dict[str, Timing]:
    return {
        name: Timing(statistics.median(timing), min(timing), max(timing), len(timing))
        for name, timing in times.items()
        if timing
    }


def machine(device: str = "cpu") -> dict[str, Plain]:
    """What a measurement on a type of device depends on, and nothing that names the machine."""
    import torch

    accelerator = torch.cuda.get_device_name() if device == "cuda" else None
    return {
        **({} if accelerator is None else {"accelerator": accelerator}),
        "architecture": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
    }


def versions(packages: Iterable[str] = ("torch", "numpy")) -> dict[str, Plain]:
    """The versions of Python, of this package, and of those packages that are installed."""
    names: dict[str, Plain] = {"python": platform.python_version(), "attnspec": __version__}
    for name in packages:
        try:
            names[name] = version(name)
        except PackageNotFoundError:
            continue
    return names
