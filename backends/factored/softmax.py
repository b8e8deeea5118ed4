"""Softmax attention between any rows: what factorised attention is put together from.

Queries and keys need not be tokens here: a projected key, a landmark or a synthesised row serves as
well. Large products, and those that nothing differentiates, go through torch's fused attention,
which keeps no weights; others through plain operations that differentiate to any order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from attnspec.backends.common.score_formula import weigh
from attnspec.backends.common.torch_modes import is_transformed, unseen
from attnspec.ir.mechanisms.declaration import LANES
from attnspec.limits import LIMITS


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """softmax(scale q k^T) v [B, H, n_q, d_v] of q [B, H, n_q, d], k [B, K, n_k, d] and v
    [B, K, n_k, d_v], where K divides H.

    `mask` is bool [B, 1, 1 or n_q, n_k], True for a pair that counts; `causal` leaves out the later
    keys, the queries being the last n_q positions. A query without a key gets 0.
    """
    batch, heads, rows, size = q.shape
    keys, columns, out_size = k.shape[1], k.shape[2], v.shape[3]
    even = causal and mask is None and rows == columns

    def earlier() -> Tensor:
        return torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)

    if causal and not even:
        mask = earlier() if mask is None else mask & earlier()
    large = batch * heads * rows * columns >= LIMITS.fused and not is_transformed()
    plain = mask is None and not causal and not dropout_p and q.is_cpu
    empty = not (q.numel() and v.numel())
    if columns >= LANES and (large or (plain and not empty and unseen(q, k, v))):
        # the fused kernel knows one head size; zeros change no score, and their outputs are cut off
        wide = max(size, out_size)
        q, k, v = (
            functional.pad(x, (0, wide - x.shape[3])) if x.shape[3] < wide else x for x in (q, k, v)
        )
        out = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout_p,
            is_causal=even,
            scale=scale,
            enable_gqa=heads > keys,
        )
        return out[..., :out_size]
    if even:
        mask = earlier()
    # the query heads of one key head are more rows of one product
    grouped = (q * scale).reshape(batch, keys, heads // keys * rows, size)
    scores = (grouped @ k.transpose(-1, -2)).view(batch, heads, rows, columns)
    weights = weigh(scores, mask, "softmax")
    if dropout_p:
        weights = functional.dropout(weights, dropout_p)
    out = weights.view(batch, keys, heads // keys * rows, columns) @ v
    return out.view(batch, heads, rows, out_size)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Key heads [B, K, n, d] as [B, heads, n, d], each beside the query heads that read it."""
    if x.shape[1] == heads:
        return x
    return x.repeat_interleave(heads // x.shape[1], 1)


def check_no_dropout(name: str, dropout_p: float) -> None:
    """Raises ValueError for a formula without weights to drop."""
    if dropout_p:
        why = "it does not compute every attention weight"
        raise ValueError(f"dropout_p must be 0 with `{name}`, got {dropout_p}: {why}")
