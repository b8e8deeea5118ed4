"""Rows of queries that choose together, the keys that they may see, counted from the first real
key of each sample, and the scores of blocks of these: in float32, without gradient, not scaled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnspec.backends.decided.choice import Given
from attnspec.backends.decided.ranking import softmax

LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows: for each of them its queries.

    `q_at` int64 [B, rows, m] are positions, `own` bool says which of them are real queries of this
    call; `first` [B, rows] is the first of these, -1 where there is none. `index` are the numbers
    of the rows, from the first one of the call.
    """

    index: slice
    q_at: Tensor
    own: Tensor
    first: Tensor


class Rows:
    """The rows of a call, of `queries` each, and its keys in blocks of `size`: as many as the
    samples have, so many at least.

    Slot s of a sample is its position start + s, int64 `at` [B, slots]; `start` is [B], `seen` bool
    [B, slots] says which slots are real keys.
    """

    def __init__(self, given: Given, queries: int, size: int, least: int = 0) -> None:
        self.given, self.queries, self.size, n = given, queries, size, given.n_k
        if given.padding is None:
            self.start = torch.zeros(len(given.q), dtype=torch.int64, device=given.q.device)
            begin, self.count = 0, (n - 1) // queries - given.first_query // queries + 1
        else:
            # the first real key, n where there is none
            start = given.padding.to(torch.int64).argmax(-1)
            self.start = torch.where(given.padding.any(-1), start, n)
            count = (n - 1 - self.start) // queries - self.first_row + 1
            begin, self.count = int(self.start.min()), max(least, int(count.max()))
        self.blocks = max(least, -(-(n - begin) // size))
        self.slots = self.blocks * size
        self.at = self.start[:, None] + torch.arange(self.slots, device=self.start.device)
        self.seen = given.real.gather(1, self.at.clamp_max(n - 1)) & (self.at < n)

    @cached_property
    def first_row(self) -> Tensor:
        """The number of the first row of each sample, [B]."""
        return (self.start.clamp_min(self.given.first_query) - self.start) // self.queries

    @property
    def places(self) -> dict[str, Any]:
        """Where the lists of rows begin, and of what, as `ListChoice` has it."""
        return {
            **{"start": self.start[:, None], "first_row": self.first_row[:, None]},
            **{"size": self.size, "shared_by": self.queries, "n_q": self.given.n_q},
            **{"n_k": self.given.n_k, "from_zero": self.given.padding is None},
        }

    def in_slots(self, k: Tensor) -> Tensor:
        """Keys [B, H, n_k, d] in their slots, [B, H, slots, d]; what is not real is 0."""
        given = self.given
        if given.padding is None and given.keys is None and self.slots == k.shape[2]:
            return k
        at = self.at.clamp_max(self.given.n_k - 1)
        k = k.take_along_dim(at[:, None, :, None], 2)
        return k.masked_fill(~self.seen[:, None, :, None], 0.0)

    def parts(self, most: int) -> Iterator[Part]:
        """The rows, at most so many at a time."""
        # queries of another sequence have no padding
        real = self.given.real if self.given.keys is None else torch.ones_like(self.given.real)
        most = max(1, most)
        for low in range(0, self.count, most):
            high = min(self.count, low + most)
            row = self.first_row[:, None] + torch.arange(low, high, device=real.device)
            q_at = row[..., None] * self.queries + torch.arange(self.queries, device=real.device)
            q_at = q_at + self.start[:, None, None]
            present = (q_at >= self.given.first_query) & (q_at < self.given.n_k)
            q_at = q_at.clamp(self.given.first_query, self.given.n_k - 1)
            present = present & real.gather(1, q_at.flatten(1)).view(q_at.shape)
            first = torch.where(present, q_at, self.given.n_k).amin(-1)
            first = torch.where(present.any(-1), first, -1)
            yield Part(slice(low, high), q_at, present, first)

    def mean_query(self, part: Part) -> Tensor:
        """The mean of the real queries of rows, float32 [B, H, rows, d]."""
        q = self.given.q
        stop = part.index.stop * self.queries
        aligned = self.given.first_query % self.queries == 0
        if self.given.padding is None and aligned and stop <= q.shape[2]:
            rows = q[:, :, part.index.start * self.queries : stop].float()
            return torch.unflatten(rows, 2, (-1, self.queries)).mean(3)
        at = part.q_at - self.given.first_query
        rows = q.take_along_dim(at.flatten(1)[:, None, :, None], 2).float()
        rows = torch.unflatten(rows, 2, at.shape[1:])
        present = part.own[:, None, ..., None]
        return rows.masked_fill(~present, 0.0).sum(3) / present.sum(3).clamp_min(1)

    @cached_property
    def _real_slots(self) -> Tensor:
        """The number of every slot that is a real key, [B, slots]; `slots` for others."""
        slot = torch.arange(self.slots, device=self.seen.device)
        return torch.where(self.seen, slot, self.slots)

    @cached_property
    def _begins(self) -> Tensor:
        """The first real slot of every block [B, blocks]; `slots` where there is none."""
        return self.in_blocks(self._real_slots).amin(-1)

    def visible(self, part: Part, causal: bool, blocks: bool = False) -> Tensor:
        """Which slots rows see, or in which blocks they see any, bool [B, 1, rows, slots]."""
        last = part.first - self.start[:, None] if causal else self.slots - 1
        last = torch.where(part.first >= 0, last, -1)
        begins = self._begins if blocks else self._real_slots
        return (begins[:, None] <= last[..., None])[:, None]

    def finished(self, part: Part) -> Tensor:
        """Which blocks lie at or before the first query of rows, bool [B, 1, rows, blocks]."""
        end = (torch.arange(self.blocks, device=self.seen.device) + 1) * self.size - 1
        return (end <= (part.first - self.start[:, None])[..., None])[:, None]

    def in_blocks(self, slots: Tensor) -> Tensor:
        """[..., slots] as [..., blocks, size]."""
        return torch.unflatten(slots, -1, (self.blocks, self.size))


class Scores:
    """The scores by one rule of the blocks of a call, rows after rows.

    `pooled` [B, H_kv, blocks, d] stands for blocks where it is one for all rows: their mean, or
    least and greatest; else each row reads the keys that it sees.
    """

    def __init__(self, rows: Rows, scorer: str, exact: bool) -> None:
        self.rows, self.scorer = rows, scorer
        self.pooled: tuple[Tensor, ...] = ()
        keys = rows.in_slots(rows.given.k.float())
        if scorer == "bound":
            # 0 times an infinite key is 0: it bounds nothing
            keys = keys.clamp(-LARGEST, LARGEST)
        self.keys = keys
        if scorer in ("mean", "bound") and not exact:
            # no number, or an infinite one, where blocks hold no real key
            k = torch.unflatten(keys, 2, (rows.blocks, rows.size))
            real = rows.in_blocks(rows.seen)[:, None, ..., None]
            if scorer == "mean":
                self.pooled = (k.sum(3) / real.sum(3),)
            else:
                low, high = (k.masked_fill(~real, x) for x in (torch.inf, -torch.inf))
                self.pooled = low.amin(3), high.amax(3)

    @property
    def width(self) -> int:
        """Numbers of a row that are examined together, for one head."""
        if self.scorer == "bound" and not self.pooled:
            return self.rows.slots * self.keys.shape[-1]
        return self.rows.blocks if self.pooled else self.rows.slots

    def __call__(self, part: Part, seen: Tensor | None, scales: Tensor) -> Tensor:
        """[B, H, rows, blocks] for slots that rows see [B, 1 or H, rows, slots], None where it does
        not matter which; anything where they see none. `scales` [H, 1, 1] are those of a
        softmax."""
        q = self.rows.mean_query(part)
        if seen is not None:
            if self.scorer == "bound":
                return self._bound(q, seen)
            return self._of_keys(product(q, self.keys), seen, scales)
        if self.scorer == "bound":
            least, most = self.pooled
            return product(q.clamp_max(0), least) + product(q.clamp_min(0), most)
        return product(q, self.pooled[0])

    def _of_keys(self, scores: Tensor, seen: Tensor, scales: Tensor) -> Tensor:
        """From scores of keys [B, H, rows, slots] to those of blocks."""
        blocks, present = self.rows.in_blocks(scores), self.rows.in_blocks(seen)
        match self.scorer:
            case "dot":
                return scores
            case "max":
                return blocks.masked_fill(~present, -torch.inf).amax(-1)
            case "mean":
                return blocks.masked_fill(~present, 0.0).sum(-1) / present.sum(-1)
            case _:
                return self.rows.in_blocks(softmax(scores * scales, seen)).sum(-1)

    def _bound(self, q: Tensor, seen: Tensor) -> Tensor:
        """The sum over channels of max(q min k, q max k)."""
        groups = q.shape[1] // self.keys.shape[1]
        present = self.rows.in_blocks(seen)[..., None]
        heads = []
        for head in range(q.shape[1]):
            k = torch.unflatten(self.keys[:, head // groups], 1, (self.rows.blocks, self.rows.size))
            mine = present[:, head if present.shape[1] > 1 else 0]
            least = k[:, None].masked_fill(~mine, torch.inf).amin(3)
            most = k[:, None].masked_fill(~mine, -torch.inf).amax(3)
            at = q[:, head, :, None]
            heads.append(torch.maximum(at * least, at * most).sum(-1))
        return torch.stack(heads, 1)


def product(q: Tensor, k: Tensor) -> Tensor:
    """q [B, H, rows, d] times k [B, H_kv, slots, d]: [B, H, rows, slots]."""
    batch, heads, rows, size = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, size)
    return (grouped @ k.mT).view(batch, heads, rows, k.shape[2])
