"""Partial results of rows of queries, or of keys, and how they become one for each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnspec.backends.common.merging import in_one_frame
from attnspec.backends.tables.sides import scratch

Index = tuple[torch.Tensor, "torch.Tensor | None"]
"""For each row some of the results, int64 [rows, parts], and which of them are none and stand for
others that are there, bool, or None."""


@dataclass
class Partials:
    """Results of rows, of which the `used` first are there: sums of values [rows, e] with the
    weights 2^(score - top), the totals of these, and the tops [rows]. Of gradients there are only
    sums."""

    outs: torch.Tensor
    totals: torch.Tensor
    tops: torch.Tensor
    used: int = 0

    def __len__(self) -> int:
        return len(self.outs)

    @staticmethod
    def room(use: str, rows: int, size: int, dtype: torch.dtype) -> Partials:
        """Buffers for so many, valid until the next ones for the same use."""
        outs = scratch(use, (rows, size), dtype)
        totals, tops = scratch(f"totals of {use}", (2, rows), dtype)
        return Partials(outs, totals, tops)

    def apart(self, use: str, rows: int) -> Partials:
        """The same for results alike."""
        return Partials.room(use, rows, self.outs.shape[1], self.outs.dtype)

    def take(self, rows: int) -> Partials:
        """The next so many."""
        self.used += rows
        part = slice(self.used - rows, self.used)
        return Partials(self.outs[part], self.totals[part], self.tops[part])

    def put(self, found: Partials) -> int:
        """Where the first of these results now stands."""
        into = self.take(len(found))
        into.outs.copy_(found.outs)
        into.totals.copy_(found.totals)
        into.tops.copy_(found.tops)
        return self.used - len(found)

    def merged(self, index: Index) -> Partials:
        """The weighted means of values of some results for each row, with the total 1 and the
        log-sum-exp, in units of ln 2, as the top: 0, 0 and -inf where there is no key."""
        places, none = index
        top, total = (x.take(places) for x in (self.tops, self.totals))
        if none is not None:
            # 0 times what stands for none need not be 0
            top.masked_fill_(none, -math.inf)
            total.masked_fill_(none, 0.0)
        most, weights = in_one_frame(top, -1, torch.exp2)
        total = total.mul_(weights).sum(-1, keepdim=True)
        empty = total == 0
        weights /= total.masked_fill(empty, 1.0)
        lse = total.log2().add_(most)[:, 0]
        outs = _bags(self.outs, places, weights)
        if bool(empty.any()):
            outs.masked_fill_(empty, 0.0)
        return Partials(outs, (~empty[:, 0]).to(total.dtype), lse)

    def summed(self, index: Index) -> Partials:
        """The sums of some results for each row."""
        outs = summed(self.outs, index)
        return Partials(outs, *outs.new_zeros(2, len(outs)))


def summed(x: torch.Tensor, index: Index) -> torch.Tensor:
    """The sums of some rows of x [m, e] for each row [rows, e]."""
    places, none = index
    if none is None:
        return _bags(x, places, None)
    found = _bags(x, places, (~none).to(x.dtype))
    # 0 times what stands for none need not be 0
    return found.masked_fill_(none.all(1, keepdim=True), 0.0)


def rows_of_tiles(places: torch.Tensor, height: int) -> Index:
    """The index of the rows of tiles of a height, given the results of tiles [tiles, parts]."""
    places, none = index_of(places)
    if height > 1:
        inside = torch.arange(height, device="cpu")[:, None]
        places = (places[:, None] * height + inside).flatten(0, 1)
        none = None if none is None else none.repeat_interleave(height, 0)
    return places, none


def index_of(places: torch.Tensor) -> Index:
    """The index of places [rows, parts], -1 for none: another one of the row stands for it, or the
    first of all."""
    if int(places.min()) >= 0:
        return places, None
    none = places < 0
    return torch.where(none, places.amax(1, keepdim=True).clamp_(min=0), places), none


def side_by_side(columns: Sequence[torch.Tensor]) -> Index:
    """The index of rows that have one result, or -1, in each of some columns [rows]."""
    return index_of(torch.stack(list(columns), 1))


def _bags(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Sums [L, e] of rows x [m, e] at index [L, parts], times their weights."""
    count, parts = index.shape
    if parts == 1:
        found = x.index_select(0, index[:, 0])
        return found if weights is None else found.mul_(weights)
    starts = torch.arange(0, count * parts, parts, device="cpu")
    weights = None if weights is None else weights.flatten()
    return torch.embedding_bag(x, index.flatten(), starts, False, 0, False, weights)[0]
