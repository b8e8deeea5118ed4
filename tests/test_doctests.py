"""The examples in the package's docstrings."""

from __future__ import annotations

import doctest
import importlib

import pytest
from package_map import MODULES

SHOWN = [module for module, path in MODULES.items() if ">>> " in path.read_text(encoding="utf-8")]


def failures(test: doctest.DocTest) -> str:
    """What differs from what the example says, empty where nothing does."""
    report: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    return "".join(report)


@pytest.mark.parametrize("module", SHOWN)
def test_examples_give_what_they_say(module: str) -> None:
    tests = [t for t in doctest.DocTestFinder().find(importlib.import_module(module)) if t.examples]
    assert tests
    assert [found for found in map(failures, tests) if found] == []


def test_a_wrong_example_is_noticed() -> None:
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    assert "Expected:\n    3" in failures(wrong)
