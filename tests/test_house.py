"""The package in numbers: its limits hold, and a fault is counted."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from house import HALL, LINES, House, measured, told
from package_map import ROOT

# what is counted is counted once
pytestmark = pytest.mark.xdist_group("house")

PAGE = ROOT / "attnspec" / "README.md"


@cache
def ours() -> House:
    return measured(ROOT)


def test_the_hall_is_small_functions_short_and_no_room_a_circle() -> None:
    assert ours().hall <= HALL
    assert sum(ours().lines.values()) <= LINES
    assert ours().long == []
    assert ours().circles == []


@pytest.mark.parametrize("fact", ["files in attnspec/ itself", "circles of imports"])
def test_the_page_of_rooms_tells_what_is_counted(fact: str) -> None:
    assert row_of(PAGE.read_text(encoding="utf-8"), fact) == counted(fact)


@pytest.mark.parametrize("fact", ["files", "lines"])
def test_the_page_of_rooms_is_not_far_off(fact: str) -> None:
    shown, now = (
        int(x.replace(",", ""))
        for x in (row_of(PAGE.read_text(encoding="utf-8"), fact), counted(fact))
    )
    assert abs(shown - now) < now / 20


def row_of(page: str, fact: str) -> str:
    """The last cell of a row, which is about this tree."""
    found = re.search(rf"^\| {re.escape(fact)} \|.*\| ([^|]+) \|$", page, re.MULTILINE)
    assert found is not None, fact
    return found[1]


def counted(fact: str) -> str:
    found = re.search(rf"^{re.escape(fact)} {{2,}}(.+)$", told(ours()), re.MULTILINE)
    assert found is not None, fact
    return found[1]


def test_faults_are_counted(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.setuptools.package-dir]\n"attnspec" = "attnspec"\n"attnspec.grammar" = "grammar"\n'
    )
    files = {
        "attnspec/__init__.py": "",
        "attnspec/a.py": "import attnspec.b\n",
        "attnspec/b.py": "def f():\n    import attnspec.a\n",
        "attnspec/room/c.py": "import attnspec.b\nimport os\n",
        "grammar/d.py": "def long():\n" + "    pass\n" * 60,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    house = measured(tmp_path)
    assert (house.hall, house.files, house.chain) == (3, 5, 2)
    assert house.lines == {"attnspec": 3, "attnspec/room": 2, "grammar": 61}
    assert house.circles == [["attnspec.a", "attnspec.b"]]
    assert house.long == [(61, "grammar/d.py:1 long")]
    assert "    1     61  grammar" in told(house)
