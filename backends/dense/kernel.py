"""Dense attention in torch: every score of every pair, masked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce

import numpy as np
import torch

from attnspec.backends.common.dropping import kept
from attnspec.backends.common.masks import Reading, by_key_head, mask_plan
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
            queries, keys = work.positions
            self.distance = torch.from_numpy((queries[:, None] - keys)[None]).to(device)
        self.at = [torch.from_numpy(at).to(device) for at in (q_at, k_at)] if work.decided else []

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        return self.partial(q, k, v, call)[0]

    def partial(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output [B, H, n_q, d_v] and its log-sum-exps [B, H, n_q], if there are any."""
        batch, heads, rows, size = q.shape
        for leaf in self.work.decided:
            q = call.data[leaf].attending(q)
        grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], rows, size)
        rounds = list(_rounds(self.work, call))
        found = [self.composed(grouped, k, v, each) for each in rounds or [call]]
        out, lse = found[0] if not rounds else (self._mean(rounds, [o for o, _ in found]), None)
        if lse is not None:
            lse = lse.reshape(batch, heads, rows)
        return out.reshape(batch, heads, rows, v.shape[-1]), lse

    def composed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same of q [B, K, R, n_q, d]."""
        blocks = Blocks(
            self.distance,
            _by_key_head(self.mask(call), q),
            _by_key_head(self._counts(call), q),
            _by_key_head(self._factor(call), q),
            self._kept(call, q),
        )
        out, lse = self.formula.partial(
            q[:, :, :, None], k[:, :, None], v[:, :, None], blocks, call
        )
        return out[:, :, :, 0], None if lse is None else lse[:, :, :, 0]

    def mask(self, call: Call) -> torch.Tensor:
        """Which pairs attend, bool, broadcastable to [B, H, n_q, n_k]."""
        mask = self.plan.mask(call.data, self.work.n_k)
        if not self.work.decided:
            mask = mask.view(-1, 1, *mask.shape[-2:])
        return mask if call.padding is None else mask & call.padding[:, None, None]

    def _counts(self, call: Call) -> torch.Tensor | None:
        """How often pairs are weighed where a choice finds them several times."""
        choices = (call.data[leaf] for leaf in self.work.decided)
        counts = [choice.counts(*self.at) for choice in choices if choice.counted]
        return torch.stack(counts).sum(0).clamp_min(1) if counts else None

    def _factor(self, call: Call) -> torch.Tensor | None:
        """What keys and values of pairs are multiplied with."""
        choices = (call.data[leaf] for leaf in self.work.decided)
        found = [choice.factor(*self.at) for choice in choices if choice.weight is not None]
        return reduce(torch.mul, found) if found else None

    def _kept(self, call: Call, q: torch.Tensor) -> torch.Tensor | None:
        """Which weights are kept where counters drop some."""
        rows, keys = (torch.arange(x, device=q.device)[None] for x in (q.shape[3], self.work.n_k))
        return kept(call, q.shape[:3], rows, keys)

    def _mean(self, rounds: list[Call], outs: list[torch.Tensor]) -> torch.Tensor:
        """The mean of the outputs [B, K, R, n_q, d_v] of the rounds in which a query has a key."""
        wide = torch.promote_types(outs[0].dtype, torch.float32)
        total = torch.zeros_like(outs[0], dtype=wide)
        count = torch.zeros_like(total[..., :1])
        for call, out in zip(rounds, outs, strict=True):
            total = total + out
            read = _by_key_head(self.mask(call).any(-1, keepdim=True), out)
            count = count + (0 if read is None else read[:, :, :, 0])
        return (total / count.clamp_min(1)).to(outs[0].dtype)


def _rounds(work: Work, call: Call) -> Iterator[Call]:
    """The calls whose outputs are averaged, if any are."""
    for leaf in work.decided:
        for choice in call.data[leaf].rounds():
            yield replace(call, data={**call.data, leaf: choice})


def _by_key_head(held: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """What is broadcastable to [B, H, n_q, n_k] as [B, K, R, 1, n_q, n_k], for q [B, K, R, …]."""
    return None if held is None else by_key_head(held, q.shape[1])


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
        self,
        scores: torch.Tensor,
        distance: torch.Tensor | None,
        call: Call,
        heads: torch.Tensor | None = None,
    ) -> torch.Tensor:
        found = super().changed(scores, distance, call, heads)
        added: torch.Tensor = by_key_head(self.added, found.shape[1])
        return found + added.to(found.dtype)


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
