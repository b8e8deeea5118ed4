from __future__ import annotations

from pathlib import Path

import pytest
from goldens import EVERY_ITEM, Golden, golden_stem, orphans


def test_no_golden_file_is_an_orphan(request: pytest.FixtureRequest) -> None:
    items = request.config.stash[EVERY_ITEM]
    stems = [golden_stem(item) for item in items if "golden" in getattr(item, "fixturenames", ())]
    # a single test asked for by name leaves its neighbours uncollected
    whole = [] if any("::" in arg for arg in request.config.args) else [i.path for i in items]
    assert orphans(Path(__file__).parent / "golden", stems, whole) == []


def test_an_orphan_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "golden"
    (folder / "test_a").mkdir(parents=True)
    (folder / "test_gone").mkdir()
    used = folder / "test_a" / "test_x[0.5].txt"
    unused = folder / "test_a" / "test_y.txt"
    gone = folder / "test_gone" / "test_z.txt"
    for path in (used, unused, gone):
        path.write_text("")
    test_file = tmp_path / "test_a.py"
    test_file.write_text("")
    stems = [Path("test_a") / "test_x[0.5]"]
    assert orphans(folder, stems, [test_file]) == [unused, gone]
    # nothing is said about a file whose tests were not collected
    assert orphans(folder, [], []) == [gone]


def test_a_golden_file_is_compared_to_the_byte(tmp_path: Path) -> None:
    stem = tmp_path / "test_a" / "test_x"
    with pytest.raises(pytest.fail.Exception, match="--update-golden"):
        Golden(stem, update=False)("text\n")
    Golden(stem, update=True)("text\n")
    Golden(stem, update=False)("text\n")
    with pytest.raises(AssertionError):
        Golden(stem, update=False)("text")
