"""Blocks of equal size and their neighbours: -after <= q//b - k//b <= before.

Edges, before = after = 0: (n // b) b**2 + (n mod b)**2.
Source: Qiu et al. 2020, "Blockwise Self-Attention for Long Document Understanding"; with neighbours
Zaheer et al. 2020, "Big Bird", appendix D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.graphs.patterns.window import Window
from attnspec.graphs.relation import Elementwise, Progressions, Relation, Tiles, covered
from attnspec.ir.parameters import argument


@dataclass(frozen=True)
class Block(Relation):
    """The keys of the query's block and of whole blocks before and after it."""

    size: int = argument("integer", "positions in a block; the last may be shorter", least=1)
    before: int = argument("integer", "blocks before the query's own", default=0, least=0)
    after: int = argument("integer", "blocks after the query's own", default=0, least=0)

    name: ClassVar = "block"

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        offset = q // self.size - k // self.size
        return (offset <= self.before) & (-offset <= self.after)

    def progressions(self, q: np.ndarray, n: int) -> Progressions:
        block = q // self.size
        start = (block - np.minimum(block, self.before)) * self.size
        last = np.minimum(block + min(self.after, n), (n - 1) // self.size)
        return start[:, None], np.minimum((last + 1) * self.size, n)[:, None], 1

    def edges(self, n: int) -> int:
        whole, rest = divmod(n, self.size)
        between_whole = Window(before=self.before, after=self.after).edges(whole)
        with_last = min(self.before, whole) + min(self.after, whole)
        return self.size**2 * between_whole + self.size * rest * with_last + rest**2

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        size = self.size
        return [q.start % size, k.start % size, q.start // size - k.start // size]

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        least = q.start // self.size - k.last // self.size
        most = q.last // self.size - k.start // self.size
        full = (most <= self.before) & (least >= -self.after)
        return covered(full, (least <= self.before) & (most >= -self.after))

    def transposed(self) -> Relation:
        return Block(self.size, self.after, self.before)
