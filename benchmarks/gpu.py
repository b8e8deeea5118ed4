"""`python -m benchmarks.gpu --seconds 3000`: check and time everything on a GPU.

First every spec of the zoo is checked against float64 in half precision, then the targets G1 to G7
are timed beside FlexAttention, torch's own calls and flash-linear-attention. Each row is written as
soon as it is known, so that a run that ends, by its time limit or otherwise, goes on behind the row
where it ended when the command is given again; `--again` starts anew. The rows are found in a
process of their own, which is ended where one hangs, and begun again behind it. `--dry-run` goes
through all of it on the CPU at lengths that mean nothing.
"""

from __future__ import annotations

import argparse
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from time import perf_counter

import torch

from attnspec.bench.timing import machine, versions
from benchmarks import gpu_checks, gpu_times
from benchmarks.cases import SHAPES, Shape
from benchmarks.gpu_checks import checked, checks
from benchmarks.gpu_times import RowOf, timings
from benchmarks.measuring import PACKAGES, Json, read, write

RESULTS = Path(__file__).resolve().parent / "results" / "gpu.json"

CHECKS = 0.6
"""The share of the time that checks may take."""

LONGEST = 180
"""Seconds that a row may take."""

GRACE = 20
"""Seconds more after which a process that writes nothing hangs: no exception reaches a call that is
blocked in the driver."""

LOST = 3
"""The exit status of a process in which nothing runs on the device any more."""

UNENDED = "the process ended in it, or was ended"
"""The reason of a row that began."""

HALF = (torch.bfloat16, torch.float16)

ON_GPU = (
    gpu_checks.Settings("cuda", (1_000, 127, 1, 8_192, 47_000, 131_072), HALF),
    gpu_times.Settings(
        "cuda", torch.bfloat16, (8_192, 32_768, 131_072), 65_536, 1 << 20, SHAPES, 16, 3
    ),
)

DRY = (
    gpu_checks.Settings("cpu", (1, 33), (torch.float32,), every=24, heads=2, size=16),
    gpu_times.Settings(
        "cpu", torch.float32, (256,), 256, 1024, (Shape(2, 2, 40),), 2, 1, compiled=False, few=True
    ),
)

AFRESH = 40
"""Checks after which all that is compiled is forgotten: compilations of a kind are limited."""

Rows = dict[str, Json]


def rows(dry: bool) -> Iterator[tuple[str, str, RowOf]]:
    """Everything that is done: `checks` or `times`, a name, and what finds the row."""
    check_settings, time_settings = DRY if dry else ON_GPU
    for check in checks(check_settings):
        yield "checks", check.key, lambda check=check: checked(check, check_settings)  # type: ignore[misc]
    for name, measure in timings(time_settings):
        yield "times", name, measure


def run(
    path: Path,
    dry: bool,
    seconds: float,
    only: str | None,
    again: bool,
    share: tuple[int, int] = (0, 1),
) -> bool:
    """Find the rows that the file does not have, as far as the time goes, and print each; whether
    the device is still there. Of a share (place, count), every count-th row from the place on."""
    device = "cpu" if dry else "cuda"
    figures: dict[str, Json] = {} if again else read(path)
    figures |= {"machine": machine(device), "versions": versions((*PACKAGES, "triton", "fla-core"))}
    known: dict[str, Rows] = {}
    for part in ("checks", "times"):
        before = figures.get(part)
        known[part] = dict(before) if isinstance(before, dict) else {}
    start, ended, lost = perf_counter(), set[str](), False
    write(path, figures | known)
    for part, name, measure in islice(rows(dry), share[0], None, share[1]):
        limit = seconds * (CHECKS if part == "checks" and only is None else 1)
        if part in ended or (only not in (None, part)) or name in known[part]:
            continue
        if perf_counter() - start > limit:
            print(f"{part}: the time is over, give the command again to go on", flush=True)
            ended.add(part)
            continue
        if part == "times" or not len(known[part]) % AFRESH:
            # what is compiled for one rival does not count as a compilation of the next
            torch.compiler.reset()
        # what ends the process is not tried again, and what raises is no less wrong than what errs
        wrong: dict[str, Json] = {"ok": False} if part == "checks" else {}
        write(path, figures | {**known, part: {**known[part], name: {"reason": UNENDED, **wrong}}})
        found, lost = _found(measure)
        known[part][name] = _finite({**wrong, **found})
        print(f"{name}: {_told(known[part][name])}", flush=True)
        write(path, figures | known)
        if lost:
            print("the device is lost to this process", flush=True)
            break
    write(path, figures | known)
    return not lost


def attended(path: Path, seconds: float, rest: Sequence[str]) -> int:
    """Run the rows in processes, the next where one is lost or was ended, as long as there is time
    and each of them gets further; the exit status of the last."""
    start, known, status = perf_counter(), -1, LOST
    options = [*rest]
    while (left := seconds - (perf_counter() - start)) > 0:
        ended = _watched(subprocess.Popen(_command([*options, "--seconds", str(left)])), path)
        if ended is None:
            print("it does not end: the driver holds it, and no other row would run", flush=True)
            return LOST
        status = ended
        # what is forgotten once is not forgotten again
        options = [each for each in options if each != "--again"]
        found = sum(len(rows) for rows in read(path).values() if isinstance(rows, dict))
        if status in (0, 2) or found == known:
            break
        known = found
        print(f"the process ended with {status}: on behind the row that it was in", flush=True)
    return status


def _command(options: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", "--here", *options]


def _watched(child: subprocess.Popen[bytes], path: Path) -> int | None:
    """Waits for a process, and ends it where it has written nothing for too long; None where it
    does not end."""
    seen, last = perf_counter(), _written(path)
    while child.poll() is None:
        time.sleep(min(1.0, LONGEST / 10))
        if (written := _written(path)) != last:
            seen, last = perf_counter(), written
        if perf_counter() - seen > LONGEST + GRACE:
            print("nothing was written for too long: the process is ended", flush=True)
            child.kill()
            try:
                return child.wait(timeout=GRACE)
            except subprocess.TimeoutExpired:
                return None
    return child.returncode


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _found(measure: RowOf) -> tuple[dict[str, Json], bool]:
    """A row, and whether nothing runs on the device any more."""
    lost = False
    try:
        with _limited(LONGEST):
            found = measure()
    except Exception as error:  # one row that fails must not end the others, and says why
        first = str(error).strip().partition("\n")[0]
        found = {"reason": f"{type(error).__name__}: {first:.300}"}
        # after an illegal access every later call fails
        lost = isinstance(error, torch.AcceleratorError)
    if torch.cuda.is_available() and not lost:
        torch.cuda.empty_cache()
    return found, lost


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raises TimeoutError after so long, as soon as Python has its turn."""

    def end(*_: object) -> None:
        raise TimeoutError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _finite(value: Json) -> Json:
    """Figures with words in place of numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list) else value


def _told(row: Json) -> str:
    if not isinstance(row, dict):
        return "nothing"
    if "reason" in row and row.get("ok") is not False:
        return f"not measured: {row['reason']}"
    shown = [
        f"{key} {row[key]}" for key in ("reason", "errors", "ratio", "eta", "seconds") if key in row
    ]
    return ("ok  " if row.get("ok") else "NO  ") + ", ".join(shown)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=3000.0, help="end after so long")
    parser.add_argument("--only", choices=("checks", "times"))
    parser.add_argument("--again", action="store_true", help="forget the rows that are there")
    parser.add_argument("--here", action="store_true", help="in this process, which may hang")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at small lengths")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of the figures")
    parser.add_argument(
        "--share", default="0/1", metavar="I/N", help="every Nth row from the Ith on"
    )
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("torch finds no GPU here: --dry-run goes through it on the CPU", file=sys.stderr)
        return 2
    if options.dry_run and options.results == RESULTS:
        print("--dry-run measures nothing: name another file by --results", file=sys.stderr)
        return 2
    rest = ["--results", str(options.results), *(["--again"] if options.again else [])]
    rest += ["--only", options.only] if options.only else []
    rest += ["--share", options.share]
    if not (options.here or options.dry_run):
        status = attended(options.results, options.seconds, rest)
    else:
        place, count = map(int, options.share.split("/"))
        arguments_of = options.results, options.dry_run, options.seconds, options.only
        status = 0 if run(*arguments_of, options.again, (place, count)) else LOST
        if options.here:
            return status
    found = read(options.results)
    failed = [
        name
        for part in (("checks",) if options.dry_run else ("checks", "times"))
        for name, row in found.get(part, {}).items()  # type: ignore[union-attr]
        if isinstance(row, dict) and row.get("ok") is False
    ]
    print(f"{len(failed)} rows are not as they should be", *failed, sep="\n- ")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
