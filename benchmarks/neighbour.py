"""Beside a busy process: how much slower everything becomes when another one keeps a core busy.

The process is started and ended here. Each subject is timed on the empty machine and beside it; the
target is on its slow-down against that of dense attention in the same run.

Dense attention itself slows down more when it is as short as a pattern, or made of as many calls:
the system moves threads between cores in tens of milliseconds, and each call waits for its last
thread. So two such cuts of dense attention are timed beside the patterns: what no kernel that
calls torch can be better than.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep

import torch
from torch.nn import functional

from attnspec.bench.timing import Timing, alternate
from benchmarks.cases import CASES, Settings
from benchmarks.efficiency import DENSE, Attention, both, forward
from benchmarks.measuring import Json
from benchmarks.shapes import OURS, TORCH, Row

TARGET = 1.5
"""How many times the slow-down of dense attention a pattern's may be."""

BUSY = "import numpy\na = numpy.random.rand(256, 256)\nwhile True:\n    a = a @ a % 1.0 + 0.1"
"""What the other process does: work for one core that never ends."""


PIECES = 32


def _in_pieces(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Dense attention by so many calls, one after the other."""
    pieces = q.chunk(PIECES, dim=-2)
    return torch.cat([functional.scaled_dot_product_attention(each, k, v) for each in pieces], -2)


def _quarter(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Dense attention of the first quarter, a sixteenth of the pairs, in one call; zeros after."""
    n = -(-q.shape[-2] // 4)
    out = functional.scaled_dot_product_attention(q[..., :n, :], k[..., :n, :], v[..., :n, :])
    return functional.pad(out, (0, 0, 0, q.shape[-2] - n))


CUTS: dict[str, Attention] = {
    f"{DENSE}, {PIECES} calls": _in_pieces,
    f"{DENSE}, a quarter": _quarter,
}
"""Dense attention as short, and in as many calls, as patterns are."""


@contextmanager
def beside() -> Iterator[None]:
    """A process of its own that keeps one core busy."""
    limits = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", BUSY], env=limits)
    try:
        sleep(1.0)
        yield
    finally:
        process.kill()
        process.wait()


def measure(settings: Settings) -> dict[str, Json]:
    """Long sequences and the shapes of `shapes`, quiet and beside the process."""
    n = settings.neighbour_n
    attentions: dict[str, Attention] = {DENSE: functional.scaled_dot_product_attention, **CUTS}
    attentions |= {name: CASES[name].spec(n).compile() for name in settings.neighbour}
    rows: list[Json] = []
    summary: dict[str, Json] = {}
    modes = {
        mode: {name: subject(attention, n) for name, attention in attentions.items()}
        for mode, subject in (("forward", forward), ("both", both))
    }
    # one after the other: what kernels have learned of the machine stays a while
    quiets = {mode: alternate(subjects, settings.rounds) for mode, subjects in modes.items()}
    with beside():
        busies = {mode: alternate(subjects, settings.rounds) for mode, subjects in modes.items()}
    for mode, subjects in modes.items():
        quiet, busy = quiets[mode], busies[mode]
        slower = {name: busy[name].median / quiet[name].median for name in subjects}
        for name in subjects:
            rows.append(
                {
                    "name": name,
                    "mode": mode,
                    "quiet": quiet[name].data(),
                    "busy": busy[name].data(),
                    "slower": slower[name],
                    "ratio": slower[name] / slower[DENSE],
                }
            )
        others = [slower[name] / slower[DENSE] for name in settings.neighbour]
        summary[mode] = {"dense": slower[DENSE], "most": max(others, default=1.0)}
    return {"n": n, "rows": rows, "summary": summary, "shapes": _shapes(settings)}


def _shapes(settings: Settings) -> list[Json]:
    """One short shape beside the process, against torch's own call there."""
    found: list[Json] = []
    for shape in settings.neighbour_shapes:
        for pattern in ("causal", "window(64)", "BigBird 64/2"):
            subjects = Row(pattern, shape, padded=False).subjects("forward")
            with beside():
                timed: dict[str, Timing] = alternate(subjects, settings.rounds)
            ratio = timed[OURS].median / timed[TORCH].median
            found.append(
                {
                    "name": pattern,
                    "shape": str(shape),
                    "ratio": ratio,
                    **{name: timing.data() for name, timing in timed.items()},
                }
            )
    return found
