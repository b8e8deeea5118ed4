"""A window and a stride in one head: |q - k| < s or s divides q - k.

Edges: those of window(radius = s) and residue(step = s) less their common n + 2 max(0, n - s).
Source: Child, Gray, Radford, Sutskever 2019, "Generating Long Sequences with Sparse Transformers",
section 4.3; the paper's two heads, merged and without the causal mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.graphs.patterns.residue import Residue
from attnspec.graphs.patterns.window import Window
from attnspec.graphs.relation import Elementwise, Relation, Tiles
from attnspec.graphs.toeplitz import Diagonals, Toeplitz
from attnspec.ir.parameters import argument


@dataclass(frozen=True)
class Strided(Toeplitz):
    """The keys less than a stride away and those at multiples of the stride."""

    stride: int = argument("integer", "distances below it and multiples of it are read", least=1)

    name: ClassVar = "strided"
    symmetric: ClassVar = True

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return (abs(q - k) < self.stride) | ((q - k) % self.stride == 0)

    def diagonals(self, n: int) -> Diagonals:
        near, far = self.stride - 1, (n - 1) // self.stride * self.stride
        return (
            (-far, -self.stride, self.stride),
            (-near, near, 1),
            (self.stride, far, self.stride),
        )

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        # beyond the window residues alone tell masks apart, as the parts say
        return Relation.phase(self, q, k, n)

    def parts(self) -> tuple[Relation, ...]:
        return Window(radius=self.stride - 1), Residue(self.stride)
