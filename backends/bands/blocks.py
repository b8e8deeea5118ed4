"""Blocks of a strip in pieces that stay in the cache: their rows, their keys, their masks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from attnspec.backends.bands.views import (
    Arrangement,
    Blocks,
    Frame,
    Lattice,
    Read,
    arrangement,
    lattice_of,
    packed_frame,
)
from attnspec.layout.batches import Strip
from attnspec.layout.cutting import Cut, Side, Whole, cut
from attnspec.limits import LIMITS

SINGLE = 8
"""One in how many of the blocks for which there is room a run must have to be a piece by itself."""


class Piece:
    """Some blocks of a strip, all of one shape, with what is added to their scores."""

    def __init__(self, strip: TensorStrip, keys: Read, low: int, high: int, heads: int) -> None:
        self.strip, self.low, self.high = strip, low, high
        self.q = Blocks(strip.q.frame, strip.rows[low:high], strip.height if strip.cut else None)
        self.k = Blocks(keys.frame, strip.columns[low:high], strip.width if strip.cut else None)
        self.to: Arrangement = arrangement(self.q, self.k, heads)

    @cached_property
    def columns(self) -> torch.Tensor:
        """The key tiles of the blocks, int64 [blocks, tiles]."""
        return torch.from_numpy(self.k.tiles.copy())

    @property
    def distance(self) -> torch.Tensor:
        """How far the key of every pair is behind its query, int64 [blocks or 1, h, w]."""
        strip = self.strip
        return strip.distance(self.low, self.high) if strip.apart is None else strip.apart

    def bias(
        self, padding: torch.Tensor | None, kind: torch.dtype
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What to add to the scores [batch, heads, h, w], and the rows without a key, bool
        [batch, heads, h]; None where nothing is added, or every row has one.

        `padding` is 0 or -inf for every key in the tiles' order.
        """
        bias, empty = self.masks(padding)
        if bias is None:
            return None, None
        return (
            self._arranged(bias.to(kind)),
            None if empty is None else self._arranged(empty),
        )

    def masks(
        self, padding: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The same as [1 or blocks, h, w] and [1 or blocks, h]."""
        strip = self.strip
        bias, empty = strip.bias, strip.empty
        if strip.kinds is not None:
            bias, empty = strip.own(self.low, self.high)
        if padding is not None:
            real = padding.view(-1, self.k.frame.size)[self.columns].flatten(1)[:, None]
            real = real[..., : self.k.height]
            bias = real.expand(-1, self.q.height, -1) if bias is None else bias + real
            empty = (bias == -math.inf).all(-1)
        return bias, empty

    def _arranged(self, x: torch.Tensor) -> torch.Tensor:
        return x[None] if len(x) == 1 else self.to.arrange(x[None])

    @cached_property
    def patches(self) -> tuple[Patch, ...]:
        """The same pairs by parts of the keys, so that the scores of a single block, which may be
        large, take about `LIMITS.piece` numbers."""
        count = self.k.tiles.shape[1]
        most = max(1, LIMITS.piece // (max(self.q.height, LIMITS.tall_cut) * self.k.frame.size))
        parts = 1 if self.q.count > 1 else -(-count // most)
        cuts = [count * part // parts for part in range(parts + 1)]
        return tuple(Patch(self, low, high) for low, high in pairwise(cuts))


class Patch:
    """Some key tiles of the blocks of a piece: each of them once, and where the blocks find them
    there."""

    def __init__(self, piece: Piece, low: int, high: int) -> None:
        size = piece.k.frame.size
        self.piece, self.q = piece, piece.q
        self.inside = slice(low * size, high * size)
        tiles, places = np.unique(piece.k.tiles[:, low:high], return_inverse=True)
        self.keys = Blocks(piece.k.frame, tiles[:, None])
        places = places.reshape(piece.q.count, high - low)
        self.places = Blocks(packed_frame(len(tiles), size), places)

    def bias(self, padding: torch.Tensor | None) -> torch.Tensor | None:
        """What to add to the scores [1 or blocks, h, w], as a piece has it, or None."""
        bias, _ = self.piece.masks(padding)
        return None if bias is None else bias[..., self.inside]


class TensorStrip:
    """A strip with its tiles and masks as tensors."""

    def __init__(
        self,
        strip: Strip,
        q: Read,
        k_frame: Frame,
        masks: torch.Tensor,
        positions: tuple[np.ndarray, np.ndarray],
    ) -> None:
        self.rows, self.columns, self.q = strip.rows, strip.columns, q
        self.positions = positions
        self.blocks = len(strip.rows)
        self.height = strip.rows.shape[1] * q.frame.size
        self.width = strip.columns.shape[1] * k_frame.size
        self.masks = masks
        self.mask = strip.mask
        self.kinds = None if strip.kinds is None else torch.from_numpy(strip.kinds.copy())
        # of a shorter sequence: the strip that it is a part of, and which blocks; whether only the
        # first places of blocks are left
        self.source: tuple[TensorStrip, np.ndarray] | None = None
        self.cut = False
        self._whole: Whole | None = None
        # masks of blocks, each its own, are kept from call to call as long as they are small
        self.affordable = self.blocks * self.height * self.width <= LIMITS.mask_kept
        self._pieces: dict[tuple[int, int, int, bool], Piece] = {}
        self._lattices: dict[bool, Lattice | None] = {}
        self._run()

    def _run(self) -> None:
        starts = lattice_of(self.q.frame.rows[self.rows[:, 0], 0])
        # blocks that follow one another at one distance
        self.run = self.blocks if starts is None else starts.each

    def below(self, n: int, sides: tuple[Side, Side], q: Read) -> tuple[list[TensorStrip], bool]:
        """What is left of the blocks for the first n positions, with queries that are read as q
        says, and whether that is all queries; `sides` are those of these tiles. Raises Uncut."""
        if self._whole is None:
            self._whole = Whole(self.rows, self.columns, *sides)
        cuts, complete = cut(self._whole, n)
        return [self._left(each, q) for each in cuts], complete

    def _left(self, part: Cut, q: Read) -> TensorStrip:
        """Some of the blocks; they share masks, and pieces where these lie as they did."""
        blocks, still = part.blocks, part.places is None and q.frame is self.q.frame
        if still and len(blocks) == self.blocks:
            return self
        found = copy(self)
        found.q, found.source, found._lattices = q, (self, blocks), {}
        found.rows, found.columns = self.rows[blocks], self.columns[blocks]
        found.blocks = len(blocks)
        if not still or blocks[-1] >= len(blocks):
            found._pieces = {}
        if self.kinds is not None:
            found.kinds = self.kinds[torch.from_numpy(blocks)]
            vars(found).pop("owned", None)
        if part.places is not None:
            found.height, found.width = height, width = part.places
            found.cut = True
            vars(found).pop("apart", None)
            if self.bias is not None:
                found.bias = self.bias[:, :height, :width]
                found.empty = _without_key(found.bias)
        found._run()
        return found

    @cached_property
    def bias(self) -> torch.Tensor | None:
        """0 where the mask of every block holds, else -inf: float32 [1, h, w], or None."""
        if self.mask is None:
            return None
        held = torch.from_numpy(self.mask)
        return torch.zeros(held.shape, device="cpu").masked_fill_(~held, -math.inf)[None]

    @cached_property
    def empty(self) -> torch.Tensor | None:
        """The rows of every block that have no key, bool [1, h], or None."""
        return None if self.bias is None else _without_key(self.bias)

    def own(self, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What some blocks, each with a mask of its own, have added to their scores [blocks, h, w],
        and their rows without a key, bool [blocks, h], or None."""
        if not self.affordable:
            bias = self._unfolded(low, high)
            return bias, _without_key(bias)
        bias, empty = self.owned
        return bias[low:high], None if empty is None else empty[low:high]

    @cached_property
    def owned(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same of all blocks."""
        if self.source is None:
            bias = self._unfolded(0, self.blocks)
            return bias, _without_key(bias)
        whole, blocks = self.source
        bias, empty = whole.owned
        first, last = int(blocks[0]), int(blocks[-1]) + 1
        chosen = slice(first, last) if last - first == len(blocks) else torch.from_numpy(blocks)
        bias = bias[chosen][:, : self.height, : self.width]
        if not self.cut:
            return bias, None if empty is None else empty[chosen]
        return bias, _without_key(bias)

    def _unfolded(self, low: int, high: int) -> torch.Tensor:
        if self.kinds is None:
            raise TypeError("these blocks share one mask")
        kinds = self.kinds[low:high]
        held = self.masks[kinds.clamp(min=0)] | (kinds < 0)[..., None, None]
        held = held.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, : self.height, : self.width]
        return torch.zeros(held.shape, device="cpu").masked_fill_(~held, -math.inf)

    @cached_property
    def apart(self) -> torch.Tensor | None:
        """How far keys are behind queries where that is the same in all blocks, int64 [1, h, w];
        places that are no positions are as far as in the first block."""
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
        """The positions of queries [blocks, h] and keys [blocks, w], negative where there are
        none."""
        q, k = self.positions
        rows, columns = self.rows[low:high], self.columns[low:high]
        return (
            q[rows].reshape(len(rows), -1)[:, : self.height],
            k[columns].reshape(len(columns), -1)[:, : self.width],
        )

    def pieces(
        self, keys: Read, heads: int, size: int, back: bool, scored: bool = False
    ) -> Iterator[Piece]:
        """Blocks in parts whose temporaries stay below `LIMITS.piece` numbers; `scored` where
        scores are among them."""
        if self.blocks == 1:
            yield self._piece(keys, 0, 1, heads, back)
            return
        # keys that are read where they lie take no memory; their gradients always do
        if back not in self._lattices:
            width = self.width if self.cut else None
            self._lattices[back] = Blocks(keys.frame, self.columns, width).lattice
        lattice = self._lattices[back]
        lying = lattice is not None and not back
        per_block = heads * size * (self.height if lying else max(self.height, self.width))
        if self.kinds is not None:
            per_block = max(per_block, self.height * self.width)
        if scored:
            per_block = max(per_block, heads * self.height * self.width)
        # backward there are twice as many temporaries: keys and values, and the gradients of both
        most = max(1, (LIMITS.piece // 2 if back else LIMITS.piece) // max(1, per_block))
        if lattice is not None and lattice.many > 1 < heads and SINGLE * self.run >= most:
            # several heads lie where they are for one run alone
            most = min(most, self.run)
        for low, high in _cuts(self.blocks, self.run, most):
            yield self._piece(keys, low, high, heads, back)

    def _piece(self, keys: Read, low: int, high: int, heads: int, back: bool) -> Piece:
        key = low, high, heads, back
        found = self._pieces.get(key)
        if found is None:
            found = self._pieces[key] = Piece(self, keys, low, high, heads)
        return found


def _without_key(bias: torch.Tensor) -> torch.Tensor | None:
    """The rows [blocks, h] to which -inf is added alone, or None."""
    empty = (bias == -math.inf).all(-1)
    return empty if bool(empty.any()) else None


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
