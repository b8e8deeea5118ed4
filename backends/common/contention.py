"""Fewer threads while other processes keep cores busy.

A parallel loop ends with its last thread. Where another process holds a core, one of our threads
waits there for its time slice, some milliseconds, and the others wait for it, in every call into
torch: with two threads on two cores, one of them taken, training takes 2.5 to 4 times as long as on
an empty machine, and with one thread 1.5 times (`benchmarks`, part `neighbour`).

Counters of the process say where that may be so: threads were put aside for others, and cores were
missing. Whether fewer threads are faster is then tried and judged by the clock. What is changed is
OpenMP's number for the calling thread alone, while a kernel runs: where `torch.set_num_threads` was
called, MKL keeps its own for products of matrices. Sums may be rounded in another order then; under
`torch.use_deterministic_algorithms` nothing is changed.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median_low
from time import perf_counter
from typing import TypeVar

import torch

try:
    from resource import RUSAGE_SELF, getrusage
except ImportError:  # Windows counts otherwise
    getrusage = None  # type: ignore[assignment]

Value = TypeVar("Value")

WINDOW = 0.02
"""Seconds of calls that are judged together."""

TAKEN = 50
"""How often a second threads are put aside at least where a machine is crowded."""

MISSING = 0.25
"""Cores that threads did not get there, at least."""

GAIN = 0.9
"""Of the seconds with a thread more, what those with one less must be below to stay."""

LATEST = 3
"""Calls with a thread more of which the median counts, behind the first one, which is slow for
other reasons: it faults pages in."""

PAUSE, LONGEST = 0.25, 8.0
"""Seconds of calls until the next trial: they double with each, up to the longest."""

AWAY = 4
"""Seconds by the clock that count as one of them: calls are not all that a program does."""

SMALL, SAMPLED = 1 << 18, 8
"""Below so many numbers one call in so many is looked at: two system calls are two microseconds."""

KEPT = 256
"""Calls whose seconds are known."""


@dataclass(frozen=True)
class Usage:
    """Seconds by the clock, seconds of all cores, and how often threads were put aside."""

    clock: float = 0.0
    cores: float = 0.0
    taken: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.clock + other.clock, self.cores + other.cores, self.taken + other.taken)

    def since(self, other: Usage) -> Usage:
        """What was used after another moment."""
        return Usage(self.clock - other.clock, self.cores - other.cores, self.taken - other.taken)

    def crowded(self, threads: int) -> bool:
        """Whether so many threads may have waited for other processes."""
        missing = threads * self.clock - self.cores
        return self.taken >= TAKEN * self.clock and missing >= MISSING * self.clock


def now() -> Usage:
    """What the process has used."""
    used = getrusage(RUSAGE_SELF)
    return Usage(perf_counter(), used.ru_utime + used.ru_stime, used.ru_nivcsw)


class Threads:
    """How many threads the kernels have that one thread of Python calls: `fewer` less than torch
    says. `look` tells what was used, `put` sets the number."""

    def __init__(self, look: Callable[[], Usage], put: Callable[[int], object]) -> None:
        self._look, self._put = look, put
        self.fewer = 0
        self._inside = self._tried = False
        self._small = 0
        # until the next trial: seconds of calls, and the clock's time by which it comes anyway
        self._pause, self._left, self._until = PAUSE, 0.0, 0.0
        self._seen = Usage()
        # of calls by their keys and threads the seconds of the latest that were no trial, and of
        # those in the trial what they take, and would have taken
        self._usual: dict[tuple[Hashable, int], deque[float]] = {}
        self._takes, self._took = 0.0, 0.0

    def run(self, key: Hashable, small: bool, call: Callable[[], Value]) -> Value:
        """What a call returns, which calls with an equal key are like."""
        full = torch.get_num_threads()
        if full < 2 or self._inside:
            return call()
        count = max(1, full - self.fewer)
        if small and not self._tried:
            self._small = (self._small + 1) % SAMPLED
            if self._small and count == full:
                return call()
        # an interrupt, which comes behind any call, must not leave this marked
        before = self._look()
        self._inside = True
        try:
            if count < full:
                self._put(count)
            found = call()
        finally:
            self._inside = False
            if count < full:
                self._put(full)
        after = self._look()
        self._judge(key, after.since(before), after.clock, count)
        return found

    def _judge(self, key: Hashable, used: Usage, clock: float, count: int) -> None:
        """After a call with so many threads at a time: how many the next one has."""
        self._seen += used
        self._left -= used.clock
        if self._tried:
            usual = self._usual.get((key, count + 1))
            if usual:
                self._takes, self._took = self._takes + used.clock, self._took + median_low(usual)
            if self._took >= WINDOW or self._seen.clock >= 10 * WINDOW:
                self._end_trial(clock)
            return
        if len(self._usual) >= KEPT:
            self._usual.clear()
        latest = self._usual.get((key, count))
        if latest is None:
            self._usual[key, count], self._seen = deque(maxlen=LATEST), Usage()
            return
        latest.append(used.clock)
        if self._seen.clock < WINDOW:
            return
        crowded, self._seen = self._seen.crowded(count), Usage()
        if self._left > 0 and clock < self._until:
            return
        if crowded and count > 1:
            self.fewer, self._tried = self.fewer + 1, True
        elif self.fewer:
            # whether the others are still there shows with a thread more
            self.fewer -= 1
        else:
            self._pause = PAUSE

    def _end_trial(self, clock: float) -> None:
        if self._takes >= GAIN * self._took:
            self.fewer -= 1
        self._tried, self._seen, self._takes, self._took = False, Usage(), 0.0, 0.0
        self._left, self._until = self._pause, clock + AWAY * self._pause
        self._pause = min(2 * self._pause, LONGEST)


class _Mine(threading.local):
    """The threads of each thread of Python; None where their number cannot be set for it alone."""

    def __init__(self) -> None:
        self.threads = None if _SET is None or getrusage is None else Threads(now, _SET)


def _setter() -> Callable[[int], object] | None:
    """OpenMP's own function, which concerns the thread that calls it; torch's would concern threads
    that are started meanwhile, too."""
    try:
        found: Callable[[int], object] = ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError, TypeError):
        return None
    # there may be another OpenMP than the one that torch runs its loops by
    count = torch.get_num_threads()
    found(count + 1)
    follows = torch.get_num_threads() == count + 1
    found(count)
    return found if follows else None


_SET = _setter()
_mine = _Mine()


def shared(key: Hashable, q: torch.Tensor, call: Callable[[], Value]) -> Value:
    """What a call of a kernel with queries q returns, with as many threads as are of use."""
    threads = _mine.threads
    if threads is None or not q.is_cpu or torch.are_deterministic_algorithms_enabled():
        return call()
    return threads.run((key, q.shape), q.numel() < SMALL, call)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for what the calling thread does inside, where calls are too small to be shared:
    another would wait for work most of the time, and on a busy machine spin for a core."""
    full = torch.get_num_threads()
    if _SET is None or full < 2:
        yield
        return
    _SET(1)
    try:
        yield
    finally:
        _SET(full)
