"""A plugin of pytest: which functions of a tree each of its tests reaches, with `REACHED` naming
the file where that is written as JSON. `mutants.py` runs it once for each file of tests.

What is cached is forgotten before each test, so that a test reaches what it would reach alone.
Functions are known by the name of their file and their own, so that a record survives when files
are moved. What other processes call that tests start (`noting`) is reached by every test of a file.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

TREE = Path(__file__).resolve().parent.parent
REACHED = "ATTNSPEC_REACHED"


class Calls:
    """The functions of the tree that are called, as long as they are noted."""

    def __init__(self) -> None:
        self._seen: dict[int, CodeType] = {}

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        # a code object is kept, so that no other has its number
        self._seen[id(frame.f_code)] = frame.f_code

    def start(self) -> None:
        """Notes what is called from now on."""
        self._seen = {}
        threading.settrace(self._note)
        sys.settrace(self._note)

    def keys(self) -> set[str]:
        """By what the functions are known."""
        # what runs here may be noted as well
        seen = list(self._seen.values())
        ours = (code for code in seen if code.co_filename.startswith(f"{TREE}/"))
        return {f"{Path(code.co_filename).stem}:{code.co_qualname}" for code in ours}


def noting() -> Callable[[], None]:
    """Notes what this process calls, if that is recorded; returns what writes it down."""
    if REACHED not in os.environ:
        return lambda: None
    calls = Calls()
    calls.start()
    into = Path(f"{os.environ[REACHED]}.{os.getpid()}")

    def write() -> None:
        into.write_text(json.dumps(sorted(calls.keys())))

    return write


record: dict[str, Any] = {"tests": [], "seconds": [], "calls": {}}
"""The tests that pass, the seconds that they take, and for each function the places of the tests
that reach it."""

_calls = Calls()
_failed: set[str] = set()
_CACHING = type(cache(len))


def forget() -> None:
    """Empties caches of the package; the garbage collector does not list what is frozen."""
    for name, module in [*sys.modules.items()]:
        for value in vars(module).values() if name.partition(".")[0] == "attnspec" else ():
            for each in (value, *(vars(value).values() if isinstance(value, type) else ())):
                function = getattr(each, "__func__", each)
                if isinstance(function, _CACHING):
                    function.cache_clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    forget()
    start = time.process_time()
    _calls.start()
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)
        if item.nodeid not in _failed:
            for key in _calls.keys():
                record["calls"].setdefault(key, []).append(len(record["tests"]))
            record["tests"].append(item.nodeid)
            record["seconds"].append(round(time.process_time() - start, 3))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome != "passed":
        _failed.add(report.nodeid)


def pytest_sessionfinish() -> None:
    into = Path(os.environ[REACHED])
    for path in into.parent.glob(f"{into.name}.*"):
        for key in json.loads(path.read_text()):
            record["calls"][key] = [*range(len(record["tests"]))]
    into.write_text(json.dumps(record))
