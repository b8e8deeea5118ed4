"""A step in blocks of 128 x 128 places: what holds in them, in time and memory of its list of tiles
alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from attnspec.backends.flex.inputs import rows_of
from attnspec.backends.flex.steps import BLOCK
from attnspec.layout.axes import Axis
from attnspec.layout.tables import FULL_TILE
from attnspec.layout.tile_layout import StepLayout

NOTHING, EVERYTHING = 0, 1
"""The numbers of the masks of an empty block and of a FULL one."""

FEWEST = 2
"""Blocks on each side: of a length of 1 the compiler makes a special case, which is one more to
compile."""

RUNS = 2
"""Runs of keys of a query that are compared with its place, in place of a mask that is read."""

PARTS = 8
"""Blocks of a query block, FULL neighbours as one, in which runs are looked for at most."""


class BlockMasks(NamedTuple):
    """`numbers` int32 [q blocks, k blocks] are those of the masks of blocks, bool
    [masks, 128, 128]. `runs` say the same: the first key places and the ends of one or two runs of
    them for each query place, int32 [2 * runs, q blocks * 128]; None where a query has more."""

    numbers: np.ndarray
    masks: np.ndarray
    runs: np.ndarray | None


def block_masks(layout: StepLayout) -> BlockMasks:
    """The blocks of a step whose tiles have at most 128 places."""
    rows = np.repeat(np.arange(layout.q.count), np.diff(layout.starts))
    masks = np.zeros((len(layout.masks) + 3, BLOCK, BLOCK), bool)
    masks[EVERYTHING] = True
    masks[2:-1, : layout.q.size, : layout.k.size] = layout.masks
    # a FULL tile that is smaller than a block
    masks[-1, :, : layout.k.size] = True
    whole = EVERYTHING if layout.k.size == BLOCK else len(masks) - 1
    numbers = np.zeros([max(FEWEST, side.count) for side in (layout.q, layout.k)], np.int32)
    numbers[rows, layout.keys] = np.where(layout.kinds == FULL_TILE, whole, layout.kinds + 2)
    return BlockMasks(numbers, masks, _runs(numbers, masks))


def places_of(side: Axis) -> np.ndarray:
    """The positions at the places of a side's blocks, int64 [blocks * 128], -1 for none."""
    found = np.full((max(FEWEST, side.count), BLOCK), -1, np.int64)
    found[: side.count, : side.size] = rows_of(side)
    return found.ravel()


def are_ranges(held: np.ndarray) -> bool:
    """Whether the blocks of each row, and of each column, follow one another."""
    steps = (np.diff(held.astype(np.int8), axis=axis, prepend=0) for axis in (0, 1))
    return all((each == 1).sum(axis).max(initial=0) <= 1 for axis, each in enumerate(steps))


def _runs(numbers: np.ndarray, masks: np.ndarray) -> np.ndarray | None:
    """The runs of key places of each query place."""
    of_masks = _runs_of_masks(masks)
    if of_masks is None:
        return None
    rows, columns = np.nonzero(numbers)
    kinds = numbers[rows, columns]
    # FULL blocks that follow one another are one wide block
    full = kinds == EVERYTHING
    follows = full[1:] & full[:-1] & (np.diff(rows) == 0) & (np.diff(columns) == 1)
    at = np.flatnonzero(np.concatenate([np.ones(min(1, len(rows)), bool), ~follows]))
    more = BLOCK * (np.diff(at, append=len(rows)) - 1)
    rows, columns, kinds = rows[at], columns[at], kinds[at]
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
    parts = int(rank.max(initial=0)) + 1
    if parts > PARTS:
        return None
    # the runs of all blocks of a query place, one behind the other, and ends of those before
    ends = np.zeros((2, len(numbers), BLOCK, parts, RUNS), np.int64)
    ends[:, rows, :, rank] = of_masks[:, kinds].transpose(1, 0, 2, 3)
    ends[:, rows, :, rank] += BLOCK * columns[:, None, None, None]
    ends[1, rows, :, rank, 0] += more[:, None]
    low, high = ends.reshape(2, len(numbers) * BLOCK, parts * RUNS)
    some = high > low
    before = np.maximum.accumulate(np.where(some, high, -1), axis=1)
    begins = some & (low != np.pad(before, ((0, 0), (1, 0)), constant_values=-1)[:, :-1])
    number = begins.cumsum(1)
    count = int(number.max(initial=0))
    if count > RUNS:
        return None
    found = np.zeros((2 * max(1, count), len(low)), np.int32)
    for run in range(count):
        mine = number == run + 1
        found[2 * run] = np.where(mine & begins, low, 0).sum(1)
        found[2 * run + 1] = np.where(mine & some, high, 0).max(1)
    return found


def _runs_of_masks(masks: np.ndarray) -> np.ndarray | None:
    """The first places and the ends of the runs of each row, [2, masks, BLOCK, RUNS], equal where
    there is none; None where a row has more."""
    edges = np.diff(masks.astype(np.int8), axis=2, prepend=0, append=0)
    if (edges > 0).sum(2).max(initial=0) > RUNS:
        return None
    found = np.zeros((2, *masks.shape[:2], RUNS), np.int64)
    for side, edge in enumerate((1, -1)):
        mask, row, place = np.nonzero(edges == edge)
        at = mask * BLOCK + row
        found[side, mask, row, np.arange(len(at)) - np.searchsorted(at, at)] = place
    return found
