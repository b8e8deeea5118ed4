"""Block plans without n²: how long they take and what they need, at a million positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from time import perf_counter
from typing import TypeVar

import torch

from attnspec.backends.planner import choose
from attnspec.elaborate import attention_names
from attnspec.lower.lower import stand_ins, works_of
from attnspec.spec import Spec, load, parse
from attnspec.text.decoding import read_source
from benchmarks.cases import BATCH, CASES, Settings
from benchmarks.fresh import ROOT, Arguments, Run, integer, peak, text
from benchmarks.masks import predicate
from benchmarks.measuring import Json, missing

Entry = TypeVar("Entry")

FILES = tuple(sorted((ROOT / "examples").glob("*.attn")))


@cache
def static_zoo() -> list[tuple[str, Spec]]:
    """The specs of the zoo whose pairs are known before run time, with their names."""
    found = []
    for path in FILES:
        for name in attention_names(read_source(path)):
            spec = load(path, name=name)
            if spec.stack().unknown is None:
                found.append((name, spec))
    return found


def measure(settings: Settings, run: Run) -> dict[str, Json]:
    """A row for each static spec of the zoo, and rows beside `create_block_mask`."""
    rows: list[Json] = []
    for name, spec in spread(static_zoo(), settings.zoo):
        lengths = spec.stack().lengths((settings.plan_n,))
        if not lengths:
            rows.append(missing(name, f"it has no length {settings.plan_n}"))
            continue
        rows.append(_planned(name, spec.source, lengths[0], run))
    beside: list[Json] = []
    for name in settings.block_mask:
        n = settings.block_mask_n
        row = _planned(name, CASES[name].text(n), n, run)
        theirs = run("block_mask", {"name": name, "n": n, "threads": torch.get_num_threads()})
        if "reason" in theirs:
            beside.append(missing(name, theirs["reason"]))
        elif "reason" in row:
            beside.append(row)
        else:
            ours, mask = row["seconds"], theirs["seconds"]
            if not isinstance(ours, float) or not isinstance(mask, float):
                raise TypeError(f"seconds must be real, got {ours!r} and {mask!r}")
            beside.append({**row, "block_mask_seconds": mask, "ratio": mask / ours})
    return {"n": settings.plan_n, "rows": rows, "block_mask": beside}


def _planned(name: str, source: str, n: int, run: Run) -> dict[str, Json]:
    found = run("plan", {"text": source, "n": n, "threads": torch.get_num_threads()})
    if "reason" in found:
        return {**missing(name, found["reason"]), "n": n}
    return {"name": name, "n": n, **found}


def spread(zoo: Sequence[Entry], count: int | None) -> Sequence[Entry]:
    """Some of the zoo at even distances, all of it without a count."""
    if count is None or count >= len(zoo):
        return zoo
    return [zoo[place * len(zoo) // count] for place in range(count)]


def plan_task(arguments: Arguments) -> dict[str, Json]:
    """Choose and lay out the kernels of all layers and heads: seconds, and bytes at the peak."""
    spec, n = parse(text(arguments, "text")), integer(arguments, "n")
    program, names = spec.program, []
    choosing = building = 0.0
    stands = stand_ins(program)
    before = peak()
    # layers that compute the same share what is built, as in a module
    layers = dict.fromkeys(
        tuple(works_of(program, layer, spec.heads or 1, n, n, stands))
        for layer in range(spec.layers)
    )
    for works in layers:
        for work, heads in works:
            start = perf_counter()
            backend = choose(work, "cpu")
            chosen = perf_counter()
            backend.build(work, heads, torch.device("cpu"))
            building += perf_counter() - chosen
            choosing += chosen - start
            names.append(backend.name)
    return {
        "seconds": choosing + building,
        "choosing_seconds": choosing,
        "building_seconds": building,
        "extra_bytes": peak() - before,
        "backends": [*sorted(set(names))],
    }


def block_mask_task(arguments: Arguments) -> dict[str, Json]:
    """The seconds that torch takes for the same blocks, from its predicate."""
    from torch.nn.attention.flex_attention import create_block_mask

    name, n = text(arguments, "name"), integer(arguments, "n")
    kept = predicate(name, n)
    start = perf_counter()
    create_block_mask(kept, BATCH, 1, n, n, device="cpu")
    return {"seconds": perf_counter() - start}
