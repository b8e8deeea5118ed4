"""Tiles of a step in batches: query tiles that are alike are computed in one call.

A `Strip` is a batch of independent blocks of equal shape. Query tiles that read the same key tiles
are one tall block; others that read equally many are blocks of one strip, with one mask for all
where their masks agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnspec.ordered import FULL_TILE, StepLayout


@dataclass(frozen=True, eq=False)
class Strip:
    """A batch of blocks.

    `rows` are query tiles [blocks, tall], `columns` key tiles [blocks, wide]. `mask` is the mask of
    every block, bool [tall * q.size, wide * k.size]; `kinds` numbers the masks of the blocks'
    tiles, [blocks, tall, wide], where they differ. Both None: every pair is an edge.
    """

    rows: np.ndarray
    columns: np.ndarray
    mask: np.ndarray | None
    kinds: np.ndarray | None


def strips_of(layout: StepLayout, tallest: int) -> list[Strip]:
    """The strips of a layout; query tiles without a key are in none.

    A tall block has at most `tallest` query tiles.
    """
    lengths = np.diff(layout.starts)
    found: list[Strip] = []
    for wide in np.unique(lengths[lengths > 0]):
        rows = np.flatnonzero(lengths == wide)
        entry = layout.starts[rows][:, None] + np.arange(wide)
        columns, kinds = layout.keys[entry], layout.kinds[entry]
        found.extend(_alike(layout, rows, columns, kinds, tallest))
    return found


def _alike(
    layout: StepLayout, rows: np.ndarray, columns: np.ndarray, kinds: np.ndarray, tallest: int
) -> list[Strip]:
    _, readers, sizes = np.unique(columns, axis=0, return_inverse=True, return_counts=True)
    readers = readers.ravel()
    together = sizes[readers] > 1
    found = []
    for group in np.unique(readers[together]):
        members = np.flatnonzero(readers == group)
        for low in range(0, len(members), tallest):
            part = members[low : low + tallest]
            full = (kinds[part] == FULL_TILE).all()
            found.append(
                Strip(
                    rows[part][None], columns[part[:1]], None, None if full else kinds[part][None]
                )
            )
    alone = np.flatnonzero(~together)
    if not len(alone):
        return found
    _, shape, counts = np.unique(kinds[alone], axis=0, return_inverse=True, return_counts=True)
    shape = shape.ravel()
    # masks that few blocks share are batched with others, each block with its own
    shared = counts[shape] * 8 >= min(64, len(alone))
    for group in np.unique(shape[shared]):
        part = alone[shape == group]
        full = (kinds[part[0]] == FULL_TILE).all()
        mask = None if full else unfolded(layout.masks, kinds[part[:1]][:, None])[0]
        found.append(Strip(rows[part][:, None], columns[part], mask, None))
    part = alone[~shared]
    if len(part):
        found.append(Strip(rows[part][:, None], columns[part], None, kinds[part][:, None]))
    return found


def unfolded(masks: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """The masks of blocks from those of their tiles: [b, tall, wide] -> bool [b, h, w]."""
    blocks, tall, wide = kinds.shape
    height, width = masks.shape[1:]
    if not len(masks):
        return np.ones((blocks, tall * height, wide * width), bool)
    held = masks[kinds] | (kinds == FULL_TILE)[..., None, None]
    return np.asarray(held.swapaxes(2, 3).reshape(blocks, tall * height, wide * width))


def progression(values: np.ndarray) -> tuple[int, int] | None:
    """First and difference of values that are an arithmetic progression, else None."""
    if len(values) == 1:
        return int(values[0]), 1
    gap = int(values[1] - values[0])
    return (int(values[0]), gap) if (np.diff(values) == gap).all() and gap > 0 else None
