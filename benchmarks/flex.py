"""Against FlexAttention with the same mask, each compiled once in a process of its own."""

from __future__ import annotations

from time import perf_counter

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnspec.bench.timing import alternate
from benchmarks.cases import BATCH, CASES, FLEX_TARGETS, HEADS, Settings
from benchmarks.fresh import Arguments, Run, integer, text
from benchmarks.masks import predicate
from benchmarks.measuring import Json, missing, planned, tensors

SAME = 1e-4
"""The largest difference at which two results count as the same."""


def measure(settings: Settings, run: Run) -> dict[str, Json]:
    """A row for each pattern: both times and their ratio, forward."""
    rows: list[Json] = []
    for name in settings.flex:
        arguments: Arguments = {
            "name": name,
            "n": settings.flex_n,
            "rounds": settings.rounds,
            "compiled": settings.compiled,
            "threads": torch.get_num_threads(),
        }
        found = run("flex", arguments)
        if "reason" in found:
            rows.append(missing(name, found["reason"]))
        else:
            rows.append({"name": name, "target": FLEX_TARGETS.get(name, 1.0), **found})
    return {"n": settings.flex_n, "rows": rows}


def flex_task(arguments: Arguments) -> dict[str, Json]:
    """One pattern beside FlexAttention; ValueError where their results differ."""
    name, n = text(arguments, "name"), integer(arguments, "n")
    kept = predicate(name, n)
    start = perf_counter()
    # a head dimension of 1 is shared by all heads
    heads = HEADS if CASES[name].spec(n).relation(n) != CASES[name].spec(n).relation(n, 0, 1) else 1
    mask = create_block_mask(kept, BATCH, heads, n, n, device="cpu")
    masked = perf_counter() - start
    q, k, v = tensors(n)
    theirs = torch.compile(flex_attention) if arguments["compiled"] else flex_attention
    spec = CASES[name].spec(n)
    ours = spec.compile()
    with torch.no_grad():
        start = perf_counter()
        expected = theirs(q, k, v, block_mask=mask)
        compiled = perf_counter() - start
        difference = float((ours(q, k, v) - expected).abs().max())
        if not difference <= SAME:
            raise ValueError(f"{name}: the results must be the same, they differ by {difference:g}")
        timed = alternate(
            {"ours": lambda: ours(q, k, v), "flex": lambda: theirs(q, k, v, block_mask=mask)},
            integer(arguments, "rounds"),
        )
    return {
        "ours": timed["ours"].data(),
        "flex": timed["flex"].data(),
        "ratio": timed["flex"].median / timed["ours"].median,
        "difference": difference,
        "block_mask_seconds": masked,
        "first_call_seconds": compiled,
        **planned(spec, n),
    }
