"""The tables of a step in which pairs must have labels in common: lists without what no label of a
tile allows, found on the device where the labels are.

Of documents that lie one behind the other, each tile reads those of its own alone. What a list has
between its first and its last such entry is looked at pair by pair in any case.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch

from attnspec.backends.triton.tables import StepTables, TileLists, TileSide


class LabelledTables:
    """The tables of a step for labels int64 [B, L, n_k]; query rows begin at position `first`."""

    def __init__(self, step: StepTables, labels: torch.Tensor, first: int) -> None:
        self.step, self.labels, self.first = step, labels, first
        self.q, self.k, self.words = step.q, step.k, step.words

    @cached_property
    def rows(self) -> TileLists:
        """The lists of query tiles."""
        return shortened(self.step.rows, self._ranges[0], self._ranges[1])

    @cached_property
    def columns(self) -> TileLists:
        """The lists of key tiles."""
        return shortened(self.step.columns, self._ranges[1], self._ranges[0])

    @cached_property
    def _ranges(self) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """The least and the greatest labels of the tiles of both sides."""
        sides = ((self.q, self.first), (self.k, 0))
        return tuple(range_of(self.labels[:, :, at:], side) for side, at in sides)


def range_of(labels: torch.Tensor, side: TileSide) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest labels [B, L, tiles] of the rows of tiles."""
    if side.step:
        rows = side.firsts[:, None] + side.step * torch.arange(side.size, device=labels.device)
        there = rows < side.ends[:, None]
    else:
        rows = side.listed.view(-1, side.size)
        there = rows >= 0
    found = labels[:, :, torch.where(there, rows, 0)]
    ends = torch.iinfo(labels.dtype)
    least = torch.where(there, found, ends.max).amin(-1)
    return least, torch.where(there, found, ends.min).amax(-1)


def shortened(
    lists: TileLists,
    own: tuple[torch.Tensor, torch.Tensor],
    other: tuple[torch.Tensor, torch.Tensor],
) -> TileLists:
    """Lists without the entries before the first and behind the last in which labels may agree, of
    each sample: programs [B, p, 5]."""
    tile, low, middle, high, slot = lists.programs.long().unbind(-1)
    entries = torch.arange(len(lists.tiles), device=tile.device)
    # programs of a tile are one behind the other, and so are tiles
    order = torch.argsort(low, stable=True)
    number = torch.searchsorted(low[order], entries, right=True) - 1
    owner, named = tile[order][number], lists.tiles.long()
    near = (own[0][:, :, owner] <= other[1][:, :, named]) & (
        other[0][:, :, named] <= own[1][:, :, owner]
    )
    near = near.all(1)
    count = len(entries)
    after = torch.where(near, entries, count).flip(1).cummin(1)[0].flip(1)
    before = torch.where(near, entries + 1, 0).cummax(1)[0]
    after = torch.nn.functional.pad(after, (0, 1), value=count)
    before = torch.nn.functional.pad(before, (1, 0))
    begin = after[:, low].minimum(high)
    end = before[:, high].maximum(begin)
    parts = tile.expand_as(begin), begin, middle.maximum(begin).minimum(end), end
    programs = torch.stack([*parts, slot.expand_as(begin)], 2)
    return replace(lists, programs=programs.to(torch.int32))
