"""No key after the query: k <= q.

Edges: n (n + 1) / 2.
Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attnspec.graphs.patterns.window import Window
from attnspec.graphs.relation import Elementwise, Relation
from attnspec.graphs.toeplitz import Diagonals, Toeplitz
from attnspec.ir.scalars import LARGEST


@dataclass(frozen=True)
class Causal(Toeplitz):
    """The keys up to and including the query."""

    name: ClassVar = "causal"
    one_sequence: ClassVar = "compares the places of queries and keys in one sequence"

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return k <= q

    def diagonals(self, n: int) -> Diagonals:
        return ((0, n - 1, 1),)

    def transposed(self) -> Relation:
        # a window that reaches past the end of any sequence
        return Window(before=0, after=LARGEST)
