"""Half types: what a useful pair costs, compared with dense attention of the same type."""

from __future__ import annotations

import torch
from torch.nn import functional

from attnspec.bench.timing import Timing, alternate
from benchmarks.cases import CASES, Settings
from benchmarks.efficiency import DENSE
from benchmarks.measuring import Json, tensors
from benchmarks.shapes import MODES, called

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def measure(settings: Settings) -> dict[str, Json]:
    """Every pattern in every type, forward and training, and dense attention."""
    n = settings.types_n
    attentions = {DENSE: functional.scaled_dot_product_attention}
    attentions |= {name: CASES[name].spec(n).compile() for name in settings.types}
    timed: dict[str, dict[str, dict[str, Timing]]] = {}
    for kind, dtype in TYPES.items():
        inputs = [x.to(dtype) for x in tensors(n)]
        timed[kind] = {}
        for mode in MODES:
            subjects = {name: called(each, inputs, mode) for name, each in attentions.items()}
            timed[kind][mode] = alternate(subjects, settings.rounds)
    rows: list[Json] = []
    for name in settings.types:
        density, row = CASES[name].edges(n) / n**2, dict[str, Json](name=name)
        for kind, modes in timed.items():
            eta: Json = {
                mode: density * found[DENSE].median / found[name].median
                for mode, found in modes.items()
            }
            row[kind] = {"eta": eta, **{mode: found[name].data() for mode, found in modes.items()}}
        rows.append(row)
    dense: Json = {
        kind: {mode: found[DENSE].data() for mode, found in modes.items()}
        for kind, modes in timed.items()
    }
    return {"n": n, "dense": dense, "rows": rows}
