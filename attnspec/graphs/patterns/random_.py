"""Random keys: r distinct keys for each query, every subset equally likely.

Edges: n min(r, n); under `causal`, sum over q of min(r, q + 1).
Source: Zaheer et al. 2020, "Big Bird", section 2; the draws are those of `graphs.counter_rng`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.graphs.counter_rng import RANDOM, Stream, distinct
from attnspec.graphs.edge_table import FEW, Drawn, table_from
from attnspec.graphs.relation import EMPTY, Changing, Edges, Tiles
from attnspec.ir.linear import N, product
from attnspec.ir.parameters import argument, context
from attnspec.ir.scalars import Scalar


@dataclass(frozen=True)
class Random(Drawn):
    """Distinct random keys; in a causal spec among the keys up to the query, or all of them."""

    keys: int = argument("integer", "keys of each query", least=0)
    seed: int = argument("integer", "the random seed", default=0, least=0, most=2**62)
    per_head: bool = argument("boolean", "draw anew for each head and layer", default=True)
    layer: int = context("layer")
    head: int = context("head")
    causal: bool = context("causal")

    name: ClassVar = "random"
    one_sequence: ClassVar = "draws by the places of one sequence"
    changes: ClassVar = Changing(
        "draws among all n keys",
        "add the statement `causal`, under which it draws among earlier keys",
        under_causal=False,
    )

    def __post_init__(self) -> None:
        if not self.per_head:
            object.__setattr__(self, "layer", 0)
            object.__setattr__(self, "head", 0)

    def draw(self, n: int) -> np.ndarray:
        return self._drawn(0, n, n)

    def _drawn(self, first: int, last: int, n: int) -> np.ndarray:
        """The keys of the queries first <= q < last."""
        q = np.arange(first, last)
        population = q + 1 if self.causal else np.full(len(q), n)
        stream = Stream(self.seed, RANDOM, self.layer, self.head)
        return distinct(stream, q, population, min(self.keys, n))

    def rows(self, first: int, last: int, n: int) -> Edges:
        if (last - first) * FEW > n:
            return super().rows(first, last, n)
        # every row is drawn for itself, so a few of them need no table
        q, k = table_from(self._drawn(first, max(first, last), n)).rows(0, max(0, last - first))
        return q + first, k

    def typical_degree(self, n: int) -> float:
        return self.edges(n) / max(1, n)

    def even_share(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        if not self.causal:
            return super().even_share(q, k, n)
        # the first queries draw from few keys, and none draws a later one: a quarter of the pairs,
        # the later queries with the earlier keys, is far from both
        q_middle, k_middle = (q.start + q.last) // 2, (k.start + k.last) // 2
        return np.where((k_middle <= q_middle) & (q_middle >= 2 * self.keys), 0.25, 0.0)

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        later = k.start > q.last
        if not self.causal or not later.any():
            return super().cover(q, k, n)
        rest = np.flatnonzero(~later)

        def chosen(tiles: Tiles) -> Tiles:
            start, stop, _ = np.broadcast_arrays(tiles.start, tiles.stop, later)
            return Tiles(start.ravel()[rest], stop.ravel()[rest], tiles.step)

        answer = np.full(later.size, EMPTY, np.uint8)
        if len(rest):
            answer[rest] = super().cover(chosen(q), chosen(k), n)
        return answer.reshape(later.shape)

    def edges(self, n: int) -> int:
        keys = min(self.keys, n)
        return keys * n - (keys * (keys - 1) // 2 if self.causal else 0)

    @classmethod
    def order(cls, given: Mapping[str, Scalar]) -> Scalar:
        return product(N, given["keys"])
