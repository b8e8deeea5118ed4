"""Scores that torch's own call does not know: the formula, in n_q n_k numbers a head."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import dropout

from attnspec.compile.standalone.sources.masking import flex, kept, masked
from attnspec.compile.standalone.sources.plain import scale_of
from attnspec.compile.standalone.sources.shifted import changed
from attnspec.compile.standalone.sources.weights import softmax as weigh


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: int,
    dropout_p: float,
    x: dict[str, Tensor],
    bias: Tensor,
) -> Tensor:
    """weigh(changed(scale q k^T)) v over the mask, in n_q n_k numbers a head."""
    (heads, n_q, size), n, kind = q.shape[1:], k.shape[2], q.dtype
    at = layer, (q.shape[0] if x else 1, heads, n_q, n), str(q.device)
    mask = masked(*at, False, x) if x else kept(*at, False)
    q, k, v = (each.to(torch.promote_types(kind, torch.float32)) for each in (q, k, v))
    k, v = (each.repeat_interleave(heads // k.shape[1], 1) for each in (k, v))
    h, keys = (torch.arange(count, device=q.device) for count in (heads, n))
    scores = q * scale_of(size, n, layer) @ k.mT
    scores = changed(scores, h[:, None, None], keys[n - n_q :, None], keys, heads, bias)
    return (dropout(weigh(scores, mask), dropout_p) @ v).to(kind)


def attend_on_gpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: int,
    dropout_p: float,
    x: dict[str, Tensor],
    bias: Tensor,
) -> Tensor:
    """The same by FlexAttention on a GPU, which drops no weights, and takes no float64 and no heads
    below 16."""
    (heads, n_q, size), n = q.shape[1:], k.shape[2]
    small = q.dtype == torch.float64 or min(size, v.shape[3]) < 16
    if not q.is_cuda or small or dropout_p:
        return attend(q, k, v, layer, dropout_p, x, bias)
    at = layer, (q.shape[0] if x else 1, heads, n_q, n), str(q.device)
    mask = masked(*at, True, x) if x else kept(*at, True)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return changed(score, h, q + (n - n_q), k, heads, bias)

    return flex()(q, k, v, score_mod, mask, scale_of(size, n, layer), enable_gqa=True)
