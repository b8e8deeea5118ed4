"""Taylor attention: the first terms of the exponential's series as exact features.

1 + x . y of unit rows is the product of (1, x) and (1, y); 1 + s + s^2 / 2 with s = x . y is that
of (1, x, x_a x_b for a < b, x_a^2 / sqrt(2)).
Sources: Li, Su et al. 2020, "Linear Attention Mechanism", section 3; Arora et al. 2024, "Simple
linear attention language models balance the recall-throughput tradeoff", section 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch.nn import functional

from attnspec.factored.blocks import Summing
from attnspec.factored.feature_kernel import FeatureKernel
from attnspec.factored.features import Features, Tables, unit
from attnspec.factored.quotients import Quotient
from attnspec.mechanisms.taylor import Taylor
from attnspec.target import Work

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
    """(1, x, the products of two channels), of x times the root of the scale of scores."""

    factor: float | None

    def queries(self, x: torch.Tensor, tables: Tables) -> Features:
        size = x.shape[-1]
        x = x * (size**-0.25 if self.factor is None else self.factor)
        a, b = torch.triu_indices(size, size, 1, device=x.device)
        squares = x.square() / math.sqrt(2)
        return Features(
            functional.pad(torch.cat([x, x[..., a] * x[..., b], squares], -1), (1, 0), value=1.0)
        )

    keys = queries

    def width(self, size: int) -> int:
        return 1 + size + size * (size + 1) // 2


def taylor_kernel(work: Work, heads: tuple[int, ...], device: torch.device) -> FeatureKernel:
    """Runs `taylor`."""
    declared = cast(Taylor, work.mechanism)
    features: FirstOrder | SecondOrder = FirstOrder()
    if declared.order == 2:
        features = SecondOrder(None if work.scale is None else math.sqrt(work.scale))
    return FeatureKernel("taylor", Summing(features, work.causal, Quotient(least=SMALL)))
