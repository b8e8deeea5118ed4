"""What scores of batches become: `alibi`, `bias` and `softcap`, head by head and pair by pair."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attnspec.backends.common.score_formula import bucket_table, slopes_of
from attnspec.lower.work import Bias, Softcap, Work


class ScoreChanges:
    """The changes of a work for its heads."""

    def __init__(self, work: Work, heads: tuple[int, ...]) -> None:
        cpu = torch.device("cpu")
        self.work = work
        self.slopes = {
            change: torch.tensor(slopes, dtype=torch.float64, device=cpu)
            for change, slopes in slopes_of(work.changes, heads).items()
        }
        self.buckets = {
            change: bucket_table(change, work.length, cpu)
            for change in work.changes
            if isinstance(change, Bias)
        }
        at = work.standing
        sides = () if at is None else (torch.from_numpy(x) for x in (at.queries, at.keys))
        self.standing: tuple[torch.Tensor, ...] = tuple(sides)


class Changes:
    """The changes for some of the heads, with their learned tables [heads, buckets]; gradients of
    these are added up."""

    def __init__(self, of: ScoreChanges, heads: list[int], tables: Mapping[str, torch.Tensor]):
        self.of, self.heads = of, torch.tensor(heads, device="cpu")
        self.tables = {name: table.detach() for name, table in tables.items()}
        self.grads = {name: torch.zeros_like(table) for name, table in self.tables.items()}

    def __call__(
        self,
        scores: torch.Tensor,
        heads: torch.Tensor,
        distance: torch.Tensor,
        tables: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Scores [G, h, w] of queries of the heads [G, h], so far behind their keys [G, h, w]."""
        heads = self.heads[heads]
        for change in self.of.work.changes:
            if isinstance(change, Softcap):
                scores = change.cap * torch.tanh(scores / change.cap)
            elif isinstance(change, Bias):
                buckets = self.of.buckets[change]
                most = len(buckets) // 2
                bucket = buckets[distance.clamp(-most, most) + most]
                table = (tables or self.tables)[change.table]
                scores = scores + table[heads[..., None], bucket].to(scores.dtype)
            else:
                slopes = self.of.slopes[change].to(scores.dtype)[heads]
                scores = scores - slopes[..., None] * distance.abs()
        return scores

    def backward(
        self,
        scores: torch.Tensor,
        heads: torch.Tensor,
        distance: torch.Tensor,
        grad: torch.Tensor,
    ) -> torch.Tensor:
        """The gradient of scores from that of what they become; those of tables are added up."""
        leaf = scores.detach().requires_grad_()
        tables = {name: x.clone().requires_grad_() for name, x in self.tables.items()}
        with torch.enable_grad():
            found = self(leaf, heads, distance, tables)
        first, *rest = torch.autograd.grad(found, [leaf, *tables.values()], grad)
        for total, share in zip(self.grads.values(), rest, strict=True):
            total += share
        return first
