"""A step of a shorter sequence, cut from that of a longer one.

Where a pair is one at every length, tiles in natural order are the same as long as their positions
are there: a new length needs the tiles at its end alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnspec.layout.axes import axis
from attnspec.layout.batches import Strip
from attnspec.layout.tile_layout import FULL_TILE, StepLayout


def cut(layout: StepLayout, strips: Sequence[Strip], n: int) -> tuple[tuple[int, ...], StepLayout]:
    """How many blocks of each strip, from the first on, have all of their positions below n, and
    the other tiles of n positions.

    The layout is that of at least n positions, in natural order on both sides, its pairs are the
    same at every length, and the strips are its own.
    """
    q, k = axis(0, n, 1, layout.q.size), axis(0, n, 1, layout.k.size)
    whole = tuple(_whole(strip, n // q.size, n // k.size) for strip in strips)
    left = np.ones(q.count, bool)
    for strip, count in zip(strips, whole, strict=True):
        left[strip.rows[:count]] = False
    row = np.repeat(np.arange(q.count), np.diff(layout.starts[: q.count + 1]))
    keys, kinds = layout.keys[: len(row)], layout.kinds[: len(row)]
    chosen = left[row] & (keys < k.count)
    row, keys, kinds = row[chosen], keys[chosen], kinds[chosen]
    kinds, masks = _shortened(layout, kinds, row >= n // q.size, keys >= n // k.size, n)
    some = kinds < len(masks)
    starts = np.zeros(q.count + 1, np.int64)
    np.cumsum(np.bincount(row[some], minlength=q.count), out=starts[1:])
    return whole, StepLayout(q, k, starts, keys[some], kinds[some], masks)


def _whole(strip: Strip, rows: int, columns: int) -> int:
    """The blocks before the first with a tile that is not among the first of its side."""
    inside = np.all(strip.rows < rows, axis=1) & np.all(strip.columns < columns, axis=1)
    return len(inside) if inside.all() else int(inside.argmin())


def _shortened(
    layout: StepLayout, kinds: np.ndarray, low: np.ndarray, narrow: np.ndarray, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """The kinds of tiles, of which some are of too few queries, `low`, or keys, `narrow`, and their
    masks; the number behind the last mask for a tile that is empty."""
    rows = np.arange(layout.q.size) < n % layout.q.size
    columns = np.arange(layout.k.size) < n % layout.k.size
    distinct, which = np.unique(np.stack([kinds, low, narrow]), axis=1, return_inverse=True)
    numbers: list[int] = []
    masks: list[np.ndarray] = []
    for kind, few_rows, few_columns in distinct.T:
        if kind == FULL_TILE and not few_columns:
            numbers.append(FULL_TILE)
            continue
        shape = layout.masks.shape[1:]
        held = np.ones(shape, bool) if kind == FULL_TILE else layout.masks[kind]
        if few_rows and kind != FULL_TILE:
            held = held & rows[:, None]
        if few_columns:
            held = held & columns
        numbers.append(len(masks) if held.any() else -2)
        if held.any():
            masks.append(held)
    found = np.array(numbers, np.int64)
    found[found == -2] = len(masks)
    return found[which.ravel()], np.stack(masks) if masks else layout.masks[:0]
