"""The formula of exact attention in tensor operations: scores, their changes, mask, weights.

It differentiates to any order and under torch.func, exports, and runs on every device. Tensors
come as blocks: q [B, K, R, G, h, d], k [B, K, G, w, d], v [B, K, G, w, e] for K key heads with R
query heads each and G independent blocks of h queries and w keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from attnspec.backends.common.dropping import factor_of
from attnspec.backends.common.merging import Outputs, wide_type
from attnspec.backends.common.scores import ScoreFunction
from attnspec.lower.work import Call, Heads, Work


@dataclass(frozen=True)
class Blocks:
    """Where the blocks of a computation lie.

    `mask` is bool, True = attends, broadcastable to [B, K, R, G, h, w]; None where nothing asks for
    it. So are `counts`, how often a pair is weighed, `factor`, what its key and value are
    multiplied with, and `kept`, whether dropout keeps its weight, where that is known. `symbols`
    are what scores read: positions q and k, int64, broadcastable to [G, h, w], and inputs by their
    symbols.
    """

    mask: Tensor | None
    counts: Tensor | None = None
    factor: Tensor | None = None
    kept: Tensor | None = None
    symbols: Mapping[str, Tensor] = field(default_factory=dict)


def widened(x: Tensor) -> Tensor:
    """A tensor in the type that sums are kept in."""
    return x.to(wide_type(x))


def scale_of(work: Work, size: int) -> float:
    """The factor of the scores for heads of a size."""
    if work.scale is not None:
        return work.scale
    return 1.0 / math.sqrt(size) if size else 1.0


class Formula:
    """Attention of one work for some heads; holds the constants its score changes need."""

    def __init__(self, work: Work, heads: Heads, device: torch.device) -> None:
        self.work, self.change = work, ScoreFunction(work.changes, heads, work.length, device)

    def of_heads(self, places: Sequence[int]) -> Formula:
        """The formula of some of the heads, by their places among them."""
        some = copy(self)
        some.change = self.change.of_heads(places)
        return some

    def of_block(self, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, call: Call) -> Outputs:
        """As `partial`, of one block, without its axis: q [B, K, R, h, d], k [B, K, w, d]."""
        q, k, v = q[:, :, :, None], k[:, :, None], v[:, :, None]
        out, lse = self.partial(q, k, v, blocks, call)
        return out[:, :, :, 0], None if lse is None else lse[:, :, :, 0]

    def partial(self, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, call: Call) -> Outputs:
        """The output blocks and their log-sum-exps [B, K, R, G, h] in float32 at least, -inf where
        a query has no key; None for weights that are not softmax."""
        rows, dtype = (q.shape[2], q.shape[4]), q.dtype
        q, k, v = widened(q), widened(k), widened(v)
        if self.work.unit_keys:
            k = unit(k)
        # the query heads of one key head are more rows of one product, so that keys are not copied
        q = q.transpose(2, 3).flatten(3, 4)
        scores = (q * scale_of(self.work, q.shape[-1])) @ k.transpose(-1, -2)
        scores = torch.unflatten(scores, 3, rows).transpose(2, 3)
        weights, lse = self.weights(scores, blocks, call)
        out = torch.unflatten(weights.transpose(2, 3).flatten(3, 4) @ v, 3, rows)
        return out.transpose(2, 3).to(dtype), lse

    def weights(self, scores: Tensor, blocks: Blocks, call: Call) -> Outputs:
        """The weights [B, K, R, G, h, w] of scaled scores, and their log-sum-exps [B, K, R, G, h],
        if there are any."""
        if blocks.factor is not None:
            scores = scores * blocks.factor
        if self.work.changes:
            scores = self.change(scores, blocks.symbols, call.tables, pairs=blocks.mask)
        weights, total, lse = shares(scores, blocks.mask, self.work.normalize, blocks.counts)
        weights = weights / total
        if blocks.factor is not None:
            weights = weights * blocks.factor
        if blocks.kept is not None:
            weights = weights * factor_of(call.dropout_p) * blocks.kept
        elif call.dropout_p:
            weights = functional.dropout(weights, call.dropout_p)
        return weights, lse


def unit(x: Tensor) -> Tensor:
    """Vectors [..., d] at length 1; those of length 0 stay."""
    # of a size at which squares neither vanish nor overflow; it cancels, and so has no gradient
    least, most = x.detach().amin(-1, keepdim=True), x.detach().amax(-1, keepdim=True)
    size = torch.maximum(most, -least)
    x = x / torch.where(size > 0, size, 1.0)
    square = torch.linalg.vecdot(x, x)[..., None]
    return x / torch.where(square > 0, square, 1.0).sqrt()


def shares(
    scores: Tensor, mask: Tensor | None, normalize: str, counts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What scores [..., w] weigh under a mask, each so many times: numerators [..., w], what
    divides them [..., 1] or [], and the log-sum-exps of the scores [...], None for weights that are
    not softmax."""

    def times(weights: Tensor) -> Tensor:
        return weights if counts is None else weights * counts.to(weights.dtype)

    if normalize in ("sigmoid", "relu"):
        weights = times(getattr(torch, normalize)(scores))
        weights = weights if mask is None else weights.masked_fill(~mask, 0.0)
        if normalize == "sigmoid":
            return weights, weights.new_ones(()), None
        total = weights.sum(-1, keepdim=True)
        return weights, torch.where(total > 0, total, 1.0), None
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf)
    # the shift cancels in the quotient, so that it has no gradient
    top = scores.detach()
    if scores.shape[-1]:
        top = top.amax(-1, keepdim=True).clamp_min(0.0 if normalize == "softmax1" else -torch.inf)
        top = torch.where(top > -torch.inf, top, 0.0)
    else:
        top = torch.zeros_like(top.sum(-1, keepdim=True))
    weights = times(torch.exp(scores - top))
    total = weights.sum(-1, keepdim=True)
    if normalize == "softmax1":
        total = total + torch.exp(-top)
    some = torch.where(total > 0, total, 1.0)
    lse = torch.where(total > 0, torch.log(some) + top, -torch.inf)
    return weights, some, lse[..., 0]
