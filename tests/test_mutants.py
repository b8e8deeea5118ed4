"""The mutation tester: which changes it makes, what kills them, that nothing is left changed."""

from __future__ import annotations

import ast
from pathlib import Path

import mutants
import pytest
from forked import Ended, Worker, in_child, recorded
from mutations import Mutation, mutations_of

SOURCE = """def more(x: int | None, y=3):
    while x > y + 9 and len(y := [x]):
        x -= min(1, x)
    return x + y if isinstance(x, int | float) else [x for x in y if x]
def samples(): return 4
"""
TESTS = """import calc
def test_slow(): assert calc.more(1, 2) == 3
def test_fast(): assert calc.more(0, 0) == 0
def test_wrong(): assert calc.more(0, 0) == 1
"""


def test_small_changes_of_meaning_are_made() -> None:
    source = SOURCE.encode()
    every = [each for each in mutations_of(Path("calc.py"), source) if each.is_real(source)]
    assert {each.function for each in every} == {"more"}
    made = {each.lines(source)[1] for each in every}
    assert made >= {
        "def more(x: int | None, y=4):",
        "while x >= y + 9 and len(y := [x]):",
        "while x > y + 9 or len(y := [x]):",
        "x += min(1, x)",
        "x -= max(1, x)",
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
    sources = [(p, mutants.source_of(p)) for room in mutants.ROOMS for p in mutants.files_of(room)]
    for function, was, becomes in mutants.alike():
        first = was.partition("\n")[0].encode()
        made = (
            each.lines(source)
            for path, source in sources
            if first in source
            for each in mutations_of(path, source)
            if each.function == function
        )
        assert (was, becomes) in made


def test_a_change_is_killed_by_the_first_test_that_notices_it(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name, text in (("calc.py", SOURCE), ("test_calc.py", TESTS), ("pytest.ini", "[pytest]\n")):
        (tree / name).write_text(text)
    record = recorded(tree, tree / "test_calc.py")
    assert record is not None
    assert {record.tests[x] for x in record.calls["calc:more"]} == {"test_slow", "test_fast"}
    worker, at = Worker(tree, tmp_path), SOURCE.index("+ y if")
    minus = Mutation(Path("calc.py"), "more", 4, at, at + 1, "-")
    slow, fast, wrong = (f"test_calc.py::test_{name}" for name in ("slow", "fast", "wrong"))
    # what fails anyway says nothing
    assert worker.killer(minus, [wrong, fast], 1.0) is None
    assert worker.killer(minus, [wrong, fast, slow], 1.0) == slow
    assert (worker.changed / "calc.py").read_text() == (tree / "calc.py").read_text() == SOURCE
    with pytest.raises(Ended, match="the time: more than 0 s"):
        in_child(lambda: sum(1 for _ in iter(int, 1)), 0)
