"""One process of a run: specs of its own numbers until the time is over.

A file of its own, for a process that is spawned knows nothing of what `__main__` defines.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from soak.run import Outcome, one

SECONDS = 240
"""A spec that takes longer, at its small lengths, is a finding."""


def worker(work: tuple[Any, int]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    given, index = work
    end = time.monotonic() + 60 * given.minutes
    total: Counter[str] = Counter()
    checks: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    without = set(filter(None, given.without.split(",")))
    number = given.first + index
    while time.monotonic() < end and not 0 < given.specs <= number - given.first:
        outcome = one(f"{given.seed}:{number}", without, seconds=SECONDS)
        if outcome is not None:
            total["specs"] += 1
            total["findings"] += bool(outcome.trial.findings)
            checks.update(outcome.trial.checks)
            refusals.update(outcome.trial.refusals)
            if outcome.trial.findings:
                _print(outcome, given.seed, number)
        number += given.processes
    return total, checks, refusals


def _print(outcome: Outcome, seed: str, number: int) -> None:
    print(f"\n=== finding: --seed {seed} --only {number}\n{outcome}", flush=True)
