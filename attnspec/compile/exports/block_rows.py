"""A graph as a block-sparse matrix by rows (BSR), as FlashInfer takes it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnspec.compile.exports.blocks import cover_of, masks_of
from attnspec.graphs.relation import EMPTY, FULL, SOME, Relation
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
        found = np.zeros((down, size, along, size), bool)
        rows = np.repeat(np.arange(down), np.diff(self.indptr))
        found[rows, :, self.indices] = self.mask
        return found.reshape(down * size, along * size)[: self.queries, : self.n]


def block_rows(relation: Relation, n: int, size: int, m: int | None = None) -> BlockRows:
    """A relation of n keys and m queries, n where it is None, in blocks of `size` of both.

    Raises TooMuch for more than `LIMITS.mask_bytes` of masks.
    """
    queries = n if m is None else m
    length = max(queries, n)
    cover = cover_of(relation, length, size, size)
    at = np.argwhere(cover != EMPTY)
    if len(at) * size * size > LIMITS.mask_bytes:
        raise TooMuch(
            f"the masks of {len(at):,} blocks of {size} x {size} are more than"
            f" {LIMITS.mask_bytes:,} bytes; take smaller blocks"
        )
    full = cover[at[:, 0], at[:, 1]] == FULL
    mask = np.zeros((len(at), size, size), bool)
    for wanted in (FULL, SOME):
        chosen = np.flatnonzero(cover[at[:, 0], at[:, 1]] == wanted)
        done = 0
        for part, masks in masks_of(relation, length, size, size, at[chosen]):
            mask[chosen[done : done + len(part)]] = masks
            done += len(part)
    counts = np.bincount(at[:, 0], minlength=len(cover))[: -(-queries // size)]
    indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return BlockRows(n, size, indptr, at[:, 1].astype(np.int32), mask, full, queries)
