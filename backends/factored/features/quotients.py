"""What sums of weighted values are divided by, so that no input divides by zero."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Quotient:
    """Sums are divided by nothing, or by the sum of the weights with `added` to it and kept at
    least `least` away from 0, with its sign, or at least `floor` whatever its sign; they stay as
    they are, that of the weights among them, if they are `whole`.

    Sums stand for a multiple exp(log) of what is meant, log None for 1: `added`, `least` and
    `floor` are about what is meant. Weights that are `signed` may add up to 0 though none is 0.
    """

    divides: bool = True
    added: float = 0.0
    least: float = 0.0
    floor: float = 0.0
    signed: bool = False
    whole: bool = False

    def of(self, sums: Tensor, log: Tensor | None) -> Tensor:
        """What sums [..., e] are worth; the last of them is that of the weights if it divides."""
        if self.whole:
            return sums
        if not self.divides:
            return sums if log is None else sums * torch.exp(log)[..., None]
        return sums[..., :-1] / self.divisor(sums[..., -1], log)[..., None]

    @property
    def positive(self) -> bool:
        """Whether sums are divided by one of weights that are never negative."""
        return self.divides and not self.signed

    def log_divisor(self, total: Tensor, log: Tensor | None) -> Tensor:
        """The logarithm of what a sum of such weights divides by, -inf where there is no weight."""
        divisor = torch.log(self.divisor(total, log))
        divisor = divisor if log is None else divisor + log
        return divisor.masked_fill(total == 0, -torch.inf)

    def divisor(self, total: Tensor, log: Tensor | None) -> Tensor:
        """What a sum of weights divides by."""
        unit = _unit(total, log)
        if self.added:
            total = total + self.added * unit
        if self.floor:
            total = torch.where(total >= self.floor * unit, total, self.floor * unit)
        elif self.least:
            least = self.least * unit
            total = torch.where(total.abs() >= least, total, torch.where(total < 0, -least, least))
        if log is not None:
            # in frames of their own, no feature of a query may meet one of a key: nothing is read
            tiny = least_in_frames(total.dtype)
            total = torch.where(total.abs() >= tiny, total, tiny)
        return torch.where(total == 0, 1.0, total)

    def gradient(
        self,
        grad: Tensor,
        out: Tensor,
        total: Tensor,
        log: Tensor | None,
        of_totals: Tensor,
    ) -> Tensor:
        """The gradient of the sums, where `grad` is that of `out` [..., e], `total` the sum of the
        weights and `of_totals` its gradient by other ways than `out`."""
        if self.whole:
            return grad
        if not self.divides:
            return grad if log is None else grad * torch.exp(log)[..., None]
        divisor = self.divisor(total, log)
        grad = grad / divisor[..., None]
        of_total = -(grad * out).sum(-1, keepdim=True)
        if self.floor or self.least:
            unit = _unit(total, log)
            # 0 times a unit that overflows would be no number
            sums = total + self.added * unit if self.added else total
            kept = sums >= self.floor * unit if self.floor else sums.abs() >= self.least * unit
            of_total = of_total * kept[..., None]
        if log is not None:
            of_total = of_total * (divisor.abs() > least_in_frames(total.dtype))[..., None]
        return torch.cat([grad, of_total + of_totals[..., None]], -1)


def _unit(total: Tensor, log: Tensor | None) -> Tensor:
    """1 in the frames of the sums."""
    return torch.ones_like(total) if log is None else torch.exp(-log)


def least_in_frames(kind: torch.dtype) -> float:
    """A sum of features in frames, which are 1 at most, that is none."""
    return math.pow(torch.finfo(kind).tiny, 0.75)
