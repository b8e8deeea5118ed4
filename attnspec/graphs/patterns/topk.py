"""The best keys or key blocks: scored cheaply, some kept, and read exactly.

A choice of `queries` consecutive queries scores the key blocks of `size` consecutive positions,
keeps some of them, and its queries read their keys. Scores are not scaled and have no gradient.
Edges: at most n b max(r, forced) where r blocks of b are kept; n c for c keys.
Source: Gupta et al. 2021, "Memory-efficient Transformers via Top-k Attention", section 2; Lu et al.
2025, "MoBA: Mixture of Block Attention for Long-Context LLMs", section 2; Tang et al. 2024, "Quest:
Query-Aware Sparsity for Efficient Long-Context LLM Inference", section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from attnspec.graphs.relation import DataDependent, Relation
from attnspec.graphs.token_sets import Data
from attnspec.ir.linear import N, product
from attnspec.ir.parameters import RelationError, argument, context
from attnspec.ir.scalars import Apply, Scalar


@dataclass(frozen=True)
class TopK(DataDependent):
    """The keys or key blocks with the highest scores."""

    keys: int | None = argument("integer", "keys of each choice", default=None, least=1)
    blocks: int | None = argument("integer", "key blocks of each choice", default=None, least=1)
    mass: float | None = argument(
        "real", "softmax mass that the blocks have together at least", default=None
    )
    above: float | None = argument("real", "what scores must be above", default=None)
    size: int | None = argument(
        "integer", "positions in a key block; 1 with `keys`", default=None, least=1
    )
    queries: int | None = argument(
        "integer",
        "consecutive queries of one choice; 1 with `keys`, else `size`",
        default=None,
        least=1,
    )
    score: str | Data | None = argument(
        "choice",
        "what blocks are ranked by; `dot` where size is 1, else `mean`",
        default=None,
        choices=("dot", "mean", "max", "bound", "mass"),
        input="scores",
    )
    always: Relation | None = argument(
        "graph", "blocks with a pair of it are taken first, inside the budget", default=None
    )
    share: str | None = argument(
        "choice",
        "heads whose scores are averaged; `group` where heads share keys, else `head`",
        default=None,
        choices=("head", "group", "all"),
    )
    within: Relation | None = argument("graph", "the only pairs scored and read", default=None)
    causal: bool = context("causal", False)

    name: ClassVar = "topk"
    signatures: ClassVar = (
        ("keys",),
        ("blocks", "size"),
        ("mass", "size"),
        ("above", "size"),
        ("keys", "size"),
    )

    def __post_init__(self) -> None:
        if self.keys is not None and self.size not in (None, 1):
            raise RelationError(f"`keys` means blocks of `size` 1, got {self.size}")
        if self.mass is not None and not self.mass > 0:
            raise RelationError(f"`mass` must be above 0, got {self.mass:g}")
        if self.score == "dot" and self.block > 1:
            raise RelationError(
                f"`score = dot` is of single keys, and blocks have {self.block}: say which of"
                " mean, max, bound, mass"
            )
        if isinstance(self.score, Data) and self.score.size != self.block:
            raise RelationError(
                f"`score` is an input about blocks of {self.score.size} positions, and `topk` has"
                f" blocks of {self.block}"
            )

    @property
    def block(self) -> int:
        """Positions in a key block."""
        return self.size or 1

    @property
    def shared_by(self) -> int:
        """Queries of one choice."""
        return self.queries or self.block

    @property
    def scorer(self) -> str:
        """The score by which blocks are ranked; "" for an input."""
        if isinstance(self.score, Data):
            return ""
        return self.score or ("dot" if self.block == 1 else "mean")

    @classmethod
    def steady(cls, arguments: Mapping[str, object], causal: bool) -> bool:
        shared = arguments.get("queries") or arguments.get("size") or 1
        return causal and shared == 1

    @classmethod
    def order(cls, given: Mapping[str, Scalar]) -> Scalar:
        size = given.get("size") or 1
        return Apply("/", (product(N, N), product(size, given.get("queries") or size)))
