"""Attention over the tables of choices: batches of tiles through the flash kernel, and partial
results merged by their log-sum-exps, each row's in one sum.

Chunks of query tiles are computed batch by batch, so that no more than some partial results are
there; those of several layouts are merged together. An entry of a list is a query tile and a key
tile that it reads. Where query tiles are low, gathering keys for each would move more numbers than
it computes: entries are sorted by key tile, and all query tiles that read it are the rows of one
product. A tall query tile meets its key tiles in one product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.common.exact import flash, flash_backward
from attnspec.backends.decided.tables import Placed
from attnspec.backends.tables.blocks import scratch
from attnspec.backends.tables.changed_scores import Change, ScoreChanges
from attnspec.limits import LIMITS

Compute = Callable[..., tuple[Tensor, Tensor]]
"""What a piece makes of its rows and keys: [G, M h, …], and log-sum-exps, or anything."""

LOWEST = -1e30
"""What is added where a pair is none: the flash kernel takes a row of -inf for one of score 0."""


@dataclass
class Results:
    """Results of rows, of which the `used` first are there: outputs [rows, e] with their
    log-sum-exps [rows], or gradients, which have none."""

    outs: Tensor
    lse: Tensor | None
    used: int = 0

    @staticmethod
    def room(use: str, rows: int, size: int, dtype: torch.dtype, merged: bool) -> Results:
        """Buffers for so many and a last row that stands for none, valid until the next ones for
        the same use."""
        outs = scratch(use, (rows + 1, size), dtype)
        outs[-1] = 0.0
        lse = scratch(f"sums of {use}", (rows + 1,), dtype) if merged else None
        if lse is not None:
            lse[-1] = -math.inf
        return Results(outs, lse)

    def take(self, rows: int) -> Results:
        """The next so many."""
        self.used += rows
        part = slice(self.used - rows, self.used)
        return Results(self.outs[part], None if self.lse is None else self.lse[part])

    def put(self, more: Results) -> int:
        """Where the first of these results now stands."""
        into = self.take(len(more.outs))
        into.outs.copy_(more.outs)
        if into.lse is not None and more.lse is not None:
            into.lse.copy_(more.lse)
        return self.used - len(more.outs)

    def combined(self, places: Tensor) -> Results:
        """Some results for each row as one, int64 [rows, parts], -1 for none: gradients summed,
        outputs merged, 0 and -inf where there is no key."""
        if self.lse is None:
            return Results(summed(self.outs, places), None)
        logs = self.lse.take(places.remainder(len(self.lse)))
        lse = logs.logsumexp(-1, keepdim=True)
        empty = lse < LOWEST / 2
        lse.masked_fill_(empty, 0.0)
        outs = summed(self.outs, places, logs.sub_(lse).exp_())
        if bool(empty.any()):
            outs.masked_fill_(empty, 0.0)
            lse.masked_fill_(empty, -math.inf)
        return Results(outs, lse[:, 0])


def summed(x: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sums [L, e] of rows of x [m, e] at places [L, parts], the last row for -1, times their
    weights."""
    count, parts = places.shape
    index = places.remainder(len(x)).flatten()
    if parts == 1:
        rows = x.index_select(0, index)
        return rows if weights is None else rows.mul_(weights)
    starts = torch.arange(0, count * parts, parts, device="cpu")
    weights = None if weights is None else weights.flatten()
    return torch.embedding_bag(x, index, starts, False, 0, False, weights)[0]


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

    rows: Tensor
    tiles: Tensor
    entries: Tensor
    real: Tensor | None
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
    places: Tensor
    slots: Tensor | None = None


def step_of(index: Tensor) -> int:
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


def by_keys(lists: Tensor, masked: Tensor | None) -> Batches:
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


def by_queries(lists: Tensor, masked: Tensor | None) -> Batches:
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


class Chunk:
    """Query tiles low <= t < high of all lists of a layout, in batches."""

    def __init__(self, tiles: ListedTiles, low: int, high: int, lists: Tensor) -> None:
        self.tiles, self.low, self.high = tiles, low, high
        masked = tiles.placed.masked
        masked = None if masked is None else masked[:, low:high].flatten(0, 1)
        if masked is not None and not bool(masked.any()):
            masked = None
        batches = by_queries if tiles.tall else by_keys
        self.batches: Batches = batches(lists[:, low:high].flatten(0, 1), masked)
        self.masks: tuple[Tensor, Tensor] | None = None
        if masked is not None:
            slots = self.batches.slots
            if slots is None:
                count = int(masked.sum(1).max())
                slots = torch.sort((~masked).to(torch.int8), dim=1, stable=True)[1][:, :count]
            slots = slots.view(len(lists), high - low, -1)
            # the masks [L, h, s, w], and which of a row's an entry has
            mask = tiles.placed.held(low, high, slots).flatten(0, 1)
            self.masks = mask, (masked.cumsum(1) - 1).flatten()

    def rows(self, x: Tensor) -> Tensor:
        """The rows of the chunk's query tiles: [N, T, h, …] -> [L, h …]."""
        return x[:, self.low : self.high].flatten(0, 1)

    def bias(self, batch: Batch, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores of a batch [G, M h, C w], in a buffer, or None."""
        if self.masks is None or not batch.masked:
            return None
        mask, which = self.masks
        count, rows, columns = batch.entries.shape
        if self.batches.slots is not None:
            mask = _ascending(mask, batch.rows[:, 0])[:, :, :columns]
        else:
            mask = mask[batch.rows[..., None], :, which[batch.entries]].transpose(2, 3)
        shape = count, rows * self.tiles.height, columns * self.tiles.placed.k.size
        into = scratch("masks of scores", shape, dtype)
        mask = mask.reshape(shape)
        if mask.dtype != torch.bool:
            return into.copy_(mask).clamp_(min=LOWEST)
        # bits as those of integers: to choose number by number takes up to ten times as long
        whole = torch.int32 if dtype == torch.float32 else torch.int64
        least = torch.full((), LOWEST, dtype=dtype, device="cpu").view(whole)
        into.view(whole).copy_(mask.view(torch.int8).sub(1)).bitwise_and_(least)
        return into

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of the chunk's queries and their heads [L, h], and the rows of key tiles."""
        placed, part = self.tiles.placed, slice(self.low, self.high)
        size = placed.batch, placed.heads, self.high - self.low, placed.repeat, placed.q.size
        at = (placed.q.places[:, :, part, None] - placed.first).clamp(min=0).expand(size)
        heads = torch.arange(placed.heads * placed.repeat, device=at.device)
        heads = heads.view(placed.heads, 1, -1, 1).expand(size)
        keys = placed.k.places.clamp(min=0).expand(placed.batch, placed.heads, -1, -1)
        q, which = (x.flatten(3).flatten(0, 2) for x in (at, heads))
        return q, which, keys.flatten(0, 2)

    def change(self, batch: Batch, scores: ScoreChanges) -> Change:
        """The change of the scores of a batch."""
        q, heads, keys = self._places
        of_tiles = (q, batch.rows), (heads, batch.rows), (keys, batch.tiles)
        places = [x[tiles].flatten(1) for x, tiles in of_tiles]
        return scores.of_places(places[0], places[1], places[2])

    def pieces(self) -> Iterator[tuple[Batch, slice]]:
        """The batches in pieces, and where the partial results of each stand."""
        height = self.tiles.height
        for batch in self.batches.each:
            for piece in batch.pieces(height * self.tiles.placed.k.size, LIMITS.product):
                first = piece.first * height
                yield piece, slice(first, first + piece.rows.numel() * height)

    def room(self, into: Results) -> Results:
        """Where the partial results of the batches go: where they stay, if there is one for each
        row."""
        rows = self.batches.partials * self.tiles.height
        if self.batches.slots is not None:
            return into.take(rows)
        size, dtype = into.outs.shape[1], into.outs.dtype
        return Results.room("partial results", rows, size, dtype, into.lse is not None)

    def put(self, parts: Results, into: Results) -> Tensor:
        """Where the results of the rows are [L, h], -1 where there is none, once partial ones are
        one for each."""
        height, places = self.tiles.height, self.batches.places[:, None]
        rows = places * height + torch.arange(height, device="cpu")[:, None]
        rows = rows.masked_fill_(places < 0, -1)
        if self.batches.slots is not None:
            base = into.used - len(parts.outs)
            return torch.where(rows < 0, -1, rows + base)[..., 0]
        base = into.put(parts.combined(rows.flatten(0, 1)))
        return (base + torch.arange(len(rows) * height, device="cpu")).view(-1, height)


class ListedTiles:
    """The tiles of a layout in memory: k [tiles, w, d] and v [tiles, w, e] of tensors
    [B, K, n_k, …]; each query tile has h rows."""

    def __init__(
        self,
        placed: Placed,
        keys: Sequence[Tensor],
        scale: float,
        scores: ScoreChanges | None = None,
        weighed: bool = False,
    ) -> None:
        self.placed, self.scale, self.scores = placed, scale, scores
        self.height = placed.repeat * placed.q.size
        # the gradient of an entry's factor is that of its own keys and values
        self.tall = self.height >= LIMITS.tall or weighed
        self.k, self.v = (
            _taken_rows(x.reshape(-1, x.shape[-1]), placed.k.rows, use).view(
                -1, placed.k.size, x.shape[-1]
            )
            for x, use in zip(keys, ("tiles of keys", "tiles of values"), strict=True)
        )
        entries = placed.lists.numel()
        self.of_factors = self.k.new_zeros(entries) if weighed else None

    def of_q(self, x: Tensor, use: str) -> Tensor:
        """x [B, K, R, n_q, …] by query tiles: [N, T, h, …], in a buffer where they are moved."""
        lists = self.placed.batch * self.placed.heads
        rows = _taken_rows(x.reshape(-1, *x.shape[4:]), self.placed.q.rows, f"tiles of {use}")
        return rows.view(lists, -1, self.height, *x.shape[4:])

    def chunks(self) -> Iterator[Chunk]:
        """The query tiles of all lists from a first to a last, in chunks."""
        lists = self.placed.numbered
        count, tiles, width = lists.shape
        parts = 1 if self.tall else width
        each = max(1, count * parts * self.height * max(self.k.shape[2], self.v.shape[2]))
        if self.placed.masked is not None:
            each = max(each, count * self.height * width * self.k.shape[1] // 4)
        # factors are counted by their places in all lists
        step = max(1, LIMITS.partials // each if self.of_factors is None else tiles)
        for low in range(0, tiles, step):
            yield Chunk(self, low, min(low + step, tiles), lists)

    def forward(self, q: Tensor, into: Results) -> Tensor:
        """Puts the results of q [B, K, R, n_q, d] into `into`; where those of all queries are,
        int64 [B K R n_q], -1 where a query has no key tile."""
        return self._walk((self.of_q(q, "rows"),), into, self._forward)

    def backward(self, rows: Sequence[Tensor], of_keys: Sequence[Tensor], into: Results) -> Tensor:
        """Puts the gradients of the queries into `into`, and says where they are, as `forward`
        does; those of key tiles and values are added to `of_keys`, like k and v. `rows` are the
        gradient of the output, q, the output, and its log-sum-exps, finite."""
        grad, q, out, lse = (self.of_q(x, f"rows {place}") for place, x in enumerate(rows))
        real = self.placed.q.real_rows
        if real is not None:
            # rows that are not queries weigh nothing
            lse = lse.masked_fill(~real, math.inf)
        return self._walk((grad, q, out, lse), into, partial(self._backward, of_keys))

    def _walk(self, rows: Sequence[Tensor], into: Results, piece: Compute) -> Tensor:
        """Puts what pieces make of rows [N, T, h, …] and keys into `into`, and says where."""
        where = self.placed.lists.new_empty(rows[0].shape[:3])
        for chunk in self.chunks():
            parts = chunk.room(into)
            given = [(chunk.rows(x), f"taken rows {place}") for place, x in enumerate(rows)]
            for batch, at in chunk.pieces():
                mine = [taken(x, batch.rows, batch.row_step, use) for x, use in given]
                k = taken(self.k, batch.tiles, batch.tile_step, "keys")
                v = taken(self.v, batch.tiles, batch.tile_step, "values")
                out, lse = piece(chunk, batch, mine, (k, v))
                parts.outs[at].view(out.shape).copy_(out)
                if parts.lse is not None:
                    parts.lse[at].view(lse.shape).copy_(lse)
            at_rows = chunk.put(parts, into)
            where[:, chunk.low : chunk.high] = at_rows.view(len(where), -1, self.height)
        return self.placed.q.back(where.flatten())

    def _forward(
        self, chunk: Chunk, batch: Batch, rows: Sequence[Tensor], keys: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The output [G, M h, e] of a piece and its log-sum-exps [G, M h]."""
        q, bias = rows[0], chunk.bias(batch, rows[0].dtype)
        if self.scores is not None:
            change = chunk.change(batch, self.scores)
            return self.scores.forward((q, *keys), bias, self.scale, change)
        out, lse = flash(*_alone(q, *keys), 0.0, False, attn_mask=_mask(bias), scale=self.scale)
        return out[:, 0], lse[:, 0]

    def _backward(
        self,
        of_keys: Sequence[Tensor],
        chunk: Chunk,
        batch: Batch,
        rows: Sequence[Tensor],
        keys: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """The gradient of a piece's queries [G, M h, d]."""
        grad, q, out, lse = rows
        if batch.real is not None:
            # rows that fill up weigh nothing; these may be the numbers of real ones
            real = batch.real[..., None].expand(-1, -1, self.height)
            lse = lse.masked_fill(~real.flatten(1), math.inf)
        bias, tensors = chunk.bias(batch, q.dtype), (grad, q, *keys, out, lse.contiguous())
        if self.scores is None:
            mask, scale = _mask(bias), self.scale
            grads = flash_backward(*_alone(*tensors), 0.0, False, attn_mask=mask, scale=scale)
            of_q, *shares = (x[:, 0] for x in grads)
        else:
            change = chunk.change(batch, self.scores)
            of_q, *shares = self.scores.backward(tensors, bias, self.scale, change)
        if self.of_factors is not None:
            products = sum((x * y).sum(-1) for x, y in zip(shares, keys, strict=True))
            each = torch.unflatten(products, 1, (batch.tiles.shape[1], -1)).sum(-1)
            self.of_factors.index_add_(0, batch.entries.flatten(), each.flatten())
        for into, x in zip(of_keys, shares, strict=True):
            _add_tiles(into, batch, x)
        return of_q, lse


def _alone(*tensors: Tensor) -> list[Tensor]:
    """Tensors [G, …] of one head, [G, 1, …]."""
    return [x[:, None] for x in tensors]


def _mask(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias[:, None]


def _ascending(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] for ascending rows, as a view where they follow one another."""
    first, last = int(rows[0]), int(rows[-1])
    return x[first : last + 1] if last - first == len(rows) - 1 else x.index_select(0, rows)


def taken(x: Tensor, index: Tensor, step: int, use: str) -> Tensor:
    """x [L, h, …][index [G, M]] as [G, M h, …], where it lies or in a buffer: to be read alone.
    `step` is that of the index."""
    height = x.shape[1]
    if step and x.is_contiguous():
        rows = x.flatten(0, 1)
        each, first = rows.stride(0), int(index[0, 0]) * height
        shape = len(index), index.shape[1] * height, *rows.shape[1:]
        strides = step * height * each, *rows.stride()
        return rows.as_strided(shape, strides, rows.storage_offset() + first * each)
    return _taken_rows(x, index, use).view(len(index), -1, *x.shape[2:])


def _add_tiles(into: Tensor, batch: Batch, x: Tensor) -> None:
    """Add what a batch gives to its keys, [G, C w, e], to the tiles [tiles, w, e]."""
    count, columns = batch.tiles.shape
    x = x.view(count, columns, *into.shape[1:])
    if not batch.tile_step:
        into.index_add_(0, batch.tiles.flatten(), x.flatten(0, 1))
        return
    first = int(batch.tiles[0, 0])
    for column in range(columns):
        into[first + column :: batch.tile_step][:count].add_(x[:, column])


def _taken_rows(x: Tensor, index: Tensor | None, use: str) -> Tensor:
    """Rows of x at an index, in a buffer; all of them where there is none."""
    if index is None:
        return x
    into = scratch(use, (index.numel(), *x.shape[1:]), x.dtype)
    return torch.index_select(x, 0, index.flatten(), out=into)
