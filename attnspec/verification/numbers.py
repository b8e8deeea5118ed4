"""Weights, outputs and gradients of a module held against the definition."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from attnspec.ir.mechanisms.rbf import Rbf
from attnspec.lower.work import Softcap, Work
from attnspec.verification.definition import NAMES, Results

SIZE = 16
"""The size of the heads that are tried."""

Heads = Sequence[tuple[Work, tuple[int, ...]]]

SLACK = 2.0
"""How much more a backend may err than the definition in the same type."""

ROUNDINGS = 16
"""Units in the last place of the largest number that are no error."""

SMALLEST = 1e-290
"""A weight below it may be rounded to 0 by one way of computing it and not by another."""


def moderate(works: Heads, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What random queries and keys are multiplied by, powers of 2, float64 [heads, 1, 1], so that
    no score is far above 1: of larger ones rounding decides which keys weigh anything."""
    factors = torch.ones(2, heads, 1, 1, dtype=torch.float64)
    for work, members in works:
        largest = max(1.0, abs(work.scale or 0.0) * math.sqrt(SIZE))
        caps = [change.cap for change in work.changes if isinstance(change, Softcap)]
        factors[0, list(members)] = _power(min((1.0, *caps)) / largest)
        if isinstance(work.mechanism, Rbf):
            factors[:, list(members)] = _power(min(1.0, work.mechanism.sigma / math.sqrt(SIZE)))
    return factors[0], factors[1]


def _power(x: float) -> float:
    """The power of 2 below a number."""
    return float(2.0 ** math.floor(math.log2(x)))


def error_bound(
    exact: torch.Tensor, dense: torch.Tensor, dtype: torch.dtype, largest: float
) -> float:
    """How far from `exact` a backend may be in a type in which the definition gives `dense`.

    `largest` is the largest number among outputs and gradients: a gradient may vanish by
    cancellation of terms of that size.
    """
    error = (dense - exact).abs().max().item() if exact.numel() else 0.0
    return SLACK * error + ROUNDINGS * torch.finfo(dtype).eps * largest


def numbers_fault(found: Results, exact: Results, dense: Results) -> str | None:
    """The first of the results of a module in float32 that errs too much, where `exact` are those
    of the definition in float64 and `dense` in float32."""
    pairs = exact.tensors[1].shape[0] * exact.tensors[2].shape[0]
    for (name, given), (_, right), (_, base) in zip(found, exact, dense, strict=True):
        if not given.numel():
            continue
        errors = (given.double() - right).abs()
        allowed = exact.largest
        if name not in NAMES:
            # a table's gradient adds up all pairs, and the errors of a sum grow as its root
            allowed = max(allowed, right.abs().max().item())
            allowed *= math.sqrt(max(1.0, pairs / len(right)))
        bound = error_bound(right, base.double(), torch.float32, allowed)
        # a comparison that NaN fails as well
        if not errors.max().item() <= bound:
            row = int((~(errors <= bound)).view(len(errors), -1).any(1).nonzero()[0, 0])
            error = errors[row].max().item()
            return f"the {name} errs by {error:.3g} in row {row}, and {bound:.3g} is allowed"
    return None


def weights_fault(
    weights: torch.Tensor,
    meant: torch.Tensor,
    held: torch.Tensor,
    rows: np.ndarray,
    first: int,
) -> tuple[bool, int, int, str] | None:
    """The first pair whose weight is not as it is meant, in an order of faults: whether it is a
    pair after all, its query, its key, what is wrong. All are [r, w], for the queries `rows` and
    the keys from `first` on.

    A pair that is held may weigh nothing, by `relu` or because its score is very low.
    """
    strange = weights.ne(0) & ~held
    missing = weights.eq(0) & (meant > SMALLEST)
    other = ~((weights - meant).abs() <= ROUNDINGS * 1e-12)
    # a pair too many or too few changes the weights of all others in its row
    for wrong, is_pair in ((strange | missing, False), (other, True)):
        if wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            query, key = int(rows[row]), first + column
            text = f"weighs key {key} with {weights[row, column]:.6g}, not {meant[row, column]:.6g}"
            if strange[row, column]:
                text = f"reads key {key}, which is no pair"
            elif missing[row, column]:
                text = f"does not read key {key}"
            return is_pair, query, key, f"query {query} {text}"
    return None


def support_fault(reached: torch.Tensor, meant: torch.Tensor, rows: np.ndarray) -> str | None:
    """The first key that the gradient of a query reaches and should not, or reaches with another
    weight: all [r, n], for the queries `rows`."""
    wrong = reached.ne(0) & meant.eq(0) | reached.eq(0) & (meant > SMALLEST)
    wrong |= ~((reached - meant).abs() <= ROUNDINGS * 1e-12)
    places = wrong.nonzero()
    if not len(places):
        return None
    row, key = places[0].tolist()
    return f"the gradient of query {int(rows[row])} is wrong at key {key}"
