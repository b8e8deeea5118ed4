"""Sorted blocks: the query's own block and the block that a learned permutation matches with it.

Block sums are mapped to a matrix of logits between blocks; alternating normalisation of its rows
and columns in log space, `iterations` times at a temperature, makes it nearly a permutation.
Edges: at most 2 b n.
Source: Tay et al. 2020, "Sparse Sinkhorn Attention", section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from attnspec.graphs.relation import DataDependent
from attnspec.ir.linear import N, product
from attnspec.ir.parameters import RelationError, argument
from attnspec.ir.scalars import Scalar


@dataclass(frozen=True)
class Sinkhorn(DataDependent):
    """The own block and a matched block."""

    size: int = argument("integer", "positions in a block", least=1)
    iterations: int = argument("integer", "normalisations of rows and columns", default=7, least=1)
    temperature: float = argument(
        "real", "divides the logits before they are normalised", default=0.75, least=0
    )

    name: ClassVar = "sinkhorn"

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise RelationError(f"`temperature` must be above 0, got {self.temperature}")

    @classmethod
    def order(cls, given: Mapping[str, Scalar]) -> Scalar:
        return product(N, given["size"])
