"""The tables of a step, on the device where it runs: sides, lists in both directions, masks.

All are plain tensors, and linear in the tiles that are read: eight bytes for an entry of a list in
each direction, twenty for a row, and shared masks as bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional

from attnspec.layout.axes import Axis
from attnspec.layout.tables import FULL_TILE
from attnspec.layout.tile_layout import StepLayout

LONGEST = 4
"""Times the length of the median list that a list is at most, before it is cut."""

SHORTEST = 16
"""Entries that a list may have in any case before it is cut."""


@dataclass(frozen=True, eq=False)
class TileSide:
    """Where the rows of tiles lie, int32: first rows and ends [tiles], a step apart, or with step 0
    the rows themselves [tiles * size], -1 for none."""

    firsts: torch.Tensor
    ends: torch.Tensor
    listed: torch.Tensor
    step: int
    size: int


@dataclass(frozen=True, eq=False)
class TileLists:
    """What the kernels do for the tiles of one side, int32.

    `programs` [p, 5], or [B, p, 5] where samples differ, are a tile, where its entries begin, where
    those with masks begin, where they end, and a slot, -1 for none; the longest come first. `tiles`
    and `kinds` are the other side's tile of every entry and the number of its mask. `spans` [s, 5]
    are the tiles whose lists are several programs, with their slots, of `slots`, in place of
    entries.
    """

    programs: torch.Tensor
    tiles: torch.Tensor
    kinds: torch.Tensor
    spans: torch.Tensor
    slots: int


class Tables(Protocol):
    """A step on a device: both sides, the bits of masks int32 [masks, height, words], and the lists
    of query tiles, `rows`, and of key tiles, `columns`."""

    @property
    def q(self) -> TileSide: ...

    @property
    def k(self) -> TileSide: ...

    @property
    def words(self) -> torch.Tensor: ...

    @property
    def rows(self) -> TileLists: ...

    @property
    def columns(self) -> TileLists: ...


class StepTables:
    """The tables of a step whose layout is known before any call."""

    def __init__(self, layout: StepLayout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.q, self.k = side_of(layout.q, device), side_of(layout.k, device)
        self.words = bits_of(layout.masks, device)
        self.rows = lists_of(layout.starts, layout.keys, layout.kinds, device)

    @cached_property
    def columns(self) -> TileLists:
        """The transposed lists, for gradients."""
        starts, tiles, order = turned(self.layout)
        return lists_of(starts, tiles, self.layout.kinds[order], self.device)


def turned(layout: StepLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the lists of key tiles begin, [tiles + 1], the query tiles in them, and which of the
    layout's entries these are."""
    rows = np.repeat(np.arange(layout.q.count), np.diff(layout.starts))
    order = np.argsort(layout.keys, kind="stable")
    starts = np.zeros(layout.k.count + 1, np.int64)
    np.cumsum(np.bincount(layout.keys, minlength=layout.k.count), out=starts[1:])
    return starts, rows[order], order


def side_of(axis: Axis, device: torch.device) -> TileSide:
    """The tiles of a side as rows of a tensor that begins at its first position."""
    places = axis.positions.reshape(axis.count, axis.size)
    rows = np.where(places >= 0, places - axis.first, -1)
    counts = (rows >= 0).sum(1)
    none = np.zeros(1, np.int64)
    firsts, step = (rows[:, 0], 1) if len(rows) else (none, 1)
    if len(rows) and axis.size > 1:
        steps = (rows[:, 1] - rows[:, 0])[counts > 1]
        step = int(steps[0]) if len(steps) else 1
        meant = firsts[:, None] + step * np.arange(axis.size)
        known = np.arange(axis.size) < counts[:, None]
        if step < 1 or (np.where(known, meant, -1) != rows).any():
            step = 0
    ends = firsts + np.maximum(counts, 1) * step * (counts > 0) if step else none
    listed = none if step else rows.ravel()
    tables = [_on(x, device) for x in (firsts, ends, listed)]
    return TileSide(tables[0], tables[1], tables[2], step, axis.size)


def bits_of(masks: np.ndarray, device: torch.device) -> torch.Tensor:
    """Masks bool [m, height, width] as bits, int32 [m, height, words], the first key lowest."""
    count, height, width = masks.shape
    words = -(-width // 32)
    bits = np.zeros((max(1, count), height, 32 * words), bool)
    bits[:count, :, :width] = masks
    packed = np.packbits(bits, axis=2, bitorder="little").view("<i4")
    return torch.from_numpy(packed.astype(np.int32)).to(device)


def packed(held: torch.Tensor, words: int) -> torch.Tensor:
    """bool [..., keys] as int32 [..., words], the first key lowest."""
    held = functional.pad(held, (0, 32 * words - held.shape[-1]))
    places = torch.arange(32, device=held.device)
    found = (torch.unflatten(held, -1, (words, 32)).long() << places).sum(-1)
    # as the bits of a number that has a sign
    return torch.where(found >> 31 > 0, found - (1 << 32), found).to(torch.int32)


def lists_of(
    starts: np.ndarray, tiles: np.ndarray, kinds: np.ndarray, device: torch.device
) -> TileLists:
    """Lists that begin at `starts` [rows + 1], their whole entries first, long ones cut."""
    lengths = np.diff(starts)
    row = np.repeat(np.arange(len(lengths)), lengths)
    masked = kinds != FULL_TILE
    order = np.argsort(2 * row + masked, kind="stable")
    middles = starts[:-1] + np.bincount(row[~masked], minlength=len(lengths))
    some = np.flatnonzero(lengths)
    typical = int(np.median(lengths[some])) if len(some) else 0
    most = max(SHORTEST, LONGEST * typical)
    parts = -(-lengths[some] // most)
    owner = np.repeat(np.arange(len(some)), parts)
    first = np.cumsum(parts) - parts
    number = np.arange(len(owner)) - first[owner]
    mine = some[owner]
    low = starts[mine] + number * most
    high = np.minimum(low + most, starts[mine + 1])
    cut = parts > 1
    slots = np.cumsum(cut[owner]) - 1
    slot = np.where(cut[owner], slots, -1)
    programs = np.stack([mine, low, np.clip(middles[mine], low, high), high, slot], axis=1)
    programs = programs[np.argsort(low - high, kind="stable")]
    begin = slots[first[cut]] if len(owner) else np.zeros(0, np.int64)
    end = begin + parts[cut]
    spans = np.stack([some[cut], begin, begin, end, np.full(len(begin), -1)], axis=1)
    numbers = np.maximum(kinds[order], 0)
    tables = [_on(x, device) for x in (programs, tiles[order], numbers, spans)]
    return TileLists(tables[0], tables[1], tables[2], tables[3], int(cut[owner].sum()))


def _on(x: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, np.int32)).to(device)
