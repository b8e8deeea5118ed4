"""A window with gaps: |q - k| <= r and d divides q - k.

Edges, with h = min(r // d, (n - 1) // d): n (2 h + 1) - d h (h + 1).
Source: Beltagy, Peters, Cohan 2020, "Longformer", section 3.1; d = 1 leaves no gaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attnspec.graphs.relation import Elementwise
from attnspec.graphs.toeplitz import Diagonals, Toeplitz
from attnspec.ir.parameters import argument


@dataclass(frozen=True)
class Dilated(Toeplitz):
    """The keys near the query at multiples of a step."""

    radius: int = argument("integer", "positions on each side that the keys lie within", least=0)
    step: int = argument("integer", "distance between neighbouring keys", least=1)

    name: ClassVar = "dilated"
    symmetric: ClassVar = True

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return (abs(q - k) <= self.radius) & ((q - k) % self.step == 0)

    def diagonals(self, n: int) -> Diagonals:
        most = self.radius // self.step * self.step
        return ((-most, most, self.step),)
