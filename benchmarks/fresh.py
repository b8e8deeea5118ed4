"""Measurements that need a process of their own: peaks of memory, and compilers with a state.

`python -m benchmarks.fresh TASK ARGUMENTS` runs one and prints its figures as one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from time import perf_counter

from benchmarks.measuring import Json

ROOT = Path(__file__).resolve().parent.parent

TIMEOUTS = {
    "flex": 300.0,
    "plan": 15.0,
    "answers": 60.0,
    "block_mask": 300.0,
    "memory": 120.0,
    "decided": 120.0,
}
"""Seconds until a process is ended, by task."""

MODULES = {
    "flex": "benchmarks.flex",
    "plan": "benchmarks.block_plans",
    "answers": "benchmarks.answers",
    "block_mask": "benchmarks.block_plans",
    "memory": "benchmarks.memory",
    "decided": "benchmarks.decided",
}
"""Where the function of a task is, by task."""

MOST_MEMORY = 8 << 30
"""Bytes that a process may allocate."""

Arguments = Mapping[str, Json]
Run = Callable[[str, Arguments], dict[str, Json]]
"""Runs a task by name; a result with a `reason` has no figures."""


def in_fresh_process(task: str, arguments: Arguments) -> dict[str, Json]:
    """The task's figures from a process of its own."""
    timeout = TIMEOUTS[task]
    command = [sys.executable, "-m", "benchmarks.fresh", task, json.dumps(arguments)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return {"reason": f"not done after {timeout:.0f} s"}
    if done.returncode:
        return {"reason": f"the process ended with status {done.returncode}"}
    found: dict[str, Json] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def in_this_process(task: str, arguments: Arguments) -> dict[str, Json]:
    """The task's figures; peaks of memory are those of everything that ran before, too."""
    # a task's module measures with this one, and FlexAttention's takes longer to load than to plan
    found: dict[str, Json] = getattr(import_module(MODULES[task]), f"{task}_task")(arguments)
    return found


def whole_process(command: Sequence[str]) -> float:
    """The wall-clock seconds of a command, on one thread, with its modules compiled and kept."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    seconds = perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command[1:])}` ended with status {done.returncode}")
    return seconds


def peak() -> int:
    """The most bytes of memory that this process has held so far."""
    return _memory("VmHWM")


def resident() -> int:
    """The bytes of memory that this process holds; where that is not told, the most so far."""
    return _memory("VmRSS")


def _memory(field: str) -> int:
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage would say what the parent held, where that was more
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields[field].split()[0]) * 1024
    import resource

    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found * 1024


def limit_memory() -> None:
    """Make allocations fail before the machine does."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, hard))


def integer(arguments: Arguments, name: str) -> int:
    """An argument that must be a whole number."""
    value = arguments[name]
    if not isinstance(value, int):
        raise TypeError(f"`{name}` must be a whole number, got {value!r}")
    return value


def text(arguments: Arguments, name: str) -> str:
    """An argument that must be a text."""
    value = arguments[name]
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a text, got {value!r}")
    return value


def main(task: str, arguments: str) -> None:
    import torch

    given: dict[str, Json] = json.loads(arguments)
    torch.set_num_threads(integer(given, "threads"))
    if task == "plan":
        limit_memory()
    try:
        found = in_this_process(task, given)
    except Exception as error:
        # whatever goes wrong belongs into the row that could not be measured
        found = {"reason": f"{type(error).__name__}: {error}".splitlines()[0]}
    print(json.dumps(found, allow_nan=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
