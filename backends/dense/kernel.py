"""Dense attention in torch: every score of every pair, masked."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from attnspec.backends.common.masks import mask_plan
from attnspec.backends.common.score_formula import Blocks, Formula, scale_of
from attnspec.backends.common.torch_modes import is_transformed
from attnspec.lower.work import Call, Kernel, Work

LARGE = 1 << 22
"""Scores from which on plain softmax goes through `scaled_dot_product_attention`, which keeps none
of them, but has no second derivative."""


def dense_kernel(
    work: Work, heads: tuple[int, ...], device: torch.device, large: int = LARGE
) -> Kernel:
    """The kernel of the definition; from `large` scores on fused, where that is the same."""
    q_at = np.arange(work.n_k - work.n_q, work.n_k)[:, None]
    k_at = np.arange(work.n_k)[None]
    plan = mask_plan(work.relation, q_at, k_at, work.n_k, device)
    formula = Formula(work, heads, device)
    plain = work.plain
    distance = None
    if formula.needs_distance:
        distance = torch.from_numpy((q_at - k_at)[None]).to(device)

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
        batch, count, rows, size = q.shape
        keys = k.shape[1]
        mask = plan.mask(call.data, work.n_k)
        fused = plain and batch * count * rows * work.n_k >= large
        if fused and size and v.shape[-1] and not is_transformed():
            mask = mask.view(-1, 1, *mask.shape[-2:])
            if call.padding is not None:
                mask = mask & call.padding[:, None, None]
            return functional.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=call.dropout_p,
                scale=scale_of(work, size),
                enable_gqa=count > keys,
            )
        mask = mask.view(-1, 1, 1, 1, *mask.shape[-2:])
        if call.padding is not None:
            mask = mask & call.padding[:, None, None, None, None, :]
        blocks = Blocks(distance, mask)
        q = q.view(batch, keys, count // keys, 1, rows, size)
        out = formula(q, k[:, :, None], v[:, :, None], blocks, call)
        return out.reshape(batch, count, rows, v.shape[-1])

    return kernel
