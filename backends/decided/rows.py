"""Rows of queries that choose together, and the keys that they may see, counted from the first real
key of each sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from attnspec.backends.decided.given import Given


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows: for each of them its queries.

    `q_at` int64 [B, rows, m] are positions, `own` bool says which of them are real queries of this
    call; `first` [B, rows] is the first of these, -1 where there is none. `index` are the numbers
    of the rows, from the first one of the call.
    """

    index: slice
    q_at: torch.Tensor
    own: torch.Tensor
    first: torch.Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a call, of `queries` each, and its keys in blocks of `size`.

    Slot s of a sample is its position start + s; `start` and `first_row` are [B], `seen` bool
    [B, slots] says which slots are real keys.
    """

    given: Given
    queries: int
    size: int
    start: torch.Tensor
    first_row: torch.Tensor
    seen: torch.Tensor
    count: int

    @staticmethod
    def of(given: Given, queries: int, size: int) -> Rows:
        """As many rows and blocks as the samples have."""
        start = given.first
        first = (start.clamp_min(given.first_query) - start) // queries
        last = (given.n_k - 1 - start) // queries
        if given.padding is None:
            begin, count = 0, (given.n_k - 1) // queries - given.first_query // queries + 1
        else:
            begin, count = int(start.min()), int((last - first + 1).max().clamp_min(0))
        blocks = -(-(given.n_k - begin) // size)
        slots = torch.arange(blocks * size, device=start.device)
        at = start[:, None] + slots
        seen = given.real.gather(1, at.clamp_max(given.n_k - 1)) & (at < given.n_k)
        return Rows(given, queries, size, start, first, seen, count)

    @property
    def slots(self) -> int:
        return self.seen.shape[1]

    @property
    def blocks(self) -> int:
        return self.slots // self.size

    def keys(self) -> torch.Tensor:
        """The keys in their slots, float32 [B, H_kv, slots, d]; what is not real is 0."""
        k = self.given.k.float()
        at = (self.start[:, None] + torch.arange(self.slots, device=k.device)).clamp_max(
            self.given.n_k - 1
        )
        k = k.gather(2, at[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3]))
        return k.masked_fill(~self.seen[:, None, :, None], 0.0)

    def parts(self, most: int) -> Iterator[Part]:
        """The rows, at most so many at a time."""
        real = self.given.real_queries
        for low in range(0, self.count, max(1, most)):
            high = min(self.count, low + max(1, most))
            row = self.first_row[:, None] + torch.arange(low, high, device=real.device)
            q_at = row[..., None] * self.queries + torch.arange(self.queries, device=real.device)
            q_at = q_at + self.start[:, None, None]
            own = (q_at >= self.given.first_query) & (q_at < self.given.n_k)
            q_at = q_at.clamp(self.given.first_query, self.given.n_k - 1)
            own = own & real.gather(1, q_at.flatten(1)).view(q_at.shape)
            first = torch.where(own, q_at, self.given.n_k).amin(-1)
            first = torch.where(own.any(-1), first, -1)
            yield Part(slice(low, high), q_at, own, first)

    def mean_query(self, part: Part) -> torch.Tensor:
        """The mean of the real queries of rows, float32 [B, H, rows, d]."""
        q = self.given.q
        if self.queries == 1 and self.given.padding is None:
            return q[:, :, part.index].float()
        at = part.q_at - self.given.first_query
        size = q.shape[1], q.shape[3]
        found = q.gather(2, at.flatten(1)[:, None, :, None].expand(-1, size[0], -1, size[1]))
        found = found.float().view(len(q), size[0], *at.shape[1:], size[1])
        own = part.own[:, None, ..., None]
        if self.queries == 1:
            return found[..., 0, :]
        total = found.masked_fill(~own, 0.0).sum(3)
        return total / own.sum(3).clamp_min(1)

    def visible(self, part: Part, causal: bool) -> torch.Tensor:
        """Which slots rows see, bool [B, 1, rows, slots]."""
        seen = self.seen[:, None] & (part.first >= 0)[..., None]
        if causal:
            slot = torch.arange(self.slots, device=seen.device)
            seen = seen & (slot <= (part.first - self.start[:, None])[..., None])
        return seen[:, None]

    @cached_property
    def _begin(self) -> torch.Tensor:
        """The first real slot of every block [B, blocks]; more than there are where there is
        none."""
        slot = torch.arange(self.slots, device=self.seen.device)
        return self.in_blocks(torch.where(self.seen, slot, self.slots)).amin(-1)

    def some_visible(self, part: Part, causal: bool) -> torch.Tensor:
        """In which blocks rows see a key, bool [B, 1, rows, blocks]."""
        last = torch.full_like(part.first, self.slots - 1)
        if causal:
            last = part.first - self.start[:, None]
        last = torch.where(part.first >= 0, last, -1)
        return (self._begin[:, None] <= last[..., None])[:, None]

    def finished(self, part: Part) -> torch.Tensor:
        """Which blocks lie at or before the first query of rows, bool [B, 1, rows, blocks]."""
        end = (torch.arange(self.blocks, device=self.seen.device) + 1) * self.size - 1
        return (end <= (part.first - self.start[:, None])[..., None])[:, None]

    def in_blocks(self, slots: torch.Tensor) -> torch.Tensor:
        """[..., slots] as [..., blocks, size]."""
        return torch.unflatten(slots, -1, (self.blocks, self.size))
