"""The best blocks: per query block the key blocks with the highest score.

The score of two blocks is the product of the means of their queries and of their keys.
Edges: n b min(r, n / b) where b divides n.
Source: Yuan et al. 2025, "Native Sparse Attention", section 3.3; Lu et al. 2025, "MoBA: Mixture of
Block Attention for Long-Context LLMs", section 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from attnspec.graphs.relation import DataDependent
from attnspec.ir.linear import N, product
from attnspec.ir.parameters import argument
from attnspec.ir.scalars import Scalar


@dataclass(frozen=True)
class TopK(DataDependent):
    """The key blocks whose means agree best with the mean of the query block."""

    size: int = argument("integer", "positions in a block", least=1)
    blocks: int = argument("integer", "key blocks of each query block", least=1)

    name: ClassVar = "topk"

    @classmethod
    def order(cls, given: Mapping[str, Scalar]) -> Scalar:
        return product(N, given["size"], given["blocks"])
