"""Mutation testing: small changes of the package's meaning, each of which some test should notice.

    python tests/mutants.py --number 200 --seed 0 --workers 2

What may be changed is drawn from the rooms below. A change is made in a throw-away copy of the tree
and the tests that reach its function run there until one fails, up to `--seconds` of them: those of
its own room first, the fastest before others, every test function once before any runs with other
arguments. A failure counts where the same test passes without the change. What survives is printed
with a diff; a survivor that means the same as before is explained in `mutants_alike.toml`, by its
function and its lines.

Which tests reach what is recorded first, once for each file of tests (`--record` does it anew),
in `.mutants/`. Nothing else is kept: results are printed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import multiprocessing
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from itertools import islice
from multiprocessing.pool import Pool
from pathlib import Path

from forked import end_on_request, killer_of, record_of, start_worker
from mutations import Mutation, mutations_of
from reached import Record, digest_of, tests_reaching

ROOMS: dict[str, tuple[str, ...]] = {
    "patterns": ("graphs/patterns/*", "graphs/operators", "graphs/relation", "graphs/token_sets"),
    "predicates": ("graphs/predicates/*", "graphs/forms/*", "ir/intervals", "ir/linear"),
    "planner": ("backends/*", "backends/*/backend", "lower/lower", "lower/costs"),
    "layouts": ("layout/*", "backends/one_block/row_keys", "graphs/grid", "graphs/edge_table"),
    "kernels": (
        *("backends/common/*", "backends/one_block/*"),
        *("backends/tables/*", "backends/scattered/*"),
        "backends/factored/features/*",
        *("backends/factored/hybrid", "backends/factored/matrices", "backends/factored/softmax"),
    ),
    "decided": ("backends/decided/*", "runtime/decisions"),
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
    places: dict[tuple[Path, int], tuple[str, Mutation]] = {}
    for path in paths:
        texts = source_of(path).splitlines()
        for each in mutations_of(path, source_of(path)):
            text = texts[each.line - 1].decode().strip()
            drawing = f"{seed} {path} {each.function} {text} {each.new}".encode()
            rank = sha256(drawing).hexdigest(), each
            place = path, each.line
            places[place] = min(places.get(place, rank), rank, key=lambda pair: pair[0])
    order = sorted(places.items(), key=lambda item: (item[1][0], item[0]))
    real = (each for _, (_, each) in order if each.is_real(source_of(each.path)))
    return list(islice(real, number))


def alike() -> dict[tuple[str, str, str], str]:
    """Changes that mean the same: function, line and what it becomes -> why."""
    path = HERE / "mutants_alike.toml"
    listed = tomllib.loads(path.read_text(encoding="utf-8")).get("change", [])
    return {(x["function"], x["was"], x["becomes"]): x["why"] for x in listed}


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
    parser.add_argument("--paths", nargs="+", default=["*"], help="patterns of files, in the rooms")
    parser.add_argument("--tests", nargs="+", default=["test_*.py"], help="patterns of their files")
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests for each change")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--record", action="store_true", help="record anew what tests reach")
    return parser.parse_args()


def records_of(paths: Iterable[Path], again: bool, pool: Pool) -> dict[Path, Record]:
    """What is recorded of files of tests; those that are new or have changed are recorded first."""
    RECORDS.mkdir(exist_ok=True)
    known: dict[Path, Record] = {}
    wanted = []
    for path in paths:
        kept = RECORDS / f"{path.stem}.json"
        if kept.exists():
            known[path] = Record(**json.loads(kept.read_text(encoding="utf-8")))
        if again or path not in known or known[path].digest != digest_of(ROOT / path):
            wanted.append(path)
    for number, (path, record) in enumerate(pool.imap_unordered(record_of, wanted), 1):
        note = "not recorded, it takes too long" if record is None else f"{len(record.tests)} tests"
        print(f"recorded {number} of {len(wanted)}: {path.name}, {note}", flush=True)
        if record is not None:
            known[path] = record
            text = json.dumps(asdict(record))
            (RECORDS / f"{path.stem}.json").write_text(text, encoding="utf-8")
    return known


def outcomes_of(asked: argparse.Namespace, pool: Pool) -> Iterator[Outcome]:
    """What becomes of each change, one after the other."""
    rooms = {
        path: room
        for room in asked.rooms
        for path in files_of(room)
        if any(path.match(pattern) for pattern in asked.paths)
    }
    files = {path for pattern in asked.tests for path in (ROOT / "tests").rglob(pattern)}
    tests = sorted(path.relative_to(ROOT) for path in files if path.name not in LEFT_OUT)
    records = records_of(tests, asked.record, pool)
    explained, jobs = alike(), []
    for each in drawn(rooms, asked.number, asked.seed):
        why = explained.get((each.function, *each.lines(source_of(each.path))))
        if why is not None:
            yield Outcome(rooms[each.path], "alike", each, why)
        else:
            jobs.append((each, *tests_reaching(records, each, asked.seconds)))
    number_of = {each: len(some) for each, some, _ in jobs}
    for each, killer in pool.imap_unordered(killer_of, jobs):
        verdict = "killed" if killer else "survived" if number_of[each] else "not reached"
        why = killer or f"{number_of[each]} tests passed"
        yield Outcome(rooms[each.path], verdict, each, why)


def main() -> int:
    asked = arguments()
    end_on_request()
    outcomes: list[Outcome] = []
    try:
        with tempfile.TemporaryDirectory(prefix="mutants-") as base:
            context = multiprocessing.get_context("fork")
            with context.Pool(asked.workers, start_worker, (ROOT, Path(base))) as pool:
                for outcome in outcomes_of(asked, pool):
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
