"""A graph as a block-sparse matrix by rows (BSR), as FlashInfer takes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attnspec.graphs.relation import EMPTY, FULL, SOME, Relation, Tiles, evaluate_pairs
from attnspec.graphs.stack import TooMuch
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


def block_rows(relation: Relation, n: int, size: int, m: int | None = None) -> BlockRows:
    """A relation of n keys and m queries, n where it is None, in blocks of `size` of both.

    Raises TooMuch for more than `LIMITS.mask_bytes` of masks.
    """
    queries = n if m is None else m
    length = max(queries, n)
    cover = cover_of(relation, length, size)
    at = np.argwhere(cover != EMPTY)
    if len(at) * size * size > LIMITS.mask_bytes:
        raise TooMuch(
            f"the masks of {len(at):,} blocks of {size} x {size} are more than"
            f" {LIMITS.mask_bytes:,} bytes; take smaller blocks"
        )
    full = cover[at[:, 0], at[:, 1]] == FULL
    none = np.zeros((0, size, size), bool)
    mask = np.concatenate([none, *(x for _, x in masks_of(relation, length, size, at))])
    counts = np.bincount(at[:, 0], minlength=len(cover))[: -(-queries // size)]
    indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return BlockRows(n, size, indptr, at[:, 1].astype(np.int32), mask, full, queries)


def cover_of(relation: Relation, n: int, size: int) -> np.ndarray:
    """EMPTY, SOME or FULL, exactly, for each block of `size` queries and keys of n positions, uint8
    [blocks, blocks]; the last ones may be short. Time and memory go with the blocks, and with the
    pairs of those that no formula decides.

    Raises TooMuch above `LIMITS.blocks_classified`.
    """
    count = -(-n // size)
    if count * count > LIMITS.blocks_classified:
        raise TooMuch(
            f"at most {LIMITS.blocks_classified:,} blocks are computed, got {count:,} x {count:,}:"
            " take larger blocks"
        )
    if n == 0:
        return np.zeros((0, 0), np.uint8)
    first = np.arange(count) * size
    ends = np.minimum(first + size, n)
    tiles = Tiles(first[:, None], ends[:, None]), Tiles(first[None], ends[None])
    found = np.array(np.broadcast_to(relation.cover(*tiles, n), (count, count)))
    for at, masks in masks_of(relation, n, size, np.argwhere(found == SOME)):
        counts, every = masks.sum((1, 2)), (ends - first)[at].prod(1)
        decided = np.where(counts == 0, EMPTY, np.where(counts == every, FULL, SOME))
        found[at[:, 0], at[:, 1]] = decided
    return found


def masks_of(
    relation: Relation, n: int, size: int, blocks: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The pairs of some blocks, int [m, 2], a few at a time: their numbers, and bool
    [some, size, size], False beyond the last position."""
    step = max(1, LIMITS.pairs_at_once // (size * size))
    for first in range(0, len(blocks), step):
        at = blocks[first : first + step]
        q, k = (at[:, axis, None] * size + np.arange(size) for axis in (0, 1))
        q, k = q[:, :, None], k[:, None, :]
        mask = evaluate_pairs(relation, np.minimum(q, n - 1), np.minimum(k, n - 1), n)
        yield at, mask & (q < n) & (k < n)
