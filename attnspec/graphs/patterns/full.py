"""Every pair.

Edges: n**2.
Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.graphs.relation import FULL, Elementwise, Progressions, Relation, Tiles


@dataclass(frozen=True)
class Full(Relation):
    """Every query reads every key."""

    name: ClassVar = "full"
    symmetric: ClassVar = True
    anchored: ClassVar = False
    sides: ClassVar = ""

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return (q == q) & (k == k)

    def progressions(self, q: np.ndarray, n: int) -> Progressions:
        return np.zeros((len(q), 1), np.int64), np.full((len(q), 1), n), 1

    def edges(self, n: int) -> int:
        return n * n

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        return []

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        return np.full(np.broadcast_shapes(q.start.shape, k.start.shape), FULL, np.uint8)
