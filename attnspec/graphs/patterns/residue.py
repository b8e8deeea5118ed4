"""Residue classes: s divides q - k.

Edges: sum over residues c < s of m_c**2, where m_c positions have residue c.
Source: Child, Gray, Radford, Sutskever 2019, "Generating Long Sequences with Sparse Transformers",
section 4.3 (the second head of the strided pattern).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.graphs.relation import Elementwise, Tiles
from attnspec.graphs.toeplitz import Diagonals, Toeplitz
from attnspec.ir.parameters import argument


@dataclass(frozen=True)
class Residue(Toeplitz):
    """The keys in the query's residue class."""

    step: int = argument("integer", "distance between neighbouring keys", least=1)

    name: ClassVar = "residue"
    symmetric: ClassVar = True

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return (q - k) % self.step == 0

    def diagonals(self, n: int) -> Diagonals:
        most = (n - 1) // self.step * self.step
        return ((-most, most, self.step),)

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        return [(q.start - k.start) % self.step]
