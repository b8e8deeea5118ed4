"""A step on the device where it runs: both sides, masks as bits, and lists in both directions.

A step is its tiles: which query tile and which key tile, and the number of a mask or none. They are
known before any call, or a call leaves some of them: by labels, by what other inputs say, or by
what the data decide. Lists are made of them on the device where they are, and nothing is asked of
it: what they take is bounded before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from attnspec.backends.flex.inputs import Masks, bits_of, ends_of, may_agree, tiles_of
from attnspec.backends.triton.blocks import Side
from attnspec.layout.axes import Axis
from attnspec.layout.tables import FULL_TILE
from attnspec.layout.tile_layout import StepLayout

LONGEST = 4
"""Times the length of the median list that a list is at most, before it is cut."""

SHORTEST = 16
"""Entries that a list may have in any case before it is cut."""


class Cut(NamedTuple):
    """How lists of a direction are cut: into programs of `most` entries, so many programs at most,
    and so many slots for what the programs of cut lists find; `tiles` int64 may have such lists."""

    most: int
    programs: int
    slots: int
    tiles: torch.Tensor


class TileLists(NamedTuple):
    """What the kernels do for the tiles of one side, int32.

    `programs` [B or 1, p, 5] are a tile, where its entries begin, where those with masks begin,
    where they end, and a slot, -1 for none; the longest come first. `tiles` and `kinds` are the
    other side's tile of every entry and the number of its mask. `spans` [B or 1, s, 5] are the
    tiles whose lists may be several programs, with their slots, of `slots`, in place of entries.
    """

    programs: torch.Tensor
    tiles: torch.Tensor
    kinds: torch.Tensor
    spans: torch.Tensor
    slots: int


@dataclass(frozen=True, eq=False)
class Step:
    """The tiles of a step: query tiles and key tiles int64 [tiles], the numbers of their masks
    [B or 1, tiles], and bool [B or 1, tiles] whether they have one and whether there is some pair;
    `words` are the bits of masks int32 [masks, height, words], `cuts` those of both directions."""

    q: Side
    k: Side
    words: torch.Tensor
    tiles: tuple[torch.Tensor, torch.Tensor]
    numbers: torch.Tensor
    masked: torch.Tensor
    some: torch.Tensor
    cuts: tuple[Cut, Cut]

    @cached_property
    def rows(self) -> TileLists:
        """The lists of query tiles."""
        return self._lists(0)

    @cached_property
    def columns(self) -> TileLists:
        """The lists of key tiles, for gradients."""
        return self._lists(1)

    def _lists(self, side: int) -> TileLists:
        count = len(self.q.firsts) if side == 0 else len(self.k.firsts)
        own, other = self.tiles[side], self.tiles[1 - side]
        code = torch.where(self.some, 2 * own + self.masked, 2 * count)
        code, order = torch.sort(code, dim=1, stable=True)
        entries = order + torch.arange(len(code), device=order.device)[:, None] * order.shape[1]
        numbers = self.numbers.expand(len(code), -1).flatten()[entries.flatten()]
        programs, spans, slots = _programs(code, count, self.cuts[side])
        found = (programs, other[order.flatten()], numbers, spans)
        each = [x.to(self.words.device, torch.int32) for x in found]
        return TileLists(each[0], each[1], each[2], each[3], slots)


def _programs(code: torch.Tensor, count: int, cut: Cut) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The programs, the spans and the number of slots of lists of so many tiles, by the sorted
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
    return programs, spans, cut.slots + 1 if cut.slots else 0


def cut_of(lengths: np.ndarray, device: torch.device) -> Cut:
    """How lists are cut that have so many entries at most."""
    some = lengths[lengths > 0]
    most = max(SHORTEST, LONGEST * (int(np.median(some)) if len(some) else 0))
    parts = np.maximum(1, -(-lengths // most))
    tiles = np.flatnonzero(parts > 1)
    slots = int(parts[tiles].sum())
    return Cut(most, int(parts.sum()), slots, torch.from_numpy(tiles).to(device))


# --- sides ---------------------------------------------------------------------------------------


def side_of(axis: Axis, device: torch.device) -> Side:
    """The tiles of a side as rows of a tensor that begins at its first position."""
    places = axis.positions.reshape(axis.count, axis.size)
    rows = np.where(places >= 0, places - axis.first, -1)
    counts = (rows >= 0).sum(1)
    firsts, step = rows[:, 0], 1
    if len(rows) and axis.size > 1:
        steps = (rows[:, 1] - rows[:, 0])[counts > 1]
        step = int(steps[0]) if len(steps) else 1
        meant = firsts[:, None] + step * np.arange(axis.size)
        known = np.arange(axis.size) < counts[:, None]
        if step < 1 or (np.where(known, meant, -1) != rows).any():
            step = 0
    ends = firsts + np.maximum(counts, 1) * step * (counts > 0)
    listed = np.zeros(1, np.int64) if step else rows.ravel()
    found = [torch.from_numpy(x.astype(np.int32)).to(device) for x in (firsts, ends, listed)]
    return Side(found[0], found[1], found[2], step, axis.size)


def rows_in(side: Side) -> torch.Tensor:
    """The rows of tiles int64 [tiles, size], -1 for none."""
    if not side.step:
        listed: torch.Tensor = side.listed.view(-1, side.size).long()
        return listed
    rows = side.firsts[:, None] + side.step * torch.arange(side.size, device=side.firsts.device)
    return torch.where(rows < side.ends[:, None], rows, -1).long()


# --- where tiles come from -----------------------------------------------------------------------


def static_step(layout: StepLayout, device: torch.device, called: bool = False) -> Step:
    """The step of a layout, its tiles on the host, or on the device if each call leaves some."""
    place = device if called else torch.device("cpu")
    masked = torch.from_numpy(layout.kinds != FULL_TILE)[None].to(place)
    numbers = torch.from_numpy(np.maximum(layout.kinds, 0).astype(np.int64))[None].to(place)
    tiles = tiles_of(layout, place)
    sides = side_of(layout.q, device), side_of(layout.k, device)
    words, some = bits_of(layout.masks, device), torch.ones_like(masked)
    return Step(*sides, words, (tiles[0], tiles[1]), numbers, masked, some, cuts_of(layout, place))


def cuts_of(layout: StepLayout, device: torch.device) -> tuple[Cut, Cut]:
    """How lists of both directions are cut, whatever a call leaves of them."""
    back = np.bincount(layout.keys, minlength=layout.k.count)
    return cut_of(np.diff(layout.starts), device), cut_of(back, device)


def labelled_step(step: Step, labels: torch.Tensor, first: int) -> Step:
    """The tiles of a step in which a pair may have labels int64 [B, L, n_k] in common; query rows
    begin at position `first`."""
    sides = ((step.q, labels[:, :, first:]), (step.k, labels))
    near = []
    for (side, own), tile in zip(sides, step.tiles, strict=True):
        least, greatest = ends_of(own, rows_in(side))
        near.append((least[:, :, tile], greatest[:, :, tile]))
    return replace(step, some=may_agree(near[0], near[1]))


def read_step(step: Step, masks: Masks) -> Step:
    """The tiles of a step that the inputs of a call leave, with the masks that these make."""
    numbers, some, full, bits = masks
    return replace(step, words=bits, numbers=numbers, masked=~full, some=some)
