"""Changed scores of pieces: what `alibi`, `bias` and `softcap` make of them, forward and backward.

What is only added goes through the flash kernel, as its mask. Where scores are bent, and where the
gradient of what was added is asked for, a piece's own scores are computed, and once more in the
backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from attnspec.backends.common.score_formula import Formula
from attnspec.backends.tables.blocks import Piece
from attnspec.lower.work import Bias, Call, Softcap, Work


class ScoreChanges:
    """The changes of a work's scores, for its heads, of which `ratio` share a key head."""

    def __init__(self, work: Work, heads: tuple[int, ...]) -> None:
        self.work, self.heads = work, heads
        self.tables = tuple(change.table for change in work.changes if isinstance(change, Bias))
        self.additive = not any(isinstance(change, Softcap) for change in work.changes)
        self._formulas: dict[tuple[int, ...], Formula] = {}

    def of(self, chosen: tuple[int, ...], tables: Mapping[str, torch.Tensor]) -> HeadScores:
        """The changes for some of the heads; tables [heads, buckets]."""
        found = self._formulas.get(chosen)
        if found is None:
            heads = tuple(self.heads[head] for head in chosen)
            found = self._formulas[chosen] = Formula(self.work, heads, torch.device("cpu"))
        mine = {name: table[list(chosen)] for name, table in tables.items()}
        # without gradients, what is taken of a table asks for none
        learned = any(table.requires_grad for table in tables.values())
        return HeadScores(found, len(chosen), mine, self.additive, learned)


@dataclass(frozen=True, eq=False)
class HeadScores:
    """The changes for `count` heads with their learned tables [count, buckets]; whether they only
    add something, and whether gradients of tables are asked for."""

    formula: Formula
    count: int
    tables: Mapping[str, torch.Tensor]
    additive: bool
    learned: bool

    def changed(self, scores: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        """Scaled scores [heads, blocks, h, w] of pairs so far apart [blocks or 1, h, w]."""
        call = Call(tables=self.tables)
        return self.formula.changed(scores[None, :, None], distance, call)[0, :, 0]

    def added(self, piece: Piece, kind: torch.dtype) -> torch.Tensor:
        """What additive changes add to the scores of a piece [batch, heads, h, w]."""
        distance = piece.distance
        none = distance.new_zeros((self.count, *distance.shape), dtype=kind)
        found = self.changed(none, distance)
        return piece.to.arrange(found.expand(-1, piece.q.count, -1, -1))

    def forward(
        self,
        piece: Piece,
        rows: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        scale: float,
        kind: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exps of a piece's queries, keys and values as the flash kernel would
        have them; -inf for a query without a key."""
        q, k, v = (x.to(kind) for x in rows)
        k, v = (_for_each(x, q) for x in (k, v))
        scores = self._scores(piece, q, k, scale)
        if bias is not None:
            scores = scores + bias
        sums = scores.logsumexp(-1)
        weights = torch.exp(scores - sums.masked_fill(sums == -math.inf, 0.0)[..., None])
        return (weights @ v).to(rows[0].dtype), sums

    def backward(
        self,
        piece: Piece,
        rows: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        scale: float,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The gradients of a piece's queries, keys and values, and of the tables; `rows` are the
        gradient of the output, q, k, v, the output and the log-sum-exps."""
        sums = rows[5]
        grad, q, k, v, out = (x.to(sums.dtype) for x in rows[:5])
        shared = k.shape[1]
        k, v = (_for_each(x, q) for x in (k, v))
        tables = [table.detach().requires_grad_() for table in self.tables.values()]
        mine = replace(self, tables=dict(zip(self.tables, tables, strict=True)))
        with torch.enable_grad():
            leaves = [q.detach().requires_grad_(), k.detach().requires_grad_()]
            scores = mine._scores(piece, leaves[0], leaves[1], scale)
        with torch.no_grad():
            masked = scores.detach() if bias is None else scores.detach() + bias
            weights = torch.exp(masked - sums[..., None])
            of_weights = grad @ v.mT - (grad * out).sum(-1, keepdim=True)
            found = torch.autograd.grad(scores, [*leaves, *tables], weights * of_weights)
            grad_v = weights.mT @ grad
        of_keys = [torch.unflatten(x, 1, (shared, -1)).sum(2) for x in (found[1], grad_v)]
        return [found[0], *of_keys], list(found[2:])

    def _scores(self, piece: Piece, q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
        """The changed scores [batch, heads, h, w]."""
        scores = piece.to.back((q * scale) @ k.mT)
        return piece.to.arrange(self.changed(scores, piece.distance))


def _for_each(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Keys of heads that queries share, once for each of these."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)
