"""A window with gaps: |q - k| <= r and d divides q - k.

Edges, with h = min(r // d, (n - 1) // d): n (2 h + 1) - d h (h + 1).
Source: Beltagy, Peters, Cohan 2020, "Longformer", section 3.1; d = 1 leaves no gaps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.graphs.relation import Elementwise, Progressions, Relation, Tiles
from attnspec.graphs.tile_cover import band_cover, differences
from attnspec.ir.parameters import argument


@dataclass(frozen=True)
class Dilated(Relation):
    """The keys near the query at multiples of a step."""

    radius: int = argument("integer", "positions on each side that the keys lie within", least=0)
    step: int = argument("integer", "distance between neighbouring keys", least=1)

    name: ClassVar = "dilated"
    anchored: ClassVar = False
    exact_cover: ClassVar = True

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return (abs(q - k) <= self.radius) & ((q - k) % self.step == 0)

    def progressions(self, q: np.ndarray, n: int) -> Progressions:
        keys = self.radius // self.step
        before = np.minimum(keys, q // self.step)
        after = np.minimum(keys, (n - 1 - q) // self.step)
        return (q - before * self.step)[:, None], (q + after * self.step + 1)[:, None], self.step

    def edges(self, n: int) -> int:
        if n == 0:
            return 0
        keys = min(self.radius, n - 1) // self.step
        return n * (2 * keys + 1) - self.step * keys * (keys + 1)

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        return [q.start - k.start]

    def strides(self, n: int) -> tuple[tuple[int, int], ...]:
        return ((self.step, self.step),)

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        return band_cover(differences(q, k), -self.radius, self.radius, self.step)

    def transposed(self) -> Relation:
        return self

    @classmethod
    def samples(cls) -> Iterator[Dilated]:
        for radius, step in ((0, 1), (0, 5), (4, 1), (4, 5), (6, 3), (7, 3), (100, 8), (1000, 2)):
            yield cls(radius, step)
