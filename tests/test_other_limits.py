"""The limits: what the variable says, and the suite once more where they are small."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields

import pytest
from limited import REFUSING
from package_map import MODULES, ROOT

from attnspec.limits import LIMITS, Limits

# one waits for two processes of its own
pytestmark = pytest.mark.xdist_group("limits")

FIRST = ("test_soak.py", "test_views.py", "test_zoo.py")
"""What is run under tiny limits each time, in part; the slow tests run all."""


@pytest.mark.parametrize(
    ("limits", "first"),
    [(REFUSING, False), ("tiny", True), pytest.param("tiny", False, marks=pytest.mark.slow)],
)
def test_the_suite_passes_under_other_limits(limits: str, first: bool) -> None:
    word = '"tiny"' if limits == "tiny" else "REFUSING"
    files = [
        str(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if (path.name in FIRST) == first
        and re.search(rf"limits\((\"\", )?{word}\)", path.read_text(encoding="utf-8"))
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--some", "-", *files],
        cwd=ROOT,
        env=os.environ | {"ATTNSPEC_LIMITS": limits},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def test_the_variable_sets_all_limits_or_single_ones() -> None:
    assert Limits.of("") == Limits()
    tiny = Limits.of("tiny")
    assert tiny.piece < 1000 < Limits().piece
    assert tiny.edges == Limits().edges
    assert Limits.of("tiny,piece=9,piece=7").piece == Limits.of("piece=7").piece == 7
    for wrong in ("small", "piece", "piece=-1", "pieces=3"):
        with pytest.raises(ValueError, match="`tiny` or NAME=NUMBER"):
            Limits.of(wrong)


def test_each_limit_is_read_somewhere() -> None:
    texts = (path.read_text(encoding="utf-8") for path in MODULES.values())
    read = {name for text in texts for name in re.findall(r"\bLIMITS\.(\w+)", text)}
    assert read == {each.name for each in fields(LIMITS)}
