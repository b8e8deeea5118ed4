"""The diagonal: q = k.

Edges: n.
Source: none; the identity that the residual stream adds to every pattern.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.graphs.relation import Elementwise, Progressions, Relation, Tiles
from attnspec.graphs.tile_cover import band_cover, differences


@dataclass(frozen=True)
class Self(Relation):
    """Every query reads its own position."""

    name: ClassVar = "self"
    anchored: ClassVar = False
    exact_cover: ClassVar = True

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return q == k

    def progressions(self, q: np.ndarray, n: int) -> Progressions:
        return q[:, None], q[:, None] + 1, 1

    def edges(self, n: int) -> int:
        return n

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        return [q.start - k.start]

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        return band_cover(differences(q, k), 0, 0)

    def transposed(self) -> Relation:
        return self

    @classmethod
    def samples(cls) -> Iterator[Self]:
        yield cls()
