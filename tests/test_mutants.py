"""The mutation tester: which changes it makes, what kills them, that nothing is left changed."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import mutants
import pytest
from mutations import Mutation, mutations_of

SOURCE = """def more(x: int | None, y=3):
    while x > y + 9 and len(y := [x]):
        x -= min(1, x)
    return x + y if isinstance(x, int | float) else [x for x in y if x]
"""
TESTS = """import calc
def test_slow(): assert calc.more(1, 2) == 3
def test_fast(): assert calc.more(0, 0) == 0
def test_wrong(): assert calc.more(0, 0) == 1
"""
QUICK = "[pytest]\naddopts = -p no:hypothesispytest -p no:timeout\n"


def test_small_changes_of_meaning_are_made() -> None:
    source = SOURCE.encode()
    every = mutations_of(Path("calc.py"), source)
    assert {each.function for each in every} == {"more"}
    for each in every:
        assert ast.dump(ast.parse(each.of(source))) != ast.dump(ast.parse(source))
    assert {each.lines(source)[1].strip() for each in every} >= {
        "def more(x: int | None, y=(4)):",
        "while (x >= y + 9) and len(y := [x]):",
        "while (x > y + 9 or len((y := [x]))):",
        "x += min(1, x)",
        "x -= (max)(1, x)",
        "pass",
    }


@pytest.mark.parametrize("room", mutants.ROOMS)
def test_rooms_have_files_whose_changes_are_drawn_by_a_seed(room: str) -> None:
    paths = mutants.files_of(room)[:2]
    first, again, other = (mutants.drawn(paths, 4, seed) for seed in (1, 1, 2))
    assert first == again != other
    for each in first:
        source = (mutants.ROOT / each.path).read_bytes()
        assert ast.dump(ast.parse(each.of(source))) != ast.dump(ast.parse(source))


def test_explanations_are_of_changes_that_can_be_made() -> None:
    files = {file for file, *_ in mutants.alike()}
    paths = [path for room in mutants.ROOMS for path in mutants.files_of(room)]
    some = [path for path in paths if path.name in files]
    every = (x for path in some for x in mutations_of(path, mutants.source_of(path)))
    assert mutants.alike().keys() - set(map(mutants.key_of, every)) == set()


@pytest.mark.slow
def test_a_change_is_killed_by_the_first_test_that_notices_it(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    shutil.copy(mutants.HERE / "reached.py", tmp_path / "tests")
    for name, text in (("calc.py", SOURCE), ("test_calc.py", TESTS), ("pytest.ini", QUICK)):
        (tmp_path / name).write_text(text)
    mutants.run(tmp_path, ["test_calc.py"], 60, "-p", "reached", ATTNSPEC_REACHED="record.json")
    record = json.loads((tmp_path / "record.json").read_text())
    at = SOURCE.index("+ y if")
    minus = Mutation(Path("calc.py"), "more", 4, at, at + 1, "-")
    slow, fast, wrong = (f"test_calc.py::test_{name}" for name in ("slow", "fast", "wrong"))
    assert {*mutants.tests_reaching([record], minus, 9.0)[0]} == {slow, fast}
    assert mutants.killer_of(tmp_path, minus, [fast], 1.0) is None
    # what fails anyway says nothing
    assert mutants.killer_of(tmp_path, minus, [wrong, fast, slow], 1.0) == slow
    assert (tmp_path / "calc.py").read_text() == SOURCE
    (tmp_path / "test_calc.py").write_text("def test_slow():\n    while True: pass")
    assert "the time" in str(mutants.first_failing(tmp_path, [slow], 0.5))
