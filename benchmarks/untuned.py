"""Patterns that nothing is tuned for, beside dense attention: at most a fifth slower."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from attnspec.bench.timing import alternate
from attnspec.spec import Spec
from benchmarks.cases import UNTUNED, UNTUNED_TARGET, Settings
from benchmarks.measuring import Json, planned, tensors

MEANS = ("ours", "dense")


def measure(settings: Settings) -> dict[str, Json]:
    """A row for each pattern with its time and that of dense attention without a mask, forward."""
    n = settings.untuned_n
    rows: list[Json] = []
    for case in UNTUNED:
        spec = case.spec(n)
        found = alternate({"ours": ours(spec, n), "dense": dense(n)}, settings.rounds)
        rows.append(
            {
                "name": case.name,
                "spec": spec.source,
                **{mean: found[mean].data() for mean in MEANS},
                "ratio": found["ours"].median / found["dense"].median,
                **planned(spec, n),
            }
        )
    return {"n": n, "target": UNTUNED_TARGET, "rows": rows}


def ours(spec: Spec, n: int) -> Callable[[], object]:
    """One call of the module, with documents of very unequal lengths where it asks for some."""
    module, given = spec.compile(), tensors(n)
    inputs = {name: documents(n) for name in spec.inputs} or None

    def run() -> object:
        with torch.no_grad():
            return module(*given, inputs=inputs)

    return run


def dense(n: int) -> Callable[[], object]:
    """One call of dense attention."""
    given = tensors(n)

    def run() -> object:
        with torch.no_grad():
            return functional.scaled_dot_product_attention(*given)

    return run


def documents(n: int) -> torch.Tensor:
    """The document of each of n positions [1, n]: one has half of them, the next a quarter, and so
    on."""
    return torch.log2(n / (n - torch.arange(n)).float()).floor().long()[None]
