"""What queries come to read after one layer, after two, and so on, counted in the cells of a
picture, and the graphs by which a page finds the way from one token to another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnspec.analysis.reach import reach
from attnspec.analysis.report.inquiry import APART
from attnspec.analysis.report.report import Report
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import Stack, TooMuch
from attnspec.limits import LIMITS
from attnspec.show.places import Slot, places
from attnspec.text.diagnostics import AttnSpecError

Rows = list[list[int]]
"""For each query its keys: first key, how many, step, and again."""


@dataclass(frozen=True)
class Reach:
    """What the last query of each row of cells has read.

    `hops` [cells, cells]: the fewest layers after which it has read a key of a cell, -1 for never.
    `graphs` are those of heads, `layers` say for each layer up to the first that only repeats which
    of them it has, each with its heads in words; both are empty where `no_paths` says why.
    """

    side: int
    hops: npt.NDArray[np.int64]
    graphs: tuple[Rows, ...]
    layers: tuple[tuple[tuple[int, str], ...], ...]
    no_paths: str


def reach_of(report: Report, side: int) -> Reach:
    """What is reached in cells of `side` positions; raises AttnSpecError with the reason where that
    is not known."""
    n, stack = report.n, report.influence
    if report.program.cross:
        raise AttnSpecError(APART)
    if n == 0:
        raise AttnSpecError("there are no positions")
    if n > LIMITS.matrix:
        raise AttnSpecError(f"what is reached is shown up to n = {LIMITS.matrix:,}, got {n:,}")
    if stack.unknown is not None:
        raise AttnSpecError(stack.unknown)
    cells = -(-n // side)
    hops = np.empty((cells, cells), np.int64)
    starts = np.arange(cells) * side
    try:
        stack.require_affordable(n)
        for row in range(cells):
            found = reach.hops(stack, n, min(n, (row + 1) * side) - 1)
            # never is later than any layer
            late = np.where(found < 0, n + 1, found)
            hops[row] = np.minimum.reduceat(late, starts)
    except TooMuch as error:
        raise AttnSpecError(str(error)) from None
    hops[hops > n] = -1
    try:
        graphs, layers = _graphs(stack, n)
    except TooMuch as error:
        return Reach(side, hops, (), (), str(error))
    return Reach(side, hops, graphs, layers, "")


def _graphs(
    stack: Stack, n: int
) -> tuple[tuple[Rows, ...], tuple[tuple[tuple[int, str], ...], ...]]:
    """Every different graph, and which of them each layer has; raises TooMuch."""
    bound = stack.bound(n)
    graphs, numbers = [], 0
    for _, _, relation in bound.found:
        rows = _rows(relation, n)
        numbers += sum(map(len, rows))
        if numbers > LIMITS.page_numbers:
            raise TooMuch(f"the graphs are more than {LIMITS.page_numbers:,} numbers")
        graphs.append(rows)
    slots = list(bound.slots)
    while len(slots) > 1 and set(slots[-1]) == set(slots[-2]):
        slots.pop()
    return tuple(graphs), tuple(map(_heads, slots))


def _heads(row: tuple[int, ...]) -> tuple[tuple[int, str], ...]:
    """The graphs of a layer in the order of its heads, each with those heads."""
    every: list[Slot] = [(0, head) for head in range(len(row))]
    found: dict[int, list[Slot]] = {}
    for head, index in enumerate(row):
        found.setdefault(index, []).append((0, head))
    return tuple((index, places(heads, every)) for index, heads in found.items())


def _rows(relation: Relation, n: int) -> Rows:
    """The keys of each query as progressions; raises TooMuch."""
    closed = relation.progressions(np.arange(n), n)
    if closed is not None:
        first, stop, step = np.broadcast_arrays(*closed)
        count = np.maximum(0, -((first - stop) // step))
        parts = np.stack([first, count, step], axis=-1)
        return [row[row[:, 1] > 0].ravel().tolist() for row in parts]
    edges, rows = 0, []
    for query in range(n):
        keys = relation.rows(query, query + 1, n)[1]
        edges += len(keys)
        if edges > LIMITS.page_edges:
            raise TooMuch(f"there are more than {LIMITS.page_edges:,} pairs")
        rows.append(_progressions(keys))
    return rows


def _progressions(keys: np.ndarray) -> list[int]:
    """Ascending keys as progressions, each as long as it goes on."""
    found: list[int] = []
    start = 0
    gaps = np.diff(keys)
    while start < len(keys):
        step = int(gaps[start]) if start < len(gaps) else 1
        changes = np.flatnonzero(gaps[start:] != step)
        count = 1 + (int(changes[0]) if len(changes) else len(gaps) - start)
        found += [int(keys[start]), count, step]
        start += count
    return found
