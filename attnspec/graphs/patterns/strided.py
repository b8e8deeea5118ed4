"""A window and a stride in one head: |q - k| < s or s divides q - k.

Edges: those of window(radius = s) and residue(step = s) less their common n + 2 max(0, n - s).
Source: Child, Gray, Radford, Sutskever 2019, "Generating Long Sequences with Sparse Transformers",
section 4.3; the paper's two heads, merged and without the causal mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.graphs.patterns.residue import Residue
from attnspec.graphs.patterns.window import Window
from attnspec.graphs.relation import Elementwise, Progressions, Relation, Tiles
from attnspec.graphs.tile_cover import band_cover, differences
from attnspec.ir.parameters import argument


@dataclass(frozen=True)
class Strided(Relation):
    """The keys less than a stride away and those at multiples of the stride."""

    stride: int = argument("integer", "distance between far keys, and reach of near ones", least=1)

    name: ClassVar = "strided"
    anchored: ClassVar = False
    exact_cover: ClassVar = True

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return (abs(q - k) < self.stride) | ((q - k) % self.stride == 0)

    def progressions(self, q: np.ndarray, n: int) -> Progressions:
        stride = self.stride
        near = np.maximum(q - stride + 1, 0), np.minimum(q + stride, n)
        start = np.stack([q % stride, near[0], q + stride], axis=1)
        stop = np.stack([q - stride + 1, near[1], np.full(len(q), n)], axis=1)
        return start, stop, np.array([[stride, 1, stride]])

    def edges(self, n: int) -> int:
        both = n + 2 * max(0, n - self.stride)
        return Window(radius=self.stride).edges(n) + Residue(self.stride).edges(n) - both

    def parts(self) -> tuple[Relation, ...]:
        return Window(radius=self.stride - 1), Residue(self.stride)

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        # a distance of one stride is in both parts, so the window may be taken with both its ends
        members = differences(q, k)
        near = band_cover(members, -self.stride, self.stride)
        return np.asarray(np.maximum(near, band_cover(members, -n, n, self.stride)))

    def transposed(self) -> Relation:
        return self

    @classmethod
    def samples(cls) -> Iterator[Strided]:
        for stride in (1, 2, 3, 8, 13, 1000):
            yield cls(stride)
