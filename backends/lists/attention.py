"""Softmax attention over lists of tiles that are known when it runs, forward and backward.

Chunks of query tiles are computed batch by batch, each entry's partial result at once, and these
are merged by their greatest scores and totals. Products are torch's own, and so are the steps
between them, all in place: a tile has too few keys for the flash kernel to gain anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch.nn import functional

from attnspec.backends.bands.views import scratch
from attnspec.backends.lists.batches import Batch, Batches, by_keys, by_queries
from attnspec.backends.lists.changes import Changes

PIECE = 1 << 19
"""Numbers in the largest temporary of a product: what stays in the cache."""

CHUNK = 1 << 23
"""Numbers in the partial results of a chunk, about."""

TALL = 48
"""Rows of a query tile from which on it meets all its key tiles in one product."""


class Pairs:
    """Which pairs of the entries are computed, and what their scores become. Here: all, as they
    are.

    Query tiles are numbered [N, T], N lists of samples and heads with T query tiles each.
    """

    masked: torch.Tensor | None = None
    """The entries that have a mask, bool [N, T, r]; None for none of them."""

    rows: torch.Tensor | None = None
    """Which rows of query tiles are queries, bool [N, T, h]; None where all are."""

    changes: Changes | None = None
    """What scores become."""

    sums: torch.Tensor | None = None
    """Where each entry's gradient of a factor of its keys and values, which is 1, is put:
    [N, T, r]; None where nobody asks for it."""

    def held(self, low: int, high: int, slots: torch.Tensor) -> torch.Tensor:
        """The masks of some entries `slots` int64 [N, high - low, s] of query tiles
        low <= t < high: bool, or what is added to the scores, [N, high - low, h, s, w]."""
        raise NotImplementedError

    def places_of_rows(self, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions of query tiles low <= t < high, and which query heads they are of, int64
        [N, high - low, h]."""
        raise NotImplementedError

    @property
    def places_of_keys(self) -> torch.Tensor:
        """The positions of key tiles, int64 [tiles, w]."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Tiles:
    """Query tiles q [N, T, h, d], multiplied with the scale, key tiles k [tiles, w, d] and
    v [tiles, w, e], and which of these each query tile reads: int64 [N, T, r], -1 for none."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lists: torch.Tensor
    pairs: Pairs

    @property
    def height(self) -> int:
        return self.q.shape[2]

    def chunks(self) -> Iterator[Chunk]:
        """The query tiles of all lists from a first to a last, in chunks."""
        count, tiles, width = self.lists.shape
        parts = 1 if self.height >= TALL else width
        size = max(self.q.shape[3], self.v.shape[2])
        each = max(1, count * parts * self.height * size)
        if self.pairs.masked is not None:
            each = max(each, count * self.height * width * self.k.shape[1] // 4)
        step = max(1, CHUNK // each)
        for low in range(0, tiles, step):
            yield Chunk(self, low, min(low + step, tiles))


class Chunk:
    """Some query tiles of all lists: their batches and masks."""

    def __init__(self, tiles: Tiles, low: int, high: int) -> None:
        self.tiles, self.low, self.high = tiles, low, high
        lists = tiles.lists[:, low:high].flatten(0, 1)
        masked = tiles.pairs.masked
        masked = None if masked is None else masked[:, low:high].flatten(0, 1)
        if masked is not None and not bool(masked.any()):
            masked = None
        batches = by_queries if tiles.height >= TALL else by_keys
        self.batches: Batches = batches(lists, masked)
        self._masks = None if masked is None else self._held(masked)

    @cached_property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The positions and heads of the chunk's queries [L, h], and the positions of key tiles."""
        rows, heads = self.tiles.pairs.places_of_rows(self.low, self.high)
        return rows.flatten(0, 1), heads.flatten(0, 1), self.tiles.pairs.places_of_keys

    def _held(self, masked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The masks of a chunk [L, h, s, w], and which of a row's an entry has, [L r]."""
        slots = self.batches.slots
        if slots is None:
            count = int(masked.sum(1).max())
            slots = torch.sort((~masked).to(torch.int8), dim=1, stable=True)[1][:, :count]
        shape = len(self.tiles.q), self.high - self.low, -1
        held = self.tiles.pairs.held(self.low, self.high, slots.view(shape)).flatten(0, 1)
        return held, (masked.cumsum(1) - 1).flatten()

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of the chunk's query tiles: [N, T, h, …] -> [L, h …]."""
        return x[:, self.low : self.high].flatten(0, 1)

    def mask(self, batch: Batch) -> torch.Tensor | None:
        """The mask of a batch [G, M h, C w], or None."""
        if self._masks is None or not batch.masked:
            return None
        held, which = self._masks
        groups, rows, columns = batch.entries.shape
        if self.batches.slots is not None:
            found = _rows_of(held, batch.rows[:, 0])[:, :, batch.column : batch.column + columns]
            return found.reshape(groups, found.shape[1], -1)
        found = held[batch.rows[..., None], :, which[batch.entries]].transpose(2, 3)
        return found.reshape(groups, rows * held.shape[1], -1)

    def changed(self, scores: torch.Tensor, batch: Batch) -> torch.Tensor:
        """What the scores of a batch [G, M h, C w] become."""
        changes = self.tiles.pairs.changes
        return scores if changes is None else changes(scores, *self._apart(batch))

    def changed_back(self, scores: torch.Tensor, batch: Batch, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of scores from that of what they become."""
        changes = self.tiles.pairs.changes
        return grad if changes is None else changes.backward(scores, *self._apart(batch), grad)

    def _apart(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The heads of a batch's rows [G, M h], and how far they are behind their keys
        [G, M h, C w]."""
        rows, heads, keys = self._places
        q, which = (x[batch.rows].flatten(1) for x in (rows, heads))
        return which, q[..., None] - keys[batch.tiles].flatten(1)[:, None]

    def pieces(self) -> Iterator[Batch]:
        """The batches in pieces."""
        per_pair = self.tiles.height * self.tiles.k.shape[1]
        for batch in self.batches.each:
            yield from batch.pieces(per_pair, PIECE)


def forward(tiles: Tiles) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [N, T, h, e] and its log-sum-exps [N, T, h], -inf where a query has no key."""
    out = tiles.q.new_empty(*tiles.q.shape[:3], tiles.v.shape[2])
    lse = tiles.q.new_empty(tiles.q.shape[:3])
    for chunk in tiles.chunks():
        found, sums = _forward_chunk(chunk)
        shape = len(tiles.q), chunk.high - chunk.low, tiles.height
        out[:, chunk.low : chunk.high] = found.view(*shape, -1)
        lse[:, chunk.low : chunk.high] = sums.view(shape)
    return out, lse


def _forward_chunk(chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    tiles = chunk.tiles
    q = chunk.rows(tiles.q)
    count, height, size = max(1, chunk.batches.partials), tiles.height, tiles.v.shape[2]
    outs = scratch("partial outputs", (count, height, size), q.dtype)
    tops = scratch("partial tops", (count, height), q.dtype)
    totals = scratch("partial totals", (count, height), q.dtype)
    for batch in chunk.pieces():
        scores = _products(chunk, batch, _taken(q, batch.rows, "rows"))
        scores = _masked(chunk, batch, chunk.changed(scores, batch))
        groups, high, _ = scores.shape
        part = slice(batch.first, batch.first + batch.rows.numel())
        top = torch.amax(scores, -1, keepdim=True)
        tops[part] = top.view(-1, height)
        if batch.masked:
            top.masked_fill_(top == -math.inf, 0.0)
        _weights(scores, top)
        torch.sum(scores, -1, out=totals[part].view(groups, high))
        values = _taken(tiles.v, batch.tiles, "values")
        torch.bmm(scores, values, out=outs[part].view(groups, high, size))
    return _merged(chunk.batches.places, outs, tops, totals)


def _products(chunk: Chunk, batch: Batch, q: torch.Tensor) -> torch.Tensor:
    """The products of a batch's queries and keys [G, M h, C w] in a buffer."""
    keys = _taken(chunk.tiles.k, batch.tiles, "keys")
    scores = scratch("scores", (len(q), q.shape[1], keys.shape[1]), q.dtype)
    return torch.bmm(q, keys.mT, out=scores)


def _masked(chunk: Chunk, batch: Batch, scores: torch.Tensor) -> torch.Tensor:
    """Scores with -inf where pairs are masked, in place."""
    mask = chunk.mask(batch)
    if mask is None:
        return scores
    return scores.add_(_bias(mask, scores.dtype) if mask.dtype == torch.bool else mask)


def _bias(held: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where pairs are held, else -inf, whose bits are taken as those of integers: to choose
    number by number takes up to ten times as long."""
    whole = torch.int32 if dtype == torch.float32 else torch.int64
    least = torch.full((), -math.inf, dtype=dtype, device="cpu").view(whole)
    return held.view(torch.int8).to(whole).sub_(1).bitwise_and_(least).view(dtype)


def _weights(scores: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """exp(scores - shift) in place. What would be below the normal numbers is 0: these, and those
    that come of -inf, take ten to a hundred times as long."""
    tiny = torch.finfo(scores.dtype).tiny
    scores.sub_(shift).clamp_(min=math.log(tiny) + 1).exp_()
    return functional.threshold(scores, 4 * tiny, 0.0, inplace=True)


def _taken(x: torch.Tensor, index: torch.Tensor, use: str) -> torch.Tensor:
    """x [L, h, …][index [G, M]] as [G, M h, …], where it lies or in a buffer: to be read alone."""
    step, height = _step(index), x.shape[1]
    if step and x.is_contiguous():
        rows = x.flatten(0, 1)
        each, first = rows.stride(0), int(index[0, 0]) * height
        shape = len(index), index.shape[1] * height, *rows.shape[1:]
        strides = step * height * each, *rows.stride()
        return rows.as_strided(shape, strides, rows.storage_offset() + first * each)
    found = scratch(use, (index.numel(), *x.shape[1:]), x.dtype)
    torch.index_select(x, 0, index.flatten(), out=found)
    return found.view(len(index), -1, *x.shape[2:])


def _step(index: torch.Tensor) -> int:
    """How far the rows of an index [G, M] lie apart, of which each numbers what follows one
    another; 0 if they do not."""
    numbers = index.numpy()
    groups, many = numbers.shape
    first = int(numbers[0, 0])
    step = int(numbers[1, 0]) - first if groups > 1 else 1
    if step < 1 or numbers[-1, -1] != first + (groups - 1) * step + many - 1:
        return 0
    wanted = first + step * np.arange(groups)[:, None] + np.arange(many)
    return step if np.array_equal(numbers, wanted) else 0


def _merged(
    places: torch.Tensor, outs: torch.Tensor, tops: torch.Tensor, totals: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [L h, e] and log-sum-exps [L h] of the partial results [partials, h, …] at the
    places int64 [L, parts]."""
    count, height, size = outs.shape
    index, none = _index(places, height)
    top, total = (x.flatten().take(index) for x in (tops, totals))
    if none is not None:
        top.masked_fill_(none, -math.inf)
    most = top.amax(-1, keepdim=True)
    most.masked_fill_(most == -math.inf, 0.0)
    weights = top.sub_(most).exp_()
    total = total.mul_(weights).sum(-1, keepdim=True)
    lse = (total.log() + most)[:, 0]
    weights /= torch.where(total > 0, total, 1.0)
    return _bags(outs.view(count * height, size), index, weights), lse


def _index(places: torch.Tensor, height: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows of partial results that belong to each query, int64 [L h, parts], and which of them
    are none and stand for another of the same query, bool, or None."""
    none = None
    if int(places.min()) < 0:
        none = places < 0
        places = torch.where(none, places.amax(1, keepdim=True).clamp_(min=0), places)
        none = none.repeat_interleave(height, 0)
    if height > 1:
        inside = torch.arange(height, device="cpu")[:, None]
        places = (places[:, None] * height + inside).flatten(0, 1)
    return places, none


def _rows_of(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x[rows] for ascending rows, as a view where they follow one another."""
    first, last = int(rows[0]), int(rows[-1])
    return x[first : last + 1] if last - first == len(rows) - 1 else x.index_select(0, rows)


def _bags(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sums [L, e] of rows x [m, e] at index [L, parts], times their weights."""
    count, parts = index.shape
    if parts == 1:
        return x[index[:, 0]].mul_(weights)
    starts = torch.arange(0, count * parts + 1, parts, device="cpu")
    return torch.embedding_bag(
        x, index.flatten(), starts, False, 0, False, weights.flatten(), True
    )[0]


def backward(
    tiles: Tiles, grad: torch.Tensor, delta: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of the query tiles, key tiles and values, given that of the output [N, T, h, e]
    and delta and lse [N, T, h]: the sums of grad times the output and the log-sum-exps, finite."""
    of_q, of_k, of_v = (torch.zeros_like(x) for x in (tiles.q, tiles.k, tiles.v))
    if tiles.pairs.rows is not None:
        # rows that are no queries weigh nothing
        lse = lse.masked_fill(~tiles.pairs.rows, math.inf)
    for chunk in tiles.chunks():
        sums = None
        if tiles.pairs.sums is not None:
            sums = tiles.q.new_zeros(chunk.rows(tiles.lists).numel())
        found = _backward_chunk(chunk, grad, delta, lse, (of_k, of_v), sums)
        if tiles.pairs.sums is not None and sums is not None:
            part = tiles.pairs.sums[:, chunk.low : chunk.high]
            part.copy_(sums.view(part.shape))
        of_q[:, chunk.low : chunk.high] = found.view(len(of_q), -1, *of_q.shape[2:])
    return of_q, of_k, of_v


def _backward_chunk(
    chunk: Chunk,
    grad: torch.Tensor,
    delta: torch.Tensor,
    lse: torch.Tensor,
    into: tuple[torch.Tensor, torch.Tensor],
    of_factors: torch.Tensor | None,
) -> torch.Tensor:
    """The gradients of the chunk's queries [L h, d]; those of keys and values are added, and those
    of factors of entries [L r]."""
    tiles = chunk.tiles
    q, grad, delta, lse = (chunk.rows(x) for x in (tiles.q, grad, delta, lse))
    count, height, size = max(1, chunk.batches.partials), tiles.height, tiles.q.shape[3]
    outs = scratch("partial outputs", (count, height, size), q.dtype)
    for batch in chunk.pieces():
        rows = _taken(q, batch.rows, "rows")
        scores = _products(chunk, batch, rows)
        plain = None if of_factors is None else scores.clone()
        weights = _masked(chunk, batch, chunk.changed(scores, batch))
        sums = _taken(lse, batch.rows, "sums")
        if batch.real is not None:
            # rows that fill up weigh nothing; these may be the numbers of real ones
            sums = sums.view(*batch.rows.shape, height)
            sums = sums.masked_fill(~batch.real[..., None], math.inf).flatten(1)
        _weights(weights, sums[..., None])
        given = _taken(grad, batch.rows, "grad")
        _add_tiles(into[1], batch, torch.bmm(weights.mT, given))
        values = _taken(tiles.v, batch.tiles, "values")
        of_scores = torch.bmm(
            given, values.mT, out=scratch("score gradients", weights.shape, q.dtype)
        )
        shares = None if plain is None else weights * of_scores
        of_scores.sub_(_taken(delta, batch.rows, "delta")[..., None]).mul_(weights)
        of_scores = chunk.changed_back(scores, batch, of_scores)
        if of_factors is not None and shares is not None and plain is not None:
            _add_sums(of_factors, batch, shares.addcmul_(of_scores, plain))
        _add_tiles(into[0], batch, torch.bmm(of_scores.mT, rows))
        keys = _taken(tiles.k, batch.tiles, "keys")
        part = outs[batch.first : batch.first + batch.rows.numel()].view(rows.shape)
        torch.bmm(of_scores, keys, out=part)
    index, none = _index(chunk.batches.places, height)
    weights = torch.ones_like(index, dtype=q.dtype)
    if none is not None:
        weights.masked_fill_(none, 0.0)
    return _bags(outs.view(count * height, size), index, weights)


def _add_sums(into: torch.Tensor, batch: Batch, found: torch.Tensor) -> None:
    """Add numbers of pairs [G, M h, C w] to those of their entries."""
    groups, rows, tiles = batch.entries.shape
    found = found.view(groups, rows, found.shape[1] // rows, tiles, -1).sum((2, 4))
    into.index_add_(0, batch.entries.flatten(), found.flatten())


def _add_tiles(into: torch.Tensor, batch: Batch, found: torch.Tensor) -> None:
    """Add [G, C w, e] to the tiles [tiles, w, e] that they belong to."""
    into.index_add_(0, batch.tiles.flatten(), found.view(-1, *into.shape[1:]))
