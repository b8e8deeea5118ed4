"""`python -m benchmarks.accuracy`: train every system on every task, write the figures.

Results are written after each system, so that a run that is interrupted keeps what it has.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from attnspec.machine import machine, versions
from attnspec.spec import parse
from benchmarks.accuracy.systems import SYSTEMS, text
from benchmarks.accuracy.tasks import TASKS, Task, images
from benchmarks.accuracy.training import Budget, train
from benchmarks.measuring import Json, read, write

RESULTS = Path(__file__).resolve().parent.parent / "results" / "accuracy.json"

SEEDS = 3


def measure(task: Task, name: str, seeds: int, budget: Budget) -> dict[str, Json]:
    """One system on one task: accuracies by seed, their mean and spread, and time per step."""
    spec = parse(text(name, task.n))
    found = [train(task, spec, seed, budget) for seed in range(seeds)]
    accuracies = [each.accuracy for each in found]
    return {
        "spec": spec.source,
        "accuracies": [*accuracies],
        "mean": statistics.fmean(accuracies),
        "spread": statistics.stdev(accuracies) if seeds > 1 else 0.0,
        "step_seconds": statistics.median(each.step_seconds for each in found),
        "parameters": found[0].parameters,
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=[*TASKS], metavar="TASK")
    parser.add_argument("--systems", nargs="+", default=[*SYSTEMS], choices=[*SYSTEMS])
    parser.add_argument("--cifar", type=Path, help="the folder of CIFAR-10's Python version")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, help="steps, else as many as a task has")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of the figures")
    options = parser.parse_args(arguments)
    tasks = [TASKS[name]() for name in options.tasks]
    if options.cifar is not None:
        tasks.append(images(options.cifar))
    figures = read(options.results)
    for task in tasks:
        rows: dict[str, Json] = {}
        budget = Budget(task.steps if options.steps is None else options.steps)
        for name in options.systems:
            rows[name] = row = measure(task, name, options.seeds, budget)
            print(f"{task.name}: {name} {row['mean']:.3f} ± {row['spread']:.3f}", file=sys.stderr)
            figures[task.name] = {
                "machine": machine(),
                "versions": versions(("torch", "numpy", "scikit-learn")),
                "n": task.n,
                "chance": task.chance,
                "budget": asdict(budget),
                "seeds": options.seeds,
                "systems": rows,
            }
            write(options.results, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
