"""Dense attention in torch: every score of every pair, masked."""

from __future__ import annotations

import numpy as np
import torch

from attnspec.backends.common.masks import mask_plan
from attnspec.backends.common.score_formula import Blocks, Formula
from attnspec.lower.work import Call, Work


class DenseKernel:
    """The definition: the formula on one block of all pairs."""

    def __init__(self, work: Work, heads: tuple[int, ...], device: torch.device) -> None:
        self.work = work
        q_at = np.arange(work.n_k - work.n_q, work.n_k)[:, None]
        k_at = np.arange(work.n_k)[None]
        self.plan = mask_plan(work.relation, q_at, k_at, work.n_k, device)
        self.formula = Formula(work, heads, device)
        self.distance = None
        if self.formula.needs_distance:
            self.distance = torch.from_numpy((q_at - k_at)[None]).to(device)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        return self.partial(q, k, v, call)[0]

    def partial(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output [B, H, n_q, d_v] and its log-sum-exps [B, H, n_q], if there are any."""
        batch, heads, rows, size = q.shape
        grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], rows, size)
        out, lse = self.composed(grouped, k, v, call)
        if lse is not None:
            lse = lse.reshape(batch, heads, rows)
        return out.reshape(batch, heads, rows, v.shape[-1]), lse

    def composed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same of q [B, K, R, n_q, d]."""
        mask = self.mask(call)
        blocks = Blocks(self.distance, mask[:, None, None, None])
        out, lse = self.formula.partial(
            q[:, :, :, None], k[:, :, None], v[:, :, None], blocks, call
        )
        return out[:, :, :, 0], None if lse is None else lse[:, :, :, 0]

    def mask(self, call: Call) -> torch.Tensor:
        """Which pairs attend, bool, broadcastable to [B, n_q, n_k]."""
        mask = self.plan.mask(call.data, self.work.n_k)
        mask = mask.view(-1, *mask.shape[-2:])
        return mask if call.padding is None else mask & call.padding[:, None]
