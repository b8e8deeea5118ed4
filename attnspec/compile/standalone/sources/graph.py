"""The attention of a graph: a mask as a function, and what runs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import dropout, scaled_dot_product_attention

from attnspec.compile.standalone.sources.module import given

HEADS: int | None = None
LAYERS: int | None = None
STEPS = (1, 2, 4)
TWO_SIDED = False

Size = tuple[int, int, int, int]
Tensors = dict[str, Tensor]


# --- generated for each spec: here causal, the usual scale, alibi --------------------------------


def mask_mod_of(layer: int, size: Size, device: str, x: Tensors) -> Callable[..., Tensor]:
    """The mask of the last n_q of n positions; `size` is (B, H, n_q, n)."""
    return lambda b, h, q, k: k <= q + (size[3] - size[2])


def scale_of(size: int, n: int, layer: int) -> float:
    """The factor of the scores, for heads of a size."""
    return 1 / math.sqrt(size)


def changed(score: Tensor, h: Tensor, q: Tensor, k: Tensor, heads: int, learned: Tensors) -> Tensor:
    """The score of query q and key k in head h, changed."""
    return score - torch.exp2(-h.to(score.dtype)) * abs(q - k)


# --- the mask ------------------------------------------------------------------------------------


def masked(layer: int, size: Size, device: str, blocks: bool, x: Tensors | None = None) -> Any:
    """The mask as blocks, or as a tensor that broadcasts to `size`, (B, H, n_q, n_k)."""
    with torch.inference_mode(False):
        mask_mod = mask_mod_of(layer, size, device, x or {})
        if blocks:
            return create_block_mask(mask_mod, *size, device)
        axes = [torch.arange(length, device=device) for length in size]
        at = [each.view(*[1] * axis, -1, *[1] * (3 - axis)) for axis, each in enumerate(axes)]
        return mask_mod(*at)


kept = lru_cache(maxsize=8)(masked)


def mask_of(q: Tensor, k: Tensor, layer: int, blocks: bool, x: Tensors) -> Any:
    """The mask of a call, kept where no input decides it; a trace computes it, at every length."""
    at = layer, (q.shape[0] if x else 1, *q.shape[1:3], k.shape[2]), str(q.device), blocks
    return masked(*at, x) if x or torch.compiler.is_compiling() else kept(*at)


@lru_cache(maxsize=1)
def flex() -> Callable[..., Tensor]:
    """FlexAttention, compiled."""
    return torch.compile(flex_attention, dynamic=False)


def fits_flex(q: Tensor, v: Tensor, dropout_p: float) -> bool:
    """Whether FlexAttention runs it: it drops no weights, takes no float64, no heads below 16."""
    small = q.dtype == torch.float64 or min(q.shape[3], v.shape[3]) < 16
    return q.is_cuda and not small and not dropout_p


# --- what runs it: one of these, which is called `attend` where it is taken over -----------------


def attend_plain(
    q: Tensor, k: Tensor, v: Tensor, layer: int, dropout_p: float, x: Tensors, learned: Tensors
) -> Tensor:
    """softmax(scale q k^T) v over the pairs of the mask; a query that reads nothing gets 0."""
    at = layer, (q.shape[0] if x else 1, *q.shape[1:3], k.shape[2]), str(q.device)
    scale = scale_of(q.shape[3], k.shape[2], layer)
    # FlexAttention drops no weights, and takes no float64 and no heads below 16
    blocks = q.is_cuda and q.dtype != torch.float64 and min(q.shape[3], v.shape[3]) >= 16
    blocks = blocks and not dropout_p
    # a trace computes the mask, at every length
    mask = masked(*at, blocks, x) if x or torch.compiler.is_compiling() else kept(*at, blocks)
    if blocks:
        return flex()(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
    none = ~mask.any(-1, keepdim=True)
    out = scaled_dot_product_attention(
        q, k, v, mask | none, dropout_p, scale=scale, enable_gqa=True
    )
    return out.masked_fill(none, 0.0)


def attend_shifted(
    q: Tensor, k: Tensor, v: Tensor, layer: int, dropout_p: float, x: Tensors, learned: Tensors
) -> Tensor:
    """softmax(changed(scale q k^T)) v over the mask; a query that reads nothing gets 0."""
    (heads, n_q, size), n = q.shape[1:], k.shape[2]
    scale, blocks = scale_of(size, n, layer), fits_flex(q, v, dropout_p)
    mask = mask_of(q, k, layer, blocks, x)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return changed(score, h, q + (n - n_q), k, heads, learned)

    if blocks:
        return flex()(q, k, v, score_mod, mask, scale, enable_gqa=True)
    # half types would round what is added to the scores of far keys
    kind, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    h, rows, keys = (torch.arange(count, device=q.device) for count in (heads, n_q, n))
    zero, none = q.new_zeros(heads, n_q, n), ~mask.any(-1, keepdim=True)
    added = score_mod(zero, zero, h[:, None, None], rows[:, None], keys)
    added = added.masked_fill(~(mask | none), -torch.inf)
    out = scaled_dot_product_attention(q, k, v, added, dropout_p, scale=scale, enable_gqa=True)
    return out.masked_fill(none, 0.0).to(kind)


def attend_weighed(
    q: Tensor, k: Tensor, v: Tensor, layer: int, dropout_p: float, x: Tensors, learned: Tensors
) -> Tensor:
    """weigh(changed(scale q k^T)) v over the mask, in n_q n_k numbers a head."""
    (heads, n_q, size), n, kind = q.shape[1:], k.shape[2], q.dtype
    mask = mask_of(q, k, layer, False, x)
    q, k, v = (each.to(torch.promote_types(kind, torch.float32)) for each in (q, k, v))
    k, v = (each.repeat_interleave(heads // k.shape[1], 1) for each in (k, v))
    h, keys = (torch.arange(count, device=q.device) for count in (heads, n))
    scores = q * scale_of(size, n, layer) @ k.mT
    scores = changed(scores, h[:, None, None], keys[n - n_q :, None], keys, heads, learned)
    return (dropout(softmax(scores, mask), dropout_p) @ v).to(kind)


def attend_on_gpu(
    q: Tensor, k: Tensor, v: Tensor, layer: int, dropout_p: float, x: Tensors, learned: Tensors
) -> Tensor:
    """The same by FlexAttention, where that runs it."""
    if not fits_flex(q, v, dropout_p):
        return attend_weighed(q, k, v, layer, dropout_p, x, learned)
    (heads, n_q, size), n = q.shape[1:], k.shape[2]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return changed(score, h, q + (n - n_q), k, heads, learned)

    mask, scale = mask_of(q, k, layer, True, x), scale_of(size, n, layer)
    return flex()(q, k, v, score_mod, mask, scale, enable_gqa=True)


# --- what scores become: one of these, which is called `weigh` where it is taken over ------------


def softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the pairs of the mask; a row without one weighs nothing."""
    none = ~mask.any(-1, keepdim=True)
    return scores.masked_fill(~(mask | none), -torch.inf).softmax(-1).masked_fill(none, 0.0)


def softmax1(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the pairs of the mask and one more logit, which is 0."""
    scores = scores.masked_fill(~mask, -torch.inf)
    return torch.cat([scores, scores.new_zeros(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]


def relu(scores: Tensor, mask: Tensor) -> Tensor:
    """The positive scores of the pairs of the mask, divided by their sum."""
    weights = torch.relu(scores).masked_fill(~mask, 0.0)
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


def sigmoid(scores: Tensor, mask: Tensor) -> Tensor:
    """The sigmoid of each score of a pair of the mask."""
    return torch.sigmoid(scores).masked_fill(~mask, 0.0)


class Biased(nn.Module):
    """q [B, H, n_q, d], k [B, H_kv, n_k, d], v [B, H_kv, n_k, d_v] -> [B, H, n_q, d_v]; queries
    are the last n_q positions, `key_padding_mask` is bool [B, n_k], True for a real key."""

    def __init__(self, head_size: int | None = None) -> None:
        super().__init__()
        buckets = (len(STEPS) + 1) * (1 + TWO_SIDED)
        self.bias_0 = nn.Parameter(torch.empty(LAYERS or 1, HEADS or 1, buckets))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """At first no position is preferred."""
        nn.init.zeros_(self.bias_0)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer: int = 0,
        key_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        x, n = given(q, k, v, layer, inputs, key_padding_mask), k.shape[2]
        # the bucket of each distance q - k, from 1 - n on; STEPS are the least of all but the first
        distance = torch.arange(1 - n, max(1, n), device=q.device)
        far = distance.abs() if TWO_SIDED else distance.clamp_min(0)
        bucket = torch.bucketize(far, torch.tensor(STEPS, device=q.device), right=True)
        bucket = bucket + (distance < 0) * TWO_SIDED * (len(STEPS) + 1)
        # in half types the gradients of all pairs would not add up
        table = self.bias_0[layer if LAYERS else 0].to(torch.promote_types(q.dtype, torch.float32))
        bias = table[:, bucket].expand(q.shape[1], -1)
        return attend_shifted(q, k, v, layer, dropout_p, x, {"bias": bias})
