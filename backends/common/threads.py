"""Parts of a call side by side, each on one thread that needs none of the others.

Attention in many small steps is hundreds of calls, and where all threads share each of them they
wait for one another hundreds of times. Heads have nothing to wait for.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock
from typing import TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")

_lock = Lock()
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def each(work: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
    """`[work(part) for part in parts]`, as many at a time as torch has threads for this one.

    `work` runs without gradients, and must leave alone what the work on other parts writes. Where
    something looks on at every operation (a profiler of operations, a default device), parts come
    one after the other in the caller's own thread, as they do where torch has one thread.
    """
    threads = torch.get_num_threads()
    watched = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    found: list[Result] = []
    while len(found) < len(parts):
        rest = parts[len(found) :]
        workers = min(threads, len(rest))
        if watched or workers < 2:
            return found + [work(part) for part in rest]
        # what does not fill all workers once more comes last, with more threads for each part
        together = rest[: len(rest) // workers * workers]
        _rest()
        found += _pool(workers, threads // workers).map(_apart(work), together)
    return found


def _apart(work: Callable[[Part], Result]) -> Callable[[Part], Result]:
    """The work in a thread that knows nothing of the caller's modes."""
    inference = torch.is_inference_mode_enabled()

    def run(part: Part) -> Result:
        with torch.inference_mode(inference), torch.no_grad():
            return work(part)

    return run


def _pool(workers: int, threads: int) -> ThreadPoolExecutor:
    """So many workers, for each of which torch has so many threads."""
    with _lock:
        found = _pools.get((workers, threads))
        if found is None:
            found = ThreadPoolExecutor(workers, "attnspec", _use, (threads,))
            # an executor starts a thread only where none is idle
            meet = Barrier(workers + 1)
            for _ in range(workers):
                found.submit(meet.wait)
            meet.wait()
            # torch keeps the number set last for threads to come as well: they shall have ours
            torch.set_num_threads(torch.get_num_threads())
            _pools[workers, threads] = found
    return found


def _pause() -> Callable[[int], object]:
    """OpenMP's `omp_pause_resource_all`, if torch's OpenMP is where a process looks for it."""
    try:
        found: Callable[[int], object] = ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, OSError, TypeError):
        return lambda _: None
    return found


_pause_resource_all = _pause()


def _rest() -> None:
    """Ends the threads that shared the caller's last operation, as the next one would begin anew.

    They wait for more in a loop for some milliseconds, on the cores that the workers need. It is
    OpenMP's own way, version 5.0, section 3.2.44; where it is not found they take their time.
    """
    _pause_resource_all(1)


def _use(threads: int) -> None:
    """Has torch use so many threads for what this thread calls."""
    # a new thread takes the number of all threads as soon as it is asked for it
    torch.get_num_threads()
    torch.set_num_threads(threads)


def _forget() -> None:
    """A forked process has the pools, but not their threads."""
    global _lock
    _lock = Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
