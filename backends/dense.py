"""The living definition: every score of every pair, masked; for short sequences and as reference.

It runs every graph on every device, differentiates to any order, exports, and takes n_q * n_k
numbers per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from attnspec.target import Call, Kernel, Work

if TYPE_CHECKING:
    import torch

PAIR = 2.5e-9
"""Seconds per pair: scores, softmax and sum of values of one head of size 64."""

START = 6e-5
"""Seconds per call."""

LARGE = 1 << 22
"""Scores from which on plain softmax goes through `scaled_dot_product_attention`, which keeps none
of them, but has no second derivative."""


@dataclass(frozen=True)
class Dense:
    """Scores of all pairs in one product; from `large` scores on fused, where that is the same."""

    large: int = LARGE

    name: ClassVar = "dense"

    def refuses(self, work: Work, device: str) -> str | None:
        return None

    def cost(self, work: Work) -> float:
        return START + PAIR * work.n_q * work.n_k

    def build(self, work: Work, heads: tuple[int, ...], device: torch.device) -> Kernel:
        import numpy as np
        import torch
        from torch.nn import functional

        from attnspec.formula import Blocks, Formula, scale_of
        from attnspec.masking import mask_plan
        from attnspec.tiled import is_transformed

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
            large = batch * count * rows * work.n_k >= self.large
            if large and plain and size and v.shape[-1] and not is_transformed():
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
