"""Choices made elsewhere: an input lists for each query the key blocks that it reads.

Blocks are counted from position 0. Edges: at most c b n for lists of c blocks of b keys.
Source: what DeepSeek-V3.2 and MiniMax-M3 hand to their attention: DeepSeek-AI 2025,
"DeepSeek-V3.2-Exp", section 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.graphs.relation import DataDependent, Edges, Elementwise, sort_edges
from attnspec.graphs.token_sets import Data
from attnspec.ir.linear import N
from attnspec.ir.parameters import argument
from attnspec.ir.scalars import Scalar


@dataclass(frozen=True)
class Chosen(DataDependent):
    """The key blocks that an input names; [n, c] numbers of one head where they are known."""

    choices: Data = argument("choices", "an input of kind `choices`", positional=True)

    name: ClassVar = "chosen"
    by_inputs: ClassVar = True

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        if self.choices.values is None:
            return super().holds(q, k, n)
        block = np.asarray(k // self.choices.size)
        return (self.choices.values[q] == block[..., None]).any(-1)

    def rows(self, first: int, last: int, n: int) -> Edges:
        if self.choices.values is None:
            return super().rows(first, last, n)
        size = self.choices.size
        blocks = np.asarray(self.choices.values[first:last], np.int64)
        q, place = np.nonzero(blocks >= 0)
        k = blocks[q, place][:, None] * size + np.arange(size)
        q = np.repeat(q + first, size)
        inside = k.ravel() < n
        return sort_edges(q[inside], k.ravel()[inside], unique=True)

    @classmethod
    def order(cls, given: Mapping[str, Scalar]) -> Scalar:
        return N
