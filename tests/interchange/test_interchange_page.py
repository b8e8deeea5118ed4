"""The page of the room says what happens."""

from __future__ import annotations

import doctest
from pathlib import Path

import attnspec

PAGE = Path(attnspec.__file__).parent / "interchange" / "README.md"


def test_the_page_says_what_happens() -> None:
    found = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert found.attempted > 15
    assert found.failed == 0
