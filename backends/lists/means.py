"""Attention of the means of clusters of queries: few rows read all keys, and each query gets what
the mean of its cluster gets."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

import torch

from attnspec.backends.one_block.dense import DenseKernel
from attnspec.backends.tables.kernel import SteppedKernel
from attnspec.graphs.patterns.full import Full
from attnspec.lower.work import Call, Work


class MeansKernel:
    """A work whose one choice are clusters of queries, `count` of them."""

    def __init__(
        self, work: Work, heads: tuple[int, ...], device: torch.device, count: int
    ) -> None:
        self.work, self.heads, self.device = work, heads, device
        means = replace(work, relation=Full(), n_q=count, reads=())
        self.inner = SteppedKernel(means, heads, device)

    @cached_property
    def definition(self) -> DenseKernel:
        """What drops single weights of each query."""
        return DenseKernel(self.work, self.heads, self.device)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        return self.partial(q, k, v, call)[0]

    def partial(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output [B, H, n_q, d_v] and its log-sum-exps [B, H, n_q]."""
        if call.dropout_p:
            return self.definition.partial(q, k, v, call)
        clusters = call.data[self.work.decided[0]]
        out, lse = self.inner.partial(clusters.means(q), k, v, Call(padding=call.padding))
        # `softmax1` has one key more, whose score is 0
        none = 0.0 if self.work.normalize == "softmax1" else -math.inf
        return clusters.spread(out, 0.0), clusters.spread(lse[..., None], none)[..., 0]
