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

from attnspec.backends.common.asking import known
from attnspec.backends.decided.choice import TileLists
from attnspec.backends.lists.attention import Pairs, Tiles
from attnspec.backends.lists.cover import Cover
from attnspec.backends.lists.sides import Side, of_tiles

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
        return Tiles(self.of_q(q), self.of_k(k), self.of_k(v), lists.flatten(0, 1), self)

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

    def of_q(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, K, R, n_q, …] by query tiles: [N, T, h, …]."""
        lists, height = self.batch * self.heads, self.repeat * self.q.size
        flat = x.reshape(-1, *x.shape[4:])
        if self._q_index is not None:
            flat = flat.index_select(0, self._q_index.flatten())
        return flat.view(lists, -1, height, *x.shape[4:])

    def of_k(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, K, n_k, …] by key tiles: [tiles, w, …]."""
        flat = x.reshape(-1, *x.shape[3:])
        if self._k_index is not None:
            flat = flat.index_select(0, self._k_index.flatten())
        return flat.view(-1, self.k.size, *x.shape[3:])

    def merge(
        self, into: tuple[torch.Tensor, torch.Tensor], found: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Merge outputs [N, T, h, e] and log-sum-exps [N, T, h] into those of all queries
        [B K R n_q, e] and [B K R n_q], contiguous."""
        out, lse = (x.flatten(0, 2) for x in found)
        if self._q_index is None:
            share = _share(into[1], lse)
            into[0].lerp_(out, share[:, None])
            torch.logaddexp(into[1], lse, out=into[1])
            return
        rows, out, lse = self._those_real(out, lse)
        o1, l1 = (x.index_select(0, rows) for x in into)
        into[0].index_copy_(0, rows, o1.lerp_(out, _share(l1, lse)[:, None]))
        into[1].index_copy_(0, rows, torch.logaddexp(l1, lse))

    def add_q(self, into: torch.Tensor, found: torch.Tensor) -> None:
        """Add gradients [N, T, h, d] to those of all queries [B K R n_q, d]."""
        found = found.flatten(0, 2)
        if self._q_index is None:
            into += found
            return
        rows, found = self._those_real(found)
        into.index_add_(0, rows, found)

    def _those_real(self, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The rows of query tiles that are queries: where they stand, and what is in them."""
        index = torch.empty(0) if self._q_index is None else self._q_index.flatten()
        if self.rows is None:
            return (index, *rows)
        real = self.rows.flatten().nonzero()[:, 0]
        return tuple(x[real] for x in (index, *rows))

    def add_k(self, into: torch.Tensor, found: torch.Tensor) -> None:
        """Add gradients [tiles, w, d] to those of all keys [B, K, n_k, d]."""
        found = found.flatten(0, 1)
        flat = into.view(-1, into.shape[3])
        if self._k_index is None:
            flat += found
        else:
            index = self._k_index.flatten()
            if self.k.real is not None:
                real = self.k.real.expand(self.batch, self.heads, -1, -1).flatten()
                index, found = index[real], found[real]
            flat.index_add_(0, index, found)

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
        if known((ends[0] == ends[1]).all(), otherwise=False):
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


def _share(l1: torch.Tensor, l2: torch.Tensor) -> torch.Tensor:
    """The second result's weight in a merge; 0 where neither has a key."""
    return torch.sigmoid(l2 - l1).nan_to_num_(0.0)
