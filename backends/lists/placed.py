"""A layout for some samples and heads: its tiles in memory, its masks, and results put back.

B samples and K key heads with R query heads each, which share orders and lists and so are rows of
one query tile: there are N = B K lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import torch

from attnspec.backends.decided.choice import TileLists
from attnspec.backends.lists.attention import Pairs, Tiles
from attnspec.backends.lists.cover import Cover
from attnspec.backends.lists.sides import Side, of_tiles
from attnspec.backends.tables.sides import scratch

Condition = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Whether q reads k, bool, or what is added to the score: of positions that broadcast, int64 of
six axes, the first two [B or 1, heads or 1]; and so is what it says."""


@dataclass(frozen=True, eq=False)
class Conditions:
    """What pairs of a layout must have besides.

    `each` is asked about pairs. Pairs in tiles that `cover` knows to be held need not be looked at,
    if padding, bool [B, n_k], does not ask for it, and not `always`.
    """

    each: Sequence[Condition] = ()
    cover: Cover | None = None
    always: bool = False
    padding: torch.Tensor | None = None


class Placed(Pairs):
    """The tiles of a layout for tensors [B, K, R, n_q, …] and [B, K, n_k, …]."""

    def __init__(self, layout: TileLists, shape: Sequence[int], n_k: int, more: Conditions) -> None:
        """`shape` is B, K, R, n_q."""
        self.batch, self.heads, self.repeat, self.n_q = shape
        self.more, self.first = more, n_k - self.n_q
        self.layout = layout = layout.of_groups(self.repeat)
        q_order, device = layout.q_order, layout.lists.device
        if q_order is None and layout.first < self.first:
            q_order = torch.arange(layout.first, n_k, device=device)[None, None]
            q_order = torch.where(q_order < self.first, -1, q_order)
        self.q = Side(q_order, layout.q_tile, layout.first, n_k, device)
        self.k = Side(layout.k_order, layout.k_tile, 0, n_k, device)
        self.lists = layout.lists.expand(self.batch, self.heads, -1, -1)
        self.masked = self._masked()
        self.rows = self._rows()

    # --- tiles in memory -----------------------------------------------------------------------

    def tiles(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tiles:
        """The tiles of q [B, K, R, n_q, d], k and v [B, K, n_k, d]."""
        count = self.k.places.shape[2]
        base = torch.arange(self.batch * self.heads, device=self.lists.device).view(
            self.batch, -1, 1, 1
        )
        lists = torch.where(self.lists >= 0, self.lists + base * count, -1)
        keys = self.of_k(k), self.of_k(v, "values")
        return Tiles(self.of_q(q), *keys, lists.flatten(0, 1), self)

    @cached_property
    def _q_index(self) -> torch.Tensor | None:
        """The rows of query tiles among all rows, int64 [B, K, T, R, size]; None where these are
        one after the other."""
        places = self.q.places
        if self.q.natural and self.repeat == 1 and self.q.real is None:
            return None
        count = self.batch * self.heads * self.repeat
        base = torch.arange(count, device=self.lists.device).view(
            self.batch, self.heads, 1, self.repeat, 1
        )
        return base * self.n_q + (places[:, :, :, None] - self.first).clamp(min=0)

    @cached_property
    def _k_index(self) -> torch.Tensor | None:
        """The rows of key tiles among all rows, int64 [B, K, T, w]; None where these are
        one after the other."""
        if self.k.natural and self.k.real is None:
            return None
        base = torch.arange(self.batch * self.heads, device=self.lists.device).view(
            self.batch, -1, 1, 1
        )
        return base * self.k.n + self.k.places.clamp(min=0)

    def _rows(self) -> torch.Tensor | None:
        """Which rows of query tiles are queries, bool [N, T, h], or None."""
        if self.q.real is None:
            return None
        real = self.q.real[:, :, :, None].expand(self.batch, self.heads, -1, self.repeat, -1)
        return real.flatten(3).flatten(0, 1)

    def of_q(self, x: torch.Tensor, use: str = "queries") -> torch.Tensor:
        """x [B, K, R, n_q, …] by query tiles: [N, T, h, …], in a buffer where they are moved."""
        lists, height = self.batch * self.heads, self.repeat * self.q.size
        flat = _taken(x.reshape(-1, *x.shape[4:]), self._q_index, use)
        return flat.view(lists, -1, height, *x.shape[4:])

    def of_k(self, x: torch.Tensor, use: str = "keys") -> torch.Tensor:
        """x [B, K, n_k, …] by key tiles: [tiles, w, …], likewise."""
        flat = _taken(x.reshape(-1, *x.shape[3:]), self._k_index, use)
        return flat.view(-1, self.k.size, *x.shape[3:])

    def by_queries(self, where: torch.Tensor) -> torch.Tensor:
        """What is known of rows of query tiles [N, T, h] for all queries [B K R n_q], -1 of those
        that are in no tile."""
        return _back(where.flatten(), self._q_index, self.rows, self.queries)

    def by_keys(self, where: torch.Tensor) -> torch.Tensor:
        """What is known of rows of key tiles [tiles w] for all keys [B K n_k], likewise."""
        real = self.k.real
        if real is not None:
            real = real.expand(self.batch, self.heads, -1, -1)
        return _back(where, self._k_index, real, self.batch * self.heads * self.k.n)

    @property
    def queries(self) -> int:
        """How many queries there are, of all samples and heads."""
        return self.batch * self.heads * self.repeat * self.n_q

    @property
    def slots(self) -> tuple[int, int]:
        """How many rows all query tiles and all key tiles have."""
        lists = self.batch * self.heads
        return lists * self.repeat * self.q.places[0, 0].numel(), lists * self.k.places[
            0, 0
        ].numel()

    # --- pairs ---------------------------------------------------------------------------------

    def _masked(self) -> torch.Tensor | None:
        """The entries whose pairs need to be looked at, bool [N, T, r]; None for none."""
        there = self.lists >= 0
        if not self.layout.whole or self.more.always:
            return there.flatten(0, 1)
        tiles = self.lists.clamp(min=0)
        wholes = [of_tiles(x, tiles) for x in (self.k.compact, self._unpadded) if x is not None]
        if self.more.cover is not None:
            ends = (x.clamp(0, self.k.n - 1) for x in self.k.ends)
            wholes.append(self._covered(self.more.cover.full(*ends), tiles, self.more.cover.size))
        if not wholes:
            return None
        return (there & ~reduce(torch.logical_and, wholes)).flatten(0, 1)

    def _covered(self, full: torch.Tensor, tiles: torch.Tensor, size: int) -> torch.Tensor:
        """Whether blocks of `size` queries in which a query tile lies hold all pairs of a key tile,
        by the table [B or 1, K or 1, blocks, T]: bool like the entries [B, K, T, r]."""
        count = full.shape[3]
        full = full.flatten(2)
        ends = [x.clamp(0, self.k.n - 1) // size * count for x in self.q.ends]
        if bool((ends[0] == ends[1]).all()):
            ends = ends[:1]
        return reduce(torch.logical_and, [of_tiles(full, tiles + x[..., None]) for x in ends])

    @cached_property
    def _unpadded(self) -> torch.Tensor | None:
        """The key tiles without padding, bool [B, heads or 1, T]; None where all are."""
        if self.more.padding is None:
            return None
        at = torch.arange(self.batch, device=self.lists.device).view(-1, 1, 1, 1)
        return self.more.padding[at, self.k.places.clamp(min=0)].all(-1)

    def held(self, low: int, high: int, slots: torch.Tensor) -> torch.Tensor:
        slots = slots.view(self.batch, self.heads, high - low, -1)
        tiles = self.lists[:, :, low:high].gather(3, slots).clamp_(min=0)
        q = self.q.places[:, :, low:high, :, None, None].clamp(min=self.first)
        k = self.k.of(tiles)[:, :, :, None]
        there, k = k >= 0, k.clamp(min=0)
        found = [there] if self.layout.whole else [there, self.layout.holds(q, k)]
        if self.more.padding is not None:
            at = torch.arange(self.batch, device=self.lists.device).view(-1, *(1,) * 5)
            found.append(self.more.padding[at, k])
        found += [condition(q, k) for condition in self.more.each]
        held, bias = found[0], None
        for said in found[1:]:
            if said.dtype == torch.bool:
                held = held & said
            else:
                bias = said if bias is None else bias + said
        if bias is not None:
            held = torch.where(held, bias, -math.inf)
        return self._by_rows(held, high - low, slots.shape[3])

    def _by_rows(self, found: torch.Tensor, rows: int, slots: int) -> torch.Tensor:
        """[B, K or 1, c, m, s, w] as [N, c, h, s, w]."""
        size = rows, self.repeat, self.q.size, slots, self.k.size
        found = found.unsqueeze(3).expand(self.batch, self.heads, *size)
        return found.flatten(3, 4).flatten(0, 1)

    # --- changes of scores ---------------------------------------------------------------------

    def places_of_rows(self, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions of query tiles low <= t < high, as distances are counted by, and which of
        the part's query heads they are of, int64 [N, high - low, h]."""
        size = self.batch, self.heads, high - low, self.repeat, self.q.size
        at = self._stand(0, self.q.places[:, :, low:high, None], self.first).expand(size)
        numbers = torch.arange(self.heads * self.repeat, device=self.lists.device).view(
            self.heads, 1, -1, 1
        )
        return tuple(x.flatten(3).flatten(0, 1) for x in (at, numbers.expand(size)))  # type: ignore[return-value]

    @cached_property
    def places_of_keys(self) -> torch.Tensor:
        """The positions of key tiles, as distances are counted by, int64 [tiles, w]."""
        at = self._stand(1, self.k.places, 0)
        return at.expand(self.batch, self.heads, -1, -1).flatten(0, 2)

    def _stand(self, side: int, at: torch.Tensor, first: int) -> torch.Tensor:
        """Where positions stand, from `first` on those of queries or keys; none stands anywhere."""
        known = () if self.changes is None else self.changes.of.standing
        return known[side].to(at.device)[(at - first).clamp(min=0)] if known else at


def _taken(x: torch.Tensor, index: torch.Tensor | None, use: str) -> torch.Tensor:
    """Rows of x at an index, in a buffer; all of them where there is none."""
    if index is None:
        return x
    found = scratch(f"tiles of {use}", (index.numel(), *x.shape[1:]), x.dtype)
    return torch.index_select(x, 0, index.flatten(), out=found)


def _back(
    where: torch.Tensor, index: torch.Tensor | None, real: torch.Tensor | None, rows: int
) -> torch.Tensor:
    """What is known of places for the rows that stand there, by the index of these."""
    if index is None:
        return where
    index = index.flatten()
    if real is not None:
        there = real.flatten()
        index, where = index[there], where[there]
    return where.new_full((rows,), -1).index_copy_(0, index, where)
