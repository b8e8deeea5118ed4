"""The formula on one block: every score of every pair, masked; or of the keys that a few queries
read, which are views where these are ranges, else gathered.

The operations differentiate to any order, export and run on every device.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.common.dropping import kept
from attnspec.backends.common.exact import ByKeyHead, fused
from attnspec.backends.common.masks import MaskPlan, by_key_head, mask_plan, reading
from attnspec.backends.common.merging import Outputs, joined
from attnspec.backends.common.score_formula import Blocks, Formula, scale_of
from attnspec.backends.common.scores import inputs_read
from attnspec.backends.common.torch_modes import unseen
from attnspec.backends.decided.choice import mean_of, rounds_of
from attnspec.backends.one_block.row_keys import ranges_of, row_keys
from attnspec.lower.work import Call, Heads, Work


class DenseKernel(ByKeyHead):
    """The definition: the formula on one block of all pairs, or of the keys at some positions."""

    def __init__(
        self,
        work: Work,
        heads: Heads,
        device: torch.device,
        keys: np.ndarray | None = None,
        plan: MaskPlan | None = None,
    ) -> None:
        self.work, self.formula = work, Formula(work, heads, device)
        q_at = np.arange(work.n_k - work.n_q, work.n_k)[:, None]
        k_at = (np.arange(work.n_k) if keys is None else keys)[None]
        if keys is None or work.reads:
            plan = mask_plan(work.relation, q_at, k_at, work.n_k, device)
        self.plan = plan
        if work.changes:
            queries, present = (torch.from_numpy(at).to(device) for at in work.positions)
            self.positions = {"q": queries[:, None], "k": present[k_at[0]]}
        self.at = [torch.from_numpy(at).to(device) for at in (q_at, k_at)] if work.decided else []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if self.work.decided:
            return self.partial(q, k, v, call)[0]
        return super().__call__(q, k, v, call)

    def partial(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Outputs:
        for leaf in self.work.decided:
            q = call.data[leaf].attending(q)
        rounds = rounds_of(self.work, call)
        if not rounds:
            return super().partial(q, k, v, call)
        outs = [super(DenseKernel, self).partial(q, k, v, each)[0] for each in rounds]
        masks = [self.mask(each) for each in rounds]
        return mean_of(outs, [mask.any(-1) for mask in masks if mask is not None]), None

    def composed(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Outputs:
        """The same of q [B, K, R, n_q, d]."""
        mask, counts, factor, left = self.mask(call), None, None, None
        if mask is not None:
            mask = by_key_head(mask, q.shape[1])
        # how often pairs are weighed, and what their keys and values are multiplied with
        choices = [call.data[leaf] for leaf in self.work.decided]
        if counted := [choice.counts(*self.at) for choice in choices if choice.counted]:
            counts = by_key_head(torch.stack(counted).sum(0).clamp_min(1), q.shape[1])
        if factors := [choice.factor(*self.at) for choice in choices if choice.weight is not None]:
            factor = by_key_head(reduce(torch.mul, factors), q.shape[1])
        if call.seed is not None:
            queries, keys = (
                torch.arange(x, device=q.device)[None] for x in (q.shape[3], k.shape[2])
            )
            left = kept(call, q.shape[:3], queries, keys)
        symbols: dict[str, Tensor] = {}
        if self.work.changes:
            read = inputs_read(self.work, call, q.shape[3], slice(None), q.shape[1])
            symbols = {**self.positions, **read}
        blocks = Blocks(mask, counts, factor, left, symbols)
        return self.formula.of_block(q, k, v, blocks, call)

    def mask(self, call: Call) -> Tensor | None:
        """Which pairs attend, bool, broadcastable to [B, H, n_q, n_k]; None where all do."""
        mask = None if self.plan is None else self.plan(call.data)
        if mask is not None and mask.dim() < 4:
            mask = mask[:, None] if mask.dim() == 3 else mask[None, None]
        if call.padding is None:
            return mask
        real = self._read(call.padding, 1)[:, None, None]
        return real if mask is None else mask & real

    def _read(self, x: Tensor, axis: int) -> Tensor:
        """The keys that are read along an axis."""
        return x


class RowsKernel(DenseKernel):
    """The definition of the last few queries over the keys that they read; plain softmax of which
    no derivative is asked for is torch's own call."""

    def __init__(self, work: Work, heads: Heads, device: torch.device) -> None:
        keys, pairs = row_keys(work)
        mask = None if pairs is None else torch.from_numpy(pairs).to(device)
        super().__init__(work, heads, device, keys, mask if mask is None else lambda data: mask)
        self.fuses = work.plain and len(keys) > 0
        self.ranges = ranges_of(keys)
        self.whole = self.ranges == (range(work.n_k),)
        if self.ranges is None:
            self.index = torch.from_numpy(keys).to(device)

    def composed(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Outputs:
        return super().composed(q, self._read(k, 2), self._read(v, 2), call)

    def traced(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if not (self.fuses and q.shape[-1] and v.shape[-1] and unseen(q, k, v)):
            return self.composed(q, k, v, call)[0]
        scale = scale_of(self.work, q.shape[-1])
        return fused(q, self._read(k, 2), self._read(v, 2), self.mask(call), scale, call.dropout_p)

    def _read(self, x: Tensor, axis: int) -> Tensor:
        """A view where the keys are one range."""
        if self.whole:
            return x
        if self.ranges is None:
            return x.index_select(axis, self.index)
        before = (slice(None),) * axis
        return joined([x[(*before, slice(at.start, at.stop, at.step))] for at in self.ranges], axis)


_LONG = 1 << 24
"""Positions between which every bucket of a learned bias occurs, or whose last has no number."""


class OpenKernel(DenseKernel):
    """The definition for n_q of n_k positions, numbers that a trace does not have."""

    def __init__(self, work: Work, heads: Heads, device: torch.device) -> None:
        self.work = work
        q = torch.arange(work.n_k - work.n_q, work.n_k, device=device)[:, None]
        k = torch.arange(work.n_k, device=device)[None]
        self.plan = reading(work.relation, q, k, work.n_k, {})
        # tables of a length: that of a long sequence serves all
        self.formula = Formula(replace(work, n_k=_LONG), heads, device)
        self.positions = {"q": q, "k": k[0]}
