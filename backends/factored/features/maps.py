"""Feature maps: rows of queries and keys as vectors whose products are the weights of pairs.

A map may give its features in a frame: `values * exp(log)` is what is meant, with a number `log`
for each row, so that exponentials neither overflow nor vanish. The frame of a query cancels in its
quotient; those of keys are brought together where they are summed.

Random features have directions w_1 .. w_m: positive exp(w . x - |x|^2 / 2), hyperbolic the same
with -w as well, trigonometric exp(|x|^2 / 2) (sin, cos)(w . x), relu(w . x); all over the root of
their number. Taylor features are the first terms of the exponential's series: 1 + x . y of unit
rows is the product of (1, x) and (1, y); 1 + s + s^2 / 2 with s = x . y is that of (1, x, x_a x_b
for a < b, x_a^2 / sqrt(2)).
Sources: Choromanski et al. 2021, "Rethinking Attention with Performers", lemma 1 and section 2.3;
Rahimi, Recht 2007, "Random Features for Large-Scale Kernel Machines"; Li, Su et al. 2020, "Linear
Attention Mechanism", section 3; Arora et al. 2024, "Simple linear attention language models balance
the recall-throughput tradeoff", section 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch.nn import functional

from attnspec.backends.common.torch_modes import unseen
from attnspec.ir.mechanisms.taylor import CHANNELS, products_kept

Tables: TypeAlias = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Features:
    """Features `values` [..., n, m] of rows, times `exp(log)`, log [..., n], where it is there.

    A frame is a constant to autograd: what it takes out of the values it puts back.
    """

    values: torch.Tensor
    log: torch.Tensor | None = None


class FeatureMap(Protocol):
    """Rows [B, K, n, d] of K heads to features of them, in the type of the rows."""

    def __call__(self, x: torch.Tensor, tables: Tables) -> Features: ...

    def width(self, size: int) -> int:
        """How many features rows of a size have."""


@runtime_checkable
class Paired(FeatureMap, Protocol):
    """A map without frames whose products have a shorter formula."""

    def pairs(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """The products [..., n_q, n_k] of the features of rows [..., n, d]."""


@dataclass(frozen=True)
class Elementwise:
    """The maps of `linear`: elu1, relu, squared_relu, exp, identity."""

    feature: str

    def __call__(self, x: torch.Tensor, tables: Tables) -> Features:
        match self.feature:
            case "elu1":
                # elu(x) + 1 would round to 0 from about -17 on in float32. Its slope at 0 is 1, but
                # that of `clamp` is 0 from torch 2.14 on
                return Features(torch.exp(x.masked_fill(x > 0, 0.0)) + torch.relu(x))
            case "relu":
                return Features(torch.relu(x))
            case "squared_relu":
                return Features(torch.relu(x).square())
            case "exp":
                return exponentials(x, in_place=False)
            case _:
                return Features(x)

    def back(self, x: torch.Tensor, values: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of rows x, where `grad` is that of the values of their features; both may be
        overwritten."""
        match self.feature:
            case "elu1":
                return grad.mul_(values.clamp_(max=1.0))
            case "relu":
                return grad.mul_(values > 0)
            case "squared_relu":
                return grad.mul_(torch.relu(x).mul_(2))
            case "exp":
                return grad.mul_(values)
            case _:
                return grad

    def width(self, size: int) -> int:
        return size


@dataclass(frozen=True)
class RandomFeatures:
    """Features of x times `factor` along the directions `tables["directions"]` [K, m, d].

    `kind` is that of `favor`, or `gaussian`, whose products estimate exp(-|x - y|^2 / 2). Without a
    `factor` it is d^(-1/4), the root of the usual scale of scores.
    """

    kind: str
    count: int
    factor: float | None = None

    def __call__(self, x: torch.Tensor, tables: Tables) -> Features:
        factor = float(x.shape[-1] ** -0.25) if self.factor is None else self.factor
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

    def width(self, size: int) -> int:
        return self.count * (2 if self.kind in ("hyperbolic", "trig") else 1)


@dataclass(frozen=True)
class UnitWaves:
    """(sin, cos)(w . x) of rows of length 1, each channel times a learned `tables["spread"]`
    [K or 1, d]: products estimate a Gaussian of the distance."""

    count: int

    def __call__(self, x: torch.Tensor, tables: Tables) -> Features:
        spread = unit(x) * tables["spread"][:, None]
        along = spread @ tables["directions"].transpose(-1, -2)
        waves = torch.cat([torch.sin(along), torch.cos(along)], -1)
        return Features(waves / math.sqrt(self.count))

    def width(self, size: int) -> int:
        return 2 * self.count


@dataclass(frozen=True)
class FirstOrder:
    """(1, x / |x|)."""

    def __call__(self, x: torch.Tensor, tables: Tables) -> Features:
        return Features(functional.pad(unit(x), (1, 0), value=1.0))

    def width(self, size: int) -> int:
        return size + 1


@dataclass(frozen=True)
class SecondOrder:
    """(the products of two channels, x, 1), of x times the root of the scale of scores.

    The products are computed by blocks of channels: x_a x_b for each pair of blocks, and
    x_a x_b / sqrt(2) for all a and b of one block.
    """

    factor: float | None

    def __call__(self, x: torch.Tensor, tables: Tables) -> Features:
        x = self._scaled(x)
        if not unseen(x):
            products = [
                (one[..., None] * rest[..., None, :]).flatten(-2) for one, rest in _blocks(x)
            ]
            return Features(torch.cat([*products, x, torch.ones_like(x[..., :1])], -1))
        values, low = x.new_empty(*x.shape[:-1], self.width(x.shape[-1])), 0
        for one, rest in _blocks(x):
            shape = one.shape[-1], rest.shape[-1]
            into = torch.unflatten(values[..., low : low + shape[0] * shape[1]], -1, shape)
            torch.mul(one[..., None], rest[..., None, :], out=into)
            low += shape[0] * shape[1]
        values[..., low:-1], values[..., -1] = x, 1.0
        return Features(values)

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


def exponentials(
    x: torch.Tensor, log: torch.Tensor | None = None, *, in_place: bool = True
) -> Features:
    """exp(x + log) of rows x [..., n, m], the largest of each row in its frame; with `in_place`
    they take the place of x if nothing else sees it."""
    top = x.detach().amax(-1)
    if in_place and unseen(x):
        values = x.sub_(top[..., None]).exp_()
    else:
        values = torch.exp(x - top[..., None])
    return Features(values, top if log is None else top + log)


def unit(x: torch.Tensor) -> torch.Tensor:
    """Rows of length 1; a row of zeros stays one, with gradient 0."""
    length: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.masked_fill(length < torch.finfo(x.dtype).tiny ** 0.5, math.inf)
