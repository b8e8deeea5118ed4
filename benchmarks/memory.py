"""The peak of memory of a training step, compared with the tensors that any attention holds."""

from __future__ import annotations

import torch

from benchmarks.cases import BATCH, CASES, HEADS, MECHANISMS, SIZE, Settings
from benchmarks.efficiency import both
from benchmarks.fresh import Arguments, Run, integer, peak, text
from benchmarks.measuring import Json, missing

WARM = 512
"""The length of the step that comes before."""

NAMES = (
    "window(256)",
    "Longformer 256 + 64",
    # what transforms make of q and k is nothing: there would be no gradients
    *(case.name for case in MECHANISMS if case.name != "FNet"),
)


def measure(settings: Settings, run: Run) -> dict[str, Json]:
    """A row for each pattern and length: bytes beyond q, k and v, and in units of q, k, v, out."""
    rows: list[Json] = []
    for name in NAMES:
        for n in settings.memory:
            found = run("memory", {"name": name, "n": n, "threads": torch.get_num_threads()})
            if "reason" in found:
                rows.append({**missing(name, found["reason"]), "n": n})
            else:
                rows.append({"name": name, "n": n, "target": 4.0, **found})
    return {"rows": rows}


def memory_task(arguments: Arguments) -> dict[str, Json]:
    """What one step needs at its peak beyond its inputs, planning and gradients included."""
    name, n = text(arguments, "name"), integer(arguments, "n")
    # a short step first: libraries start up, and that is not the pattern's memory
    both(CASES[name].spec(WARM).compile(), WARM)()
    step = both(CASES[name].spec(n).compile(), n)
    held = 4 * BATCH * HEADS * n * SIZE * torch.float32.itemsize
    before = peak()
    step()
    extra = peak() - before
    return {"extra_bytes": extra, "held_bytes": held, "ratio": extra / held}
