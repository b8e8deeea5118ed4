"""A step on the device where it runs: both sides, masks as bits, and lists in both directions.

A step is its tiles: which query tile and which key tile, and the number of a mask or none. They are
known before any call, or a call leaves some of them: by labels, by what other inputs say, or by
data-dependent choices. Lists are made of them on the device where they are, and nothing is asked of
it: what they take is bounded before.
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
from attnspec.layout.axes import Axis

LONGEST = 4
"""Times the length of the median list that a list is at most, before it is cut."""

SHORTEST = 16
"""Entries that a list may have in any case before it is cut."""

Programs = tuple[Lists, Lists, int]
"""What kernels do for the tiles of one side: the programs, the longest first, the spans of slots of
the tiles whose lists may be several programs, and how many slots there are."""


class Cut(NamedTuple):
    """How lists of a direction are cut: into programs of `most` entries, so many programs at most,
    and so many slots for what the programs of cut lists find; `tiles` int64 may have such lists."""

    most: int
    programs: int
    slots: int
    tiles: Tensor


@dataclass(frozen=True, eq=False)
class Step:
    """The tiles of a step: query tiles and key tiles int64 [tiles], what holds in them, and how the
    lists of both directions are cut."""

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
        count = len(self.q.firsts) if side == 0 else len(self.k.firsts)
        this, other, cut = self.tiles[side], self.tiles[1 - side], self.cuts[side]
        masks, device = self.masks, self.q.firsts.device
        # those with masks behind the others of their tile
        code = torch.where(masks.some, 2 * this + (~masks.full).long(), 2 * count)
        code, order = torch.sort(code, dim=1, stable=True)
        entries = order + torch.arange(len(code), device=order.device)[:, None] * order.shape[1]
        numbers = masks.numbers.expand(len(code), -1).flatten()[entries.flatten()]
        tiles, kinds = (x.to(device, torch.int32) for x in (other[order.flatten()], numbers))
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
    after = torch.where(parts > 1, parts, 0).cumsum(1)
    tiles = cut.tiles.expand(batch, -1)
    stop = after.gather(1, tiles)
    start = stop - torch.where(parts > 1, parts, 0).gather(1, tiles)
    spans = torch.stack([tiles, start, start, stop, torch.full_like(start, -1)], 2)
    if code.is_cpu and batch == 1:
        # the host knows what there is nothing to do for
        programs, spans = (x[x[..., 3] > x[..., 1]][None] for x in (programs, spans))
    return programs, spans


def step_of(tiles: StepTiles, device: torch.device) -> Step:
    """The step of tiles; lists are made of them where they are."""
    layout, place = tiles.layout, tiles.device
    back = np.bincount(layout.keys, minlength=layout.k.count)
    cuts = cut_of(np.diff(layout.starts), place), cut_of(back, place)
    masks = tiles.static._replace(bits=tiles.static.bits.to(device))
    sides = side_of(layout.q, device), side_of(layout.k, device)
    return Step(*sides, tiles.entries, masks, cuts)


def cut_of(lengths: np.ndarray, device: torch.device) -> Cut:
    """How lists are cut that have so many entries at most."""
    some = lengths[lengths > 0]
    most = max(SHORTEST, LONGEST * (int(np.median(some)) if len(some) else 0))
    parts = np.maximum(1, -(-lengths // most))
    tiles = np.flatnonzero(parts > 1)
    return Cut(most, int(parts.sum()), int(parts[tiles].sum()), torch.from_numpy(tiles).to(device))


def side_of(axis: Axis, device: torch.device) -> Side:
    """The tiles of a side as rows of a tensor that begins at its first position."""
    places = axis.positions.reshape(axis.count, axis.size)
    rows = np.where(places >= 0, places - axis.first, -1)
    gaps = np.diff(rows, axis=1)[rows[:, 1:] >= 0]
    step = int(gaps[0]) if len(gaps) else 1
    step = step if step > 0 and (gaps == step).all() else 0
    ends = rows[:, 0] + (rows >= 0).sum(1) * step
    listed = np.zeros(1, np.int64) if step else rows.ravel()
    tables = [torch.from_numpy(x.astype(np.int32)).to(device) for x in (rows[:, 0], ends, listed)]
    return Side(tables[0], tables[1], tables[2], step, axis.size)
