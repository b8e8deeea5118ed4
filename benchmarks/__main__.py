"""`python -m benchmarks [--quick]`: time everything, write the figures, print the tables.

Figures are written after each part, and in the course of long ones, so that a run that is
interrupted keeps what it has. `--only` measures some parts anew and leaves the others as they are
in the file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter

import torch

from attnspec.bench.timing import machine, versions
from benchmarks import (
    answers,
    block_plans,
    choices,
    decided,
    efficiency,
    emitting,
    flex,
    fused,
    growth,
    lengths,
    memory,
    neighbour,
    packages,
    report,
    shapes,
    types,
    untuned,
)
from benchmarks.cases import FULL, QUICK, Settings
from benchmarks.choices import Keep
from benchmarks.fresh import Run, in_fresh_process
from benchmarks.measuring import PACKAGES, Json, read, write

RESULTS = Path(__file__).resolve().parent / "results"

PARTS: Mapping[str, Callable[[Settings, Run, Keep], dict[str, Json]]] = {
    "efficiency": lambda settings, run, keep: efficiency.measure(settings),
    "shapes": lambda settings, run, keep: shapes.measure(settings),
    "lengths": lambda settings, run, keep: lengths.measure(settings),
    "types": lambda settings, run, keep: types.measure(settings),
    "neighbour": lambda settings, run, keep: neighbour.measure(settings),
    "decided": lambda settings, run, keep: decided.measure(settings, run),
    "untuned": lambda settings, run, keep: untuned.measure(settings),
    "fused": lambda settings, run, keep: fused.measure(settings),
    "flex": lambda settings, run, keep: flex.measure(settings, run),
    "packages": lambda settings, run, keep: packages.measure(settings),
    "plans": lambda settings, run, keep: block_plans.measure(settings, run),
    "answers": lambda settings, run, keep: answers.measure(settings, run),
    "emitting": lambda settings, run, keep: emitting.measure(settings),
    "growth": lambda settings, run, keep: growth.measure(settings),
    "memory": lambda settings, run, keep: memory.measure(settings, run),
    "choices": lambda settings, run, keep: choices.measure(settings, keep),
}
"""The parts of a run, in the order in which they are measured; a long one gives its figures so far
to its last argument."""


def measure(
    settings: Settings, path: Path, only: Sequence[str] = (), run: Run = in_fresh_process
) -> dict[str, Json]:
    """Measure the parts and write them to the file, each as soon as it is known."""
    figures = read(path)
    for name, part in PARTS.items():
        if only and name not in only:
            continue
        print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
        start = perf_counter()

        def keep(found: dict[str, Json], name: str = name, start: float = start) -> None:
            figures[name] = {
                "machine": machine(),
                "versions": versions(PACKAGES),
                "rounds": settings.rounds,
                "wall_seconds": perf_counter() - start,
                **found,
            }
            write(path, figures)

        keep(part(settings, run, keep))
        print(f"{perf_counter() - start:.0f} s", file=sys.stderr)
    return figures


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="short sequences and fewer rows")
    parser.add_argument("--only", nargs="+", default=(), choices=[*PARTS], metavar="PART")
    parser.add_argument("--threads", type=int, help="threads of torch, as many as cores by default")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the figures")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    settings = QUICK if options.quick else FULL
    figures = measure(settings, options.results / f"{settings.name}.json", options.only)
    print(report.tables(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
