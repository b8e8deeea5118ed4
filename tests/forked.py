"""Tests run in processes of their own, on throw-away copies of the tree, one of which is changed.

A process that has imported what tests import, but not the package, is forked for every run, so that
a run costs no more than the package's own import.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mutations import Mutation
from reached import Record, Recorder, digest_of

NOT_COPIED = (".git", ".venv", ".*_cache", "__pycache__", ".hypothesis", ".mutants", "build")

IMPORTED = ("networkx", "numpy", "pytest", "scipy.stats", "torch")
"""What is imported before forking; pytest wants to import its plugins itself."""

RECORDING = 1800.0
"""Seconds of computing that the tests of one file may take while they are recorded."""

MEMORY = 8 << 30
"""Bytes that a run of tests may take: what a change makes of a size has no other bound."""

FEW = 16
"""Tests that are run first: those of many files take longer to be collected than to run."""

PASSED, FAILED, INTERRUPTED, UNKNOWN = 0, 1, 2, 4
"""What pytest returns; UNKNOWN where there is no test of a name."""


def end_on_request() -> None:
    """A request to end is an exception, so that nothing is left behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


class Ended(Exception):
    """A process that ended without an answer; says why."""


def in_child(run: Callable[[], object], seconds: float) -> Any:
    """What `run` returns in a process of its own, as plain data; raises Ended where it takes more
    seconds of computing, or crashes."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        _answer(run, seconds, read, write)
    os.close(write)
    # waiting takes no time of computing: what sleeps for ever is ended by the clock
    before = signal.signal(signal.SIGALRM, lambda *_: os.killpg(pid, signal.SIGKILL))
    signal.alarm(int(20 * seconds) + 60)
    try:
        with os.fdopen(read, "rb") as out:
            text = out.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:
        # a child is not left behind
        os.killpg(pid, signal.SIGKILL)
        raise
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        raise Ended(f"the time: more than {seconds:.0f} s of computing, or no end")
    if status < 0:
        raise Ended(f"a crash: {signal.Signals(-status).name}")
    if status:
        raise RuntimeError(f"a run of tests failed by itself: {text.decode()}")
    return json.loads(text)


def _answer(run: Callable[[], object], seconds: float, read: int, write: int) -> None:
    """What a child does; never returns."""
    status = 1
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # what was there before is shared with the parent as long as nobody writes to it
    gc.freeze()
    os.close(read)
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    try:
        answer, status = run(), 0
    except BaseException as error:
        answer = repr(error)
    with contextlib.suppress(OSError), os.fdopen(write, "wb") as into:
        into.write(json.dumps(answer).encode())
    os._exit(status)


class Watch:
    """A plugin of pytest: the first test that fails."""

    failed: str | None = None

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome == "failed" and self.failed is None:
            self.failed = report.nodeid or "collecting tests"

    pytest_collectreport = pytest_runtest_logreport


def run_pytest(copy: Path, arguments: Sequence[str], plugin: object) -> int:
    """Runs tests in this process, of the package in the copy."""
    import pytest

    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)
    quiet = ("-p", "no:xdist", "-p", "no:cacheprovider", "-q", "--no-header", "--tb=no")
    return int(pytest.main([*quiet, *arguments], plugins=[plugin]))


def failing(copy: Path, tests: Sequence[str], seconds: float) -> str | None:
    """The first of the tests that fails in a tree, or what else went wrong."""

    def run() -> tuple[int, str | None]:
        watch = Watch()
        return run_pytest(copy, ["-x", *tests], watch), watch.failed

    try:
        status, failed = in_child(run, seconds)
    except Ended as error:
        return str(error)
    functions = list(dict.fromkeys(test.partition("[")[0] for test in tests))
    if status == UNKNOWN and functions != list(tests):
        # the cases of a test come out of what is changed
        return failing(copy, functions, seconds)
    if status not in (PASSED, FAILED, INTERRUPTED, UNKNOWN):
        raise RuntimeError(f"pytest returned {status} for {' '.join(tests[:3])} …")
    return failed if status != UNKNOWN else "tests that are gone"


def recorded(copy: Path, path: Path) -> Record | None:
    """What the tests of one file reach; None where they take too long."""

    def run() -> dict[str, object]:
        recorder = Recorder(copy)
        run_pytest(copy, [str(path)], recorder)
        return {**asdict(recorder.record), "digest": digest_of(copy / path)}

    try:
        return Record(**in_child(run, RECORDING))
    except Ended:
        return None


class Worker:
    """A process with two copies of the tree, one of which it changes."""

    def __init__(self, root: Path, base: Path) -> None:
        self.changed, self.right = (base / f"{os.getpid()}-{name}" for name in ("changed", "right"))
        for copy in (self.changed, self.right):
            ignored = shutil.ignore_patterns(*NOT_COPIED)
            shutil.copytree(root, copy, symlinks=True, ignore=ignored)
        self._fails: dict[str, bool] = {}

    def _fails_anyway(self, test: str) -> bool:
        """Whether a test fails without any change."""
        if test not in self._fails:
            self._fails[test] = failing(self.right, [test], 300) is not None
        return self._fails[test]

    def killer(self, mutation: Mutation, tests: list[str], seconds: float) -> str | None:
        """The first of the tests that fails because of a change, or what else does; they take so
        many seconds without it."""
        path = self.changed / mutation.path
        source = path.read_bytes()
        path.write_bytes(mutation.of(source))
        size = FEW
        try:
            while tests:
                some = tests[:size]
                found = failing(self.changed, some, 4 * seconds + 60)
                if found is None:
                    tests, size = tests[size:], 8 * size
                elif found in some and self._fails_anyway(found):
                    tests = [test for test in tests if test != found]
                else:
                    return found
            return None
        finally:
            path.write_bytes(source)


_worker: list[Worker] = []


def start_worker(root: Path, base: Path) -> None:
    """Makes this process one; imports what tests import, but not the package, which is changed."""
    end_on_request()
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    for name in IMPORTED:
        __import__(name)
    sys.modules["torch"].set_num_threads(1)
    _worker.append(Worker(root, base))


def killer_of(job: tuple[Mutation, list[str], float]) -> tuple[Mutation, str | None]:
    """What kills a change, in a worker."""
    return job[0], _worker[0].killer(*job)


def record_of(path: Path) -> tuple[Path, Record | None]:
    """What the tests of a file reach, in a worker."""
    return path, recorded(_worker[0].right, path)
