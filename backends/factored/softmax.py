"""Softmax attention between any rows, and means of segments: what factorised attention is put
together from.

Queries and keys need not be tokens here: a projected key, a landmark or a synthesised row serves as
well. Large products, and those that nothing differentiates, go through torch's fused attention,
which keeps no weights; others through plain operations that differentiate to any order.

n positions in m segments: the first m - n mod m have n // m positions, the others one more; with
fewer positions than segments each position is its own. Padding does not count: the real positions
of a sample are cut as a sequence of their own, so that padding changes no result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attnspec.backends.common.score_formula import weigh
from attnspec.backends.common.torch_modes import is_transformed, unseen
from attnspec.backends.factored import text_of_matrices
from attnspec.ir.mechanisms.declaration import LANES
from attnspec.limits import LIMITS

_text: Any = text_of_matrices
"""The definition, whose functions are written without types."""


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
    if causal and not even:
        earlier = lower_triangle(rows, columns, q.device)
        mask = earlier if mask is None else mask & earlier
    large = batch * heads * rows * columns >= LIMITS.fused and not is_transformed()
    plain = mask is None and not causal and not dropout_p and q.is_cpu
    empty = not (q.numel() and v.numel())
    if columns >= LANES and (large or (plain and not empty and unseen(q, k, v))):
        # the fused kernel knows one head size; zeros change no score, and their outputs are cut off
        wide = max(size, out_size)
        out = functional.scaled_dot_product_attention(
            functional.pad(q, (0, wide - size)) if size < wide else q,
            functional.pad(k, (0, wide - size)) if size < wide else k,
            functional.pad(v, (0, wide - out_size)) if out_size < wide else v,
            attn_mask=mask,
            dropout_p=dropout_p,
            is_causal=even,
            scale=scale,
            enable_gqa=heads > keys,
        )
        return out[..., :out_size]
    if even:
        mask = lower_triangle(rows, columns, q.device)
    # the query heads of one key head are more rows of one product
    grouped = (q * scale).reshape(batch, keys, heads // keys * rows, size)
    scores = (grouped @ k.transpose(-1, -2)).view(batch, heads, rows, columns)
    weights = weigh(scores, mask, "softmax")
    if dropout_p:
        weights = functional.dropout(weights, dropout_p)
    out = weights.view(batch, keys, heads // keys * rows, columns) @ v
    return out.view(batch, heads, rows, out_size)


def lower_triangle(rows: int, columns: int, device: torch.device) -> Tensor:
    """bool [rows, columns]: the last `rows` positions read no later one."""
    at = torch.arange(columns - rows, columns, device=device)
    return at[:, None] >= torch.arange(columns, device=device)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Key heads [B, K, n, d] as [B, heads, n, d], each beside the query heads that read it."""
    if x.shape[1] == heads:
        return x
    return x.repeat_interleave(heads // x.shape[1], 1)


def without_padding(x: Tensor, padding: Tensor | None) -> Tensor:
    """Rows [B, H, n, d] with zeros where `padding`, bool [B, n], is False."""
    return x if padding is None else x.masked_fill(~padding[:, None, :, None], 0.0)


def check_no_dropout(name: str, dropout_p: float) -> None:
    """Raises ValueError for a formula without weights to drop."""
    if dropout_p:
        why = "it does not compute every attention weight"
        raise ValueError(f"dropout_p must be 0 with `{name}`, got {dropout_p}: {why}")


# --- segments ------------------------------------------------------------------------------------


def segment_means(x: Tensor, count: int, padding: Tensor | None = None) -> Tensor:
    """The means [B, H, m, d] of m = min(count, n) segments of x [B, H, n, d]; 0 for an empty one.

    `padding` is bool [B, n], True for a real position.
    """
    # torch takes sums many times faster than means
    return _of_segments(x, count, padding, _text.means, lambda parts: parts.sum(3) / parts.shape[3])


def segment_maxima(x: Tensor, count: int, padding: Tensor | None = None) -> Tensor:
    """The maxima likewise."""
    return _of_segments(x, count, padding, _text.maxima, lambda parts: parts.amax(3))


def _of_segments(
    x: Tensor,
    count: int,
    padding: Tensor | None,
    defined: Callable[..., Tensor],
    pooled: Callable[[Tensor], Tensor],
) -> Tensor:
    """What `pooled` makes of segments [B, H, m, length, d], first of the short ones, then of the
    others; the definition where they are those of real positions."""
    n = x.shape[2]
    count = min(count, n)
    if padding is not None:
        return defined(x, count, padding)
    if count == n:
        return x
    size, long = divmod(n, count)
    cut = (count - long) * size
    parts = [pooled(torch.unflatten(x[:, :, :cut], 2, (count - long, size)))]
    if long:
        parts.append(pooled(torch.unflatten(x[:, :, cut:], 2, (long, size + 1))))
    return torch.cat(parts, 2)
