"""A relation in blocks of queries and keys: which hold every pair, which none, and the rest looked
into. Time and memory go with the blocks, and with the pairs of those that no formula decides."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attnspec.graphs.relation import EMPTY, FULL, SOME, Relation, Tiles, evaluate_pairs
from attnspec.graphs.stack import TooMuch
from attnspec.limits import LIMITS


def cover_of(relation: Relation, n: int, rows: int, columns: int) -> np.ndarray:
    """EMPTY, SOME or FULL, exactly, for each block of `rows` queries and `columns` keys of n
    positions, uint8 [ceil(n / rows), ceil(n / columns)]; the last blocks may be short.

    Raises TooMuch above `LIMITS.blocks_classified`.
    """
    shape = -(-n // rows), -(-n // columns)
    if shape[0] * shape[1] > LIMITS.blocks_classified:
        raise TooMuch(
            f"at most {LIMITS.blocks_classified:,} pairs of blocks are classified, got"
            f" {shape[0]:,} x {shape[1]:,}: take larger blocks"
        )
    if n == 0:
        return np.zeros(shape, np.uint8)
    q, k = (np.arange(count) * size for count, size in zip(shape, (rows, columns), strict=True))
    queries = Tiles(q[:, None], np.minimum(q + rows, n)[:, None])
    keys = Tiles(k[None], np.minimum(k + columns, n)[None])
    found = np.array(np.broadcast_to(relation.cover(queries, keys, n), shape))
    open_blocks = np.argwhere(found == SOME)
    for at, masks in masks_of(relation, n, rows, columns, open_blocks):
        sizes = [
            np.minimum(size, n - at[:, axis] * size) for axis, size in ((0, rows), (1, columns))
        ]
        counts = masks.sum((1, 2))
        found[at[:, 0], at[:, 1]] = np.where(
            counts == 0, EMPTY, np.where(counts == sizes[0] * sizes[1], FULL, SOME)
        )
    return found


def masks_of(
    relation: Relation, n: int, rows: int, columns: int, blocks: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The pairs of some blocks, int [m, 2], a few at a time: their numbers, and bool
    [some, rows, columns], False beyond the last position."""
    step = max(1, LIMITS.pairs_at_once // (rows * columns))
    for first in range(0, len(blocks), step):
        at = blocks[first : first + step]
        q = (at[:, 0, None] * rows + np.arange(rows))[:, :, None]
        k = (at[:, 1, None] * columns + np.arange(columns))[:, None, :]
        held = evaluate_pairs(relation, np.minimum(q, n - 1), np.minimum(k, n - 1), n)
        yield at, held & (q < n) & (k < n)
