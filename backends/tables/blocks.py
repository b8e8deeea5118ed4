"""Blocks of tables in pieces that stay in the cache: their rows, their keys, their masks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from attnspec.backends.common.composed import on_device, unfolded
from attnspec.backends.common.masks import added_by
from attnspec.backends.tables.sides import (
    REREAD,
    Arrangement,
    Blocks,
    Lattice,
    Order,
    arrangement,
    gap_of,
    in_order,
    lattice_of,
)
from attnspec.layout.tables import Batch, Tiled
from attnspec.limits import LIMITS

SINGLE = 8
"""One in how many of the blocks for which there is room a run must have to be a piece by itself."""

Positions = tuple[np.ndarray, np.ndarray]
"""Where queries [n_q] and keys [n_k] stand, int64."""

Added = tuple[torch.Tensor | None, torch.Tensor | None]
"""What is added to scores, and the rows without a key; None for nothing, and for no such rows."""


AS_THEY_LIE = Order()


class Step:
    """The batches of one step, and both sides as they are read: where they lie, or put in order.
    Gradients of keys are added to rows in an order more often than keys are read in it."""

    def __init__(
        self, batches: Sequence[Batch[np.ndarray]], n_q: int, positions: Positions
    ) -> None:
        q, k = [batch.q for batch in batches], [batch.k for batch in batches]
        queries = np.concatenate([np.zeros(0, np.int64), *(rows.ravel() for rows in q)])
        self.complete = int((queries >= 0).sum()) == n_q
        self.q_order = Order()
        if self.complete and not gap_of(q):
            self.q_order = Order(queries)
            ends = np.cumsum([0, *(rows.size for rows in q)])
            at = np.arange(len(queries))
            q = [at[a:b].reshape(x.shape) for (a, b), x in zip(pairwise(ends), q, strict=True)]
        gap, self.k_order, moved = gap_of(k), Order(), k
        if gap != 1 and batches:
            order, moved = in_order(k)
            self.k_order = Order(order)
        reads = sum(rows.size for rows in k)
        self.moves = not self.k_order.natural and (
            not gap or reads > REREAD * max(1, len(self.k_order))
        )
        self.batches = [
            TensorBatch(batch, rows, keys if not self.moves else places, places, positions)
            for batch, rows, keys, places in zip(batches, q, k, moved, strict=True)
        ]

    def keys_order(self, back: bool) -> Order:
        """The order in which keys are read, forward or backward."""
        return self.k_order if back or self.moves else AS_THEY_LIE

    def pieces(self, heads: int, size: int, back: bool, scored: bool) -> Iterator[Piece]:
        """The pieces of all batches for so many heads of a size."""
        for batch in self.batches:
            yield from batch.pieces(heads, size, back, scored)


class Piece:
    """Some blocks of a batch with what is added to their scores."""

    def __init__(self, batch: TensorBatch, low: int, high: int, heads: int, back: bool) -> None:
        self.batch, self.low, self.high = batch, low, high
        self.q = Blocks(batch.q[low:high])
        self.k = Blocks((batch.k_back if back else batch.k)[low:high])
        self.to: Arrangement = arrangement(self.q, self.k, heads)

    @cached_property
    def keys(self) -> torch.Tensor:
        """The rows of the key tensor, int64 [blocks, w], the first one in place of none."""
        return torch.from_numpy(np.maximum(self.batch.tables.k[self.low : self.high], 0))

    @cached_property
    def queries(self) -> torch.Tensor:
        """The rows of the query tensor, int64 [blocks, h], the first one in place of none."""
        return torch.from_numpy(np.maximum(self.batch.tables.q[self.low : self.high], 0))

    @property
    def distance(self) -> torch.Tensor:
        """How far the key of every pair is behind its query, int64 [blocks or 1, h, w]."""
        batch = self.batch
        return batch.distance(self.low, self.high) if batch.apart is None else batch.apart

    def bias(self, padding: torch.Tensor | None, kind: torch.dtype) -> Added:
        """As `masks`, in a type, [batch, heads, h, w] and bool [batch, heads, h]; `padding` is 0 or
        -inf for every key."""
        bias, empty = self.masks(padding)
        if bias is None:
            return None, None
        return self._arranged(bias.to(kind)), None if empty is None else self._arranged(empty)

    def masks(self, padding: torch.Tensor | None) -> Added:
        """The same as [1 or blocks, h, w] and [1 or blocks, h]."""
        bias, empty = self.batch.masks(self.low, self.high)
        if padding is not None:
            real = padding[self.keys][:, None]
            bias = real.expand(-1, self.q.height, -1) if bias is None else bias + real
            empty = (bias == -math.inf).all(-1)
        return bias, empty

    def _arranged(self, x: torch.Tensor) -> torch.Tensor:
        return x[None] if len(x) == 1 else self.to.arrange(x[None])


class TensorBatch:
    """A batch with its rows as they are read, and its masks as tensors."""

    def __init__(
        self,
        tables: Batch[np.ndarray],
        q: np.ndarray,
        k: np.ndarray,
        k_back: np.ndarray,
        positions: Positions,
    ) -> None:
        self.tables, self.q, self.k, self.k_back = tables, q, k, k_back
        self.blocks, self.height = q.shape
        self.width = k.shape[1]
        self.positions = positions
        # masks of blocks, each its own, are kept from call to call as long as they are small
        self.affordable = self.blocks * self.height * self.width <= LIMITS.mask_kept
        self._differ = self._tiled is not None or self._holes is not None
        self._pieces: dict[tuple[int, int, int, bool], Piece] = {}
        self._lattices: dict[bool, Lattice | None] = {}
        starts = lattice_of(q[:, 0])
        # blocks that follow one another at one distance
        self.run = self.blocks if starts is None else starts.each

    @cached_property
    def _tiled(self) -> Tiled[torch.Tensor] | None:
        mask = self.tables.mask
        return on_device(mask, torch.device("cpu")) if isinstance(mask, Tiled) else None

    @cached_property
    def _holes(self) -> torch.Tensor | None:
        """Places of keys that are not rows, though no mask leaves them out: bool [blocks, w]."""
        if self.tables.mask is not None or (self.tables.k >= 0).all():
            return None
        return torch.from_numpy(self.tables.k < 0)

    def masks(self, low: int, high: int) -> Added:
        """What is added to the scores of some blocks, 0 or -inf [1 or blocks, h, w], and their rows
        without a key, bool [1 or blocks, h]; None for nothing, and where every row has one."""
        if self._differ and not self.affordable:
            return _with_empty(self._held(low, high))
        bias, empty = self._all
        if bias is None or not self._differ:
            return bias, empty
        return bias[low:high], None if empty is None else empty[low:high]

    @cached_property
    def _all(self) -> Added:
        return _with_empty(self._held(0, self.blocks))

    def _held(self, low: int, high: int) -> torch.Tensor | None:
        """The pairs of some blocks, bool [1 or blocks, h, w]; None where all are."""
        if self._tiled is not None:
            return unfolded(self._tiled, slice(low, high))
        if self._holes is not None:
            return ~self._holes[low:high, None].expand(-1, self.height, -1)
        mask = self.tables.mask
        return torch.from_numpy(mask) if isinstance(mask, np.ndarray) else None

    @cached_property
    def apart(self) -> torch.Tensor | None:
        """How far keys are behind queries where that is the same in all blocks, int64 [1, h, w];
        places that are not rows are as far as in the first block."""
        q, k = self._places(0, self.blocks)
        if self.blocks > 1:
            first = q[:, :1]
            if min(q[0].min(), k[0].min(), first.min()) < 0:
                return None
            # blocks that differ by where they start alone: no need to look at pairs
            for side in (q, k):
                moved = side - first
                if not ((moved == moved[:1]) | (side < 0)).all():
                    return None
        return self.distance(0, 1)

    def distance(self, low: int, high: int) -> torch.Tensor:
        """How far keys are behind queries in some blocks, int64 [blocks, h, w]."""
        q, k = self._places(low, high)
        return torch.from_numpy(q[:, :, None] - k[:, None])

    def _places(self, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
        """The positions of queries [blocks, h] and keys [blocks, w], -1 where there are none."""
        q, k = (
            np.where(rows[low:high] < 0, -1, at[rows[low:high]])
            for rows, at in zip((self.tables.q, self.tables.k), self.positions, strict=True)
        )
        return q, k

    def pieces(self, heads: int, size: int, back: bool, scored: bool = False) -> Iterator[Piece]:
        """Blocks in parts whose temporaries stay below `LIMITS.piece` numbers; `scored` where
        scores are among them."""
        if self.blocks == 1:
            yield self._piece(0, 1, heads, back)
            return
        # keys that are read where they lie take no memory; their gradients always do
        if back not in self._lattices:
            self._lattices[back] = Blocks(self.k_back if back else self.k).lattice
        lattice = self._lattices[back]
        lying = lattice is not None and not back
        per_block = heads * size * (self.height if lying else max(self.height, self.width))
        if self._tiled is not None:
            per_block = max(per_block, self.height * self.width)
        if scored:
            per_block = max(per_block, heads * self.height * self.width)
        # backward there are twice as many temporaries: keys and values, and the gradients of both
        most = max(1, (LIMITS.piece // 2 if back else LIMITS.piece) // max(1, per_block))
        if lattice is not None and lattice.many > 1 < heads and SINGLE * self.run >= most:
            # several heads lie where they are for one run alone
            most = min(most, self.run)
        for low, high in _cuts(self.blocks, self.run, most):
            yield self._piece(low, high, heads, back)

    def _piece(self, low: int, high: int, heads: int, back: bool) -> Piece:
        key = low, high, heads, back
        found = self._pieces.get(key)
        if found is None:
            found = self._pieces[key] = Piece(self, low, high, heads, back)
        return found


def _with_empty(held: torch.Tensor | None) -> Added:
    """0 where pairs are, else -inf, and the rows [blocks, h] without a pair, or None."""
    if held is None:
        return None, None
    empty = ~held.any(-1)
    return added_by(held, torch.float32), empty if bool(empty.any()) else None


def _cuts(blocks: int, run: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `most` blocks that are whole runs, or parts of one."""
    step = most // run * run
    if step:
        for low in range(0, blocks, step):
            yield low, min(low + step, blocks)
        return
    for first in range(0, blocks, run):
        for low in range(first, first + run, most):
            yield low, min(low + most, first + run)
