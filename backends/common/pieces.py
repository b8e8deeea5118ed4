"""Pieces of runs in torch: their rows and keys are taken, their masks made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from attnspec.layout.runs import Run
from attnspec.layout.tile_layout import FULL_TILE
from attnspec.limits import LIMITS


@dataclass(frozen=True)
class Piece:
    """A part of a run: blocks `low:high`, and of their queries `first:last`."""

    run: TensorRun
    low: int
    high: int
    first: int
    last: int

    @property
    def blocks(self) -> int:
        return self.high - self.low

    @property
    def height(self) -> int:
        return self.last - self.first

    @property
    def rows(self) -> slice:
        """Where the queries stand among all queries of the run."""
        start = self.low * self.run.height + self.first
        return slice(start, start + self.blocks * self.height)


class TensorRun:
    """A run with its positions and masks as tensors of one device."""

    def __init__(self, run: Run, tile: int, masks: torch.Tensor | None, device: torch.device):
        self.blocks, self.height, self.width, self.tile = run.blocks, run.height, run.width, tile
        self.queries = torch.from_numpy(run.queries.ravel()).to(device)
        self.tiles = torch.from_numpy(run.tiles).to(device)
        self.first_query = _start_of(run.queries)
        first_tile = _start_of(run.tiles)
        whole = run.blocks == 1 or run.width == run.tiles.shape[1] * tile
        self.first_key = None if first_tile is None or not whole else first_tile * tile
        self.shared = None if run.shared is None else torch.from_numpy(run.shared).to(device)
        self.kinds = None if run.kinds is None else torch.from_numpy(run.kinds).to(device)
        self.masks = masks

    def pieces(self, per_block: int, per_row: int) -> Iterator[Piece]:
        """Parts whose temporaries stay below `LIMITS.piece` numbers, `per_block` of them a block
        or a single row `per_row`."""
        if self.blocks > 1 or (self.height <= self.tile and per_block <= LIMITS.piece):
            step = max(1, LIMITS.piece // max(1, per_block))
            for low in range(0, self.blocks, step):
                yield Piece(self, low, min(low + step, self.blocks), 0, self.height)
            return
        step = max(1, LIMITS.piece // max(1, per_row))
        if step > self.tile:
            step -= step % self.tile
        for first in range(0, self.height, step):
            yield Piece(self, 0, 1, first, min(first + step, self.height))

    def keys(self, piece: Piece) -> torch.Tensor:
        """The rows of k that a piece reads, int64 [blocks, width]."""
        inside = torch.arange(self.tile, device=self.tiles.device)
        at = self.tiles[piece.low : piece.high, :, None] * self.tile + inside
        return at.flatten(1)[:, : self.width]

    def mask(self, piece: Piece) -> torch.Tensor | None:
        """The piece's mask, bool [h, w] or [blocks, h, w], or None."""
        if self.shared is not None:
            return self.shared[piece.first : piece.last]
        if self.kinds is None or self.masks is None:
            return None
        above = piece.first // self.tile
        tall = slice(above, -(-piece.last // self.tile))
        kinds = self.kinds[piece.low : piece.high, tall]
        held = self.masks[kinds] | (kinds == FULL_TILE)[..., None, None]
        held = held.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        top = piece.first - above * self.tile
        return held[:, top : top + piece.height, : self.width]


def _start_of(positions: np.ndarray) -> int | None:
    """The first position, if all of them follow one another."""
    flat = positions.ravel()
    return int(flat[0]) if (np.diff(flat) == 1).all() else None


def rows_of(x: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The queries of a piece: [B, K, R, n_q, d] -> [B, K, R, blocks, h, d]."""
    first, rows = piece.run.first_query, piece.rows
    if first is None:
        x = x.index_select(3, piece.run.queries[rows])
    else:
        x = x[:, :, :, first + rows.start : first + rows.stop]
    return x.view(*x.shape[:3], piece.blocks, piece.height, x.shape[4])


def keys_of(x: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The keys of a piece: [B, K, n_k, d] -> [B, K, blocks, w, d]."""
    run = piece.run
    if run.first_key is None:
        x = x.index_select(2, run.keys(piece).flatten())
    else:
        first = run.first_key + piece.low * run.width
        x = x[:, :, first : first + piece.blocks * run.width]
    return x.view(*x.shape[:2], piece.blocks, run.width, x.shape[3])


def folded(x: torch.Tensor) -> torch.Tensor:
    """[B, K, R, blocks, h, d] -> [B K, blocks, R h, d]: more rows for the same keys."""
    batch, keys, repeat, blocks, height, size = x.shape
    return x.transpose(2, 3).reshape(batch * keys, blocks, repeat * height, size)
