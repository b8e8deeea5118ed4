"""Feature maps: rows of queries and keys as vectors whose products are the weights of pairs, and
what sums of such weights divide by, so that no input divides by zero.

A map may give its features in a frame: `values * exp(log)` is what is meant, with a number `log`
for each row, so that exponentials neither overflow nor vanish. The frame of a query cancels in its
quotient; those of keys are brought together where they are summed.

Features are those of the definition, `text_of_sums`.
Sources: Choromanski et al. 2021, "Rethinking Attention with Performers", lemma 1 and section 2.3;
Rahimi, Recht 2007, "Random Features for Large-Scale Kernel Machines"; Li, Su et al. 2020, "Linear
Attention Mechanism", section 3; Arora et al. 2024, "Simple linear attention language models balance
the recall-throughput tradeoff", section 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from attnspec.backends.common.merging import Outputs
from attnspec.backends.common.torch_modes import Function, is_transformed
from attnspec.backends.factored.definitions import cancels, text_of
from attnspec.ir.mechanisms.declaration import KeySums, MechanismDeclaration
from attnspec.limits import LIMITS
from attnspec.lower.work import Work, mechanism_of

Tables: TypeAlias = Mapping[str, Tensor]

Features: TypeAlias = tuple[Tensor, Tensor]
"""Features [N, n, m] of rows, times exp(log), log [N, n]. A frame is a constant to autograd: what
it takes out of the values it puts back."""

FRAMED = "exp", "trig", "positive", "hyperbolic", "gaussian"
"""Features of the definition in frames of their own; those of others are 0."""


@dataclass(frozen=True, eq=False)
class Summing:
    """How a mechanism makes features of rows, and what it divides their sums by.

    Sums [..., n, e] of values by weights, that of the weights last where they are divided, stand
    for exp(log) times as much, log [..., n]. Weights that are `signed` may add up to 0
    though none is 0.
    """

    work: Work

    @property
    def declared(self) -> MechanismDeclaration:
        return mechanism_of(self.work)

    @cached_property
    def text(self) -> dict[str, Any]:
        """The functions of the definition, which take directions in the place of a layer."""
        return text_of(self.work, 0, directions=lambda x, rows: rows)

    def features(self, x: Tensor, tables: Tables) -> Features:
        """The features of rows x [N, n, d], along `tables["directions"]` [N, m, d] where they are
        random, with what else is learned [N, ...]."""
        if self.text["feature_of"].__name__ == "elu1" and not is_transformed():
            values = cast(Tensor, _Elu1.apply(x, self.text["elu1"]))  # type: ignore[no-untyped-call]
            return values, torch.zeros_like(x[..., 0])
        learned = {f"{self.declared.name}_{part}": each for part, each in tables.items()}
        values, log = self.text["feature_of"](x[None], tables.get("directions"), learned)
        return values[0], log[0, ..., 0].detach()

    @cached_property
    def framed(self) -> bool:
        """Whether features have frames of their own."""
        return self.text["feature_of"].__name__ in FRAMED

    def width(self, size: int) -> int:
        """How many features rows of a size have."""
        return cast(KeySums, self.declared.key_sums(size)).features

    @cached_property
    def paired(self) -> bool:
        """Whether the products of features have a shorter formula, without frames."""
        return bool(self.text["feature_of"].__name__ == "second_order")

    @property
    def chunk(self) -> int:
        """Positions whose pairs are computed one by one in causal sums."""
        return LIMITS.taylor_chunk if self.paired else LIMITS.feature_chunk

    def pairs(self, q: Tensor, k: Tensor) -> Tensor:
        """The products [..., n_q, n_k] of the features of rows [..., n, d] by that formula."""
        factor = float(self.text["factor_of"](q.shape[-1]))
        scores = (q * factor) @ (k * factor).mT
        return 1 + scores + scores.square() / 2

    # --- quotients -----------------------------------------------------------------------------

    @cached_property
    def divides(self) -> bool:
        return bool(self.text["NORMALIZE"] != "none")

    @cached_property
    def signed(self) -> bool:
        return cancels(self.declared)

    def worth(self, weighed: tuple[Tensor, Tensor]) -> Outputs:
        """What sums and their frames are worth, and the logarithms of what divides them, if it is
        positive."""
        sums, log = weighed
        return self.divided(sums, log), self.log_divisor(sums[..., -1], log)

    def divided(self, sums: Tensor, log: Tensor) -> Tensor:
        """What sums are worth."""
        if not self.divides:
            return sums * torch.exp(log)[..., None]
        values, total = torch.split(sums, [sums.shape[-1] - 1, 1], -1)
        return values / self.divisor(total, log[..., None])

    def divisor(self, total: Tensor, log: Tensor) -> Tensor:
        """What sums of weights divide by."""
        divisor: Tensor = self.text["divisor"](total, log)
        if not self.framed:
            return divisor
        # no feature of a query may meet one of a key in their frames, so that nothing is read
        least = least_in_frames(total.dtype)
        return torch.where(divisor.abs() >= least, divisor, least)

    def log_divisor(self, total: Tensor, log: Tensor) -> Tensor | None:
        """The logarithm of what sums of such weights divide by, -inf where there is no weight; None
        where it may be negative or is nothing."""
        if self.signed or not self.divides:
            return None
        divisor = torch.log(self.divisor(total, log)) + log
        return divisor.masked_fill(total == 0, -torch.inf)


class _Elu1(Function):
    """elu(x) + 1 as the definition has it, with its slope, 1 at most: nothing else is kept."""

    @staticmethod
    def forward(ctx, x, defined):  # type: ignore[no-untyped-def]
        values, _ = defined(x, None, None)
        ctx.save_for_backward(values)
        return values

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad * ctx.saved_tensors[0].clamp(max=1.0), None


def least_in_frames(kind: torch.dtype) -> float:
    """A sum of features in frames, which are 1 at most, that is none."""
    return math.pow(torch.finfo(kind).tiny, 0.75)
