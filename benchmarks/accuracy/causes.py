"""`python -m benchmarks.accuracy.causes`: why a system finds a task hard, by one change to it.

Each row trains a system again with one thing changed, all else as in `benchmarks.accuracy`, and
holds it against what that found. Results are written row by row; rows that are there are kept.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from attnspec.bench.timing import machine, versions
from attnspec.spec import parse
from benchmarks.accuracy.__main__ import RESULTS, SEEDS
from benchmarks.accuracy.systems import SYSTEMS, spelled
from benchmarks.accuracy.tasks import TASKS
from benchmarks.accuracy.training import Budget, train
from benchmarks.measuring import Json, read, write

CAUSES = RESULTS.with_name("causes.json")


@dataclass(frozen=True)
class Change:
    """A system on a task with something else in its place: `words` say what, `body` is the
    attention as in `SYSTEMS`, None where it stays, and `longer` multiplies the steps."""

    system: str
    task: str
    words: str
    body: str | None = None
    longer: int = 1


CHANGES: tuple[Change, ...] = (
    Change("window", "digits", "four times the radius", "attend window(radius = {n} // 2)"),
    Change("window", "listops", "four times the radius", "attend window(radius = {n} // 2)"),
    Change(
        "Longformer",
        "recall",
        "sixteen global tokens in place of two",
        "attend window(radius = {eighth}) | global(first(16))",
    ),
    Change(
        "Linformer",
        "recall",
        "as many projected keys as keys",
        "attend linformer(rank = {n}, max_length = {n})",
    ),
    Change(
        "Linformer",
        "listops",
        "as many projected keys as keys",
        "attend linformer(rank = {n}, max_length = {n})",
    ),
    Change(
        "Nyströmformer",
        "recall",
        "landmarks of two tokens in place of four",
        "attend nystrom(landmarks = {n} // 2)",
    ),
    Change("linear", "recall", "four times the steps", longer=4),
    Change("linear", "digits", "four times the steps", longer=4),
    Change("FAVOR+", "recall", "four times the steps", longer=4),
    Change("Taylor", "recall", "four times the steps", longer=4),
    Change(
        "RFA",
        "digits",
        "no floor under the sums",
        "attend rfa(features = 32, seed = 0)",
    ),
)


def measured(change: Change, seeds: int = SEEDS) -> dict[str, Json]:
    """The accuracies of a changed system by seed, their mean and spread."""
    task, budget = TASKS[change.task](), Budget()
    budget = replace(budget, steps=budget.steps * change.longer)
    spec = parse(spelled(change.body or SYSTEMS[change.system], task.n))
    found = [train(task, spec, seed, budget).accuracy for seed in range(seeds)]
    return {
        "system": change.system,
        "task": task.name,
        "words": change.words,
        "spec": spec.source,
        "steps": budget.steps,
        "accuracies": [*found],
        "mean": statistics.fmean(found),
        "spread": statistics.stdev(found),
    }


def main(path: Path = CAUSES) -> int:
    unchanged: Mapping[str, Any] = read(RESULTS)
    before: Mapping[str, Any] = read(path)
    known = {(row["system"], row["task"], row["words"]): row for row in before.get("rows", [])}
    rows: list[dict[str, Any]] = []
    for change in CHANGES:
        task = TASKS[change.task]().name
        row = known.get((change.system, task, change.words)) or measured(change)
        rows.append(row | {"unchanged": unchanged[task]["systems"][change.system]["mean"]})
        print(f"{task}: {change.system}, {change.words}: {rows[-1]['mean']:.3f}", file=sys.stderr)
        figures: dict[str, Json] = {
            "machine": machine(),
            "versions": versions(("torch", "numpy", "scikit-learn")),
            "budget": asdict(Budget()),
            "rows": [*rows],
        }
        write(path, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
