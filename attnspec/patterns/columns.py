"""Columns of a token set: k in T.

Edges: n |T|.
Source: Beltagy, Peters, Cohan 2020, "Longformer", section 3.1 (one half of global attention); with
T = first(c) the attention sinks of Xiao et al. 2023, "Efficient Streaming Language Models with
Attention Sinks".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.relations import Edges, Elementwise, Progressions, Relation, Tiles, argument
from attnspec.tokens import Every, First, Last, Positions, TokenSet, TokenUnion


@dataclass(frozen=True)
class Columns(Relation):
    """Every query reads the keys of the set."""

    tokens: TokenSet = argument("tokens", "the keys that every query reads", positional=True)

    name: ClassVar = "columns"

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return self.tokens.contains(k, n) & (q == q)

    def progressions(self, q: np.ndarray, n: int) -> Progressions | None:
        closed = self.tokens.progressions(n)
        if closed is None:
            return None
        start, stop, step = closed
        shape = (len(q), len(start))
        return np.broadcast_to(start, shape), np.broadcast_to(stop, shape), step

    def rows(self, first: int, last: int, n: int) -> Edges:
        members = self.tokens.members(n)
        queries = max(0, last - first)
        return np.repeat(np.arange(first, first + queries), len(members)), np.tile(members, queries)

    def degrees(self, n: int) -> np.ndarray:
        return np.full(n, len(self.tokens.members(n)), np.int64)

    def edges(self, n: int) -> int:
        return len(self.tokens.members(n)) * n

    def listing(self, n: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        return None, self.tokens.members(n)

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        return [self.tokens.phase(k, n) + 0 * q.start]

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        answer = self.tokens.cover(k, n)
        return np.broadcast_to(answer, np.broadcast_shapes(q.start.shape, k.start.shape))

    def transposed(self) -> Relation:
        # imported late: each of the two patterns is the other's transpose
        from attnspec.patterns.rows import Rows

        return Rows(self.tokens)

    @classmethod
    def samples(cls) -> Iterator[Columns]:
        for tokens in (
            First(3),
            Last(200),
            Every(7),
            Positions(((0, 0), (5, 9), (100, 120))),
            TokenUnion((First(2), Last(2))),
        ):
            yield cls(tokens)
