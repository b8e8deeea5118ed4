"""A step on the device where it runs: its tiles, by query tile, key tile and mask, known before any
call or those that a call leaves, and lists of them in both directions.

Lists are made on the device where the tiles are, and nothing is asked of it: what they take is
bounded before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.flex.tiles import Masks, StepTiles
from attnspec.backends.triton.blocks import Lists, Side

LONGEST = 4
"""Times the length of the mean list that a list is at most, before it is cut."""

SHORTEST = 16
"""Entries that a list may have in any case before it is cut."""

Programs = tuple[Lists, Lists, int]
"""The programs of one side, the longest first, the spans of slots of its tiles, and how many slots
there are."""


@dataclass(frozen=True, eq=False)
class Step:
    """The tiles of a step: query tiles and key tiles int64 [B or 1, tiles], what holds in them, and
    how long a list of each direction is at most."""

    q: Side
    k: Side
    tiles: Sequence[Tensor]
    masks: Masks
    longest: tuple[int, int]

    @cached_property
    def rows(self) -> Programs:
        """The lists of query tiles."""
        return self._lists(0)

    @cached_property
    def columns(self) -> Programs:
        """The lists of key tiles, for gradients."""
        return self._lists(1)

    def _lists(self, side: int) -> Programs:
        rows, masks, total = (self.q, self.k)[side].rows, self.masks, self.tiles[0].shape[1]
        count, device = rows.shape[1], rows.device
        most = max(SHORTEST, LONGEST * (total // max(1, count)))
        # how many more programs there may be is not asked of the device
        more = total // most if self.longest[side] > most else 0
        # those with masks behind the others of their tile
        code = torch.where(masks.some, 2 * self.tiles[side] + (~masks.full).long(), 2 * count)
        code, order = torch.sort(code, dim=1, stable=True)
        tiles, kinds = (
            x.take_along_dim(order, 1).to(device, torch.int32)
            for x in (self.tiles[1 - side], masks.numbers)
        )
        *lists, slots = _programs(code, count, most, more)
        programs, spans = (
            Lists(x.to(device, torch.int32), tiles, kinds, x.shape[1], x[0].numel() * (len(x) > 1))
            for x in lists
        )
        return programs, spans, slots + 1 if slots else 0


def _programs(code: Tensor, count: int, most: int, more: int) -> tuple[Tensor, Tensor, int]:
    """The programs of at most so many entries and the spans of lists of so many tiles, as `Lists`
    has them, by the sorted codes of their entries [B, entries], twice the tile, and 1 more with a
    mask; and how many slots there are at most, for so many `more` programs than tiles."""
    batch, total = code.shape
    device = code.device
    wanted = 2 * torch.arange(count, device=device).repeat(batch, 1)
    low, middle, high = (torch.searchsorted(code, wanted + at) for at in range(3))
    parts = ((high - low + most - 1) // most).clamp(min=1)
    last = parts.cumsum(1)
    number = torch.arange(count + more, device=device).repeat(batch, 1)
    tile = torch.searchsorted(last, number, right=True).clamp(max=count - 1)
    low_of, high_of, parts_of, last_of = (x.gather(1, tile) for x in (low, high, parts, last))
    begin = (low_of + (number - last_of + parts_of) * most).minimum(high_of)
    end = (begin + most).minimum(high_of)
    # what is none has the slot behind those that something is taken of
    none = number >= last[:, -1:]
    several = (parts_of > 1) & ~none
    slot = torch.where(several, several.cumsum(1) - 1, torch.where(none, 2 * more, -1))
    first = torch.arange(batch, device=device)[:, None] * total
    middle = middle.gather(1, tile).maximum(begin).minimum(end)
    work = torch.stack([tile, begin + first, middle + first, end + first, slot], 2)
    longest = torch.argsort(begin - end, dim=1, stable=True)
    programs = work.take_along_dim(longest[..., None], 1)
    slots = torch.where(parts > 1, parts, 0)
    stop = slots.cumsum(1)
    start = stop - slots
    spans = torch.stack([wanted // 2, start, start, stop, torch.full_like(start, -1)], 2)
    if code.is_cpu and batch == 1:
        # the host knows what there is nothing to do for
        programs, spans = (x[x[..., 3] > x[..., 1]][None] for x in (programs, spans))
        return programs, spans, int(stop[0, -1])
    return programs, spans, 2 * more


def step_of(tiles: StepTiles, device: torch.device) -> Step:
    """The step of tiles; lists are made of them where they are."""
    layout = tiles.layout
    lengths = np.diff(layout.starts), np.bincount(layout.keys)
    rows, columns = (int(x.max(initial=0)) for x in lengths)
    masks = tiles.static._replace(bits=tiles.static.bits.to(device))
    q, k = (
        side_of(places[None], axis.first, device)
        for places, axis in zip(tiles.places, (layout.q, layout.k), strict=True)
    )
    return Step(q, k, [x[None] for x in tiles.entries], masks, (rows, columns))


def side_of(places: Tensor, first: int, device: torch.device) -> Side:
    """A side by the positions at the places of its tiles [B or 1, tiles, size], as rows of a tensor
    that begins at a first one."""
    rows = torch.where(places < 0, -1, places - first).to(device, torch.int32).contiguous()
    return Side(rows, rows[0].numel() * (len(rows) > 1), rows.shape[2])
