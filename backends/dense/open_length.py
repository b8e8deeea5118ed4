"""Dense attention in a trace whose lengths are symbols: the pairs are asked for when it runs."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnspec.backends.common.masks import Reading
from attnspec.backends.common.score_formula import Formula
from attnspec.backends.dense.kernel import DenseKernel
from attnspec.lower.work import Work

_LONG = 1 << 24
"""Positions between which every bucket of a learned bias occurs, or whose last has no number."""


class OpenKernel(DenseKernel):
    """The definition for n_q of n_k positions, numbers that a trace does not have."""

    def __init__(self, work: Work, heads: tuple[int, ...], device: torch.device) -> None:
        self.work = work
        q = torch.arange(work.n_k - work.n_q, work.n_k, device=device)[:, None]
        k = torch.arange(work.n_k, device=device)[None]
        self.plan = Reading(work.relation, q, k)
        # tables of a length: that of a long sequence serves all
        self.formula = Formula(replace(work, n_k=_LONG), heads, device)
        self.distance = (q - k)[None]
