"""`sinkhorn`: blocks of keys matched with blocks of queries by a balanced matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch.nn import functional

from attnspec.backends.decided.block_scores import Rows
from attnspec.backends.decided.choice import Choice, TileLists, look_up
from attnspec.backends.decided.given import Given
from attnspec.graphs.patterns.sinkhorn import Sinkhorn


@dataclass(frozen=True, eq=False)
class MatchChoice(Choice):
    """The key blocks that blocks of queries read, of `size` positions from `start` [B, 1] on.

    `blocks` is int64 [B, H, rows, r], a row for each query block, or one for all with `cut`; -1 is
    none, and one that stands twice counts once. `weight` are the factors of their keys and values,
    1 with a gradient. Without `cut` the first is the own block, and the second the matched one.
    """

    blocks: torch.Tensor
    start: torch.Tensor
    size: int
    cut: bool
    n_q: int
    n_k: int
    weight: torch.Tensor | None = None

    def _read(
        self, q: torch.Tensor, k: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each place in the rows of queries, whether it names the blocks of keys, and its
        factors."""
        query_block, block = (self._block_of(position) for position in (q, k))
        row = query_block.clamp(0, self.blocks.shape[2] - 1)
        weight = torch.ones_like(self.blocks) if self.weight is None else self.weight
        for blocks, factor in zip(self.blocks.unbind(-1), weight.unbind(-1), strict=True):
            matched = (look_up(blocks, row) == block) & (query_block >= 0) & (block >= 0)
            yield matched, look_up(factor, row)

    def _block_of(self, position: torch.Tensor) -> torch.Tensor:
        """The block of positions, with the axes of samples and heads; -1 before the first."""
        position = position.view(*(1,) * (4 - position.dim()), *position.shape)
        start = self.start.view(-1, *(1,) * (position.dim() - 1))
        return (position - start).div(self.size, rounding_mode="floor").clamp_min(-1)

    def holds(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return reduce(torch.logical_or, (matched for matched, _ in self._read(q, k)))

    def factor(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        # a block that several rows have counts once, and trains all of them
        shares = (torch.where(matched, factor - 1, 0.0) for matched, factor in self._read(q, k))
        return 1 + reduce(torch.add, shares)

    @property
    def _once(self) -> torch.Tensor:
        """The blocks, each once in its row."""
        same = self.blocks[..., None] == self.blocks[..., None, :]
        return self.blocks.masked_fill(same.tril(-1).any(-1), -1)

    def layouts(self) -> tuple[TileLists, ...]:
        """Tiles of one block: the own one and the matched one, or those of all rows."""
        first = self.n_k - self.n_q
        block, lists = torch.arange(-(-self.n_k // self.size), device=self.start.device), self._once
        if self.cut:
            lists = lists.expand(-1, -1, len(block), -1)
        lists = functional.pad(lists, (0, 0, 0, len(block) - lists.shape[2]), value=-1)
        # blocks before the first query ask for nothing
        idle = self.start[:, None] + (block + 1) * self.size <= first
        lists = lists.masked_fill(idle[..., None], -1)
        q_order = k_order = None
        if bool(self.start.any()):
            order = (self.start + torch.arange(len(block) * self.size, device=block.device))[
                :, None
            ]
            k_order = torch.where(order < self.n_k, order, -1)
            q_order = torch.where(k_order >= first, k_order, -1)
        return (TileLists(q_order, k_order, self.size, self.size, lists, self.holds, whole=True),)

    def of_weight(self, sums: torch.Tensor) -> torch.Tensor:
        rows = self.blocks.shape[2]
        sums = sums.sum(2, keepdim=True) if self.cut else sums[:, :, :rows]
        same = (self.blocks[..., None] == self._once[..., None, :]) & (self.blocks[..., None] >= 0)
        return torch.where(same, sums[..., None, :], 0.0).sum(-1)

    @property
    def lists(self) -> Mapping[str, torch.Tensor]:
        return {"matched": self.blocks[:, :, 0] if self.cut else self.blocks[..., 1]}


def decide(leaf: Sinkhorn, given: Given) -> Choice:
    """The matched blocks; raises ValueError where there are more than the network is for."""
    rows = Rows.of(given, leaf.size, leaf.size, least=1)
    start, blocks = rows.start, rows.blocks
    if blocks > leaf.max_blocks:
        raise ValueError(
            f"`sinkhorn` learns for at most max_blocks = {leaf.max_blocks} blocks, and {given.n_k}"
            f" keys are {blocks} of {leaf.size}"
        )
    sums, some = block_sums(leaf, rows)
    logits = sums @ given.tables["sort"].to(sums.dtype)[..., :blocks]
    allowed = some[:, None, :] & some[:, :, None]
    if leaf.causal:
        allowed = allowed & torch.ones_like(allowed).tril(-1)
    balance = balanced(logits / leaf.temperature, allowed[:, None], leaf.iterations, leaf.causal)
    best = balance.detach().masked_fill(~allowed[:, None], -1.0)
    weight, matched = best.max(-1).values, best.argmax(-1)
    matched = torch.where(weight < 0, -1, matched)
    chosen = balance.gather(-1, matched.clamp_min(0)[..., None])[..., 0]
    factor = 1 + chosen - chosen.detach()
    if leaf.cut is None:
        block = torch.arange(blocks, device=matched.device).expand_as(matched)
        matched = torch.stack([block, matched], -1)
        factor = torch.stack([torch.ones_like(factor), factor], -1)
    else:
        matched, factor = (x[:, :, None, : leaf.cut] for x in (matched, factor))
    sizes = leaf.size, leaf.cut is not None, given.n_q, given.n_k
    return MatchChoice(matched, start[:, None], *sizes, weight=factor)


def block_sums(leaf: Sinkhorn, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """What stands for each block, [B, H, blocks, d], and bool [B, blocks], which have a real key:
    the sum of its keys, under `causal` that of all keys before it and of its first one."""
    k = rows.given.keys_by_head
    slots = rows.in_slots(k.to(torch.promote_types(k.dtype, torch.float32)))
    slots = torch.unflatten(slots, 2, (rows.blocks, rows.size))
    sums, some = slots.sum(3), rows.in_blocks(rows.seen).any(2)
    if leaf.causal:
        sums = sums.cumsum(2) - sums + slots[:, :, :, 0]
    return sums, some


def balanced(
    logits: torch.Tensor, allowed: torch.Tensor, iterations: int, causal: bool
) -> torch.Tensor:
    """Rows and columns of exp(logits) [..., blocks, blocks] normalised in turns, in log space;
    under `causal` sums over a column run over the rows up to the current one. 0 where not
    allowed."""
    low = torch.finfo(logits.dtype).min / 4
    weights = logits.masked_fill(~allowed, low)
    for _ in range(iterations):
        weights = weights - weights.logsumexp(-1, keepdim=True)
        weights = weights.masked_fill(~allowed, low)
        total = weights.logcumsumexp(-2) if causal else weights.logsumexp(-2, keepdim=True)
        weights = (weights - total).masked_fill(~allowed, low)
    return torch.where(allowed, weights, -torch.inf).exp()
