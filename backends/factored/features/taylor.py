"""Taylor attention: the first terms of the exponential's series as exact features.

1 + x . y of unit rows is the product of (1, x) and (1, y); 1 + s + s^2 / 2 with s = x . y is that
of (1, x, x_a x_b for a < b, x_a^2 / sqrt(2)). The products of channels are computed by blocks of
channels: x_a x_b for each pair of blocks, and x_a x_b / sqrt(2) for all a and b of one block.
Sources: Li, Su et al. 2020, "Linear Attention Mechanism", section 3; Arora et al. 2024, "Simple
linear attention language models balance the recall-throughput tradeoff", section 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch.nn import functional

from attnspec.backends.common.torch_modes import unseen
from attnspec.backends.factored.features.kernel import FeatureKernel
from attnspec.backends.factored.features.maps import Features, Tables, unit
from attnspec.backends.factored.features.quotients import Quotient
from attnspec.backends.factored.features.spans import Summing
from attnspec.ir.mechanisms.taylor import CHANNELS, Taylor, products_kept
from attnspec.limits import LIMITS
from attnspec.lower.work import Work

SMALL = 1e-6
"""How far sums of weights are kept from 0: unit rows that point away from each other weigh 0."""


@dataclass(frozen=True)
class FirstOrder:
    """(1, x / |x|)."""

    def queries(self, x: torch.Tensor, tables: Tables) -> Features:
        return Features(functional.pad(unit(x), (1, 0), value=1.0))

    keys = queries

    def width(self, size: int) -> int:
        return size + 1


@dataclass(frozen=True)
class SecondOrder:
    """(the products of two channels, x, 1), of x times the root of the scale of scores."""

    factor: float | None

    def queries(self, x: torch.Tensor, tables: Tables) -> Features:
        x = self._scaled(x)
        blocks = list(_blocks(x))
        if not unseen(x):
            products = [(one[..., None] * rest[..., None, :]).flatten(-2) for one, rest in blocks]
            return Features(torch.cat([*products, x, torch.ones_like(x[..., :1])], -1))
        values = x.new_empty(*x.shape[:-1], self.width(x.shape[-1]))
        low = 0
        for one, rest in blocks:
            shape = one.shape[-1], rest.shape[-1]
            into = torch.unflatten(values[..., low : low + shape[0] * shape[1]], -1, shape)
            torch.mul(one[..., None], rest[..., None, :], out=into)
            low += shape[0] * shape[1]
        values[..., low:-1], values[..., -1] = x, 1.0
        return Features(values)

    keys = queries

    def back(
        self, x: torch.Tensor, values: torch.Tensor, grad: torch.Tensor, tables: Tables
    ) -> torch.Tensor:
        size, low = x.shape[-1], 0
        found = grad[..., -size - 1 : -1].clone()
        for at, (one, rest) in zip(range(0, size, CHANNELS), _blocks(self._scaled(x)), strict=True):
            shape = one.shape[-1], rest.shape[-1]
            products = torch.unflatten(grad[..., low : low + shape[0] * shape[1]], -1, shape)
            own = (products @ rest[..., None]).squeeze(-1)
            others = (one[..., None, :] @ products).squeeze(-2)
            found[..., at : at + shape[0]] += own + others[..., : shape[0]] / math.sqrt(2)
            found[..., at + shape[0] :] += others[..., shape[0] :]
            low += shape[0] * shape[1]
        return self._scaled(found)

    def pairs(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = self._scaled(q) @ self._scaled(k).transpose(-1, -2)
        return 1 + scores + scores.square() / 2

    def width(self, size: int) -> int:
        return products_kept(size)

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.shape[-1] ** -0.25 if self.factor is None else self.factor)


def _blocks(x: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each block of channels and what it is multiplied with: itself, over the root of 2 on both
    sides of a product, and all channels behind it."""
    for low in range(0, x.shape[-1], CHANNELS):
        one, behind = x[..., low : low + CHANNELS], x[..., low + CHANNELS :]
        yield one, torch.cat([one / math.sqrt(2), behind], -1)


def taylor_kernel(work: Work, heads: tuple[int, ...], device: torch.device) -> FeatureKernel:
    """Runs `taylor`."""
    declared = cast(Taylor, work.mechanism)
    features: FirstOrder | SecondOrder = FirstOrder()
    if declared.order == 2:
        features = SecondOrder(None if work.scale is None else math.sqrt(work.scale))
    how = Summing(features, work.causal, Quotient(least=SMALL))
    return FeatureKernel(
        "taylor", replace(how, chunk=LIMITS.taylor_chunk) if declared.order == 2 else how
    )
