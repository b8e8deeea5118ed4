"""A step on the device where it runs: its tiles, by query tile, key tile and mask, known before any
call or those that a call leaves, and lists of them in both directions.

Lists are made on the device where the tiles are, and nothing is asked of it: what they take is
bounded before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.flex.tiles import Masks, StepTiles
from attnspec.backends.triton.blocks import Lists, Side

LONGEST = 4
"""Times the length of the median list that a list is at most, before it is cut."""

SHORTEST = 16
"""Entries that a list may have in any case before it is cut."""

Programs = tuple[Lists, Lists, int]
"""The programs of one side, the longest first, the spans of slots of its tiles, and how many slots
there are."""


class Cut(NamedTuple):
    """How lists of a direction are cut: into programs of `most` entries, so many programs at most,
    and so many slots for what the programs of cut lists find."""

    most: int
    programs: int
    slots: int


@dataclass(frozen=True, eq=False)
class Step:
    """The tiles of a step: query tiles and key tiles int64 [B or 1, tiles], what holds in them, and
    how the lists of both directions are cut."""

    q: Side
    k: Side
    tiles: Sequence[Tensor]
    masks: Masks
    cuts: tuple[Cut, Cut]

    @cached_property
    def rows(self) -> Programs:
        """The lists of query tiles."""
        return self._lists(0)

    @cached_property
    def columns(self) -> Programs:
        """The lists of key tiles, for gradients."""
        return self._lists(1)

    def _lists(self, side: int) -> Programs:
        rows, masks, cut = (self.q, self.k)[side].rows, self.masks, self.cuts[side]
        count, device = rows.shape[1], rows.device
        # those with masks behind the others of their tile
        code = torch.where(masks.some, 2 * self.tiles[side] + (~masks.full).long(), 2 * count)
        code, order = torch.sort(code, dim=1, stable=True)
        tiles, kinds = (
            x.expand(order.shape).gather(1, order).to(device, torch.int32)
            for x in (self.tiles[1 - side], masks.numbers)
        )
        programs, spans = (
            Lists(x.to(device, torch.int32), tiles, kinds, x.shape[1], x[0].numel() * (len(x) > 1))
            for x in _programs(code, count, cut)
        )
        return programs, spans, cut.slots + 1 if cut.slots else 0


def _programs(code: Tensor, count: int, cut: Cut) -> tuple[Tensor, Tensor]:
    """The programs and the spans of lists of so many tiles, as `Lists` has them, by the sorted
    codes of their entries [B, entries], twice the tile, and 1 more with a mask."""
    batch, total = code.shape
    device = code.device
    wanted = 2 * torch.arange(count, device=device).repeat(batch, 1)
    low, middle, high = (torch.searchsorted(code, wanted + more) for more in range(3))
    parts = (high - low + cut.most - 1).div(cut.most, rounding_mode="floor").clamp(min=1)
    last = parts.cumsum(1)
    number = torch.arange(cut.programs, device=device).repeat(batch, 1)
    tile = torch.searchsorted(last, number, right=True).clamp(max=count - 1)
    low_of, high_of, parts_of, last_of = (x.gather(1, tile) for x in (low, high, parts, last))
    begin = (low_of + (number - last_of + parts_of) * cut.most).minimum(high_of)
    end = (begin + cut.most).minimum(high_of)
    # what is none has the slot behind those that something is taken of
    none = number >= last[:, -1:]
    several = (parts_of > 1) & ~none
    slot = torch.where(several, several.cumsum(1) - 1, torch.where(none, cut.slots, -1))
    first = torch.arange(batch, device=device)[:, None] * total
    middle = middle.gather(1, tile).maximum(begin).minimum(end)
    work = torch.stack([tile, begin + first, middle + first, end + first, slot], 2)
    longest = torch.argsort(begin - end, dim=1, stable=True)
    programs = work.gather(1, longest[..., None].expand(-1, -1, 5))
    slots = torch.where(parts > 1, parts, 0)
    stop = slots.cumsum(1)
    start = stop - slots
    spans = torch.stack([wanted // 2, start, start, stop, torch.full_like(start, -1)], 2)
    if code.is_cpu and batch == 1:
        # the host knows what there is nothing to do for
        programs, spans = (x[x[..., 3] > x[..., 1]][None] for x in (programs, spans))
    return programs, spans


def step_of(tiles: StepTiles, device: torch.device) -> Step:
    """The step of tiles; lists are made of them where they are."""
    layout = tiles.layout
    lengths = np.diff(layout.starts), np.bincount(layout.keys, minlength=layout.k.count)
    masks = tiles.static._replace(bits=tiles.static.bits.to(device))
    q, k = (
        side_of(places[None], axis.first, device)
        for places, axis in zip(tiles.places, (layout.q, layout.k), strict=True)
    )
    return Step(q, k, [x[None] for x in tiles.entries], masks, (_cut(lengths[0]), _cut(lengths[1])))


def _cut(lengths: np.ndarray) -> Cut:
    """How lists are cut that have so many entries at most."""
    some = lengths[lengths > 0]
    most = max(SHORTEST, LONGEST * (int(np.median(some)) if len(some) else 0))
    parts = np.maximum(1, -(-lengths // most))
    return Cut(most, int(parts.sum()), int(parts[parts > 1].sum()))


def side_of(places: Tensor, first: int, device: torch.device) -> Side:
    """A side by the positions at the places of its tiles [B or 1, tiles, size], as rows of a tensor
    that begins at a first one."""
    rows = torch.where(places < 0, -1, places - first).to(device, torch.int32).contiguous()
    return Side(rows, rows[0].numel() * (len(rows) > 1), rows.shape[2])
