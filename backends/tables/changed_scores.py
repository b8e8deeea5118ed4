"""Changed scores of blocks, forward and backward.

What is only added goes through the flash kernel, as its mask. Where scores are bent, and where the
gradient of what was added is asked for, a block's own scores are computed, and once more in the
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from attnspec.backends.common.exact import repeated
from attnspec.backends.common.merging import LOWEST, Partial
from attnspec.backends.common.score_formula import shares
from attnspec.backends.common.scores import ScoreFunction, masked
from attnspec.backends.tables.blocks import Piece
from attnspec.ir.scores import Scores
from attnspec.lower.work import Heads, Work

Learned = Mapping[str, Tensor]
"""Learned tables [heads of the work, buckets] by their names."""


@dataclass(eq=False)
class ScoreChanges:
    """The changes of a work's scores in a call, of some of its heads, by their places among them,
    with their learned tables, and what adds up the gradients of these."""

    scores: Scores
    function: ScoreFunction
    positions: Sequence[Tensor]
    heads: Tensor
    tables: Learned
    grads: Learned

    def _of(self, piece: Piece) -> tuple[dict[str, Tensor], Tensor]:
        """The positions of a piece, and its heads, broadcastable to scores [c, blocks, h, w]."""
        (queries, keys), (q, k, heads) = self.positions, piece.places(self.scores.by_distance)
        placed = {"q": queries[q][..., None], "k": keys[k][:, None]}
        one = self.heads.view(-1, 1, 1, 1) if heads is None else self.heads[heads][..., None]
        return placed, one

    @property
    def learned(self) -> bool:
        """Whether gradients of tables are asked for."""
        return any(table.requires_grad for table in self.tables.values())

    def _hidden(self, piece: Piece, bias: Tensor | None) -> Tensor | None:
        """The mask that is added, which hides rows that only fill up, whose scores may be NaN."""
        if self.scores.everywhere or piece.q.missing is None:
            return bias
        rows = torch.zeros(piece.q.count, 1, piece.q.height, 1, device="cpu")
        rows.view(-1)[piece.q.missing] = LOWEST
        return rows if bias is None else torch.minimum(bias, rows)

    def _changed(
        self, piece: Piece, q: Tensor, k: Tensor, bias: Tensor | None, tables: Learned
    ) -> Tensor:
        """What scores of a piece [blocks, c, h, w] become under a mask, which is added."""
        placed, heads = self._of(piece)
        scores = q @ repeated(k, q.shape[1]).mT
        left, bias = None, self._hidden(piece, bias)
        if bias is not None and not self.scores.everywhere:
            left = (bias >= 0).expand_as(scores).transpose(0, 1)
        changed = self.function(scores.transpose(0, 1), placed, tables, heads, left)
        return masked(changed.transpose(0, 1), bias, self.scores)

    def added(self, piece: Piece, bias: Tensor | None, kind: torch.dtype) -> Tensor:
        """What additive changes and a mask add to the scores of a piece [blocks, c, h, w]."""
        (placed, heads), bias = self._of(piece), self._hidden(piece, bias)
        added = self.function.added_to(kind, placed, self.tables, heads)
        heads_there = len(heads) if heads.dim() == 4 else 1
        added = added.expand(heads_there, piece.q.count, piece.q.height, piece.k.height)
        return masked(added.transpose(0, 1), bias, self.scores)

    def forward(
        self, piece: Piece, rows: Sequence[Tensor], bias: Tensor | None, scale: float
    ) -> Partial:
        """Output and log-sum-exps of blocks' queries [..., h, d], keys and values as the flash
        kernel would have them, in the type of `bias`; -inf for a query without a key."""
        q, k, v = rows
        scores = self._changed(piece, q * scale, k, bias, self.tables)
        weights, total, lse = shares(scores, None, "softmax")
        # a softmax has them
        return (weights @ repeated(v, q.shape[1])) / total, cast(Tensor, lse)

    def backward(
        self, piece: Piece, rows: Sequence[Tensor], bias: Tensor | None, scale: float
    ) -> list[Tensor]:
        """The gradients of blocks' queries, keys and values; `rows` are the gradient of the output,
        q, k, v, the output and the log-sum-exps, as `forward` takes and returns them."""
        sums = rows[5]
        grad, q, k, v, out = (x.to(sums.dtype) for x in rows[:5])
        tables = {name: x.detach().requires_grad_() for name, x in self.tables.items()}
        with torch.enable_grad():
            leaves = [q.detach().requires_grad_(), k.detach().requires_grad_()]
            scores = self._changed(piece, leaves[0] * scale, leaves[1], bias, tables)
        with torch.no_grad():
            weights = torch.exp(scores - sums[..., None])
            of_weights = grad @ repeated(v, q.shape[1]).mT - (grad * out).sum(-1, keepdim=True)
            asked = [*leaves, *tables.values()]
            of_q, of_k, *shares = torch.autograd.grad(scores, asked, weights * of_weights)
            of_v = weights.mT @ grad
        for name, share in zip(tables, shares, strict=True):
            self.grads[name].add_(share)
        if of_v.shape != v.shape:
            of_v = torch.unflatten(of_v, 1, (v.shape[1], -1)).sum(2)
        return [of_q, of_k, of_v]


def changes_of(work: Work, heads: Heads) -> Callable[..., ScoreChanges] | None:
    """Makes the changes of a call from what it brings; None where scores are not changed."""
    if not work.changes:
        return None
    function = ScoreFunction(work.changes, heads, work.length, torch.device("cpu"))
    positions = [torch.from_numpy(at) for at in work.positions]
    return partial(ScoreChanges, work.changes, function, positions)
