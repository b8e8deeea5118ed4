"""Distances that are powers: |q - k| in {0, 1, b, b**2, ...}.

Edges: n + 2 sum of (n - p) over the powers p < n, which is about 2 n log_b(n).
Source: Li et al. 2019, "Enhancing the Locality and Breaking the Memory Bottleneck of Transformer on
Time Series Forecasting" (LogSparse), with base 2 and the causal mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, ClassVar

import numpy as np

from attnspec.graphs.relation import Elementwise, Progressions, Relation, Tiles
from attnspec.graphs.tile_cover import covered, differences, meets
from attnspec.ir.linear import N, product
from attnspec.ir.parameters import argument
from attnspec.ir.scalars import Apply, Scalar


@dataclass(frozen=True)
class Powers(Relation):
    """The keys at exponentially growing distances on both sides, and the query itself."""

    base: int = argument("integer", "ratio of one distance to the next", default=2, least=2)

    name: ClassVar = "powers"
    reads_itself: ClassVar = True
    symmetric: ClassVar = True
    anchored: ClassVar = False
    exact_cover: ClassVar = True
    moves_by: ClassVar = 1

    def distances(self, n: int) -> list[int]:
        """The distances below n, the distance 0 included, ascending."""
        found, power = [0], 1
        while power < n:
            found.append(power)
            power *= self.base
        return found

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        distance = abs(q - k)
        return reduce(or_, (distance == each for each in self.distances(n)))

    def progressions(self, q: np.ndarray, n: int) -> Progressions:
        powers = self.distances(n)
        keys = q[:, None] + np.array([-p for p in reversed(powers[1:])] + powers)
        inside = (keys >= 0) & (keys < n)
        start = np.where(inside, keys, 0)
        return start, start + inside, 1

    def edges(self, n: int) -> int:
        return n + 2 * sum(n - power for power in self.distances(n)[1:])

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        return [q.start - k.start]

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        members = differences(q, k)
        least, most, step = members
        if step == 1:
            distances = np.array(self.distances(n), np.int64)
            offsets = np.unique(np.concatenate([-distances, distances]))
            found = np.searchsorted(offsets, most, "right") - np.searchsorted(offsets, least)
            return covered(found == most - least + 1, found > 0)
        found = np.zeros(np.shape(least), np.int64)
        for power in self.distances(n):
            for offset in {power, -power}:
                found = found + meets(members, offset, offset)
        return covered(found == (most - least) // step + 1, found > 0)

    def transposed(self) -> Relation:
        return self

    def formula(self, causal: bool) -> Any:
        """With L powers of the base below n, which add up to (b**L - 1) / (b - 1), every distance d
        has n - d pairs on each side."""
        import sympy

        n, base = sympy.Symbol("n"), sympy.Integer(self.base)
        count = sympy.ceiling(sympy.log(n, base))
        one_side = count * n - (base**count - 1) / (base - 1)
        return n + (1 if causal else 2) * one_side

    @classmethod
    def order(cls, given: Mapping[str, Scalar]) -> Scalar:
        return product(N, Apply("/", (Apply("log2", (N,)), Apply("log2", (given["base"],)))))

    @classmethod
    def samples(cls) -> Iterator[Powers]:
        for base in (2, 3, 7, 1000):
            yield cls(base)
