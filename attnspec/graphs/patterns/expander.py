"""A random expander: d/2 random Hamiltonian cycles and their reverses.

Edges: at most n d; fewer where cycles share a pair. One position reads itself, and of two positions
each reads the other.
Source: Shirzad et al. 2023, "Exphormer", section 3 and appendix C; Friedman 2008, "A Proof of
Alon's Second Eigenvalue Conjecture". The cycles are the permutations of `graphs.counter_rng`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.graphs.counter_rng import EXPANDER, Stream, permutation
from attnspec.graphs.edge_table import Drawn
from attnspec.graphs.relation import Changing
from attnspec.ir.linear import N, product
from attnspec.ir.parameters import argument, context
from attnspec.ir.scalars import Scalar


@dataclass(frozen=True)
class Expander(Drawn):
    """The neighbours of the query on each of the cycles."""

    degree: int = argument("integer", "keys of each query", least=2, most=4096, even=True)
    seed: int = argument("integer", "the random seed", default=0, least=0, most=2**62)
    per_head: bool = argument("boolean", "draw anew for each head and layer", default=True)
    layer: int = context("layer")
    head: int = context("head")

    name: ClassVar = "expander"
    one_sequence: ClassVar = "walks in cycles through one sequence"
    symmetric: ClassVar = True
    changes: ClassVar = Changing(
        "draws cycles through all n positions",
        "use `random(keys = …)`, which under the statement `causal` draws among earlier keys",
    )

    def __post_init__(self) -> None:
        if not self.per_head:
            object.__setattr__(self, "layer", 0)
            object.__setattr__(self, "head", 0)

    def draw(self, n: int) -> np.ndarray:
        stream = Stream(self.seed, EXPANDER, self.layer, self.head)
        table = np.empty((n, self.degree), np.int32)
        for index in range(self.degree // 2):
            cycle = permutation(stream, index, n)
            table[cycle, 2 * index] = np.roll(cycle, -1)
            table[cycle, 2 * index + 1] = np.roll(cycle, 1)
        return table

    def typical_degree(self, n: int) -> float:
        # cycles share a pair only now and then
        return float(min(self.degree, max(1, n - 1)))

    @classmethod
    def order(cls, given: Mapping[str, Scalar]) -> Scalar:
        return product(N, given["degree"])
