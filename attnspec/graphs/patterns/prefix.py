"""A prefix that everyone reads: k < x.

Edges: n min(x, n).
Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer", section 3.2.1 (prefix LM, together with the causal mask).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.graphs.patterns.columns_rows import Rows
from attnspec.graphs.relation import Elementwise, Progressions, Relation, Tiles
from attnspec.graphs.tile_cover import covered
from attnspec.graphs.token_sets import Data, First
from attnspec.ir.parameters import RelationError, argument


@dataclass(frozen=True)
class Prefix(Relation):
    """Every query reads the first keys.

    `length` is a count, or an input: one number for the closed forms, an array that broadcasts with
    (q, k) for `holds`.
    """

    length: int | Data = argument(
        "length", "an input of kind `length`, or a count", least=0, positional=True
    )

    name: ClassVar = "prefix"
    sides: ClassVar = "k"
    exact_cover: ClassVar = True

    def __post_init__(self) -> None:
        given: object = self.length
        if isinstance(given, Data):
            return
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            raise RelationError(f"`prefix` needs a count of at least 0, got {given}")

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        length = self.length.values if isinstance(self.length, Data) else self.length
        return (q == q) & (k < length)

    def keys(self, n: int) -> int:
        """The number of keys read, at most n."""
        length = self.length.values if isinstance(self.length, Data) else self.length
        return min(n, int(np.asarray(length).item()))

    def progressions(self, q: np.ndarray, n: int) -> Progressions:
        shape = (len(q), 1)
        return np.zeros(shape, np.int64), np.full(shape, self.keys(n)), 1

    def edges(self, n: int) -> int:
        return n * self.keys(n)

    def listing(self, n: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        return None, None if isinstance(self.length, Data) else np.arange(self.keys(n))

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        return [k.start + 0 * q.start]

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        keys = self.keys(n)
        answer = covered(k.last < keys, k.start < keys)
        return np.broadcast_to(answer, np.broadcast_shapes(q.start.shape, k.start.shape))

    def transposed(self) -> Relation | None:
        return None if isinstance(self.length, Data) else Rows(First(self.length))

    @classmethod
    def samples(cls) -> Iterator[Prefix]:
        for length in (0, 1, 5, 1000):
            yield cls(length)
        yield cls(Data(np.int64(7)))
        yield cls(Data(9))
