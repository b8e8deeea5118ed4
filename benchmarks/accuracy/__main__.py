"""`python -m benchmarks.accuracy`: train every system on every task, write the figures.

Results are written after each system, so that a run that is interrupted keeps what it has;
`--missing` goes on from there, with more seeds as well.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attnspec.bench.timing import machine, versions
from attnspec.spec import parse
from benchmarks.accuracy.costs import costs_of
from benchmarks.accuracy.published import PUBLISHED, SOURCE
from benchmarks.accuracy.systems import SYSTEMS, text
from benchmarks.accuracy.tasks import TASKS, Task, images
from benchmarks.accuracy.training import Budget, train
from benchmarks.measuring import Json, read, write

RESULTS = Path(__file__).resolve().parent.parent / "results" / "accuracy.json"

SEEDS = 3


def measure(
    task: Task, name: str, seeds: int, budget: Budget, known: dict[str, Any]
) -> dict[str, Any]:
    """One system on one task: accuracies by seed, their mean and spread, and what a step costs.

    Only what is not known of it is measured.
    """
    spec = parse(text(name, task.n))
    row = {"spec": spec.source, "accuracies": [], **known}
    for seed in range(len(row["accuracies"]), seeds):
        found = train(task, spec, seed, budget)
        row["accuracies"] = [*row["accuracies"], found.accuracy]
        row["parameters"] = found.parameters
    row["mean"] = statistics.fmean(row["accuracies"])
    row["spread"] = statistics.stdev(row["accuracies"]) if len(row["accuracies"]) > 1 else 0.0
    return row if "step_seconds" in row else row | asdict(costs_of(task, spec))


def rows_of(figures: Mapping[str, Any], task: Task, budget: Budget) -> dict[str, dict[str, Any]]:
    """What is known of the systems on a task; ValueError where they were trained in another way."""
    if task.name not in figures:
        return {}
    before, now = figures[task.name]["budget"], asdict(budget)
    if before != now:
        raise ValueError(f"all systems must be trained alike: {before} in the file, {now} asked")
    return {**figures[task.name]["systems"]}


def figures_of(task: Task, rows: dict[str, dict[str, Any]], budget: Budget) -> dict[str, Json]:
    """What is written of a task: its systems, how they were trained, and what others found."""
    found: dict[str, Json] = {
        "machine": machine(),
        "versions": versions(("torch", "numpy", "scikit-learn")),
        "n": task.n,
        "chance": task.chance,
        "budget": asdict(budget),
        "seeds": min(len(row["accuracies"]) for row in rows.values()),
        "systems": {name: rows[name] for name in SYSTEMS if name in rows},
    }
    if task.name in PUBLISHED:
        title, accuracies = PUBLISHED[task.name]
        found["published"] = {"title": title, "source": SOURCE, "accuracies": {**accuracies}}
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=[*TASKS], metavar="TASK")
    parser.add_argument("--systems", nargs="+", default=[*SYSTEMS], choices=[*SYSTEMS])
    parser.add_argument("--cifar", type=Path, help="the folder of CIFAR-10's Python version")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=Budget.steps)
    parser.add_argument("--missing", action="store_true", help="keep what the file has of a task")
    parser.add_argument(
        "--costs-only", action="store_true", help="measure time and memory of what is there anew"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of the figures")
    options = parser.parse_args(arguments)
    tasks = [TASKS[name]() for name in options.tasks]
    if options.cifar is not None:
        tasks.append(images(options.cifar))
    figures = read(options.results)
    budget = Budget(options.steps)
    for task in tasks:
        rows: dict[str, dict[str, Any]] = {}
        if options.missing or options.costs_only:
            rows = rows_of(figures, task, budget)
        for name in options.systems:
            if options.costs_only:
                rows[name] |= asdict(costs_of(task, parse(text(name, task.n))))
            else:
                rows[name] = row = measure(task, name, options.seeds, budget, rows.get(name, {}))
                told = f"{row['mean']:.3f} ± {row['spread']:.3f}"
                print(f"{task.name}: {name} {told}", file=sys.stderr)
            figures[task.name] = figures_of(task, rows, budget)
            write(options.results, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
