"""`python -m benchmarks [--quick]`: time everything, write the figures, print the tables.

Figures are written after each part, so that a run that is interrupted keeps what it has. `--only`
measures some parts anew and leaves the others as they are in the file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter

import torch

from attnspec.bench.timing import machine, versions
from benchmarks import efficiency, growth, lengths, report, shapes
from benchmarks.cases import FULL, QUICK, Settings
from benchmarks.measuring import PACKAGES, Json, read, write

RESULTS = Path(__file__).resolve().parent / "results"

PARTS: Mapping[str, Callable[[Settings], dict[str, Json]]] = {
    "efficiency": efficiency.measure,
    "shapes": shapes.measure,
    "lengths": lengths.measure,
    "growth": growth.measure,
}
"""The parts of a run, in the order in which they are measured."""


def measure(settings: Settings, path: Path, only: Sequence[str] = ()) -> dict[str, Json]:
    """Measure the parts and write them to the file, each as soon as it is known."""
    figures = read(path)
    for name, part in PARTS.items():
        if only and name not in only:
            continue
        print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
        start = perf_counter()
        found = part(settings)
        figures[name] = {
            "machine": machine(),
            "versions": versions(PACKAGES),
            "rounds": settings.rounds,
            "wall_seconds": perf_counter() - start,
            **found,
        }
        write(path, figures)
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
