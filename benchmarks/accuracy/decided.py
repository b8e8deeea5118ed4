"""`python -m benchmarks.accuracy.decided`: what choices by content learn, and windows do not.

Two tasks whose answers stand far away, each with a choice and with a window that does not reach
them. Results are written row by row; rows that are there are kept. The steps that `duplication`
takes are not known: sequences of 64 tokens were not learned in some hundred, by `full` neither.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from attnspec.bench.timing import machine, versions
from attnspec.spec import parse
from benchmarks.accuracy.__main__ import RESULTS, SEEDS
from benchmarks.accuracy.systems import spelled
from benchmarks.accuracy.tasks import Task, duplication, recall
from benchmarks.accuracy.training import Budget, train
from benchmarks.measuring import Json, read, write

DECIDED = RESULTS.with_name("decided_accuracy.json")


@dataclass(frozen=True)
class Far:
    """A task, how it is trained, and the attentions that are tried, as in `SYSTEMS`."""

    task: Callable[[], Task]
    budget: Budget
    bodies: Mapping[str, str]


WINDOW = "causal attend window(before = {before}, after = 0)"

FAR: Mapping[str, Far] = {
    "recall": Far(
        partial(recall, asked=64, copies=32, gap=192, count=2400),
        Budget(steps=600, batch=8),
        {
            "topk": "causal attend topk(blocks = 4, size = 16, queries = 1)",
            "window": WINDOW.format(before=63),
        },
    ),
    "duplication": Far(
        duplication,
        Budget(steps=6000, batch=8),
        {
            "lsh": "causal attend lsh(rounds = 4, chunk = 64, share_qk = false)",
            "window": WINDOW.format(before=127),
        },
    ),
}
"""Two layers of a window reach twice as far, which is less than the gap, and less than half a
sequence."""


def measured(far: Far, body: str, seeds: int) -> dict[str, Json]:
    """The accuracies of an attention by seed, their mean and spread, and that of chance."""
    task = far.task()
    spec = parse(spelled(body, task.n))
    found = [train(task, spec, seed, far.budget).accuracy for seed in range(seeds)]
    return {
        "task": task.name,
        "n": task.n,
        "chance": task.chance,
        "spec": spec.source,
        "budget": asdict(far.budget),
        "accuracies": [*found],
        "mean": statistics.fmean(found),
        "spread": statistics.stdev(found) if len(found) > 1 else 0.0,
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy.decided", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--tasks", nargs="+", default=[*FAR], choices=[*FAR])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--results", type=Path, default=DECIDED, help="the file of the figures")
    options = parser.parse_args(arguments)
    before: Mapping[str, Any] = read(options.results)
    rows: dict[str, Any] = {**before.get("rows", {})}
    for name in options.tasks:
        for system, body in FAR[name].bodies.items():
            row = rows.get(f"{name}, {system}") or measured(FAR[name], body, options.seeds)
            rows[f"{name}, {system}"] = row
            print(
                f"{name}: {system} {row['mean']:.3f}, chance {row['chance']:.3f}", file=sys.stderr
            )
            figures: dict[str, Json] = {
                "machine": machine(),
                "versions": versions(("torch", "numpy")),
                "rows": {**rows},
            }
            write(options.results, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
