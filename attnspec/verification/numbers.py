"""Outputs and gradients of a module held against the definition, and how far they may be apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attnspec.ir.mechanisms.rbf import Rbf
from attnspec.ir.scalars import parts_of
from attnspec.lower.work import Work
from attnspec.verification.meaning import SIZE, Meaning, Numbers

NAMES = ("output", "dq", "dk", "dv")

Heads = Sequence[tuple[Work, tuple[int, ...]]]

SLACK = 2.0
"""How much more a backend may err than the definition in the same type."""

ROUNDINGS = 16
"""Units in the last place of the largest number that are not error."""

EXACT = 1e-12
"""What stands for a unit in the last place of float64: sums of other orders err by some."""

SMALLEST = 1e-290
"""A weight below it may be rounded to 0 by one way of computing it and not by another."""


def moderate(works: Heads, heads: int) -> tuple[Tensor, Tensor]:
    """What random queries and keys are multiplied by, powers of 2, float64 [heads, 1, 1], so that
    no score is far above 1: of larger ones rounding decides which keys weigh anything."""
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
    return factors[0], factors[1]


def _power(x: float) -> float:
    """The power of 2 below a number."""
    return float(2.0 ** math.floor(math.log2(x)))


def error_bound(exact: Tensor, dense: Tensor, dtype: torch.dtype, largest: float) -> float:
    """How far from `exact` a backend may be in a type in which the definition gives `dense`.

    `largest` is the largest number among outputs and gradients: a gradient may vanish by
    cancellation of terms of that size.
    """
    error = (dense - exact).abs().max().item() if exact.numel() else 0.0
    return SLACK * error + ROUNDINGS * torch.finfo(dtype).eps * largest


def numbers_fault(
    meaning: Meaning,
    found: Numbers,
    exact: Numbers,
    rough: Numbers | None,
    sizes: Sequence[float],
) -> tuple[int, int | None, str] | None:
    """The first of the numbers of a module that errs too much: its head, the place of the query
    where it is one of its outputs, and what is wrong. `exact` are those of the definition in
    float64, the largest of each head `sizes`, and `rough` those in the type of the module, None for
    float64."""
    three = found, exact, rough or exact
    for head in meaning.heads:
        for name, *parts in zip(NAMES, *(x.heads for x in three), strict=True):
            fault = _fault(name, *(x[head] for x in parts), sizes[head], rough is None)
            if fault is not None:
                return head, fault[0] if name == "output" else None, fault[1]
    if rough is None:
        return None
    largest = max(sizes[head] for head in meaning.heads)
    pairs = exact.heads[1].shape[1] * exact.heads[2].shape[1]
    learned = [meaning.learned_by(meaning.heads, x.learned) for x in three]
    for called, name in meaning.learned:
        for mine, right, base in zip(*(x[called] for x in learned), strict=True):
            # a table's gradient adds up all pairs, and the errors of a sum grow as its root
            size = max(largest, right.abs().max().item())
            size *= math.sqrt(max(1.0, pairs / right.numel()))
            fault = _fault(f"gradient of {name}", mine, right, base, size, False)
            if fault is not None:
                return meaning.heads[0], None, fault[1]
    return None


def _fault(
    name: str,
    found: Tensor,
    exact: Tensor,
    rough: Tensor,
    largest: float,
    is_exact: bool,
) -> tuple[int, str] | None:
    """The first row that errs more than is allowed, and what is wrong with it."""
    if not found.numel():
        return None
    errors = (found.double() - exact).abs()
    bound = ROUNDINGS * EXACT * max(1.0, largest)
    if not is_exact:
        bound = error_bound(exact, rough.double(), torch.float32, largest)
    # a comparison that NaN fails as well
    wrong = ~(errors <= bound)
    if not wrong.any():
        return None
    row = int(wrong.view(len(errors), -1).any(1).nonzero()[0, 0])
    error = errors[row].max().item()
    return row, f"the {name} errs by {error:.3g} in row {row}, and {bound:.3g} is allowed"
