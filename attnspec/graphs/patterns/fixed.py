"""Blocks and summary columns in one head: q//s = k//s or k mod s >= s - c.

Edges: those of block(size = s) and summary less their common
(n // s) s c + r max(0, r - (s - c)), with r = n mod s.
Source: Child, Gray, Radford, Sutskever 2019, "Generating Long Sequences with Sparse Transformers",
section 4.3; the paper's two heads, merged and without the causal mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.graphs.operators import Union
from attnspec.graphs.patterns.block import Block
from attnspec.graphs.patterns.summary import StrideEnds, Summary
from attnspec.graphs.relation import Elementwise, Progressions, Relation, Tiles
from attnspec.ir.parameters import argument


@dataclass(frozen=True)
class Fixed(Relation):
    """The keys of the query's block and the last cells of every block."""

    stride: int = argument("integer", "positions in a block", least=1)
    cells: int = argument("integer", "summary positions at the end of each block", least=1)

    name: ClassVar = "fixed"

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        summary = k % self.stride >= self.stride - self.cells
        return (q // self.stride == k // self.stride) | summary

    def progressions(self, q: np.ndarray, n: int) -> Progressions | None:
        return Union(self.parts()).progressions(q, n)

    def edges(self, n: int) -> int:
        whole, rest = divmod(n, self.stride)
        ends = StrideEnds(self.stride, self.cells)
        both = whole * self.stride * ends.size(self.stride) + rest * ends.size(rest)
        return Block(self.stride).edges(n) + Summary(self.stride, self.cells).edges(n) - both

    def parts(self) -> tuple[Relation, ...]:
        return Block(self.stride), Summary(self.stride, self.cells)

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        return Union(self.parts()).cover(q, k, n)

    def transposed(self) -> Relation:
        return Union((Block(self.stride), Summary(self.stride, self.cells).transposed()))
