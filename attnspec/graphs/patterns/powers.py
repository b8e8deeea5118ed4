"""Distances that are powers: |q - k| in {0, 1, b, b**2, ...}.

Edges: n + 2 sum of (n - p) over the powers p < n, which is about 2 n log_b(n).
Source: Li et al. 2019, "Enhancing the Locality and Breaking the Memory Bottleneck of Transformer on
Time Series Forecasting" (LogSparse), with base 2 and the causal mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import ClassVar

import numpy as np

from attnspec.graphs.relation import Elementwise, Tiles, covered
from attnspec.graphs.toeplitz import Diagonals, Toeplitz
from attnspec.ir.linear import N, product
from attnspec.ir.parameters import argument
from attnspec.ir.scalars import Apply, Scalar


@dataclass(frozen=True)
class Powers(Toeplitz):
    """The keys at exponentially growing distances on both sides, and the query itself."""

    base: int = argument("integer", "ratio of each distance to the one before", default=2, least=2)

    name: ClassVar = "powers"
    numpy_only: ClassVar = True
    reads_itself: ClassVar = True
    symmetric: ClassVar = True
    moves_by: ClassVar = 1

    def distances(self, n: int) -> list[int]:
        """The distances below n, the distance 0 included, ascending."""
        distances, power = [0], 1
        while power < n:
            distances.append(power)
            power *= self.base
        return distances

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        distance = abs(q - k)
        return reduce(or_, (distance == each for each in self.distances(n)))

    def diagonals(self, n: int) -> Diagonals:
        distances = self.distances(n)
        return tuple((d, d, 1) for d in sorted({*distances, *(-d for d in distances)}))

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        if q.step > 1 or k.step > 1:
            return super().cover(q, k, n)
        # all distances in one look, where one by one they take ten times as long
        distances = np.array([first for first, _, _ in self.diagonals(n)], np.int64)
        least, most = q.start - k.last, q.last - k.start
        counts = np.searchsorted(distances, most, "right") - np.searchsorted(distances, least)
        return covered(counts == most - least + 1, counts > 0)

    @classmethod
    def order(cls, given: Mapping[str, Scalar]) -> Scalar:
        return product(N, Apply("/", (Apply("log2", (N,)), Apply("log2", (given["base"],)))))
