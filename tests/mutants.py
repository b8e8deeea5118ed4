"""Mutation testing: small changes of the package's meaning, each of which some test should notice.

    python tests/mutants.py --number 200 --seed 0 --workers 2

What may be changed is drawn from the rooms below. A change is made in a throw-away copy of the tree
and the tests that reach its function run there until one fails, up to `--seconds` of them: every
test function once before any runs with other arguments, those of its own room first, then the
fastest. A failure counts where the same test passes without the change. What survives is printed
with a diff; a survivor that means the same as before is explained in `mutants_alike.toml`, by its
function and its lines.

Which tests reach what is recorded first, once for each file of tests (`--record` does it anew),
in `.mutants/`. Nothing else is kept: results are printed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mutations import Mutation, mutations_of
from reached import REACHED

ROOMS: dict[str, tuple[str, ...]] = {
    "patterns": ("graphs/patterns/*", "graphs/operators", "graphs/relation", "graphs/token_sets"),
    "predicates": ("graphs/predicates/*", "graphs/forms/*", "ir/intervals", "ir/linear"),
    "planner": ("backends/*", "backends/*/backend", "lower/lower", "lower/costs"),
    "layouts": ("layout/*", "backends/one_block/row_keys", "graphs/grid", "graphs/edge_table"),
    "kernels": (
        *("backends/common/*", "backends/one_block/*"),
        *("backends/tables/*", "backends/edges/*"),
        "backends/factored/features/*",
        *("backends/factored/hybrid", "backends/factored/matrices", "backends/factored/softmax"),
    ),
    "decided": ("backends/decided/*",),
    "runtime": ("runtime/operator", "runtime/engine"),
    "streaming": ("runtime/streaming", "backends/common/key_cache", "graphs/look_back"),
    "analysis": ("analysis/*/*",),
    "claims": ("check/*", "verification/*"),
    "distributed": ("distributed/*",),
    "interchange": ("interchange/*", "integrations/*"),
}
"""What is changed: files of the package by their paths in it."""

LEFT_OUT = ("test_packaging.py", "test_docs.py", "test_mutants.py")
"""Files of tests that are not run: they build packages, or are about this."""

HERE = Path(__file__).resolve().parent
ROOT = next(folder for folder in HERE.parents if (folder / "pyproject.toml").exists())
RECORDS = ROOT / ".mutants"

NOT_COPIED = (".git", ".venv", ".*_cache", "__pycache__", ".hypothesis", ".mutants", "build")

RECORDING = 1800.0
"""Seconds that the tests of one file may take while they are recorded."""

MEMORY = 8 << 30
"""Bytes that a run of tests may take: what a change makes of a size has no other bound."""

UNKNOWN = 4
"""What pytest returns where there is no test of a name."""


@dataclass(frozen=True)
class Outcome:
    """What became of a change: the verdict, and what killed it or why it did not."""

    room: str
    verdict: str
    mutation: Mutation
    why: str


def files_of(room: str) -> list[Path]:
    """The files of a room, relative to the root; ValueError where a name stands for none."""
    found: dict[Path, None] = {}
    for name in ROOMS[room]:
        # the folders at the top are linked into the package
        at = ROOT if name.partition("/")[0] in ("backends", "grammar") else ROOT / "attnspec"
        chosen = sorted(at.glob(f"{name}.py"))
        if not chosen:
            raise ValueError(f"the room {room} names {name}, and there is no such file")
        found.update(dict.fromkeys(path.relative_to(ROOT) for path in chosen))
    return list(found)


@cache
def source_of(path: Path) -> bytes:
    """A file as it was when the run began: changes are places in it."""
    return (ROOT / path).read_bytes()


def drawn(paths: Iterable[Path], number: int, seed: int) -> list[Mutation]:
    """So many changes, no two of one line. What is drawn of a line depends on its text alone, so
    that most of them are drawn again from a tree in which some tests or functions were mended."""

    def rank(each: Mutation) -> str:
        text = source_of(each.path).splitlines()[each.line - 1].decode().strip()
        return sha256(f"{seed} {each.path} {each.function} {text} {each.new}".encode()).hexdigest()

    first: dict[tuple[Path, int], Mutation] = {}
    for each in sorted(
        (x for path in paths for x in mutations_of(path, source_of(path))), key=rank
    ):
        first.setdefault((each.path, each.line), each)
    return [*first.values()][:number]


def known_by(file: str, function: str, was: str, becomes: str) -> tuple[str, ...]:
    """A change without what may differ where it means the same: blanks, brackets, quotes."""
    return file, function, *(re.sub(r"[\s()'\"]", "", text) for text in (was, becomes))


def key_of(mutation: Mutation) -> tuple[str, ...]:
    lines = mutation.lines(source_of(mutation.path))
    return known_by(mutation.path.name, mutation.function, *lines)


def alike() -> dict[tuple[str, ...], str]:
    """Changes that mean the same, and why."""
    path = HERE / "mutants_alike.toml"
    listed = tomllib.loads(path.read_text(encoding="utf-8")).get("change", [])
    return {known_by(x["file"], x["function"], x["was"], x["becomes"]): x["why"] for x in listed}


def report(outcomes: Sequence[Outcome]) -> str:
    """Scores of rooms and of all."""
    lines = []
    for name in (*(room for room in ROOMS if any(x.room == room for x in outcomes)), "all"):
        count = Counter(x.verdict for x in outcomes if name in (x.room, "all"))
        asked = count.total() - count["alike"]
        part = f"{count['killed'] / asked:.0%}" if asked else "-"
        rest = (f"{count[x]} {x}" for x in ("survived", "not reached", "alike") if count[x])
        killed = f"{name:<12} {count['killed']:>4} of {asked:>4} killed {part:>5}"
        lines.append(f"{killed}  {', '.join(rest)}".rstrip())
    return "\n".join(lines)


def diff_of(mutation: Mutation) -> str:
    source = source_of(mutation.path)
    was, becomes = (text.decode().splitlines() for text in (source, mutation.of(source)))
    names = f"{mutation.path} ({mutation.function})", "changed"
    return "\n".join(difflib.unified_diff(was, becomes, *names, n=2, lineterm=""))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--number", type=int, default=200, help="changes that are tried")
    parser.add_argument("--seed", type=int, default=0, help="draws other changes")
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=[*ROOMS])
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests for each change")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--record", action="store_true", help="record anew what tests reach")
    return parser.parse_args()


# --- tests in trees ------------------------------------------------------------------------------


def run(
    tree: Path, tests: Sequence[str], seconds: float, *more: str, **env: str
) -> tuple[int, str]:
    """The status and the output of pytest in a tree; raises TimeoutExpired."""
    command = [sys.executable, "-m", "pytest", "-v", "--tb=no", "-p", "no:xdist"]
    env |= {"PYTHONPATH": f"{tree}:{tree / 'tests'}", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "-p", "no:cacheprovider", *more, *tests],
        cwd=tree,
        env=os.environ | env | {"PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (MEMORY, MEMORY))
        try:
            output, _ = process.communicate(timeout=seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def first_failing(tree: Path, tests: Sequence[str], seconds: float) -> str | None:
    """The first of the tests that fails in a tree, or what else goes wrong."""
    try:
        status, output = run(tree, tests, seconds, "-x")
    except subprocess.TimeoutExpired:
        return f"the time: more than {seconds:.0f} s"
    functions = list(dict.fromkeys(test.partition("[")[0] for test in tests))
    if status == UNKNOWN and functions != list(tests):
        # the cases of a test come out of what is changed
        return first_failing(tree, functions, seconds)
    failed = re.search(r"^(\S+::.*) (?:FAILED|ERROR)\b", output, re.MULTILINE)
    return None if status == 0 else failed[1] if failed else f"pytest ended with {status}"


def killer_of(tree: Path, mutation: Mutation, tests: list[str], seconds: float) -> str | None:
    """The first test that fails, or what else does; they take so many seconds without it."""
    path = tree / mutation.path
    source = path.read_bytes()
    while tests:
        try:
            path.write_bytes(mutation.of(source))
            failed = first_failing(tree, tests, 4 * seconds + 60)
        finally:
            path.write_bytes(source)
        if failed not in tests or first_failing(tree, [failed], 300) is None:
            return failed
        tests = tests[tests.index(failed) + 1 :]
    return None


def record_of(path: Path, again: bool, trees: SimpleQueue[Path]) -> dict[str, Any]:
    """What the tests of a file reach; nothing where they take too long."""
    digest = sha256((ROOT / path).read_bytes()).hexdigest()[:16]
    kept = RECORDS / f"{path.stem}-{digest}.json"
    if again or not kept.exists():
        tree = trees.get()
        with suppress(subprocess.TimeoutExpired):
            run(tree, [str(path)], RECORDING, "-p", "reached", **{REACHED: str(kept)})
        trees.put(tree)
        print(f"recorded {path}{'' if kept.exists() else ': it takes too long'}", flush=True)
    return json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {"calls": {}}


def tests_reaching(
    records: Iterable[Mapping[str, Any]], mutation: Mutation, seconds: float
) -> tuple[list[str], float]:
    """The tests that reach a change, as far as the seconds allow, and how long they take."""
    key, parts = f"{mutation.path.stem}:{mutation.function}", mutation.path.parts
    own = f"tests/{parts[1] if parts[0] == 'attnspec' else parts[0]}/"
    found: list[tuple[int, bool, float, str]] = []
    for record in records:
        # of a class, tests of its functions
        names = (name for name in record["calls"] if name == key or name.startswith(f"{key}."))
        cases: Counter[str] = Counter()
        places = {place for name in names for place in record["calls"][name]}
        for place in sorted(places, key=record["seconds"].__getitem__):
            test, taken = record["tests"][place], record["seconds"][place]
            function = test.partition("[")[0]
            found.append((cases[function], not test.startswith(own), taken, test))
            cases[function] += 1
    chosen: dict[str, float] = {}
    for *_, taken, test in sorted(found):
        if sum(chosen.values()) + taken <= seconds:
            chosen[test] = taken
    return list(chosen), sum(chosen.values())


def outcomes_of(
    asked: argparse.Namespace, pool: ThreadPoolExecutor, trees: SimpleQueue[Path]
) -> Iterator[Outcome]:
    """What becomes of each change, one after the other."""
    rooms = {path: room for room in asked.rooms for path in files_of(room)}
    files = (ROOT / "tests").rglob("test_*.py")
    tests = sorted(path.relative_to(ROOT) for path in files if path.name not in LEFT_OUT)
    records = list(pool.map(lambda path: record_of(path, asked.record, trees), tests))
    explained = alike()

    def outcome(each: Mutation) -> Outcome:
        why = explained.get(key_of(each))
        if why is not None:
            return Outcome(rooms[each.path], "alike", each, why)
        some, seconds = tests_reaching(records, each, asked.seconds)
        tree = trees.get()
        killer = killer_of(tree, each, some, seconds)
        trees.put(tree)
        verdict = "killed" if killer else "survived" if some else "not reached"
        return Outcome(rooms[each.path], verdict, each, killer or f"{len(some)} tests passed")

    yield from pool.map(outcome, drawn(rooms, asked.number, asked.seed))


def main() -> int:
    asked = arguments()
    # a request to end is an exception, so that nothing is left behind
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    RECORDS.mkdir(exist_ok=True)
    outcomes: list[Outcome] = []
    trees = SimpleQueue[Path]()
    with tempfile.TemporaryDirectory(prefix="mutants-") as base:
        for number in range(asked.workers):
            tree = Path(base, str(number))
            shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
            trees.put(tree)
        try:
            with ThreadPoolExecutor(asked.workers) as pool:
                for outcome in outcomes_of(asked, pool, trees):
                    outcomes.append(outcome)
                    mutation = outcome.mutation
                    place = f"{mutation.path}:{mutation.line} {mutation.function}"
                    print(f"{len(outcomes):>4} {outcome.verdict:<11} {place}, {outcome.why}")
                    if outcome.verdict in ("survived", "not reached"):
                        print(diff_of(mutation), flush=True)
        finally:
            # hours of work are told of, also where they were ended
            print(report(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
