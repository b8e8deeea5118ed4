"""`python -m soak --minutes 10 --seed 1 --processes 2`: random specs until the time is over.

Prints each finding as a reproduction, and a line of JSON at the end; ends with 1 if there was one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter

from soak.worker import worker


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--specs", type=int, default=0, help="end after so many, 0 for no bound")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", type=int, help="the one spec of this number")
    parser.add_argument("--first", type=int, default=0, help="the number of the first spec")
    parser.add_argument("--without", default="", help="words that no spec may have, by commas")
    given = parser.parse_args()
    if given.only is not None:
        given.first, given.specs, given.processes = given.only, 1, 1
    start = time.monotonic()
    work = [(given, index) for index in range(given.processes)]
    if given.processes == 1:
        results = [worker(work[0])]
    else:
        with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
            results = pool.map(worker, work)
    total, checks, refusals = (sum(each, Counter[str]()) for each in zip(*results, strict=True))
    for kind, times in refusals.most_common():
        print(f"refused {times:7,}  {kind}")
    for kind, times in checks.most_common():
        print(f"checked {times:7,}  {kind}")
    summary = {
        "specs": total["specs"],
        "calls": checks["call"] + checks["steps"],
        "checks": sum(checks.values()),
        "refusals": sum(refusals.values()),
        "findings": total["findings"],
        "seconds": round(time.monotonic() - start),
    }
    print(json.dumps(summary))
    return 1 if total["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
