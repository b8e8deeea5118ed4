"""The formula of exact attention in tensor operations: scores, their changes, mask, weights.

It differentiates to any order and under torch.func, exports, and runs on every device. Tensors
come as blocks: q [B, K, R, G, h, d], k [B, K, G, w, d], v [B, K, G, w, e] for K key heads with R
query heads each and G independent blocks of h queries and w keys.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional

from attnspec.backends.common.dropping import factor_of
from attnspec.backends.common.score_expression import evaluate
from attnspec.ir.scalars import SCORE
from attnspec.lower.work import Alibi, Bias, Call, Change, Expression, Softcap, Work

HALF = (torch.float16, torch.bfloat16)
"""Types whose sums are kept in float32."""


@dataclass(frozen=True)
class Blocks:
    """Where the blocks of a computation lie.

    `distance` is q - k as int64 [G, h, w], `mask` bool, True = attends, both broadcastable to
    [B, K, R, G, h, w]; None where nothing asks for them. So are `counts`, how often a pair is
    weighed, `factor`, what its key and value are multiplied with, and `kept`, whether dropout keeps
    its weight, where that is known, and `added`, what stands on top of the changed scores.
    `symbols` are the values of what expressions of scores read.
    """

    distance: torch.Tensor | None
    mask: torch.Tensor | None
    counts: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    symbols: Mapping[str, torch.Tensor] = field(default_factory=dict)
    added: torch.Tensor | None = None


def widened(x: torch.Tensor) -> torch.Tensor:
    """A tensor in the type that sums are kept in: float32 for the half types."""
    return x.float() if x.dtype in HALF else x


def scale_of(work: Work, size: int) -> float:
    """The factor of the scores for heads of a size."""
    if work.scale is not None:
        return work.scale
    return 1.0 / math.sqrt(size) if size else 1.0


def slopes_of(changes: Sequence[Change], heads: Sequence[int]) -> dict[Alibi, list[float]]:
    """The slope of each head for every `alibi` among the changes."""
    return {
        change: [change.slopes[head] for head in heads]
        for change in changes
        if isinstance(change, Alibi)
    }


def bucket_table(
    change: Bias, n_k: int, device: torch.device, kind: torch.dtype = torch.int64
) -> torch.Tensor:
    """The bucket of every distance q - k from -m to m, shifted by m, [2 m + 1].

    Where one may be further than m = len // 2 away, its bucket is that of m.
    """
    last = farthest(change.buckets, change.max_distance, change.two_sided)
    most = max(0, min(n_k - 1, last))
    distance = np.arange(-most, most + 1)
    found = bucket_of(distance, change.buckets, change.max_distance, change.two_sided)
    # of its type before it is moved: nothing of it runs on the device
    return torch.from_numpy(found).to(kind).to(device)


class Formula:
    """Attention of one work for some heads; holds the constants its score changes need."""

    def __init__(self, work: Work, heads: tuple[int, ...], device: torch.device) -> None:
        self.work = work
        self.slopes = {
            change: torch.from_numpy(np.array(slopes)).to(device)
            for change, slopes in slopes_of(work.changes, heads).items()
        }
        self.buckets = {
            change: bucket_table(change, work.length, device)
            for change in work.changes
            if isinstance(change, Bias)
        }

    def of_heads(self, places: Sequence[int]) -> Formula:
        """The formula of some of the heads, by their places among them."""
        some = copy(self)
        some.slopes = {change: slopes[list(places)] for change, slopes in self.slopes.items()}
        return some

    @property
    def needs_distance(self) -> bool:
        """Whether a score change asks how far apart query and key are."""
        return bool(self.slopes or self.buckets)

    def of_block(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `partial`, of one block, without its axis: q [B, K, R, h, d], k [B, K, w, d]."""
        q, k, v = q[:, :, :, None], k[:, :, None], v[:, :, None]
        out, lse = self.partial(q, k, v, blocks, call)
        return out[:, :, :, 0], None if lse is None else lse[:, :, :, 0]

    def partial(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output blocks and their log-sum-exps [B, K, R, G, h] in float32 at least, -inf where
        a query has no key; None for weights that are not softmax."""
        batch, keys, repeat, groups, rows, _ = q.shape
        given = q.dtype
        q, k, v = widened(q), widened(k), widened(v)
        if self.work.unit_keys:
            k = unit(k)
        # the query heads of one key head are more rows of one product, so that keys are not copied
        q = q.transpose(2, 3).reshape(batch, keys, groups, repeat * rows, q.shape[-1])
        scores = (q * scale_of(self.work, q.shape[-1])) @ k.transpose(-1, -2)
        scores = scores.view(batch, keys, groups, repeat, rows, k.shape[-2]).transpose(2, 3)
        weights, lse = self.weights(scores, blocks, call)
        weights = weights.transpose(2, 3).reshape(batch, keys, groups, repeat * rows, k.shape[-2])
        out = (weights @ v).view(batch, keys, groups, repeat, rows, v.shape[-1])
        return out.transpose(2, 3).to(given), lse

    def weights(
        self, scores: torch.Tensor, blocks: Blocks, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weights [B, K, R, G, h, w] of scaled scores, and their log-sum-exps [B, K, R, G, h],
        if there are any."""
        if blocks.factor is not None:
            scores = scores * blocks.factor
        scores = self.changed(scores, blocks.distance, call, None, blocks.symbols)
        if blocks.added is not None:
            scores = scores + blocks.added.to(scores.dtype)
        found = shares(scores, blocks.mask, self.work.normalize, blocks.counts)
        weights = found.weights
        if blocks.factor is not None:
            weights = weights * blocks.factor
        if blocks.kept is not None:
            weights = weights * factor_of(call.dropout_p) * blocks.kept
        elif call.dropout_p:
            weights = functional.dropout(weights, call.dropout_p)
        return weights, found.lse

    def changed(
        self,
        scores: torch.Tensor,
        distance: torch.Tensor | None,
        call: Call,
        heads: torch.Tensor | None = None,
        symbols: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """What scores [B, K, R, G, h, w] become; of any shape where `heads`, int64, broadcasts to
        it and says which head each of them is of. `symbols` are what expressions read."""
        for change in self.work.changes:
            if isinstance(change, Expression):
                values = {**(symbols or {}), SCORE: scores}
                found = evaluate(change.value, values, scores)
                # a number that reads no pair is that of each
                scores = torch.zeros_like(scores) + found
            elif isinstance(change, Softcap):
                scores = change.cap * torch.tanh(scores / change.cap)
            elif distance is None:
                continue
            elif isinstance(change, Alibi):
                slopes = self.slopes[change].to(scores.dtype)
                each = slopes.view(*scores.shape[1:3], 1, 1, 1) if heads is None else slopes[heads]
                scores = scores - each * distance.abs()
            else:
                table, buckets = call.tables[change.table], self.buckets[change]
                most = len(buckets) // 2
                bucket = buckets[distance.clamp(-most, most) + most]
                if heads is None:
                    bias = table[:, bucket].view(*scores.shape[1:3], *bucket.shape)
                else:
                    bias = table[heads, bucket]
                scores = scores + bias.to(scores.dtype)
        return scores


def unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors [..., d] at length 1; those of length 0 stay."""
    # of a size at which squares neither vanish nor overflow; it cancels, and so has no gradient
    least, most = x.detach().amin(-1, keepdim=True), x.detach().amax(-1, keepdim=True)
    size = torch.maximum(most, -least)
    x = x / torch.where(size > 0, size, 1.0)
    square = torch.linalg.vecdot(x, x)[..., None]
    return x / torch.where(square > 0, square, 1.0).sqrt()


def weigh(scores: torch.Tensor, mask: torch.Tensor | None, normalize: str) -> torch.Tensor:
    """The weights of scores [..., w] under a mask; a row without a key weighs nothing."""
    return shares(scores, mask, normalize).weights


@dataclass(frozen=True)
class Shares:
    """Weights as numerators [..., w], what divides them [..., 1], None for nothing, and the
    log-sum-exps of the scores [...], None for weights that are not softmax."""

    numerators: torch.Tensor
    total: torch.Tensor | None
    lse: torch.Tensor | None = None

    @property
    def weights(self) -> torch.Tensor:
        """The weights."""
        return self.numerators if self.total is None else self.numerators / self.total


def shares(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    normalize: str,
    counts: torch.Tensor | None = None,
) -> Shares:
    """What scores [..., w] weigh under a mask, each so many times."""
    if normalize == "sigmoid":
        weights = _times(torch.sigmoid(scores), counts)
        return Shares(weights if mask is None else weights.masked_fill(~mask, 0.0), None)
    if normalize == "relu":
        weights = _times(torch.relu(scores), counts)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        total = weights.sum(-1, keepdim=True)
        return Shares(weights, torch.where(total > 0, total, 1.0))
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf)
    # the shift cancels in the quotient, so that it has no gradient
    top = _top(scores, 0.0 if normalize == "softmax1" else -torch.inf)
    weights = _times(torch.exp(scores - top), counts)
    total = weights.sum(-1, keepdim=True)
    if normalize == "softmax1":
        total = total + torch.exp(-top)
    some = torch.where(total > 0, total, 1.0)
    lse = torch.where(total > 0, torch.log(some) + top, -torch.inf)
    return Shares(weights, some, lse[..., 0])


def _times(weights: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
    return weights if counts is None else weights * counts.to(weights.dtype)


def _top(scores: torch.Tensor, least: float) -> torch.Tensor:
    """The greatest score of every row [..., 1], a constant; 0 where there is none."""
    if scores.shape[-1] == 0:
        return torch.zeros_like(scores.detach().sum(-1, keepdim=True))
    top = scores.detach().amax(-1, keepdim=True).clamp_min(least)
    return torch.where(top > -torch.inf, top, 0.0)


def thresholds(buckets: int, max_distance: int) -> list[int]:
    """The least distance of every bucket but the first, for one direction."""
    exact = buckets // 2
    if exact == 0:
        return []
    wide = buckets - exact
    # in whole numbers the least x with (x / exact)^wide >= (max_distance / exact)^step
    far = range(exact, max(exact, max_distance))
    least = [max_distance**step * exact ** (wide - step) for step in range(1, wide)]
    places = (bisect_left(far, x, key=lambda distance: distance**wide) for x in least)
    return [*range(1, exact + 1), *(exact + place for place in places)]


def farthest(buckets: int, max_distance: int, two_sided: bool) -> int:
    """The distance from which on all have the same bucket."""
    return max(thresholds(buckets // 2 if two_sided else buckets, max_distance), default=0)


def bucket_of(distance: np.ndarray, buckets: int, max_distance: int, two_sided: bool) -> np.ndarray:
    """The bucket of each distance q - k, int64; later keys have the upper half if `two_sided`."""
    side = buckets // 2 if two_sided else buckets
    steps = np.array(thresholds(side, max_distance), np.int64)
    far = np.abs(distance) if two_sided else np.maximum(distance, 0)
    bucket = np.searchsorted(steps, far, side="right")
    if two_sided:
        bucket = bucket + side * (distance < 0)
    return np.asarray(bucket, np.int64)
