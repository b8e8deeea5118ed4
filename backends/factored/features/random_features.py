"""Random features: products of them estimate exp(x . y), or a Gaussian of the distance.

With directions w_1 .. w_m: positive exp(w . x - |x|^2 / 2), hyperbolic the same with -w as well,
trigonometric exp(|x|^2 / 2) (sin, cos)(w . x), relu(w . x); all over the root of their number.
Sources: Choromanski et al. 2021, "Rethinking Attention with Performers", lemma 1 and section 2.3;
Rahimi, Recht 2007, "Random Features for Large-Scale Kernel Machines".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attnspec.backends.common.torch_modes import unseen
from attnspec.backends.factored.features.maps import Features, Tables, exponentials, unit


@dataclass(frozen=True)
class RandomFeatures:
    """Features of x times `factor` along the directions `tables["directions"]` [K, m, d].

    `kind` is that of `favor`, or `gaussian`, whose products estimate exp(-|x - y|^2 / 2).
    """

    kind: str
    count: int
    factor: float | None = None

    def queries(self, x: torch.Tensor, tables: Tables) -> Features:
        factor = self._factor(x)
        along = x @ (tables["directions"] * factor).transpose(-1, -2)
        half = x.square().sum(-1, keepdim=True) * (factor**2 / 2)
        log = x.new_full(x.shape[:-1], -math.log(self.count) / 2)
        match self.kind:
            case "positive" | "gaussian":
                less = half if self.kind == "positive" else 2 * half
                if unseen(x):
                    # what is the same in a whole row is as well in its frame
                    return exponentials(along, log - less[..., 0])
                return exponentials(along - less, log)
            case "hyperbolic":
                both = torch.cat([along - half, -along - half], -1)
                return exponentials(both, log - math.log(2) / 2)
            case "trig":
                top = half.detach()
                waves = torch.cat([torch.sin(along), torch.cos(along)], -1)
                return Features(waves * torch.exp(half - top), top[..., 0] + log)
            case _:
                return Features(torch.relu(along) / math.sqrt(self.count))

    keys = queries

    def back(
        self, x: torch.Tensor, values: torch.Tensor, grad: torch.Tensor, tables: Tables
    ) -> torch.Tensor:
        # `of_half` is the gradient of |factor x|^2 / 2
        of_half = None
        match self.kind:
            case "positive" | "gaussian":
                along = grad.mul_(values)
                of_half = along.sum(-1, keepdim=True).mul_(-1 if self.kind == "positive" else -2)
            case "hyperbolic":
                up, down = grad.mul_(values).chunk(2, -1)
                of_half = -grad.sum(-1, keepdim=True)
                along = up - down
            case "trig":
                (sines, cosines), (up, down) = values.chunk(2, -1), grad.chunk(2, -1)
                of_half = (grad * values).sum(-1, keepdim=True)
                along = up * cosines - down * sines
            case _:
                along = grad.mul_(values > 0).div_(math.sqrt(self.count))
        factor = self._factor(x)
        found = along @ (tables["directions"] * factor)
        return found if of_half is None else found.addcmul_(x, of_half, value=factor**2)

    def _factor(self, x: torch.Tensor) -> float:
        """None is d^(-1/4), the root of the usual scale of scores."""
        return float(x.shape[-1] ** -0.25) if self.factor is None else self.factor

    def width(self, size: int) -> int:
        return self.count * (2 if self.kind in ("hyperbolic", "trig") else 1)


@dataclass(frozen=True)
class UnitWaves:
    """(sin, cos)(w . x) of rows of length 1, each channel times a learned `tables["spread"]`
    [K or 1, d]: products estimate a Gaussian of the distance."""

    count: int

    def queries(self, x: torch.Tensor, tables: Tables) -> Features:
        spread = unit(x) * tables["spread"][:, None]
        along = spread @ tables["directions"].transpose(-1, -2)
        waves = torch.cat([torch.sin(along), torch.cos(along)], -1)
        return Features(waves / math.sqrt(self.count))

    keys = queries

    def width(self, size: int) -> int:
        return 2 * self.count
