"""Which tests reach which functions of the package: recorded once for each file of tests.

A file is run by itself while every call is noted, and what is cached is forgotten before each test,
so that a test reaches what it would reach alone. Functions are known by the name of their file and
their own, so that a record survives when files are moved. Processes that tests start may note what
they call (`noted.noting`); what comes of a fixture that tests share is reached by all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from mutations import Mutation
from noted import NOTED, Calls, key_of


@dataclass
class Record:
    """What the tests of one file reach: their names within it, the seconds they take, for each
    function the places of the tests that call it; `digest` is that of the file."""

    digest: str = ""
    tests: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    calls: dict[str, list[int]] = field(default_factory=dict)


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def tests_reaching(
    records: Mapping[Path, Record], mutation: Mutation, seconds: float
) -> tuple[list[str], float]:
    """The tests that reach a change, as far as the seconds allow, those of its own room first, and
    how long they take; `records` by the files' paths relative to the root."""
    key = key_of(mutation.path, mutation.function)
    found: list[tuple[int, float, str]] = []
    for path, record in records.items():
        # of a class, tests of its functions
        names = (name for name in record.calls if name == key or name.startswith(f"{key}."))
        cases: Counter[str] = Counter()
        places = {place for name in names for place in record.calls[name]}
        for place in sorted(places, key=record.seconds.__getitem__):
            test, taken = record.tests[place], record.seconds[place]
            found.append((cases[test.partition("[")[0]], taken, f"{path}::{test}"))
            cases[test.partition("[")[0]] += 1
    parts = mutation.path.parts
    own = f"tests/{parts[1] if parts[0] == 'attnspec' else parts[0]}/"
    # up to half of the time for its own room, before one case of every other function fills it
    chosen: dict[str, float] = {}
    for share, some in ((0.5, own), (1.0, "")):
        for _, taken, test in sorted(found):
            if test.startswith(some) and test not in chosen:
                if sum(chosen.values()) + taken <= share * seconds:
                    chosen[test] = taken
    return sorted(chosen, key=lambda test: not test.startswith(own)), sum(chosen.values())


_CACHING = type(cache(len))


def forget() -> None:
    """Empties what functions of the package have cached. The garbage collector would not name them
    all: what is frozen is no longer in its lists."""
    for name, module in [*sys.modules.items()]:
        for value in vars(module).values() if name.partition(".")[0] == "attnspec" else ():
            for each in (value, *(vars(value).values() if isinstance(value, type) else ())):
                function = getattr(each, "__func__", each)
                if isinstance(function, _CACHING):
                    function.cache_clear()


class Recorder:
    """A plugin of pytest that notes which functions of a tree each test calls that passes."""

    def __init__(self, tree: Path) -> None:
        self.record = Record()
        self._here = Calls(f"{tree}/")
        self._shared: dict[str, set[str]] = {}
        self._failed = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        forget()
        self._failed = False
        with tempfile.TemporaryDirectory() as folder:
            os.environ[NOTED] = os.pathsep.join([folder, self._here.tree])
            start = time.process_time()
            self._here.start()
            try:
                return (yield)
            finally:
                self._here.stop()
                seconds = time.process_time() - start
                del os.environ[NOTED]
                keys = self._here.keys() | self._elsewhere(item, Path(folder))
                if not self._failed:
                    for key in keys:
                        self.record.calls.setdefault(key, []).append(len(self.record.tests))
                    self.record.tests.append(item.nodeid.partition("::")[2])
                    self.record.seconds.append(round(seconds, 3))

    def _elsewhere(self, item: pytest.Item, folder: Path) -> set[str]:
        """What other processes have called for a test, or for a fixture that it shares."""
        new = {key for path in folder.iterdir() for key in json.loads(path.read_text())}
        fixtures = cast("Any", item)._fixtureinfo.name2fixturedefs
        for name in (name for name, all in fixtures.items() if all[-1].scope != "function"):
            self._shared.setdefault(name, set()).update(new)
            new = new | self._shared[name]
        return new

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.outcome != "passed"
