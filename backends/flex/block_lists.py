"""A step in blocks of 128 x 128 places: which blocks FlexAttention visits, and what holds in them.

All of it comes from the step's list of tiles, in time and memory of the lists alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from attnspec.layout.axes import Axis
from attnspec.layout.tables import FULL_TILE
from attnspec.layout.tile_layout import StepLayout

BLOCK = 128
"""Axis of a block."""

NOTHING, EVERYTHING = 0, 1
"""The numbers of the masks of an empty block and of a FULL one."""

FEWEST = 2
"""Blocks on each side: of a length of 1 the compiler makes a special case, which is one more to
compile."""

RUNS = 2
"""Runs of keys of a query that are compared with its place, in place of a mask that is read."""

BYTES_MOST = 1 << 30
"""Bytes of the masks of a step at most; with more, an index would be beyond 32 bits."""

Lists: TypeAlias = "tuple[np.ndarray, np.ndarray]"
"""For each block of one side how many of the other it has, int32 [blocks], and which, ascending,
int32 [blocks, blocks of the other side], 0 behind them."""


@dataclass(frozen=True, eq=False)
class BlockLists:
    """One step in blocks.

    `q_at` and `k_at` are the positions at its places, int64 [blocks * 128], -1 where none is.
    Block (i, j) has the mask `numbers[i * width + j]`; mask m holds at place (a, b) of its block
    where bit b % 8 of `bits[(m * 128 + a) * 16 + b // 8]` is set. `masked` and `full` list the key
    blocks of each query block, `q_masked` and `q_full` the query blocks of each key block.
    `contiguous` says that all lists are ranges. `runs` say the same as the masks: the first key
    places and the ends of one or two runs of them for each query place, int32
    [2 * runs, blocks * 128]; None where a query has more.
    """

    q_at: np.ndarray
    k_at: np.ndarray
    numbers: np.ndarray
    width: int
    bits: np.ndarray
    masked: Lists
    full: Lists
    q_masked: Lists
    q_full: Lists
    contiguous: bool
    runs: np.ndarray | None


def block_lists(layout: StepLayout) -> BlockLists:
    """The blocks of a step whose tiles have at most 128 places."""
    q_at, k_at = (_places(side) for side in (layout.q, layout.k))
    shape = len(q_at) // BLOCK, len(k_at) // BLOCK
    rows = np.repeat(np.arange(layout.q.count), np.diff(layout.starts))
    masks = np.zeros((len(layout.masks) + 3, BLOCK, BLOCK), bool)
    masks[EVERYTHING] = True
    masks[2:-1, : layout.q.size, : layout.k.size] = layout.masks
    # a FULL tile that is smaller than a block
    masks[-1, :, : layout.k.size] = True
    whole = EVERYTHING if layout.k.size == BLOCK else len(masks) - 1
    kinds = np.where(layout.kinds == FULL_TILE, whole, layout.kinds + 2)
    numbers = np.zeros(shape, np.int32)
    numbers[rows, layout.keys] = kinds
    is_full = kinds == EVERYTHING
    some, every = (rows[~is_full], layout.keys[~is_full]), (rows[is_full], layout.keys[is_full])
    lists = [
        _listed(one, other, sides)
        for one, other, sides in (
            (*some, shape),
            (*every, shape),
            (*some[::-1], shape[::-1]),
            (*every[::-1], shape[::-1]),
        )
    ]
    return BlockLists(
        q_at,
        k_at,
        numbers.ravel(),
        shape[1],
        np.packbits(masks, axis=2, bitorder="little").ravel(),
        lists[0],
        lists[1],
        lists[2],
        lists[3],
        contiguous=all(_are_ranges(each) for each in lists),
        runs=_runs(rows, layout.keys, kinds, masks, shape[0]),
    )


def _runs(
    rows: np.ndarray, columns: np.ndarray, kinds: np.ndarray, masks: np.ndarray, count: int
) -> np.ndarray | None:
    """The runs of key places of each query place, from the masks of the blocks (rows, columns)."""
    of_masks = _runs_of_masks(masks)
    if of_masks is None:
        return None
    order = np.lexsort((columns, rows))
    rows, columns, kinds = rows[order], columns[order], kinds[order]
    # FULL blocks that follow one another are one wide block
    full = kinds == EVERYTHING
    follows = full[1:] & full[:-1] & (np.diff(rows) == 0) & (np.diff(columns) == 1)
    at = np.flatnonzero(np.concatenate([np.ones(min(1, len(rows)), bool), ~follows]))
    more = BLOCK * (np.diff(at, append=len(rows)) - 1)
    rows, columns, kinds = rows[at], columns[at], kinds[at]
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
    found = np.zeros((2 * RUNS, count, BLOCK), np.int32)
    used = np.zeros((count, BLOCK), np.int64)
    for place in range(int(rank.max(initial=-1)) + 1):
        here = np.flatnonzero(rank == place)
        row, kind = rows[here], kinds[here]
        for low, high in of_masks[:, :, kind]:
            some, start = high > low, columns[here, None] * BLOCK
            low, high = start + low, start + high + more[here, None]
            end = np.take_along_axis(found[1::2, row], np.maximum(used[row] - 1, 0)[None], 0)[0]
            goes_on = some & (used[row] > 0) & (end == low)
            begins = some & ~goes_on
            used[row] += begins
            if used.max(initial=0) > RUNS:
                return None
            for run in range(RUNS):
                mine = used[row] == run + 1
                found[2 * run, row] = np.where(mine & begins, low, found[2 * run, row])
                grows = mine & (begins | goes_on)
                found[2 * run + 1, row] = np.where(grows, high, found[2 * run + 1, row])
    return found[: 2 * max(1, int(used.max(initial=0)))].reshape(-1, count * BLOCK)


def _runs_of_masks(masks: np.ndarray) -> np.ndarray | None:
    """The first places and the ends of the runs of each row, [RUNS, 2, masks, BLOCK], equal where
    there is none; None where a row has more."""
    edges = np.diff(masks.astype(np.int8), axis=2, prepend=0, append=0)
    if (edges > 0).sum(2).max(initial=0) > RUNS:
        return None
    found = np.zeros((RUNS, 2, *masks.shape[:2]), np.int64)
    for side, edge in enumerate((1, -1)):
        mask, row, place = np.nonzero(edges == edge)
        at = mask * BLOCK + row
        which = np.arange(len(at)) - np.searchsorted(at, at)
        found[which, side, mask, row] = place
    return found


def _places(side: Axis) -> np.ndarray:
    """The positions at the places of a side's blocks."""
    blocks = max(FEWEST, side.count)
    found = np.full((blocks, BLOCK), -1, np.int64)
    found[: side.count, : side.size] = side.positions.reshape(side.count, side.size)
    return found.ravel()


def _listed(rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> Lists:
    """The columns of each row, ascending."""
    order = np.lexsort((columns, rows))
    rows, columns = rows[order], columns[order]
    counts = np.bincount(rows, minlength=shape[0])
    rank = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    found = np.zeros(shape, np.int32)
    found[rows, rank] = columns
    return counts.astype(np.int32), found


def _are_ranges(lists: Lists) -> bool:
    """Whether each row lists numbers that follow one another."""
    counts, found = lists
    last = np.take_along_axis(found, np.maximum(counts - 1, 0)[:, None], 1)[:, 0]
    return bool(((counts == 0) | (last - found[:, 0] == counts - 1)).all())
