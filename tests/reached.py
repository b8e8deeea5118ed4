"""Which tests reach which functions of the package: recorded once for each file of tests.

A file is run by itself while every call is noted, and what is cached is forgotten before each test,
so that a test reaches what it would reach alone. Functions are known by the name of their file and
their own, so that a record survives when files are moved.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from mutations import Mutation


@dataclass(frozen=True)
class Record:
    """What the tests of one file reach: their names within it, the seconds they take, for each
    function the places of the tests that call it; `digest` is that of the file."""

    digest: str
    tests: list[str]
    seconds: list[float]
    calls: dict[str, list[int]]

    def to_file(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def from_file(path: Path) -> Record:
        return Record(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Reaching:
    """The records of all files of tests, by their paths relative to the root."""

    records: dict[Path, Record]

    def tests(self, mutation: Mutation, seconds: float) -> tuple[list[str], float]:
        """The tests that reach a change, as far as the seconds allow, and how long they take."""
        key = key_of(mutation.path, mutation.function)
        found: list[tuple[int, float, str]] = []
        for path, record in self.records.items():
            places = set(record.calls.get(key, ()))
            for called, at in record.calls.items():
                # of a class, tests of its functions
                places.update(at if called.startswith(f"{key}.") else ())
            cases: Counter[str] = Counter()
            for place in sorted(places, key=record.seconds.__getitem__):
                function = record.tests[place].partition("[")[0]
                found.append(
                    (cases[function], record.seconds[place], f"{path}::{record.tests[place]}")
                )
                cases[function] += 1
        chosen, total = [], 0.0
        for _, time_taken, test in sorted(found):
            if total + time_taken <= seconds:
                chosen.append(test)
                total += time_taken
        return chosen, total


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def key_of(path: Path, function: str) -> str:
    """By what a function is known."""
    return f"{path.stem}:{function}"


class Recorder:
    """A plugin of pytest that notes which functions of a tree each test calls that passes."""

    def __init__(self, tree: Path) -> None:
        self.tree = f"{tree}/"
        self.tests: list[str] = []
        self.seconds: list[float] = []
        self.calls: dict[str, list[int]] = {}
        self._seen: dict[int, CodeType] = {}
        self._failed = False
        self._cached: tuple[int, list[Any]] = (0, [])

    def _forget(self) -> None:
        """Empties what functions of the package have cached. Looking through all objects for those
        functions takes longer than most tests: it is done anew where a module has come."""
        loaded = len(sys.modules)
        if loaded != self._cached[0]:
            self._cached = loaded, [each for each in gc.get_objects() if _is_cached_here(each)]
        for each in self._cached[1]:
            each.cache_clear()

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        # a code object is kept, so that no other has its number
        self._seen[id(frame.f_code)] = frame.f_code

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._forget()
        self._seen, self._failed = {}, False
        start = time.process_time()
        threading.settrace(self._note)
        sys.settrace(self._note)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            if not self._failed:
                self._take(item.nodeid.partition("::")[2], time.process_time() - start)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.outcome != "passed"

    def _take(self, name: str, seconds: float) -> None:
        number = len(self.tests)
        self.tests.append(name)
        self.seconds.append(round(seconds, 3))
        ours = (x for x in self._seen.values() if x.co_filename.startswith(self.tree))
        for key in {key_of(Path(code.co_filename), code.co_qualname) for code in ours}:
            self.calls.setdefault(key, []).append(number)

    def record(self, path: Path) -> Record:
        """What was noted of a file of tests."""
        return Record(digest_of(path), self.tests, self.seconds, self.calls)


def _is_cached_here(each: object) -> bool:
    named = type(each).__name__ == "_lru_cache_wrapper"
    return named and str(getattr(each, "__module__", "")).startswith("attnspec")
