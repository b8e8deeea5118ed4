"""Softmax attention over lists of tiles that are known when it runs, forward and backward.

Chunks of query tiles are computed batch by batch, each entry's partial result at once, and these
are merged by their greatest scores and totals. Products are torch's own, and so are the steps
between them, all in place: a tile has too few keys for the flash kernel to gain anything. Scores
are counted in units of ln 2: powers of two take a third of the time of those of e, and a tenth
where -inf is among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from attnspec.backends.lists.batches import Batch, Batches, by_keys, by_queries
from attnspec.backends.lists.changes import Changes
from attnspec.backends.lists.partials import Partials, rows_of_tiles
from attnspec.backends.tables.sides import scratch
from attnspec.limits import LIMITS

LOG2E = math.log2(math.e)
"""The score 1 in units of ln 2."""


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
        parts = 1 if self.height >= LIMITS.tall else width
        size = max(self.q.shape[3], self.v.shape[2])
        each = max(1, count * parts * self.height * size)
        if self.pairs.masked is not None:
            each = max(each, count * self.height * width * self.k.shape[1] // 4)
        step = max(1, LIMITS.partials // each)
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
        batches = by_queries if tiles.height >= LIMITS.tall else by_keys
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

    @property
    def unit(self) -> float:
        """How many units of a product of a batch are 1: changes are those of scores as they are."""
        return LOG2E if self.tiles.pairs.changes is None else 1.0

    def changed(self, scores: torch.Tensor, batch: Batch) -> torch.Tensor:
        """What the products of a batch [G, M h, C w] become, in units of ln 2."""
        changes = self.tiles.pairs.changes
        return scores if changes is None else changes(scores, *self._apart(batch)) * LOG2E

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
            yield from batch.pieces(per_pair, LIMITS.product)

    # --- results -------------------------------------------------------------------------------

    @property
    def _final(self) -> bool:
        """Whether there is one partial result for each row, which need not be merged."""
        return self.batches.slots is not None and self.batches.places.shape[1] == 1

    def room(self, into: Partials) -> Partials:
        """Where the partial results of the batches go."""
        rows = self.batches.partials * self.tiles.height
        return into.take(rows) if self._final else into.apart("partial results", rows)

    def put(self, found: Partials, into: Partials, merged: Callable[..., Partials]) -> torch.Tensor:
        """Where the results of the rows are [L, h], -1 where there is none, once partial ones are
        merged."""
        height, places = self.tiles.height, self.batches.places
        inside = torch.arange(height, device="cpu")
        if not self.batches.partials:
            return places.new_full((len(places), height), -1)
        if self._final:
            base = into.used - len(found)
            return torch.where(places < 0, -1, base + places * height + inside)
        rows = len(places) * height
        base = into.put(merged(found, rows_of_tiles(places, height)))
        return (base + torch.arange(rows, device="cpu")).view(-1, height)


def forward(tiles: Tiles, into: Partials) -> torch.Tensor:
    """Computes the tiles' results, tops in units of ln 2, and says where they are among all that
    there are: int64 [N, T, h], -1 where a query has no key tile."""
    where = tiles.lists.new_empty(tiles.q.shape[:3])
    for chunk in tiles.chunks():
        found = chunk.room(into)
        _forward_chunk(chunk, found)
        at = chunk.put(found, into, Partials.merged)
        where[:, chunk.low : chunk.high] = at.view(len(where), -1, tiles.height)
    return where


def _forward_chunk(chunk: Chunk, found: Partials) -> None:
    tiles, q = chunk.tiles, chunk.rows(chunk.tiles.q)
    for batch in chunk.pieces():
        scores, _ = _scores(chunk, batch, _taken(q, batch.rows, batch.row_step, "rows"))
        shape, rows = scores.shape[:2], batch.part(tiles.height)
        top = torch.amax(scores, -1, keepdim=True)
        found.tops[rows] = top.flatten()
        if batch.masked:
            top.masked_fill_(top == -math.inf, 0.0)
        torch.sum(scores.sub_(top).exp2_(), -1, out=found.totals[rows].view(shape))
        values = _taken(tiles.v, batch.tiles, batch.tile_step, "values")
        torch.bmm(scores, values, out=found.outs[rows].view(*shape, -1))


def _scores(
    chunk: Chunk, batch: Batch, q: torch.Tensor, apart: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of a batch's queries and keys [G, M h, C w] in units of ln 2, -inf where pairs are
    masked, and the products that they come from, in units of the chunk's: the same where nothing
    changes them, unless they are wanted `apart`. Both are in buffers."""
    keys = _taken(chunk.tiles.k, batch.tiles, batch.tile_step, "keys")
    found = scratch("scores", (len(q), q.shape[1], keys.shape[1]), q.dtype)
    mask = chunk.mask(batch)
    together = chunk.tiles.pairs.changes is None and not apart
    if together and mask is not None:
        # products are added to what masks add: no step of its own
        _put_bias(found, mask)
        found.baddbmm_(q, keys.mT, alpha=chunk.unit)
        return found, found
    torch.baddbmm(found, q, keys.mT, beta=0, alpha=chunk.unit, out=found)
    if mask is None:
        return chunk.changed(found, batch), found
    bias = _put_bias(scratch("masks of scores", tuple(found.shape), q.dtype), mask)
    return bias.add_(chunk.changed(found, batch)), found


def _put_bias(into: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What a mask adds to scores in units of ln 2, where it is bool 0 or -inf, whose bits are taken
    as those of integers: to choose number by number takes up to ten times as long."""
    if mask.dtype != torch.bool:
        return torch.mul(mask, LOG2E, out=into)
    whole = torch.int32 if into.dtype == torch.float32 else torch.int64
    least = torch.full((), -math.inf, dtype=into.dtype, device="cpu").view(whole)
    into.view(whole).copy_(mask.view(torch.int8).sub(1)).bitwise_and_(least)
    return into


def _taken(x: torch.Tensor, index: torch.Tensor, step: int, use: str) -> torch.Tensor:
    """x [L, h, …][index [G, M]] as [G, M h, …], where it lies or in a buffer: to be read alone.
    `step` is that of the index."""
    height = x.shape[1]
    if step and x.is_contiguous():
        rows = x.flatten(0, 1)
        each, first = rows.stride(0), int(index[0, 0]) * height
        shape = len(index), index.shape[1] * height, *rows.shape[1:]
        strides = step * height * each, *rows.stride()
        return rows.as_strided(shape, strides, rows.storage_offset() + first * each)
    found = scratch(use, (index.numel(), *x.shape[1:]), x.dtype)
    torch.index_select(x, 0, index.flatten(), out=found)
    return found.view(len(index), -1, *x.shape[2:])


def _rows_of(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x[rows] for ascending rows, as a view where they follow one another."""
    first, last = int(rows[0]), int(rows[-1])
    return x[first : last + 1] if last - first == len(rows) - 1 else x.index_select(0, rows)


def backward(
    tiles: Tiles,
    above: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    of_keys: tuple[torch.Tensor, torch.Tensor],
    into: Partials,
) -> torch.Tensor:
    """Computes the gradients of the query tiles, and says where they are, as `forward` does; those
    of key tiles and values are added to `of_keys`, like k and v.

    `above` are the gradient of the output [N, T, h, e], and delta and lse [N, T, h]: the sums of it
    times the output, and the log-sum-exps in units of ln 2, finite.
    """
    grad, delta, lse = above
    where = tiles.lists.new_empty(tiles.q.shape[:3])
    if tiles.pairs.rows is not None:
        # rows that are no queries weigh nothing
        lse = lse.masked_fill(~tiles.pairs.rows, math.inf)
    for chunk in tiles.chunks():
        sums = None
        if tiles.pairs.sums is not None:
            sums = tiles.q.new_zeros(chunk.rows(tiles.lists).numel())
        found = chunk.room(into)
        _backward_chunk(chunk, (grad, delta, lse), of_keys, found.outs, sums)
        if tiles.pairs.sums is not None and sums is not None:
            part = tiles.pairs.sums[:, chunk.low : chunk.high]
            part.copy_(sums.view(part.shape))
        at = chunk.put(found, into, Partials.summed)
        where[:, chunk.low : chunk.high] = at.view(len(where), -1, tiles.height)
    return where


def _backward_chunk(
    chunk: Chunk,
    above: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    into: tuple[torch.Tensor, torch.Tensor],
    outs: torch.Tensor,
    of_factors: torch.Tensor | None,
) -> None:
    """Puts the partial gradients of the chunk's queries into `outs`; those of keys and values are
    added, and those of factors of entries [L r]."""
    tiles, height = chunk.tiles, chunk.tiles.height
    q, grad, delta, lse = (chunk.rows(x) for x in (tiles.q, *above))
    for batch in chunk.pieces():
        rows, given, before, sums = (
            _taken(x, batch.rows, batch.row_step, use)
            for x, use in ((q, "rows"), (grad, "grad"), (delta, "delta"), (lse, "sums"))
        )
        weights, scores = _scores(chunk, batch, rows, apart=of_factors is not None)
        plain = None if of_factors is None else scores / chunk.unit
        if batch.real is not None:
            # rows that fill up weigh nothing; these may be the numbers of real ones
            sums = sums.view(*batch.rows.shape, height)
            sums = sums.masked_fill(~batch.real[..., None], math.inf).flatten(1)
        weights.sub_(sums[..., None]).exp2_()
        _add_tiles(into[1], batch, weights, given)
        values = _taken(tiles.v, batch.tiles, batch.tile_step, "values")
        of_scores = torch.bmm(
            given, values.mT, out=scratch("score gradients", weights.shape, q.dtype)
        )
        shares = None if plain is None else weights * of_scores
        of_scores.sub_(before[..., None]).mul_(weights)
        of_scores = chunk.changed_back(scores, batch, of_scores)
        if of_factors is not None and shares is not None and plain is not None:
            _add_sums(of_factors, batch, shares.addcmul_(of_scores, plain))
        _add_tiles(into[0], batch, of_scores, rows)
        keys = _taken(tiles.k, batch.tiles, batch.tile_step, "keys")
        torch.bmm(of_scores, keys, out=outs[batch.part(height)].view(rows.shape))


def _add_sums(into: torch.Tensor, batch: Batch, found: torch.Tensor) -> None:
    """Add numbers of pairs [G, M h, C w] to those of their entries."""
    groups, rows, tiles = batch.entries.shape
    found = found.view(groups, rows, found.shape[1] // rows, tiles, -1).sum((2, 4))
    into.index_add_(0, batch.entries.flatten(), found.flatten())


def _add_tiles(into: torch.Tensor, batch: Batch, weights: torch.Tensor, rows: torch.Tensor) -> None:
    """Add what rows [G, M h, e] give to their keys, with weights [G, M h, C w], to the tiles
    [tiles, w, e]."""
    groups, columns = batch.tiles.shape
    shape = groups, weights.shape[2], rows.shape[2]
    found = torch.bmm(weights.mT, rows, out=scratch("shares of keys", shape, rows.dtype))
    found = found.view(groups, columns, *into.shape[1:])
    if not batch.tile_step:
        into.index_add_(0, batch.tiles.flatten(), found.flatten(0, 1))
        return
    first = int(batch.tiles[0, 0])
    for column in range(columns):
        into[first + column :: batch.tile_step][:groups].add_(found[:, column])
