"""Sliding window: |q - k| <= r, or -a <= q - k <= b.

Edges, two-sided, for n > r: n (2r + 1) - r (r + 1).
Source: Beltagy, Peters, Cohan 2020, "Longformer", section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attnspec.graphs.relation import Elementwise, Relation
from attnspec.graphs.toeplitz import Diagonals, Toeplitz
from attnspec.ir.parameters import argument


@dataclass(frozen=True)
class Window(Toeplitz):
    """The keys near the query. Both forms count positions on one side, the query not included."""

    radius: int | None = argument("integer", "keys on each side", default=None, least=0)
    before: int | None = argument("integer", "keys before the query", default=None, least=0)
    after: int | None = argument("integer", "keys after the query", default=None, least=0)

    name: ClassVar = "window"
    signatures: ClassVar = (("radius",), ("before", "after"))

    @property
    def reach(self) -> tuple[int, int]:
        """Keys before and after the query."""
        if self.radius is not None:
            return self.radius, self.radius
        before = 0 if self.before is None else self.before
        return before, 0 if self.after is None else self.after

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        before, after = self.reach
        return (q - k <= before) & (k - q <= after)

    def diagonals(self, n: int) -> Diagonals:
        before, after = self.reach
        return ((-after, before, 1),)

    def transposed(self) -> Relation:
        before, after = self.reach
        return Window(before=after, after=before)

    @classmethod
    def readings(cls, size: int) -> tuple[str, ...]:
        return (
            f"`window(radius = {size})` reads the query's own key and {size:,} on each side,"
            f" {2 * size + 1:,} in all",
            f"`window(before = {size - 1}, after = 0)` reads the query's own key and {size - 1:,}"
            f" before it, {size:,} in all",
        )
