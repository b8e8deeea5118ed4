"""No key after the query: k <= q.

Edges: n (n + 1) / 2.
Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.graphs.patterns.window import Window
from attnspec.graphs.relation import Elementwise, Progressions, Relation, Tiles
from attnspec.graphs.tile_cover import covered, differences
from attnspec.ir.scalars import LARGEST


@dataclass(frozen=True)
class Causal(Relation):
    """The keys up to and including the query."""

    name: ClassVar = "causal"
    one_sequence: ClassVar = "compares the places of queries and keys in one sequence"
    anchored: ClassVar = False
    exact_cover: ClassVar = True

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return k <= q

    def progressions(self, q: np.ndarray, n: int) -> Progressions:
        return np.zeros((len(q), 1), np.int64), q[:, None] + 1, 1

    def edges(self, n: int) -> int:
        return n * (n + 1) // 2

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        return [q.start - k.start]

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        least, most, _ = differences(q, k)
        return covered(least >= 0, most >= 0)

    def transposed(self) -> Relation:
        # a window that reaches past the end of any sequence
        return Window(before=0, after=LARGEST)

    @classmethod
    def samples(cls) -> Iterator[Causal]:
        yield cls()
