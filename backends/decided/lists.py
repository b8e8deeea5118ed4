"""Choices that are lists: key blocks of one size for rows of consecutive queries; and `chosen`,
lists that an input brings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnspec.backends.common.masks import mask_plan, reading
from attnspec.backends.common.torch_modes import array_of
from attnspec.backends.decided.choice import Choice, Given, TileLists
from attnspec.backends.decided.ranking import marked
from attnspec.graphs.patterns.chosen import Chosen
from attnspec.graphs.relation import Relation, takes_tensors
from attnspec.limits import LIMITS


@dataclass(frozen=True, eq=False)
class Pairs(Choice):
    """The pairs of a graph that queries and keys do not decide, with the inputs it reads."""

    relation: Relation
    data: Mapping[Any, Any]
    n: int

    def holds(self, q: Tensor, k: Tensor) -> Tensor:
        if not q.is_cpu and takes_tensors(self.relation):
            return reading(self.relation, q, k, self.n, {})(self.data) & (q == q) & (k == k)
        return mask_plan(self.relation, array_of(q), array_of(k), self.n, q.device)(self.data)


@dataclass(frozen=True, eq=False)
class ListChoice(Choice):
    """Row `(q - start) // shared_by` of the queries reads the key blocks in its list, of `size`
    keys from `start` on.

    `blocks` is int64 [B, H or 1, rows, r], each list ascending, -1 for none, none twice. The first
    row of each sample has the number `first_row` [B, 1] in the sequence; `start` is [B, 1].
    `within` cuts the pairs. `from_zero` says that every sample is known to start at 0.
    """

    blocks: Tensor
    start: Tensor
    first_row: Tensor
    size: int
    shared_by: int
    n_q: int
    n_k: int
    within: Pairs | None = None
    from_zero: bool = False

    def holds(self, q: Tensor, k: Tensor) -> Tensor:
        row, block, inside = self._named(q, k)
        if not self.blocks.numel():
            return inside & False
        pairs = inside & self._read(row, block)
        return pairs if self.within is None else pairs & self.within.holds(q, k)

    def _named(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of queries and the blocks of keys, and for which pairs there are both."""
        dims = max(4, q.dim(), k.dim())
        start, first_row = (x.view(-1, *(1,) * (dims - 1)) for x in (self.start, self.first_row))
        row = (q - start) // self.shared_by - first_row
        block = (k - start) // self.size
        rows = self.blocks.shape[2]
        inside = (row >= 0) & (row < rows) & (block >= 0)
        return row.clamp(0, rows - 1), block.clamp(0, self.count - 1), inside

    @property
    def count(self) -> int:
        """Key blocks that may be named."""
        return -(-self.n_k // self.size)

    def _read(self, row: Tensor, block: Tensor) -> Tensor:
        """Whether rows read blocks."""
        batch, heads, rows, _ = self.blocks.shape
        sample, head = (
            torch.arange(size, device=row.device).view(-1, *(1,) * (row.dim() - 1 - axis))
            for axis, size in enumerate((batch, heads))
        )
        if batch * heads * rows * self.count <= LIMITS.table:
            if row.dim() == 4 and row.shape[3] == block.shape[2] == 1:
                # all pairs of some rows and blocks: what is looked up one by one takes ten times
                # as long
                return self._table.take_along_dim(row, 2).take_along_dim(block, 3)
            return self._table[sample, head, row, block]
        # every list has numbers of its own, so that all of them are one ascending list
        wide = self.count + 1
        start = torch.arange(batch * heads * rows, device=row.device)[:, None] * wide
        codes = (start + self.blocks.view(-1, self.blocks.shape[3]) + 1).flatten()
        wanted = ((sample * heads + head) * rows + row) * wide + block + 1
        place = torch.searchsorted(codes, wanted.contiguous()).clamp_max(len(codes) - 1)
        return codes[place] == wanted

    @cached_property
    def _table(self) -> Tensor:
        """Whether each row reads each block, bool [B, H, rows, blocks]."""
        return marked(self.blocks, self.count)

    def layouts(self) -> tuple[TileLists, ...]:
        """Query tiles are the rows of the lists, key tiles the blocks."""
        before = self.start + self.first_row * self.shared_by
        first, n, device = self.n_k - self.n_q, self.n_k, before.device
        q_order = k_order = None
        together = self.from_zero and first % self.shared_by == 0
        if not (together or bool((before == first).all())):
            slots = torch.arange(self.blocks.shape[2] * self.shared_by, device=device)
            q_order = before[..., None] + slots
            q_order = torch.where((q_order >= first) & (q_order < n), q_order, -1)
        if not self.from_zero and bool(self.start.any()):
            k_order = self.start[..., None] + torch.arange(n, device=device)
            k_order = torch.where(k_order < n, k_order, -1)
        tiles = self.shared_by, self.size, self.blocks
        return (TileLists(q_order, k_order, *tiles, self.holds, self.within is None),)

    @property
    def lists(self) -> Mapping[str, Tensor]:
        return {"keys" if self.size == 1 else "blocks": self.blocks}


def decide_chosen(leaf: Chosen, given: Given) -> Choice:
    """The listed blocks, each once; raises ValueError for one that there is not."""
    size, name = leaf.choices.size, leaf.choices.name  # type: ignore[attr-defined]
    blocks = given.data[name].to(torch.int64)
    keys = given.n_k if given.keys is None else given.keys
    count = -(-keys // size)
    wrong = (blocks < -1) | (blocks >= count)
    if bool(wrong.any()):
        raise ValueError(
            f"`{name}` must hold indices of blocks, at least 0 and below {count}, or -1 for no"
            f" block, got {int(blocks[wrong][0])} (there are {keys} keys, up to {size} in a block)"
        )
    blocks = blocks.sort(dim=-1)[0]
    again = (blocks[..., 1:] == blocks[..., :-1]) & (blocks[..., 1:] >= 0)
    if bool(again.any()):
        blocks[..., 1:].masked_fill_(again, -1)
        blocks = blocks.sort(dim=-1)[0]
    start = blocks.new_zeros(len(blocks), 1)
    first_row = start + given.first_query
    return ListChoice(blocks, start, first_row, size, 1, given.n_q, given.n_k, from_zero=True)
