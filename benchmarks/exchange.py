"""What travels between 8 and 64 ranks, on paper, for every spec of the zoo.

`python -m benchmarks.exchange` plans each at n = 1,048,576, or at its own length, and writes
`results/exchange.json`; the table of the page comes from there (`readme_tables`). It starts no
process, makes no tensor, and goes on where an earlier run ended.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

import attnspec
from attnspec.bench.timing import machine, versions
from attnspec.distributed.exchange import Tensors
from attnspec.distributed.planning import (
    Links,
    Planner,
    head_links,
    is_graph,
    plan,
    state_links,
)
from attnspec.interchange.zoo import zoo_texts
from attnspec.lower.mechanism_sizes import longest_of
from attnspec.spec import Spec
from benchmarks.measuring import Json, read, write

RANKS = (8, 64)
N = 1 << 20

SHAPE = Tensors(1, 32, 8, 128, 128, 2)
"""Heads where a spec does not say how many, heads of keys, their size, and bytes a number."""

SAME_DRAWS = "bigbird, the same draws in all heads"


def specs() -> Iterator[tuple[str, Spec]]:
    """Every spec that ships, of one sequence, and one more that says what draws apart cost."""
    for name in attnspec.zoo():
        spec = attnspec.zoo(name)
        if not spec.program.cross:
            yield name, spec
    text = zoo_texts()["bigbird"].replace("seed = 7", "seed = 7, per_head = false")
    yield SAME_DRAWS, attnspec.parse(text)


def tensors_of(spec: Spec) -> Tensors:
    """The shape of a spec's heads: as many key heads as `SHAPE` has, or fewer."""
    heads = spec.program.heads or SHAPE.heads
    keys = max(count for count in (SHAPE.key_heads, 4, 2, 1) if heads % count == 0)
    return replace(SHAPE, heads=heads, key_heads=keys)


def length_of(spec: Spec, longest: int) -> int:
    """The longest length that the spec allows."""
    if spec.program.fixed_length is not None:
        return spec.program.fixed_length
    return min(longest, longest_of(spec.program) or longest)


def row(spec: Spec, n: int, ranks: int) -> dict[str, Json]:
    """What is planned, and beside it what else might be done, in the most bytes that reach a rank
    in all layers, forward; None where that cannot be."""
    shape = tensors_of(spec)
    found = plan(spec.program, n, ranks, shape)
    planner = Planner(spec.program, n, shape, None, None)
    kinds = planner.kinds(range(spec.program.layers or 1))
    figures: dict[str, Json] = {
        "n": n,
        "ranks": ranks,
        "heads": shape.heads,
        "key_heads": shape.key_heads,
        "partition": str(found.partition),
        "how": [layer.how for layer in found.layers],
        "balance": max((each.balance or 1.0 for each in found.layers), default=1.0),
        "bytes": max(found.bytes_received),
        "gathered": found.bytes_gathered,
        "by_heads": _most([(at, head_links(found.partition, shape)) for at, _ in kinds]),
        "states": _most([(at, state_links(w, found.partition, shape)) for at, w in kinds]),
        "rows": None,
        "all_links": None,
        "keys_alone": None,
    }
    if all(is_graph(work) for _, works in kinds for work, _ in works):
        rows, alone = (
            [
                replace(planner.rows(works, found.partition, queries), layers=numbers)
                for numbers, works in kinds
            ]
            for queries in (True, False)
        )
        figures |= {
            "rows": _most([(each.layers, (each.there, each.back)) for each in rows]),
            "all_links": sum(len(each.layers) * int(each.links.sum()) for each in rows),
            "keys_alone": _most([(each.layers, (each.there, each.back)) for each in alone]),
        }
    return figures


def _most(layers: Sequence[tuple[tuple[int, ...], Links | None]]) -> int | None:
    """The most bytes that reach a rank in layers together; None where one of them cannot."""
    total = np.zeros(1, np.int64)
    for numbers, links in layers:
        if links is None:
            return None
        total = total + len(numbers) * (links[0] + links[1]).sum(0)
    return int(total.max())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/exchange.json"))
    parser.add_argument("-n", type=int, default=N)
    parser.add_argument("--only", nargs="*", help="these specs alone")
    given = parser.parse_args(arguments)
    stored = read(given.out).get("rows")
    rows = dict(stored) if isinstance(stored, dict) else {}
    for name, spec in specs():
        if given.only and name not in given.only:
            continue
        n = length_of(spec, given.n)
        for ranks in RANKS:
            key = f"{name}, {ranks}, {n}"
            if key in rows:
                continue
            found = row(spec, n, ranks)
            rows[key] = {"name": name, **found}
            print(f"{key}: {found['how']}, {found['bytes']:,} bytes", flush=True)
            figures: dict[str, Json] = {
                "machine": machine(),
                "versions": versions(("numpy", "scipy")),
                "rows": dict(sorted(rows.items())),
            }
            write(given.out, figures)


if __name__ == "__main__":
    main()
