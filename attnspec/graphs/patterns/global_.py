"""Global tokens: q in T or k in T.

Edges, with g = |T|: g (2 n - g).
Source: Beltagy, Peters, Cohan 2020, "Longformer", section 3.1; Zaheer et al. 2020, "Big Bird",
section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.graphs.operators import Union
from attnspec.graphs.patterns.columns_rows import Columns, Rows
from attnspec.graphs.relation import Edges, Elementwise, Progressions, Relation, Tiles
from attnspec.graphs.token_sets import TokenSet
from attnspec.ir.parameters import argument


@dataclass(frozen=True)
class Global(Relation):
    """The tokens of the set read every key and are read by every query."""

    tokens: TokenSet = argument("tokens", "the tokens that all others read", positional=True)

    name: ClassVar = "global"
    symmetric: ClassVar = True

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return self.tokens.contains(q, n) | self.tokens.contains(k, n)

    def progressions(self, q: np.ndarray, n: int) -> Progressions | None:
        closed = self.tokens.progressions(n)
        if closed is None:
            return None
        special = np.asarray(self.tokens.contains(q, n), dtype=bool)[:, None]
        start, stop, step = (np.broadcast_to(array, (len(q), len(closed[0]))) for array in closed)
        # a special query reads the one range 0:n, whatever the set looks like
        leading = np.arange(start.shape[1]) == 0
        whole = np.where(leading, n, 0)
        return (
            np.where(special, 0, start),
            np.where(special, whole, stop),
            np.where(special, 1, step),
        )

    def rows(self, first: int, last: int, n: int) -> Edges:
        return Union(self.parts()).rows(first, last, n)

    def edges(self, n: int) -> int:
        count = self.tokens.size(n)
        return count * (2 * n - count)

    def parts(self) -> tuple[Relation, ...]:
        return Rows(self.tokens), Columns(self.tokens)

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        return np.asarray(np.maximum(self.tokens.cover(q, n), self.tokens.cover(k, n)))
