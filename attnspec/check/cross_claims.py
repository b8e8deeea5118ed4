"""Claims about specs between two sequences: what is judged where both are as long, and what not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from attnspec.graphs.across import reads_m
from attnspec.graphs.stack import Stack
from attnspec.ir.crossing import crossed
from attnspec.ir.program import Program
from attnspec.text.diagnostics import AttnSpecError

QUERIES = range(1, 17)
KEYS = (1, 2, 5, 16)
"""The numbers of queries, and of keys, at which a query is looked for that changes."""


def against_stable(program: Program) -> str | None:
    """Why rows are others where more queries come after them, None where no graph reads m."""
    if not reads_m(program):
        return None
    change = next(_changed(program), None)
    if change is None:
        return "a graph reads m, the number of queries"
    m, n, query, key, reads = change
    at, other = (m + 1, m) if reads else (m, m + 1)
    return f"query {query} reads key {key} of n = {n} at m = {at}, but not at m = {other}"


def _changed(program: Program) -> Iterator[tuple[int, int, int, int, bool]]:
    """Numbers of queries and keys, and the first pair that one query more makes or takes away, the
    fewest queries first."""
    slots = {
        index: (layer, head)
        for layer, row in reversed([*enumerate(program.slots)])
        for head, index in reversed([*enumerate(row)])
    }
    for m, n, (layer, head) in product(QUERIES, KEYS, sorted(slots.values())):
        few, more = (_mask(program, n, queries, layer, head) for queries in (m, m + 1))
        if few is not None and more is not None and (few != more[:m]).any():
            query, key = np.argwhere(few != more[:m])[0].tolist()
            yield m, n, query, key, bool(more[query, key])


def _mask(program: Program, n: int, m: int, layer: int, head: int) -> np.ndarray | None:
    lengths, length = crossed(program, n, m)
    stack = Stack(lengths)
    try:
        return stack.mask(length, layer, head)[stack.queries(length), :n]
    except AttnSpecError:
        # a size has no value at these lengths, or inputs decide
        return None
