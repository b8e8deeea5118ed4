"""A prefix that everyone reads: k < x.

Edges: n min(x, n).
Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer", section 3.2.1 (prefix LM, together with the causal mask).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.graphs.patterns.columns_rows import Rows
from attnspec.graphs.relation import Elementwise, Relation
from attnspec.graphs.token_sets import Data, First, OfKeys, TokenSet
from attnspec.ir.parameters import RelationError, argument


@dataclass(frozen=True)
class Prefix(OfKeys):
    """Every query reads the first keys.

    `length` is a count, or an input: one number for the closed forms, an array that broadcasts with
    (q, k) for `holds`.
    """

    length: int | Data = argument(
        "length", "an input of kind `length`, or a count", least=0, positional=True
    )

    name: ClassVar = "prefix"

    def __post_init__(self) -> None:
        length: object = self.length
        if isinstance(length, Data):
            return
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise RelationError(f"`prefix` needs a count of at least 0, got {length}")

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        length = self.length.values if isinstance(self.length, Data) else self.length
        return (q == q) & (k < length)

    def keys(self) -> TokenSet:
        length = self.length.values if isinstance(self.length, Data) else self.length
        return First(int(np.asarray(length).item()))

    def listing(self, n: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        return (None, None) if isinstance(self.length, Data) else super().listing(n)

    def transposed(self) -> Relation | None:
        return None if isinstance(self.length, Data) else Rows(self.keys())
