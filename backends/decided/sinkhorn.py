"""`sinkhorn`: blocks of keys matched with blocks of queries by a balanced matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attnspec.backends.common.score_formula import widened
from attnspec.backends.decided.block_scores import Rows
from attnspec.backends.decided.choice import Choice, Given, look_up
from attnspec.backends.decided.lists import ListChoice
from attnspec.graphs.patterns.sinkhorn import Sinkhorn


@dataclass(frozen=True, eq=False, kw_only=True)
class MatchChoice(ListChoice):
    """Query blocks read the key blocks `matched` int64 [B, H, rows, r], -1 for none; one that
    stands twice in a row counts once.

    `weight` [B, H, rows, r] are the factors of their keys and values, 1 with a gradient. Without
    `cut` the first is the own block, and the second the matched one.
    """

    matched: Tensor
    cut: bool
    weight: Tensor

    def factor(self, q: Tensor, k: Tensor) -> Tensor:
        row, block, inside = self._named(q, k)
        # a block that several rows have counts once, and trains all of them
        shares = [
            torch.where(inside & (look_up(blocks, row) == block), look_up(factor, row) - 1, 0.0)
            for blocks, factor in zip(self.matched.unbind(-1), self.weight.unbind(-1), strict=True)
        ]
        return 1 + torch.stack(shares).sum(0)

    def of_weight(self, sums: Tensor) -> Tensor:
        matched = self.matched[..., None]
        same = (matched == self.blocks[..., None, :]) & (matched >= 0)
        return torch.where(same, sums[..., None, :], 0.0).sum(-1)

    @property
    def lists(self) -> Mapping[str, Tensor]:
        return {"matched": self.matched[:, :, 0] if self.cut else self.matched[..., 1]}


def decide(leaf: Sinkhorn, given: Given) -> Choice:
    """The matched blocks; raises ValueError where there are more than the network is for."""
    rows = Rows(given, leaf.size, leaf.size, least=1)
    blocks = rows.blocks
    if blocks > leaf.max_blocks:
        raise ValueError(
            f"`sinkhorn` learns for at most max_blocks = {leaf.max_blocks} blocks, and {given.n_k}"
            f" keys are {blocks} blocks of {leaf.size}: write a larger `max_blocks`"
        )
    # of a block the sum of its keys, under `causal` that of all keys before it and its first one
    slots = rows.in_slots(widened(given.keys_by_head))
    slots = torch.unflatten(slots, 2, (blocks, rows.size))
    sums, some = slots.sum(3), rows.in_blocks(rows.seen).any(2)
    if leaf.causal:
        sums = sums.cumsum(2) - sums + slots[:, :, :, 0]
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
    row = rows.first_row[:, None] + torch.arange(rows.count, device=matched.device)
    row = row.clamp_max(blocks - 1)[:, None].expand(-1, matched.shape[1], -1)
    if leaf.cut is None:
        matched, factor = (x.gather(2, row) for x in (matched, factor))
        matched = torch.stack([row, matched], -1)
        factor = torch.stack([torch.ones_like(factor), factor], -1)
    else:
        matched, factor = (
            x[:, :, None, : leaf.cut].expand(-1, -1, rows.count, -1) for x in (matched, factor)
        )
    again = (matched[..., None] == matched[..., None, :]).tril(-1).any(-1)
    blocks_read, cut = matched.masked_fill(again, -1).sort(-1).values, leaf.cut is not None
    return MatchChoice(blocks_read, **rows.places, matched=matched, cut=cut, weight=factor)


def balanced(logits: Tensor, allowed: Tensor, iterations: int, causal: bool) -> Tensor:
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
