"""Residue classes: s divides q - k.

Edges: sum over residues c < s of m_c**2, where m_c positions have residue c.
Source: Child, Gray, Radford, Sutskever 2019, "Generating Long Sequences with Sparse Transformers",
section 4.3 (the second head of the strided pattern).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import ClassVar

import numpy as np

from attnspec.graphs.relation import EMPTY, FULL, SOME, Elementwise, Progressions, Relation, Tiles
from attnspec.ir.parameters import argument


@dataclass(frozen=True)
class Residue(Relation):
    """The keys in the query's residue class."""

    step: int = argument("integer", "distance between neighbouring keys", least=1)

    name: ClassVar = "residue"
    anchored: ClassVar = False
    exact_cover: ClassVar = True

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return (q - k) % self.step == 0

    def progressions(self, q: np.ndarray, n: int) -> Progressions:
        return (q % self.step)[:, None], np.full((len(q), 1), n), self.step

    def edges(self, n: int) -> int:
        longer, shorter = n % self.step, self.step - n % self.step
        return longer * (n // self.step + 1) ** 2 + shorter * (n // self.step) ** 2

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        return [(q.start - k.start) % self.step]

    def strides(self, n: int) -> tuple[tuple[int, int], ...]:
        return ((self.step, self.step),)

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        return residue_cover(q, k, self.step)

    def transposed(self) -> Relation:
        return self

    @classmethod
    def samples(cls) -> Iterator[Residue]:
        for step in (1, 2, 3, 7, 64, 1000):
            yield cls(step)


def residue_cover(q: Tiles, k: Tiles, step: int) -> np.ndarray:
    """The cover of `step` divides q - k; exact where a tile's step is one or both steps agree."""
    full = ((q.count == 1) | (q.step % step == 0)) & ((k.count == 1) | (k.step % step == 0))
    divides = (q.start - k.start) % step == 0
    common = gcd(step, q.step, k.step)
    never = (q.start - k.start) % common != 0
    if q.step == k.step:
        # q - k = d + t m for every m in [-(keys - 1), queries - 1]: is one of them 0 modulo step?
        turn = step // common
        inverse = pow(q.step // common, -1, turn) if turn > 1 else 0
        wanted = (-((q.start - k.start) // common) * inverse) % turn
        low = 1 - k.count
        first = low + (wanted - low) % turn
        never = never | (first > q.count - 1)
    return np.where(full, np.where(divides, FULL, EMPTY), np.where(never, EMPTY, SOME)).astype(
        np.uint8
    )
