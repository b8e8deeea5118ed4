"""Entries of tile lists in batches: which query tiles meet which key tiles in one product.

An entry is a query tile and a key tile that it reads. Where query tiles are low, gathering keys for
each would move more numbers than it computes: entries are sorted by key tile, and all query tiles
that read it are the rows of one product. A tall query tile meets its key tiles in one product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

TILES = 16
"""Key tiles that a tall query tile meets at once, at most."""

LEVELS = 8
"""Levels of an octave: key tiles whose numbers of entries are on one are computed together, with as
many rows as the one that has most, which wastes a few percent."""


@dataclass(frozen=True, eq=False)
class Batch:
    """G products of M query tiles with C key tiles each.

    `rows` int64 [G, M] and `tiles` int64 [G, C] number the tiles, `entries` int64 [G, M, C] the
    places in the lists; `real` is bool [G, M], False where a row only fills up a product, None
    where none does. The G M partial results stand from `first` on among those of all batches.
    """

    rows: torch.Tensor
    tiles: torch.Tensor
    entries: torch.Tensor
    real: torch.Tensor | None
    masked: bool
    first: int

    def pieces(self, per_pair: int, most: int) -> Iterator[Batch]:
        """The same in pieces of about `most` numbers, `per_pair` of them for a pair of tiles."""
        groups, rows = self.rows.shape
        each = per_pair * self.tiles.shape[1]
        step = max(1, most // (each * rows))
        high = rows if step > 1 else max(1, min(rows, most // each))
        for low in range(0, groups, step):
            for start in range(0, rows, high):
                yield self._part(slice(low, low + step), slice(start, start + high))

    def _part(self, groups: slice, rows: slice) -> Batch:
        real = None if self.real is None else self.real[groups, rows]
        first = self.first + groups.start * self.rows.shape[1] + rows.start
        mine = self.rows[groups, rows], self.tiles[groups], self.entries[groups, rows]
        return Batch(*mine, real, self.masked, first)


@dataclass(frozen=True, eq=False)
class Batches:
    """All entries of lists in batches: `partials` results, and which of them belong to each query
    tile, int64 [L, parts], -1 for none."""

    each: list[Batch]
    partials: int
    places: torch.Tensor


def by_keys(lists: torch.Tensor, masked: torch.Tensor | None) -> Batches:
    """The entries of lists int64 [L, r], -1 for none, key tile by key tile; those with masks, bool
    [L, r], apart."""
    flat = lists.flatten()
    entries = (flat >= 0).nonzero()[:, 0]
    places = torch.full_like(flat, -1)
    each: list[Batch] = []
    first = 0
    for mine, tiles, real, has_mask in _by_count(flat, entries, masked):
        numbers = torch.arange(first, first + mine.numel(), device="cpu").view(mine.shape)
        if real is None:
            places[mine.flatten()] = numbers.flatten()
        else:
            places[mine[real]] = numbers[real]
        rows = mine // lists.shape[1]
        each.append(Batch(rows, tiles[:, None], mine[..., None], real, has_mask, first))
        first += mine.numel()
    return Batches(each, first, places.view(lists.shape))


def _by_count(
    flat: torch.Tensor, entries: torch.Tensor, masked: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, bool]]:
    """Key tiles that have about as many entries [G, M], their numbers [G], which of the entries
    are not repeated to fill up, None for all, and whether they have masks."""
    if not len(entries):
        return
    keys = flat[entries]
    base = int(keys.min())
    span = int(keys.max()) - base + 1
    keys = keys - base
    if masked is not None:
        keys += span * masked.flatten()[entries]
    # short integers are sorted in a fraction of the time
    kind = torch.int16 if 2 * span < 1 << 15 else torch.int64
    keys, order = torch.sort(keys.to(kind), stable=True)
    entries = entries[order]
    keys, counts = torch.unique_consecutive(keys, return_counts=True)
    starts = counts.cumsum(0) - counts
    keys = keys.long()
    apart = keys >= span
    level = (counts.double().log2() * LEVELS).floor().long() * 2 + apart
    for which in level.unique().tolist():
        mine = (level == which).nonzero()[:, 0]
        count = counts[mine]
        inside = torch.arange(int(count.max()), device="cpu")
        real = inside < count[:, None]
        at = torch.minimum(inside, count[:, None] - 1) + starts[mine, None]
        tiles = keys[mine] % span + base
        yield entries[at], tiles, None if bool(real.all()) else real, bool(which % 2)


def by_queries(lists: torch.Tensor, masked: torch.Tensor | None) -> Batches:
    """The entries of lists int64 [L, r], -1 for none, query tile by query tile, at most `TILES` of
    them at once; the tiles with a mask, bool [L, r], apart."""
    count, width = lists.shape
    parts = -(-width // TILES)
    places = lists.new_full((count, parts), -1)
    # those that there are first
    order = torch.sort((lists < 0).to(torch.int8), dim=1, stable=True)[1]
    order += torch.arange(count, device="cpu")[:, None] * width
    lengths = (lists >= 0).sum(1)
    some = torch.zeros_like(lengths) if masked is None else masked.any(1).long()
    each: list[Batch] = []
    first = 0
    for part in range(parts):
        here = (lengths - part * TILES).clamp(0, TILES)
        kind = here * 2 + some
        for which in kind[here > 0].unique().tolist():
            rows = (kind == which).nonzero()[:, 0]
            low = part * TILES
            entries = order[rows, low : low + which // 2]
            tiles = lists.flatten()[entries]
            places[rows, part] = torch.arange(first, first + len(rows), device="cpu")
            each.append(
                Batch(rows[:, None], tiles, entries[:, None], None, bool(which % 2), first)
            )
            first += len(rows)
    return Batches(each, first, places)
