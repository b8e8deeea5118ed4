"""The living definition: every score of every pair, masked; for short sequences and as reference.

It runs every graph on every device, differentiates to any order, exports, and takes n_q * n_k
numbers per head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnspec.limits import LIMITS
from attnspec.lower.cost_model import current
from attnspec.lower.rates import Amounts
from attnspec.lower.work import Kernel, Work

if TYPE_CHECKING:
    import torch


class Dense:
    """Scores of all pairs in one product."""

    name = "dense"
    takes_standing = True
    runs_decided = True
    takes_expressions = True

    @property
    def least(self) -> float:
        return current().dense_call

    def refuses(self, work: Work, device: str) -> str | None:
        pairs = work.n_q * work.n_k
        if pairs > LIMITS.dense:
            return (
                f"at most {LIMITS.dense:,} pairs are looked at one by one, and there are {pairs:,}"
            )
        return None

    def cost(self, work: Work) -> float:
        return current(work.device).seconds(self.amounts(work), work.copies)

    def amounts(self, work: Work) -> Amounts:
        """What the work takes."""
        return {"dense_call": 1, "dense_pair": work.n_q * work.n_k}

    def steps(self, work: Work) -> tuple[str, ...]:
        return (f"all {work.n_q:,} x {work.n_k:,} scores",)

    def build(self, work: Work, heads: tuple[int, ...], device: torch.device) -> Kernel:
        from attnspec.backends.dense.kernel import DenseKernel

        return DenseKernel(work, heads, device)
