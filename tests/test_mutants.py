"""The mutation tester: which changes it makes, what kills them, that nothing is left changed."""

from __future__ import annotations

import ast
import json
import os
import random
import signal
import time
from pathlib import Path

import forked
import mutants
import pytest
from forked import Ended, Worker, in_child, recorded
from mutations import Mutation, mutations_of
from reached import Reaching, Record

SOURCE = '''
"""A doc string with 1 < 2."""
from functools import lru_cache

SIZE = 4

class Box:
    closed: bool = True

    @lru_cache(maxsize=8)
    def area(self, wide: int | None, high: "int | str" = 3) -> int:
        """É: what stands behind letters of two bytes is found, too."""
        if wide is None or high < 0:
            raise ValueError(f"needs {1 + 1}")
        total = wide * high - 1
        total += max(wide, high)
        return total if isinstance(wide, int | float) else -total

def outer(x):
    def inner(y):
        return [z for z in y if z]
    x.sort()
    both = dict(zip(x, x, strict=True))
    return inner(x) == 1.5
'''


def changes() -> dict[str, set[str]]:
    """The lines that a change of the source makes, for each line."""
    source = SOURCE.encode()
    found: dict[str, set[str]] = {}
    for each in mutations_of(Path("box.py"), source):
        if each.is_real(source):
            was, becomes = each.lines(source)
            found.setdefault(was, set()).add(becomes)
    return found


def test_what_is_changed() -> None:
    found = changes()
    assert found["if wide is None or high < 0:"] == {
        "if wide is not None or high < 0:",
        "if wide is None or high <= 0:",
        "if wide is None or high < 1:",
        "if wide is None and high < 0:",
        "if ((wide is None)):",
        "if ((high < 0)):",
        "if not (wide is None or high < 0):",
    }
    assert found["total = wide * high - 1"] == {
        "total = wide * high + 1",
        "total = wide // high - 1",
        "total = (wide) - 1",
        "total = (high) - 1",
        "total = (wide * high)",
        "total = (1)",
        "total = ((1) - (wide * high))",
        "total = wide * high - 2",
        "total = wide * high - 0",
    }
    assert found["total += max(wide, high)"] == {
        "total -= max(wide, high)",
        "total += min(wide, high)",
        "pass",
    }
    assert found["closed: bool = True"] == {"closed: bool = False"}
    assert found["return [z for z in y if z]"] == {"return [z for z in y if True]"}
    assert found["x.sort()"] == {"pass"}
    assert found["return inner(x) == 1.5"] == {"return inner(x) != 1.5", "return inner(x) == 2.5"}


def test_what_is_left_out() -> None:
    found = changes()
    for line in ("SIZE = 4", "@lru_cache(maxsize=8)", 'raise ValueError(f"needs {1 + 1}")'):
        assert line not in found
    assert not any("strict" in line for line in found)
    (line,) = (line for line in found if line.startswith("def area"))
    # the default, and no annotation
    assert {becomes.rpartition("=")[2] for becomes in found[line]} == {" 4) -> int:", " 2) -> int:"}
    (line,) = (line for line in found if "isinstance" in line)
    assert all("isinstance(wide, int | float)" in becomes for becomes in found[line])


def test_functions_are_known_by_their_names() -> None:
    names = {each.function for each in mutations_of(Path("box.py"), SOURCE.encode())}
    assert names == {"Box", "Box.area", "outer", "outer.<locals>.inner"}


@pytest.mark.parametrize("room", mutants.ROOMS)
def test_rooms_have_files_whose_changes_are_programs(room: str) -> None:
    paths = mutants.files_of(room)
    assert paths
    few = random.Random(0).sample(paths, min(2, len(paths)))
    drawn = mutants.drawn(few, 4, seed=1)
    assert len(drawn) == 4
    for each in drawn:
        source = (mutants.ROOT / each.path).read_bytes()
        assert ast.dump(ast.parse(each.of(source))) != ast.dump(ast.parse(source))


def test_the_same_seed_draws_the_same_changes() -> None:
    paths = mutants.files_of("streaming")
    first, again, other = (mutants.drawn(paths, 4, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_what_is_drawn_elsewhere_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"def f{n}(x): return x + {n}" for n in range(40)]
    sources = ["\n".join(text) for text in (lines, ["import os", *lines[:7], *lines[8:]])]
    texts = []
    for source in sources:
        monkeypatch.setattr(mutants, "source_of", lambda _, source=source: source.encode())
        texts.append([mutants.lines_of(x) for x in mutants.drawn([Path("f.py")], 20, seed=3)])
    gone = [x for x in texts[0] if x not in texts[1]]
    assert all("f7" in was for was, _ in gone)
    assert len(gone) <= 1


def test_what_survived_is_tried_again(tmp_path: Path) -> None:
    few = mutants.drawn(mutants.files_of("streaming"), 3, seed=1)
    outcomes = [
        mutants.Outcome("streaming", each, killer, 1)
        for each, killer in zip(few, ("t", None, "t"), strict=True)
    ]
    path = tmp_path / "run.json"
    path.write_text(json.dumps(mutants.as_data(outcomes, 3, 1)))
    assert mutants.survivors_of(path) == {mutants.named(few[1])}
    assert mutants.survivors_of(None) is None


def test_a_room_of_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mutants.ROOMS, "patterns", ("graphs/patterns/*", "graphs/paterns/window"))
    with pytest.raises(ValueError, match="the room patterns names graphs/paterns/window"):
        mutants.files_of("patterns")


def test_what_is_explained_can_be_made() -> None:
    """Explanations whose lines have changed are taken out, or written anew."""
    paths = [path for room in mutants.ROOMS for path in mutants.files_of(room)]
    sources = {path: (mutants.ROOT / path).read_bytes() for path in paths}
    for function, was, becomes in mutants.alike():
        first = was.partition("\n")[0].encode()
        made = (
            each.lines(source)
            for path, source in sources.items()
            if first in source
            for each in mutations_of(path, source)
            if each.function == function
        )
        assert (was, becomes) in made, f"{function}: {was}"


# --- running --------------------------------------------------------------------------------------

CALC = "def more(x, y):\n    while x > y + 9:\n        x = x - 1\n    return x + y\n"
TESTS = (
    "import calc\n"
    "def test_slow(): assert calc.more(1, 2) == 3\n"
    "def test_fast(): assert calc.more(0, 0) == 0\n"
    "def test_far(): assert calc.more(12, 2) == 13\n"
    "def test_wrong(): assert calc.more(0, 0) == 1\n"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    root.mkdir()
    (root / "calc.py").write_text(CALC)
    (root / "test_calc.py").write_text(TESTS)
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return root


def named(*names: str) -> list[str]:
    return [f"test_calc.py::test_{name}" for name in names]


def change(was: str, becomes: str) -> Mutation:
    source = CALC.encode()
    (found,) = (
        each
        for each in mutations_of(Path("calc.py"), source)
        if each.lines(source) == (was, becomes)
    )
    return found


def test_a_change_is_killed_by_the_first_test_that_notices_it(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(tree, tmp_path)
    minus = change("return x + y", "return x - y")
    assert worker.killer(minus, named("fast"), 1.0) is None
    assert worker.killer(minus, named("fast", "slow", "far"), 1.0) == named("slow")[0]
    # what fails anyway says nothing
    assert worker.killer(minus, named("wrong", "fast"), 1.0) is None
    assert worker.killer(minus, named("wrong", "slow"), 1.0) == named("slow")[0]
    # a few tests run first, then the others
    monkeypatch.setattr(forked, "FEW", 1)
    assert worker.killer(minus, named("fast", "far", "slow"), 1.0) == named("far")[0]
    assert worker.killer(minus, named("wrong", "fast", "slow"), 1.0) == named("slow")[0]
    # nothing is left changed, neither in the copy nor in the tree
    assert (tree / "calc.py").read_text() == CALC
    assert (worker.changed / "calc.py").read_text() == CALC


SHARED = f"""
import subprocess, sys
import pytest
PROGRAM = '''
import sys
sys.path.append({str(mutants.HERE)!r})
from noted import noting
tell = noting()
import calc
calc.more(1, 2)
tell()
'''

@pytest.fixture(scope="module")
def ran():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)

def test_first(ran): pass
def test_second(ran): pass
def test_other(): pass
"""


def test_what_processes_of_tests_call_is_reached(tree: Path) -> None:
    (tree / "test_shared.py").write_text(SHARED)

    def reaching(name: str) -> set[str]:
        found = recorded(tree, tree / name)
        assert found is not None
        return {found.tests[place] for place in found.calls.get("calc:more", ())}

    assert reaching("test_shared.py") == {"test_first", "test_second"}
    assert reaching("test_calc.py") == {"test_slow", "test_fast", "test_far"}


def test_what_does_not_end_is_ended() -> None:
    def endless() -> None:
        while True:
            pass

    with pytest.raises(Ended, match="the time: more than 0 s"):
        in_child(endless, 0)
    with pytest.raises(Ended, match="a crash: SIGUSR1"):
        in_child(lambda: os.kill(os.getpid(), signal.SIGUSR1), 5)
    with pytest.raises(RuntimeError, match="failed by itself"):
        in_child(lambda: 1 // 0, 5)
    start = time.process_time()
    assert in_child(lambda: [1, "two"], 5) == [1, "two"]
    assert time.process_time() - start < 5


def test_every_test_runs_once_before_any_runs_with_other_arguments() -> None:
    record = Record(
        digest="",
        tests=["test_a[1]", "test_a[2]", "test_b", "test_c", "test_d"],
        seconds=[0.1, 0.2, 3.0, 50.0, 0.1],
        calls={"box:Box.area": [0, 1, 2, 3], "box:Box.other": [4]},
    )
    reaching = Reaching({Path("tests/test_box.py"): record})
    area = Mutation(Path("attnspec/box.py"), "Box.area", 1, 0, 1, "x")
    tests, seconds = reaching.tests(area, 10.0)
    assert [test.partition("::")[2] for test in tests] == ["test_a[1]", "test_b", "test_a[2]"]
    assert seconds == pytest.approx(3.3)
    # what stands in a class is reached with any of its functions
    whole = Mutation(Path("attnspec/other/box.py"), "Box", 1, 0, 1, "x")
    assert len(reaching.tests(whole, 100.0)[0]) == 5
    # the tests of its own room are first
    near = Reaching({Path(f"tests/{x}/test_box.py"): record for x in ("cli", "ir", "text")})
    inside = Mutation(Path("attnspec/ir/box.py"), "Box.other", 1, 0, 1, "x")
    assert [test.split("/")[1] for test in near.tests(inside, 9.0)[0]] == ["ir", "cli", "text"]
    assert reaching.tests(Mutation(Path("attnspec/lid.py"), "Lid", 1, 0, 1, "x"), 10.0) == ([], 0.0)
