"""Lists that the data decide as tables of the kernels, made where the tensors are.

All samples and heads are one sequence, list after list: tile t of list i is tile i T + t, and its
rows lie behind those of the lists before. What of an entry is to be looked at is bits of a mask of
its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from attnspec.backends.decided.tables import Placed, Side
from attnspec.backends.triton import tables
from attnspec.backends.triton.tables import TileLists, TileSide, packed

LOOKED = 1 << 24
"""Pairs whose conditions are looked at together, about."""


class PlacedTables:
    """The tables of a layout for tensors [1, R, B K n_q, …] and [1, 1, B K n_k, …]."""

    def __init__(self, placed: Placed) -> None:
        self.placed = placed
        count = placed.batch * placed.heads
        self.q = _side(placed.q, placed.n_q, count, (placed.batch, placed.heads))
        self.k = _side(placed.k, placed.k.n, count, (placed.batch, placed.heads))
        lists = placed.lists.flatten(0, 1)
        self.device = lists.device
        tiles = placed.k.places.shape[2]
        base = torch.arange(count, device=self.device)[:, None, None] * tiles
        self.count = count * tiles
        # tiles, masked or not, and numbers of masks of all entries, [rows, r]
        self.entries = torch.where(lists >= 0, lists + base, self.count).flatten(0, 1)
        masked = placed.masked
        self.masked = torch.zeros_like(lists, dtype=torch.bool) if masked is None else masked
        self.numbers, self.words = self._masks()

    @cached_property
    def rows(self) -> TileLists:
        """The lists of query tiles: whole entries, those with masks, and then those that are
        none."""
        rows, width = self.entries.shape
        kinds = self.masked.flatten(0, 1) + 2 * (self.entries == self.count)
        order = torch.sort(kinds, dim=1, stable=True)[1]
        low = torch.arange(rows, device=self.device) * width
        middle, high = (low + (kinds < kind).sum(1) for kind in (1, 2))
        found = self.entries.gather(1, order), self.numbers.gather(1, order)
        number = torch.arange(rows, device=self.device)
        programs = [number, low, middle, high, torch.full_like(low, -1)]
        return _lists(programs, [], found[0].flatten(), found[1].flatten())

    @cached_property
    def columns(self) -> TileLists:
        """The lists of key tiles, by sorting."""
        code = (2 * self.entries + self.masked.flatten(0, 1)).flatten()
        code, order = torch.sort(code, stable=True)
        tiles = 2 * torch.arange(self.count, device=self.device)
        ends = [torch.searchsorted(code, tiles + more) for more in range(3)]
        rows = order // max(1, self.entries.shape[1])
        most = max(tables.SHORTEST, tables.LONGEST * (len(code) // max(1, self.count)))
        return _lists(*_cut(ends, most, len(code)), rows, self.numbers.flatten()[order])

    def _masks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers of masks [rows, r], and masks as bits int32 [masks, height, words]."""
        masked, placed = self.masked, self.placed
        lists, rows = masked.shape[:2]
        most = int(masked.sum(2).max()) if masked.numel() else 0
        height, columns = placed.q.size, placed.k.size
        words = -(-columns // 32)
        bits = torch.zeros(
            (lists, rows, max(1, most), height, words), dtype=torch.int32, device=self.device
        )
        slots = torch.sort((~masked).to(torch.int8), dim=2, stable=True)[1][:, :, :most]
        step = max(1, LOOKED // max(1, lists * most * height * columns))
        for first in range(0, rows if most else 0, step):
            last = min(first + step, rows)
            # heads of a group hold the same pairs
            held = placed.held(first, last, slots[:, first:last])[:, :, :height]
            bits[:, first:last] = packed(held.transpose(2, 3), words)
        base = torch.arange(lists * rows, device=self.device).view(lists, rows, 1) * max(1, most)
        numbers = (masked.cumsum(2) - 1).clamp(min=0) + base
        return numbers.flatten(0, 1), bits.flatten(0, 2)


def _side(side: Side, length: int, count: int, lead: tuple[int, int]) -> TileSide:
    """The tiles of all lists as rows of one sequence, each of them with so many rows."""
    device = side.places.device
    base = torch.arange(count, device=device)[:, None] * length
    tiles = side.places.shape[2]
    none = torch.zeros(1, dtype=torch.int32, device=device)
    if side.natural:
        firsts = base + torch.arange(tiles, device=device) * side.size
        ends = (base + length).expand_as(firsts)
        tables = [x.flatten().to(torch.int32) for x in (firsts, ends)]
        return TileSide(tables[0], tables[1], none, 1, side.size)
    places = side.places.expand(*lead, -1, -1).flatten(0, 1)
    rows = torch.where(places >= 0, places - (side.n - length) + base[..., None], -1)
    return TileSide(none, none, rows.flatten().to(torch.int32), 0, side.size)


def _cut(
    ends: Sequence[torch.Tensor], most: int, entries: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Programs and spans for lists with these ends, none longer than `most`, as many as so many
    entries may need: how many there are is not asked of the device."""
    low, middle, high = ends
    parts = (high - low + most - 1).div(most, rounding_mode="floor").clamp(min=1)
    last = parts.cumsum(0)
    first = last - parts
    number = torch.arange(len(low) + entries // most, device=low.device)
    tile = torch.searchsorted(last, number, right=True).clamp(max=len(low) - 1)
    begin = (low[tile] + (number - first[tile]) * most).minimum(high[tile])
    end = (begin + most).minimum(high[tile])
    # what is cut has slots, and what is none has one that nothing is taken of
    cut = (parts[tile] > 1) | (number >= last[-1])
    slot = torch.where(cut, number, -1)
    programs = [tile, begin, middle[tile].maximum(begin).minimum(end), end, slot]
    stop = torch.where(parts > 1, last, first)
    return programs, [torch.arange(len(low), device=low.device), first, first, stop, first]


def _lists(
    programs: Sequence[torch.Tensor],
    spans: Sequence[torch.Tensor],
    tiles: torch.Tensor,
    kinds: torch.Tensor,
) -> TileLists:
    """The lists of so many programs, the longest first."""
    work = torch.stack([*programs], dim=1)
    work = work[torch.argsort(work[:, 1] - work[:, 3], stable=True)]
    held = torch.stack([*spans], dim=1) if spans else work[:0]
    found = [x.to(torch.int32) for x in (work, tiles, kinds, held)]
    return TileLists(found[0], found[1], found[2], found[3], len(work) if spans else 0)
