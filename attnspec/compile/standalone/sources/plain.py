"""Softmax of the scaled scores: torch's own call, FlexAttention on a GPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnspec.compile.standalone.sources.masking import flex, kept, masked


def scale_of(size: int, n: int, layer: int) -> float:
    """Generated for each spec; here the usual one."""
    return 1 / math.sqrt(size)


def attend(
    q: Tensor, k: Tensor, v: Tensor, layer: int, dropout_p: float, x: dict[str, Tensor]
) -> Tensor:
    """softmax(scale q k^T) v over the pairs of the mask; a query that reads nothing gets 0."""
    at = layer, (q.shape[0] if x else 1, *q.shape[1:3], k.shape[2]), str(q.device)
    scale = scale_of(q.shape[3], k.shape[2], layer)
    # FlexAttention drops no weights, and takes no float64 and no heads below 16
    blocks = q.is_cuda and q.dtype != torch.float64 and min(q.shape[3], v.shape[3]) >= 16
    blocks = blocks and not dropout_p
    mask = masked(*at, blocks, x) if x else kept(*at, blocks)
    if blocks:
        return flex()(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
    none = ~mask.any(-1, keepdim=True)
    out = scaled_dot_product_attention(
        q, k, v, mask | none, dropout_p, scale=scale, enable_gqa=True
    )
    return out.masked_fill(none, 0.0)
