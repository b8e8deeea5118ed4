"""Columns and rows of a token set: each is the transpose of the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.graphs.relation import Edges, Elementwise, Progressions, Relation, Tiles
from attnspec.graphs.token_sets import OfKeys, TokenSet
from attnspec.ir.parameters import argument


@dataclass(frozen=True)
class Columns(OfKeys):
    """Columns of a token set: k in T.

    Edges: n |T|.
    Source: Beltagy, Peters, Cohan 2020, "Longformer", section 3.1 (one half of global attention);
    with T = first(c) the attention sinks of Xiao et al. 2023, "Efficient Streaming Language Models
    with Attention Sinks".
    """

    tokens: TokenSet = argument("tokens", "the keys that every query reads", positional=True)

    name: ClassVar = "columns"

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return self.tokens.contains(k, n) & (q == q)

    def keys(self) -> TokenSet:
        return self.tokens

    def transposed(self) -> Relation:
        return Rows(self.tokens)


@dataclass(frozen=True)
class Rows(Relation):
    """Rows of a token set: q in T.

    Edges: |T| n.
    Source: Beltagy, Peters, Cohan 2020, "Longformer", section 3.1 (one half of global attention).
    """

    tokens: TokenSet = argument("tokens", "the queries that read every key", positional=True)

    name: ClassVar = "rows"
    sides: ClassVar = "q"

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return self.tokens.contains(q, n) & (k == k)

    def progressions(self, q: np.ndarray, n: int) -> Progressions:
        special = np.asarray(self.tokens.contains(q, n), dtype=bool)
        return np.zeros((len(q), 1), np.int64), np.where(special, n, 0)[:, None], 1

    def rows(self, first: int, last: int, n: int) -> Edges:
        members = self.tokens.members(n)
        members = members[(members >= first) & (members < last)]
        return np.repeat(members, n), np.tile(np.arange(n), len(members))

    def edges(self, n: int) -> int:
        return self.tokens.size(n) * n

    def listing(self, n: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        return self.tokens.members(n), None

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        return [self.tokens.phase(q, n) + 0 * k.start]

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        answer = self.tokens.cover(q, n)
        return np.broadcast_to(answer, np.broadcast_shapes(q.start.shape, k.start.shape))

    def transposed(self) -> Relation:
        return Columns(self.tokens)
