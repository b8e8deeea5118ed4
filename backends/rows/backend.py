"""The last few queries over the keys that they read: the steps of generation.

The operations are those of the dense definition, on fewer keys: views of the tensors where these
are ranges, copies of the keys that are read elsewhere. Nothing is laid out in tiles, because the
next step has another length and would have to do it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnspec.backends.rows.keys import row_layout
from attnspec.limits import LIMITS
from attnspec.lower.costs import Amounts, seconds_for, weighed
from attnspec.lower.work import Kernel, Work

if TYPE_CHECKING:
    import torch


class RowsBackend:
    """A few queries at once, each key read once for all of them."""

    name = "rows"
    takes_standing = True

    def refuses(self, work: Work, device: str) -> str | None:
        if work.n_q > LIMITS.rows_looked_up:
            most = LIMITS.rows_looked_up
            return f"it takes the last {most} queries at most, the steps of generation"
        return None

    def cost(self, work: Work) -> float:
        return seconds_for(self.amounts(work), work.device)

    def amounts(self, work: Work) -> Amounts:
        """What the work takes."""
        count = row_layout(work).count
        units = {"call": 1, "pair": work.n_q * count}
        return weighed("torch", units, work.device, work.copies)

    def steps(self, work: Work) -> tuple[str, ...]:
        count = row_layout(work).count
        return (f"{count:,} of {work.n_k:,} keys",)

    def build(self, work: Work, heads: tuple[int, ...], device: torch.device) -> Kernel:
        from attnspec.backends.rows.kernel import RowsKernel

        layout = row_layout(work)
        return RowsKernel(work, heads, device, layout)
