"""Entries of tile lists in batches: which query tiles meet which key tiles in one product.

An entry is a query tile and a key tile that it reads. Where query tiles are low, gathering keys for
each would move more numbers than it computes: entries are sorted by key tile, and all query tiles
that read it are the rows of one product. A tall query tile meets its key tiles in one product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

LEVELS = 8
"""Levels of an octave: key tiles whose numbers of entries are on one are computed together, with as
many rows as the one that has most, which wastes a few percent."""


@dataclass(frozen=True, eq=False)
class Batch:
    """G products of M query tiles with C key tiles each.

    `rows` int64 [G, M] and `tiles` int64 [G, C] number the tiles, `entries` int64 [G, M, C] the
    places in the lists; `real` is bool [G, M], False where a row only fills up a product, None
    where none does. The G M partial results stand from `first` on among those of all batches.
    `row_step` and `tile_step` are the steps (`step_of`) of the whole batch that this is a piece of.
    """

    rows: torch.Tensor
    tiles: torch.Tensor
    entries: torch.Tensor
    real: torch.Tensor | None
    masked: bool
    first: int
    row_step: int = 0
    tile_step: int = 0

    def pieces(self, per_pair: int, most: int) -> Iterator[Batch]:
        """The same in pieces of about `most` numbers, `per_pair` of them for a pair of tiles."""
        row_step, tile_step = step_of(self.rows), step_of(self.tiles)
        count, rows = self.rows.shape
        each = per_pair * self.tiles.shape[1]
        step = max(1, most // (each * rows))
        high = rows if step > 1 else max(1, min(rows, most // each))
        for low in range(0, count, step):
            for start in range(0, rows, high):
                part = slice(low, low + step), slice(start, start + high)
                yield replace(
                    self,
                    rows=self.rows[part],
                    tiles=self.tiles[part[0]],
                    entries=self.entries[part],
                    real=None if self.real is None else self.real[part],
                    first=self.first + low * rows + start,
                    row_step=row_step,
                    tile_step=tile_step,
                )


@dataclass(frozen=True, eq=False)
class Batches:
    """All entries of lists in batches: `partials` results, and which of them belong to each query
    tile, int64 [L, parts], -1 for none: one, where batches are those of query tiles. `slots` int64
    [L, r] are then the places in the lists, those of entries first; else None."""

    each: list[Batch]
    partials: int
    places: torch.Tensor
    slots: torch.Tensor | None = None


def step_of(index: torch.Tensor) -> int:
    """The distance between the rows of an index [G, M], of which each numbers what follows one
    another; 0 if there is none."""
    numbers = index.numpy()
    count, many = numbers.shape
    first = int(numbers[0, 0])
    step = int(numbers[1, 0]) - first if count > 1 else 1
    if step < 1 or numbers[-1, -1] != first + (count - 1) * step + many - 1:
        return 0
    wanted = first + step * np.arange(count)[:, None] + np.arange(many)
    return step if np.array_equal(numbers, wanted) else 0


def by_keys(lists: torch.Tensor, masked: torch.Tensor | None) -> Batches:
    """The entries of lists int64 [L, r], -1 for none, key tile by key tile; those with masks, bool
    [L, r], by themselves."""
    flat = lists.numpy().ravel()
    entries = None if flat.min(initial=0) >= 0 else np.flatnonzero(flat >= 0)
    keys = flat if entries is None else flat[entries]
    base = int(keys.min(initial=0))
    span = int(keys.max(initial=0)) - base + 1
    keys = keys - base
    if masked is not None:
        has_mask = masked.numpy().ravel()
        keys += span * (has_mask if entries is None else has_mask[entries])
    # short integers are sorted in a fraction of the time
    order = np.argsort(keys.astype(np.int16) if 2 * span < 1 << 15 else keys, kind="stable")
    counts = np.bincount(keys)
    groups, firsts, partials = _grouped(counts, span)
    at = np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(len(order))
    order = order if entries is None else entries[order]
    places = np.full(len(flat), -1)
    places[order] = at
    # a row that fills up is the first one
    rows, where = np.zeros(partials, np.int64), np.zeros(partials, np.int64)
    rows[at], where[at] = order // lists.shape[1], order
    each = []
    for tiles, most in groups:
        first, shape = int(firsts[tiles[0]]), (len(tiles), most)
        part = slice(first, first + len(tiles) * most)
        fills = np.arange(most) >= counts[tiles][:, None]
        each.append(
            Batch(
                torch.from_numpy(rows[part].reshape(shape)),
                torch.from_numpy(tiles[:, None] % span + base),
                torch.from_numpy(where[part].reshape(*shape, 1)),
                torch.from_numpy(~fills) if fills.any() else None,
                bool(tiles[0] >= span),
                first,
            )
        )
    return Batches(each, partials, torch.from_numpy(places).view(lists.shape))


def _grouped(counts: np.ndarray, span: int) -> tuple[list[tuple[np.ndarray, int]], np.ndarray, int]:
    """Tiles, with masks from `span` on, that have about as many entries, with the most of them;
    where the partial results of each tile start; and how many there are."""
    tiles = np.flatnonzero(counts)
    level = np.floor(np.log2(counts[tiles]) * LEVELS).astype(np.int64) * 2 + (tiles >= span)
    firsts = np.zeros(len(counts), np.int64)
    groups, total = [], 0
    for which in np.unique(level):
        mine = tiles[level == which]
        most = int(counts[mine].max())
        firsts[mine] = total + np.arange(len(mine)) * most
        total += len(mine) * most
        groups.append((mine, most))
    return groups, firsts, total


def by_queries(lists: torch.Tensor, masked: torch.Tensor | None) -> Batches:
    """The entries of lists int64 [L, r], -1 for none, query tile by query tile; those with a mask,
    bool [L, r], by themselves."""
    count, width = lists.shape
    lengths, rows = (lists >= 0).sum(1), torch.arange(count, device="cpu")
    slots = torch.sort((lists < 0).to(torch.int8), dim=1, stable=True)[1]
    slots = slots[:, : int(lengths.max())]
    tiles, entries = lists.gather(1, slots), rows[:, None] * width + slots
    kinds = 2 * lengths + (0 if masked is None else masked.any(1))
    places, each, first = torch.full((count, 1), -1, device="cpu"), [], 0
    for kind in np.unique(kinds[lengths > 0].numpy()).tolist():
        mine, many = rows[kinds == kind], slice(0, kind // 2)
        places[mine, 0] = torch.arange(first, first + len(mine), device="cpu")
        some = mine[:, None], tiles[mine, many], entries[mine, None, many]
        each.append(Batch(*some, None, bool(kind % 2), first))
        first += len(mine)
    return Batches(each, first, places, slots)
