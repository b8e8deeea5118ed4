"""A graph as a block-sparse matrix by rows (BSR), as FlashInfer takes it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import TooMuch
from attnspec.layout.orders import NATURAL
from attnspec.layout.tile_layout import StepLayout, step_layout
from attnspec.layout.tiling import Tiling, TooFine
from attnspec.limits import LIMITS


@dataclass(frozen=True, eq=False)
class BlockRows:
    """The blocks of one head that hold a pair.

    Row i of blocks has the columns `indices[indptr[i] : indptr[i + 1]]`, ascending, int32. `mask`
    has the pairs of each block, bool [blocks, size, size], False beyond the last position; `full`
    says which blocks hold every pair of theirs, bool [blocks]. There are `n` keys, and `queries`
    queries: as many, but between two sequences.
    """

    n: int
    size: int
    indptr: np.ndarray
    indices: np.ndarray
    mask: np.ndarray
    full: np.ndarray
    queries: int

    @property
    def packed_mask(self) -> np.ndarray:
        """`mask` in bits, block after block and row after row, the lowest bit first, uint8."""
        return np.packbits(self.mask.ravel(), bitorder="little")

    def dense(self) -> np.ndarray:
        """The same pairs, bool [queries, n]."""
        down, size = len(self.indptr) - 1, self.size
        along = -(-self.n // size)
        mask = np.zeros((down, size, along, size), bool)
        rows = np.repeat(np.arange(down), np.diff(self.indptr))
        mask[rows, :, self.indices] = self.mask
        return mask.reshape(down * size, along * size)[: self.queries, : self.n]


def block_rows(relation: Relation, n: int, size: int, m: int | None) -> BlockRows:
    """A relation of n keys and m queries, n where it is None, in blocks of `size` of both.

    Raises TooMuch for more than `LIMITS.mask_bytes` of masks.
    """
    queries = n if m is None else m
    small = size * size <= LIMITS.mask_bytes
    layout = tiles_of(relation, max(queries, n), size) if small else None
    if layout is None or len(layout.rows) * size * size > LIMITS.mask_bytes:
        raise TooMuch(
            f"the masks of the blocks of {size} x {size} would take more than {LIMITS.mask_bytes:,}"
            " bytes: use a shorter sequence, or, where the graph is sparse, smaller blocks"
        )
    rows, whole = layout.rows, np.ones((1, size, size), bool)
    mask = np.concatenate([layout.masks, whole])[layout.kinds]
    q = rows[:, None] * size + np.arange(size) < queries
    k = layout.keys[:, None] * size + np.arange(size) < n
    mask &= q[:, :, None] & k[:, None]
    full = mask.sum((1, 2)) == q.sum(1) * k.sum(1)
    indptr = layout.starts[: 1 - (-queries // size)].astype(np.int32)
    return BlockRows(n, size, indptr, layout.keys.astype(np.int32), mask, full, queries)


def tiles_of(relation: Relation, n: int, size: int) -> StepLayout:
    """The blocks of `size` queries and keys of n positions that hold a pair.

    Raises TooMuch above `LIMITS.blocks_classified`.
    """
    count = -(-n // size)
    try:
        if count * count > LIMITS.blocks_classified:
            raise TooFine
        return step_layout(Tiling(relation, n, n, NATURAL, (size, size)))
    except TooFine:
        raise TooMuch(
            f"at most {LIMITS.blocks_classified:,} blocks are computed, got {count:,} x {count:,}:"
            " take larger blocks"
        ) from None
