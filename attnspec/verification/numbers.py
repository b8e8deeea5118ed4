"""Outputs and gradients of a module held against the definition, and how far they may be apart."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnspec.ir.mechanisms.rbf import Rbf
from attnspec.ir.scalars import parts_of
from attnspec.lower.work import Works

SIZE = 16
"""The size of the heads that are tried."""

NAMES = {"output": "output", "q": "dq", "k": "dk", "v": "dv"}
"""What is compared of every head, as reports call it: outputs, and gradients."""

SLACK = 2.0
"""How much more a backend may err than the definition in the same type."""

ROUNDINGS = 16
"""Units in the last place of the largest number that are not error."""

EXACT = 1e-12
"""What stands for a unit in the last place of float64: sums of other orders err by some."""

SMALLEST = 1e-290
"""A weight below it may be rounded to 0 by one way of computing it and not by another."""


def moderate(works: Works, heads: int) -> Tensor:
    """What random queries and keys are multiplied by, powers of 2, float64 [2, heads, 1, 1], so
    that no score is far above 1: of larger ones rounding decides which keys weigh anything."""
    factors = torch.ones(2, heads, 1, 1, dtype=torch.float64)
    for work, members in works:
        largest = max(1.0, abs(work.scale or 0.0) * math.sqrt(SIZE))
        caps = [
            abs(part.args[1])
            for value in work.changes.statements
            for part in parts_of(value)
            if part.op == "/" and isinstance(part.args[1], int | float) and part.args[1]
        ]
        factors[0, list(members)] = _power(min((1.0, *caps)) / largest)
        if isinstance(work.mechanism, Rbf):
            factors[:, list(members)] = _power(min(1.0, work.mechanism.sigma / math.sqrt(SIZE)))
    return factors


def _power(x: float) -> float:
    return 2.0 ** math.floor(math.log2(x))


def error_bound(exact: Tensor, dense: Tensor, dtype: torch.dtype, largest: float) -> float:
    """How far from `exact` a backend may be in a type in which the definition gives `dense`.

    `largest` is the largest number among outputs and gradients: a gradient may vanish by
    cancellation of terms of that size.
    """
    error = (dense - exact).abs().max().item() if exact.numel() else 0.0
    return SLACK * error + ROUNDINGS * torch.finfo(dtype).eps * largest
