"""The definition with numbers added to the scores of all pairs: a mask that comes with a call."""

from __future__ import annotations

import torch

from attnspec.backends.common.masks import by_key_head
from attnspec.backends.common.score_formula import Formula
from attnspec.backends.dense.kernel import DenseKernel
from attnspec.lower.work import Call, Work


class MaskedKernel(DenseKernel):
    """Dense attention of some heads with `added`, broadcastable to [B, H, n_q, n_k] for all heads,
    on top of the changed scores; a pair with -inf is none."""

    def __init__(
        self, work: Work, heads: tuple[int, ...], device: torch.device, added: torch.Tensor
    ) -> None:
        super().__init__(work, heads, device)
        if added.dim() == 4 and added.shape[1] > 1:
            added = added[:, list(heads)]
        added = added.reshape((1,) * (4 - added.dim()) + added.shape)
        self.allowed = added > -torch.inf
        self.formula = _Adding(work, heads, device, torch.where(self.allowed, added, 0.0))

    def mask(self, call: Call) -> torch.Tensor:
        return super().mask(call) & self.allowed


class _Adding(Formula):
    """The formula with numbers [B or 1, H or 1, n_q, n_k] on top of the changed scores."""

    def __init__(
        self, work: Work, heads: tuple[int, ...], device: torch.device, added: torch.Tensor
    ) -> None:
        super().__init__(work, heads, device)
        self.added = added

    def changed(
        self, scores: torch.Tensor, distance: torch.Tensor | None, call: Call
    ) -> torch.Tensor:
        found = super().changed(scores, distance, call)
        added: torch.Tensor = by_key_head(self.added, found.shape[1])
        return found + added.to(found.dtype)
