"""`sinkhorn`: blocks of keys matched with blocks of queries by a balanced matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from attnspec.backends.decided.choice import Choice, TileLists, look_up
from attnspec.backends.decided.cluster import keys_by_head
from attnspec.backends.decided.given import Given
from attnspec.graphs.patterns.sinkhorn import Sinkhorn


@dataclass(frozen=True, eq=False)
class MatchChoice(Choice):
    """Blocks of `size` positions from `start` [B, 1] on, and the block that is matched with each.

    `matched` is int64 [B, H, blocks], -1 for none, `weight` the factor of its keys and values, 1
    with a gradient. With `cut` only that many rows are left, all queries read their blocks and none
    its own.
    """

    matched: torch.Tensor
    start: torch.Tensor
    size: int
    cut: int | None
    n_q: int
    n_k: int
    weight: torch.Tensor | None = None

    def _blocks(self, position: torch.Tensor) -> torch.Tensor:
        """The block of positions, with the axes of samples and heads; -1 before the first."""
        position = position.view(*(1,) * (4 - position.dim()), *position.shape)
        start = self.start.view(-1, *(1,) * (position.dim() - 1))
        return (position - start).div(self.size, rounding_mode="floor").clamp_min(-1)

    def _of_row(self, row: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether key blocks are matched with rows, and the factor of those that are."""
        held = (look_up(self.matched, row.clamp_min(0)) == k) & (row >= 0) & (k >= 0)
        weight = torch.ones_like(self.matched) if self.weight is None else self.weight
        return held, torch.where(held, look_up(weight, row.clamp_min(0)), 1.0)

    def holds(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        own, block = self._blocks(q), self._blocks(k)
        if self.cut is None:
            return ((own == block) & (own >= 0)) | self._of_row(own, block)[0]
        held = torch.zeros_like(block, dtype=torch.bool) & (own < 0)
        for row in range(self.matched.shape[2]):
            held = held | self._of_row(torch.full_like(own, row), block)[0]
        return held & (own >= 0)

    def factor(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        own, block = self._blocks(q), self._blocks(k)
        if self.cut is None:
            return self._of_row(own, block)[1]
        factors = [
            self._of_row(torch.full_like(own, row), block)[1]
            for row in range(self.matched.shape[2])
        ]
        # a block that several rows have counts once, and trains all of them
        return 1 + torch.stack([each - 1 for each in factors]).sum(0)

    @property
    def _own(self) -> torch.Tensor:
        """The numbers of all blocks."""
        return torch.arange(-(-self.n_k // self.size), device=self.start.device)

    def _pairs_of_blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The own block of each and the matched one [B, H, blocks, 2], and whether they are one
        [B, H, blocks]."""
        short = len(self._own) - self.matched.shape[2]
        matched = torch.nn.functional.pad(self.matched, (0, short), value=-1)
        return torch.stack([self._own.expand_as(matched), matched], -1), matched == self._own

    def _rows(self) -> torch.Tensor:
        """The blocks of all rows [B, H, rows], each once, -1 for none."""
        rows = self.matched.sort(-1).values
        again = rows[..., 1:] == rows[..., :-1]
        rows[..., 1:] = torch.where(again, -1, rows[..., 1:])
        return rows

    def layouts(self) -> tuple[TileLists, ...]:
        """Tiles of one block: the own one and the matched one, or those of all rows."""
        own, first = self._own, self.n_k - self.n_q
        if self.cut is None:
            both, same = self._pairs_of_blocks()
            lists = torch.where(same[..., None] & both.new_tensor([0, 1]).bool(), -1, both)
        else:
            lists = self._rows()[:, :, None].expand(-1, -1, len(own), -1)
        # blocks before the first query ask for nothing
        idle = self.start[:, None] + (own + 1) * self.size <= first
        lists = lists.masked_fill(idle[..., None], -1)
        q_order = k_order = None
        if bool(self.start.any()):
            order = (self.start + torch.arange(len(own) * self.size, device=own.device))[:, None]
            k_order = torch.where(order < self.n_k, order, -1)
            q_order = torch.where(k_order >= first, k_order, -1)
        return (TileLists(q_order, k_order, self.size, self.size, lists, self.holds, whole=True),)

    def of_weight(self, sums: torch.Tensor) -> torch.Tensor:
        rows = self.matched.shape[2]
        if self.cut is None:
            _, same = self._pairs_of_blocks()
            found = torch.where(same, sums[..., 0], sums[..., 1])[:, :, :rows]
        else:
            total = sums.sum(2)[:, :, None]
            same = self._rows()[:, :, None] == self.matched[..., None]
            found = torch.where(same, total, 0.0).sum(-1)
        return found.masked_fill(self.matched < 0, 0.0)

    @property
    def lists(self) -> Mapping[str, torch.Tensor]:
        return {"matched": self.matched}


def decide(leaf: Sinkhorn, given: Given) -> Choice:
    """The matched blocks; raises ValueError where there are more than the network is for."""
    start = given.first
    begin = 0 if given.padding is None else int(start.min())
    blocks = max(1, -(-(given.n_k - begin) // leaf.size))
    if blocks > leaf.max_blocks:
        raise ValueError(
            f"`sinkhorn` learns for at most max_blocks = {leaf.max_blocks} blocks, and {given.n_k}"
            f" keys are {blocks} of {leaf.size}"
        )
    sums, some = block_sums(leaf, given, start, blocks)
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
    if leaf.cut is not None:
        matched, factor = matched[..., : leaf.cut], factor[..., : leaf.cut]
    sizes = leaf.size, leaf.cut, given.n_q, given.n_k
    return MatchChoice(matched, start[:, None], *sizes, weight=factor)


def block_sums(
    leaf: Sinkhorn, given: Given, start: torch.Tensor, blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What stands for each block, [B, H, blocks, d], and bool [B, blocks], which have a real key:
    the sum of its keys, under `causal` that of all keys before it and of its first one."""
    k = keys_by_head(given)
    k = k.to(torch.promote_types(k.dtype, torch.float32))
    at = start[:, None] + torch.arange(blocks * leaf.size, device=k.device)
    real = given.real.gather(1, at.clamp_max(given.n_k - 1)) & (at < given.n_k)
    place = at.clamp_max(given.n_k - 1)[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
    own = k.gather(2, place).masked_fill(~real[:, None, :, None], 0.0)
    own = torch.unflatten(own, 2, (blocks, leaf.size))
    sums, some = own.sum(3), torch.unflatten(real, 1, (blocks, leaf.size)).any(2)
    if leaf.causal:
        sums = sums.cumsum(2) - sums + own[:, :, :, 0]
    return sums, some


def balanced(
    logits: torch.Tensor, allowed: torch.Tensor, iterations: int, causal: bool
) -> torch.Tensor:
    """Rows and columns of exp(logits) [..., blocks, blocks] normalised in turns, in log space;
    under `causal` sums over a column run over the rows up to the current one. 0 where not
    allowed."""
    low = torch.finfo(logits.dtype).min / 4
    found = logits.masked_fill(~allowed, low)
    for _ in range(iterations):
        found = found - found.logsumexp(-1, keepdim=True)
        found = found.masked_fill(~allowed, low)
        total = found.logcumsumexp(-2) if causal else found.logsumexp(-2, keepdim=True)
        found = (found - total).masked_fill(~allowed, low)
    return torch.where(allowed, found, -torch.inf).exp()
