"""Random keys: r distinct keys for each query, every subset equally likely.

Edges: n min(r, n); under `causal`, sum over q of min(r, q + 1).
Source: Zaheer et al. 2020, "Big Bird", section 2; the draws are those of `attnspec.counter`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.counter import RANDOM, Stream, distinct
from attnspec.drawn import Drawn
from attnspec.relations import Edges, argument, context


@dataclass(frozen=True)
class Random(Drawn):
    """Distinct random keys; in a causal spec among the keys up to the query, or all of them."""

    keys: int = argument("integer", "keys of each query", least=0)
    seed: int = argument("integer", "where the draws start", default=0, least=0, most=2**64 - 1)
    per_head: bool = argument("boolean", "draw anew for each head and layer", default=True)
    layer: int = context("layer", 0)
    head: int = context("head", 0)
    causal: bool = context("causal", False)

    name: ClassVar = "random"

    def __post_init__(self) -> None:
        if not self.per_head:
            object.__setattr__(self, "layer", 0)
            object.__setattr__(self, "head", 0)

    def draw(self, n: int) -> Edges:
        q = np.arange(n)
        population = q + 1 if self.causal else np.full(n, n)
        stream = Stream(self.seed, RANDOM, self.layer, self.head)
        table = distinct(stream, q, population, min(self.keys, n))
        at, _ = np.nonzero(table >= 0)
        return at, table[table >= 0]

    def edges(self, n: int) -> int:
        keys = min(self.keys, n)
        return keys * n - (keys * (keys - 1) // 2 if self.causal else 0)

    @classmethod
    def samples(cls) -> Iterator[Random]:
        yield cls(0)
        yield cls(3)
        yield cls(5, seed=2**64 - 1, layer=2, head=7)
        yield cls(4, seed=1, causal=True)
        yield cls(1000, per_head=False, layer=1)
        yield cls(1000, causal=True)
