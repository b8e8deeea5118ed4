"""Feature maps: rows of queries and keys as vectors whose products are the weights of pairs.

A map may give its features in a frame: `values * exp(log)` is what is meant, with a number `log`
for each row, so that exponentials neither overflow nor vanish. The frame of a query cancels in its
quotient; those of keys are brought together where they are summed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from attnspec.backends.common.torch_modes import unseen

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

    def queries(self, x: torch.Tensor, tables: Tables) -> Features: ...

    def keys(self, x: torch.Tensor, tables: Tables) -> Features: ...

    def width(self, size: int) -> int:
        """About how many features rows of a size have."""


@runtime_checkable
class Differentiated(FeatureMap, Protocol):
    """A map without learned tables that knows its derivative."""

    def back(
        self, x: torch.Tensor, values: torch.Tensor, grad: torch.Tensor, tables: Tables
    ) -> torch.Tensor:
        """The gradient of rows x [B, K, n, d], where `grad` is that of the values of their features
        [B, K, n, m]; both may be overwritten."""


@runtime_checkable
class Paired(FeatureMap, Protocol):
    """A map without frames whose products have a shorter formula."""

    def pairs(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """The products [..., n_q, n_k] of the features of rows [..., n, d]."""


@dataclass(frozen=True)
class Elementwise:
    """The maps of `linear`: elu1, relu, squared_relu, exp, identity."""

    feature: str

    def queries(self, x: torch.Tensor, tables: Tables) -> Features:
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
                return exponentials(x, given=True)
            case _:
                return Features(x)

    keys = queries

    def back(
        self, x: torch.Tensor, values: torch.Tensor, grad: torch.Tensor, tables: Tables
    ) -> torch.Tensor:
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


def exponentials(
    x: torch.Tensor, log: torch.Tensor | None = None, *, given: bool = False
) -> Features:
    """exp(x + log) of rows x [..., n, m], the largest of each row in its frame.

    Unless x is `given` by someone who needs it, they take its place if nothing else sees it.
    """
    top = x.detach().amax(-1)
    if given or not unseen(x):
        values = torch.exp(x - top[..., None])
    else:
        values = x.sub_(top[..., None]).exp_()
    return Features(values, top if log is None else top + log)


def unit(x: torch.Tensor) -> torch.Tensor:
    """Rows of length 1; a row of zeros stays one, with gradient 0."""
    length: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.masked_fill(length < torch.finfo(x.dtype).tiny ** 0.5, math.inf)
