"""Softmax attention between any rows: what factorised attention is put together from.

Queries and keys need not be tokens here: a projected key, a landmark or a synthesised row serves as
well. Large products, and those that nothing differentiates, go through torch's fused attention,
which keeps no weights; others through plain operations that differentiate to any order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from attnspec.backends.common.exact import rows_of_size, torch_attention
from attnspec.backends.common.score_formula import shares
from attnspec.backends.common.torch_modes import is_transformed, unseen
from attnspec.ir.mechanisms.declaration import LANES
from attnspec.limits import LIMITS


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool = False,
    *,
    dropout_p: float = 0.0,
) -> Tensor:
    """softmax(scale q k^T) v [B, H, n_q, d_v] of q [B, H, n_q, d], k [B, H, n_k, d] and v.

    `mask` is bool [B, 1, 1 or n_q, n_k], True for a pair that counts; `causal` leaves out the later
    keys, the queries being the last n_q positions. A query without a key gets 0.
    """
    rows, columns, size = q.shape[2], k.shape[2], v.shape[3]
    even = causal and mask is None and rows == columns
    large = q.shape[:3].numel() * columns >= LIMITS.fused and not is_transformed()
    plain = not (causal or dropout_p) and mask is None and q.is_cpu and q.numel() and v.numel()
    fuses = columns >= LANES and (large or (plain and unseen(q, k, v)))
    if causal and not (even and fuses):
        pairs = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)
        mask = pairs if mask is None else mask & pairs
    if not fuses:
        return by_scores(q * scale @ k.mT, v, mask, dropout_p)
    # the fused kernel knows one head size; zeros change no score, and their outputs are cut off
    wide = max(q.shape[3], size)
    q, k, v = (rows_of_size(x, wide) for x in (q, k, v))
    out = torch_attention(q, k, v, mask, scale, dropout_p=dropout_p, is_causal=even)[..., :size]
    return out if mask is None else out.masked_fill(~mask.any(-1, keepdim=True), 0.0)


def by_scores(scores: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float) -> Tensor:
    """softmax(scores) v; a query without a key gets 0."""
    numerators, total, _ = shares(scores, mask, "softmax")
    weights = numerators / total
    if dropout_p:
        # scores may be those of every sample
        weights = functional.dropout(weights.expand(*v.shape[:2], -1, -1), dropout_p)
    return weights @ v


def check_no_dropout(name: str, dropout_p: float) -> None:
    """Raises ValueError for a formula without weights to drop."""
    if dropout_p:
        why = f"dropout needs the weights of all pairs, which `{name}` does not compute"
        raise ValueError(f"dropout_p must be 0 with `{name}`, got {dropout_p}: {why}")
