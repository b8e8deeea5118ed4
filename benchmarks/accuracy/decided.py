"""`python -m benchmarks.accuracy.decided`: what choices by content learn, and windows do not.

Two tasks whose answers stand far away, each with a choice and with a window that does not reach
them, by a model of one layer. Results are written seed by seed; what is there, and was trained
alike, is kept. Weights hardly decay: as they do in the other tasks not even `full` learned
`duplication`, in steps that are enough without. `lsh` takes its time, and 900 steps were enough for
one seed of two: attention meets only what is hashed together, and that must be learned.

What `topk` does not take has no gradient, so that a key whose blocks are never taken stays lost:
with heads of 16 and a rate of 3e-3 that befell one or two keys of 16 on most seeds (90 to 98 %).
Three things keep them. Heads are of 64: the means of blocks of b keys are told apart the better the
larger √(d / 2b) is. Each token is told the three before it, so that all of a block know its key and
its value, as FlashMoBA convolves keys. And the rate is lower.
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
from benchmarks.accuracy.training import Budget, Size, train
from benchmarks.measuring import Json, read, write

DECIDED = RESULTS.with_name("decided_accuracy.json")


@dataclass(frozen=True)
class Far:
    """A task, the size of the model and how it is trained, and the attentions that are tried, as in
    `SYSTEMS`."""

    task: Callable[[], Task]
    size: Size
    budget: Budget
    bodies: Mapping[str, str]


WINDOW = "causal attend window(before = {before}, after = 0)"

FAR: Mapping[str, Far] = {
    "recall": Far(
        partial(recall, asked=64, copies=32, gap=192, count=4800),
        Size(width=128, layers=1, told=3, last=64),
        Budget(steps=400, batch=8, rate=1e-3, decay=0.01),
        {
            "topk": "causal attend topk(blocks = 4, size = 16, queries = 1)",
            "window": WINDOW.format(before=63),
        },
    ),
    "duplication": Far(
        duplication,
        Size(width=64, layers=1),
        Budget(steps=2000, rate=3e-3, decay=0.01),
        {
            "lsh": "causal attend lsh(rounds = 4, chunk = 16)",
            "window": WINDOW.format(before=31),
        },
    ),
}
"""A window reaches less far than the gap, and than half a sequence."""


def measured(far: Far, task: Task, body: str, seed: int) -> float:
    """The accuracy that an attention reaches from a seed."""
    spec = parse(spelled(body, task.n, far.size.layers))
    return train(task, spec, seed, far.budget, far.size).accuracy


def row_of(far: Far, task: Task, body: str, found: Sequence[float]) -> dict[str, Json]:
    """The accuracies of an attention by seed, their mean and spread, and that of chance."""
    return {
        "task": task.name,
        "n": task.n,
        "chance": task.chance,
        "spec": spelled(body, task.n, far.size.layers),
        "size": asdict(far.size),
        "budget": asdict(far.budget),
        "accuracies": [*found],
        "mean": statistics.fmean(found),
        "spread": statistics.stdev(found) if len(found) > 1 else 0.0,
    }


def known(before: Mapping[str, Any], asked: Mapping[str, Json]) -> list[float]:
    """The accuracies that a row has, if it was trained as is asked now."""
    alike = all(before.get(name) == asked[name] for name in ("n", "spec", "size", "budget"))
    return [*before["accuracies"]] if alike else []


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
        far = FAR[name]
        task = far.task()
        for system, body in far.bodies.items():
            key = f"{name}, {system}"
            found = known(rows.get(key, {}), row_of(far, task, body, [0.0]))
            for seed in range(len(found), options.seeds):
                found.append(measured(far, task, body, seed))
                rows[key] = row_of(far, task, body, found)
                figures: dict[str, Json] = {
                    "machine": machine(),
                    "versions": versions(("torch", "numpy")),
                    "rows": {**rows},
                }
                write(options.results, figures)
            row = rows[key]
            print(
                f"{name}: {system} {row['mean']:.3f}, chance {row['chance']:.3f}", file=sys.stderr
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
