"""Softmax of scaled scores to which something is added: torch's own call takes that as a mask."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnspec.compile.standalone.sources.masking import flex, kept, masked
from attnspec.compile.standalone.sources.plain import scale_of


def changed(score: Tensor, h: Tensor, q: Tensor, k: Tensor, heads: int, bias: Tensor) -> Tensor:
    """Generated for each spec; here that of `alibi`."""
    return score - torch.exp2(-8 * (h + 1).to(score.dtype) / heads) * abs(q - k)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: int,
    dropout_p: float,
    x: dict[str, Tensor],
    bias: Tensor,
) -> Tensor:
    """softmax(changed(scale q k^T)) v over the mask; a query that reads nothing gets 0."""
    (heads, n_q, size), n = q.shape[1:], k.shape[2]
    at = layer, (q.shape[0] if x else 1, heads, n_q, n), str(q.device)
    scale = scale_of(size, n, layer)
    # FlexAttention drops no weights, and takes no float64 and no heads below 16
    blocks = q.is_cuda and q.dtype != torch.float64 and min(size, v.shape[3]) >= 16
    blocks = blocks and not dropout_p
    mask = masked(*at, blocks, x) if x else kept(*at, blocks)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return changed(score, h, q + (n - n_q), k, heads, bias)

    if blocks:
        return flex()(q, k, v, score_mod, mask, scale, enable_gqa=True)
    h, rows, keys = (torch.arange(count, device=q.device) for count in (heads, n_q, n))
    zero, none = q.new_zeros(heads, n_q, n), ~mask.any(-1, keepdim=True)
    added = score_mod(zero, zero, h[:, None, None], rows[:, None], keys)
    added = added.masked_fill(~(mask | none), -torch.inf)
    out = scaled_dot_product_attention(q, k, v, added, dropout_p, scale=scale, enable_gqa=True)
    return out.masked_fill(none, 0.0)
