"""Sorted blocks: the query's own block and the block that a learned permutation matches with it.

Sums of the keys of a block times a learned matrix are logits between blocks; alternating
normalisation of rows and columns in log space, `iterations` times at a temperature, makes of them
nearly a permutation R. Keys and values of the block that is matched with block i, argmax_j R_ij,
carry the factor 1 + R_ij - stop(R_ij), which trains the matrix.
Edges: at most 2 b n, with cut = r at most r b n.
Source: Tay et al. 2020, "Sparse Sinkhorn Attention", section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from attnspec.graphs.relation import Ahead, DataDependent
from attnspec.ir.linear import N, product
from attnspec.ir.mechanisms.declaration import Part
from attnspec.ir.parameters import RelationError, argument, context
from attnspec.ir.scalars import Scalar


@dataclass(frozen=True)
class Sinkhorn(DataDependent):
    """The own block and a matched block."""

    size: int = argument("integer", "positions in a block", least=1)
    iterations: int = argument("integer", "normalisations of rows and columns", default=7, least=1)
    temperature: float = argument(
        "real", "divides the logits before they are normalised", default=0.75, above=0
    )
    max_blocks: int = argument(
        "integer", "blocks that the learned matrix is for", default=64, least=1
    )
    cut: int | None = argument(
        "integer", "every query reads the blocks of so many rows alone", default=None, least=1
    )
    causal: bool = context("causal")

    name: ClassVar = "sinkhorn"
    one_sequence: ClassVar = "matches blocks of one sequence with each other"

    def __post_init__(self) -> None:
        if self.cut is not None and self.causal:
            raise RelationError(
                "`cut` lets every query read later keys, and the spec is `causal`: remove one of"
                " the two"
            )
        if self.cut is not None and self.cut > self.max_blocks:
            raise RelationError(
                f"`cut` must be at most `max_blocks`, which is {self.max_blocks}, got {self.cut}"
            )

    @property
    def learned(self) -> tuple[Part, ...]:
        return (Part("sort", ("d", self.max_blocks), "normal", 0.02),)

    @property
    def weighs(self) -> str:
        return "multiplies the keys and values of matched blocks"

    @property
    def weighs_pairs(self) -> bool:
        return True

    def ahead(self, n: int) -> Ahead | None:
        if self.causal or n <= self.size:
            return None
        why = "all blocks are matched together, by sums over whole blocks"
        query = self.size if self.cut is None else 0
        return Ahead(query, query + 1, why) if query + 1 < n else None

    def most_keys(self, n: int) -> int:
        return min(n, (self.cut or 2) * self.size)

    def about_keys(self, n: int) -> int:
        return self.most_keys(n)

    def scoring(self, n: int, d: int) -> tuple[int, str]:
        blocks = -(-n // self.size)
        return 2 * blocks * blocks * d + n * d, "sums of blocks and the network; balancing beside"

    @classmethod
    def beside(cls, arguments: Mapping[str, object]) -> bool:
        return False

    @classmethod
    def order(cls, given: Mapping[str, Scalar]) -> Scalar:
        return product(N, given["size"])
