"""The diagonal: q = k.

Edges: n.
Source: none; the identity that the residual stream adds to every pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attnspec.graphs.relation import Elementwise
from attnspec.graphs.toeplitz import Diagonals, Toeplitz


@dataclass(frozen=True)
class Self(Toeplitz):
    """Every query reads its own position."""

    name: ClassVar = "self"
    symmetric: ClassVar = True

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return q == k

    def diagonals(self, n: int) -> Diagonals:
        return ((0, 0, 1),)
