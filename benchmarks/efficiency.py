"""Edge efficiency: what a useful pair costs, compared with a pair of the best dense kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from attnspec.bench.timing import Timing, alternate
from benchmarks.cases import BANDED, BATCH, CASES, HEADS, Settings
from benchmarks.measuring import Json, geometric_mean, planned, tensors

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

DENSE = "dense"
"""The rival's name among the subjects."""


def forward(attention: Attention, n: int) -> Callable[[], object]:
    """One call without gradients."""
    q, k, v = tensors(n)

    def run() -> object:
        with torch.no_grad():
            return attention(q, k, v)

    return run


def both(
    attention: Attention, n: int, batch: int = BATCH, heads: int = HEADS
) -> Callable[[], object]:
    """One call, and the gradients of q, k and v."""
    inputs = tensors(n, True, batch, heads)
    upstream = torch.ones_like(inputs[0])

    def run() -> object:
        return torch.autograd.grad(attention(*inputs), inputs, upstream)

    return run


def measure(settings: Settings) -> dict[str, Json]:
    """The efficiency of every pattern, forward alone and with its gradients."""
    n = settings.n
    attentions: dict[str, Attention] = {DENSE: functional.scaled_dot_product_attention}
    attentions |= {name: CASES[name].spec(n).compile() for name in settings.efficiency}
    timed: dict[str, dict[str, Timing]] = {}
    for mode, subject in (("forward", forward), ("both", both)):
        subjects = {name: subject(attention, n) for name, attention in attentions.items()}
        timed[mode] = alternate(subjects, settings.rounds)
    banded = {case.name for case in BANDED}
    rows: list[Json] = []
    eta: dict[str, dict[str, float]] = {mode: {} for mode in timed}
    for name in settings.efficiency:
        edges = CASES[name].edges(n)
        for mode, found in timed.items():
            eta[mode][name] = edges / n**2 * found[DENSE].median / found[name].median
        rows.append(
            {
                "name": name,
                "scattered": name not in banded,
                "spec": CASES[name].text(n),
                "edges": edges,
                "density": edges / n**2,
                **{mode: found[name].data() for mode, found in timed.items()},
                **{f"eta_{mode}": eta[mode][name] for mode in timed},
                **planned(CASES[name].spec(n), n),
            }
        )
    summary: dict[str, Json] = {}
    for mode, values in eta.items():
        listed = [value for name, value in values.items() if name in banded]
        if listed:
            summary[f"mean_{mode}"] = geometric_mean(listed)
            summary[f"least_{mode}"] = min(listed)
    dense: dict[str, Json] = {mode: found[DENSE].data() for mode, found in timed.items()}
    return {"n": n, "dense": dense, "rows": rows, "summary": summary}
