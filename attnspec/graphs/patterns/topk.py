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
from math import gcd
from typing import Any, ClassVar

import numpy as np

from attnspec.graphs.relation import EMPTY, Ahead, DataDependent, Relation, Tiles
from attnspec.graphs.token_sets import Data
from attnspec.ir.linear import N, product
from attnspec.ir.parameters import RelationError, argument, context
from attnspec.ir.program import InputRef
from attnspec.ir.scalars import Apply, Scalar
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import count_of


@dataclass(frozen=True)
class TopK(DataDependent):
    """The keys or key blocks with the highest scores."""

    keys: int | None = argument("integer", "keys of each choice", default=None, least=1)
    blocks: int | None = argument("integer", "key blocks of each choice", default=None, least=1)
    mass: float | None = argument(
        "real", "least softmax mass that the blocks have together", default=None, above=0
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
    share: str | None = argument(  # type: ignore[misc]
        "choice",
        "heads whose scores are averaged; `group` where heads share keys, else `head`",
        default=None,
        choices=("head", "group", "all"),
    )
    within: Relation | None = argument("graph", "the only pairs scored and read", default=None)
    causal: bool = context("causal")

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
            what = f"`size` is that of a block, and `keys = {self.keys}` chooses single keys"
            raise RelationError(f"{what}: remove `size`, or write `blocks = {self.keys}`")
        if self.score == "dot" and self.block > 1:
            raise RelationError(
                f"`score = dot` scores single keys, and a block has {self.block} keys here: write"
                " `score = mean`, `max`, `bound` or `mass`"
            )
        if isinstance(self.score, Data) and self.score.size != self.block:
            raise RelationError(
                f"`score` is an input for blocks of {count_of(self.score.size, 'position')}, and"
                f" `topk` has blocks of {self.block}: declare it as `scores(size = {self.block})`"
            )

    @classmethod
    def not_across(cls, given: Mapping[str, object]) -> str:
        if isinstance(given.get("score"), InputRef):
            return "has a `score` input about one sequence; without `score` it can be used"
        if (given.get("queries") or given.get("size") or 1) != 1:
            return "makes one choice for several queries; with `queries = 1` it can be used"
        return ""

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

    @property
    def given_choice(self) -> bool:
        return isinstance(self.score, Data)

    def ahead(self, n: int) -> Ahead | None:
        if self.given_choice:
            return None
        m, most = self.shared_by, self.keys or self.blocks or 1
        if not self.causal:
            if m == self.block == 1 and self.above is not None and self.scorer != "mass":
                # each key is examined by itself
                return None
            crowded = -(-n // self.block) > most or self.above is not None
            why = "later keys compete with earlier ones, as its scope is not `causal`"
            return Ahead(0, 1, why) if crowded and n > 1 else None
        if m == 1:
            return None
        # the first row with more candidates than places, and a query after its first
        if self.above is not None or self.mass is not None:
            # of keys one is always kept by its mass
            fewest = 2 if self.block == 1 and self.mass is not None else 1
            first = self._row_with(fewest)
        elif self.always is None and self.block > 1:
            rows = np.arange(0, n, m)
            # the last choice may have fewer queries
            last = np.minimum(rows + m, n) - 1
            left = most - (last // self.block - rows // self.block + 1)
            first = min(rows[(0 < left) & (left < rows // self.block)].tolist(), default=n)
        else:
            first = self._row_with(most + 1)
        why = f"{m:,} queries share one choice, by their mean"
        return Ahead(first, first + 1, why) if first + 1 < n else None

    def _row_with(self, candidates: int) -> int:
        """The first query of the first row with so many blocks before it."""
        m = self.shared_by
        return -(-(candidates * self.block - (self.block == 1)) // m) * m

    @property
    def waits(self) -> str:
        return "forces blocks for queries to come, too" if self.shared_by > 1 else ""

    @property
    def own_blocks(self) -> int:
        """The blocks in which the queries of one choice may lie, counted from a border of both."""
        m, b = self.shared_by, self.block
        # a choice begins at most b - gcd(m, b) positions after the begin of a block
        return (b - gcd(m, b) + m - 1) // b + 1

    def forced(self, n: int) -> int:
        """At most so many blocks are forced on one choice, where no padding stands before."""
        if self.always is None:
            return self.own_blocks if self.causal and self.block > 1 else 0
        rows, blocks = -(-n // self.shared_by), -(-n // self.block)
        if rows * blocks > LIMITS.blocks_looked:
            return blocks
        q, k = (np.arange(0, n, size) for size in (self.shared_by, self.block))
        tiles = (
            Tiles(q[:, None], np.minimum(q + self.shared_by, n)[:, None]),
            Tiles(k, np.minimum(k + self.block, n)),
        )
        if isinstance(self.always, DataDependent):
            return blocks
        kinds = np.broadcast_to(self.always.cover(*tiles, n), (rows, blocks)) != EMPTY
        if self.causal:
            kinds = kinds & (tiles[1].start < tiles[0].stop)
        return int(kinds.sum(1).max(initial=0))

    def doubt(self, n: int) -> str:
        most, forced = self.blocks or 0, self.forced(n)
        if 0 < most <= forced and most * self.block < n:
            return f"keeps {count_of(most, 'block')} and forces as many: ask for more"
        return ""

    def most_keys(self, n: int) -> int:
        if self.mass is not None or self.above is not None:
            return n
        return min(n, self.block * max(self.keys or self.blocks or 0, self.forced(n)))

    def about_keys(self, n: int) -> int:
        most = self.keys or self.blocks
        return super().about_keys(n) if most is None else min(n, most * self.block)

    def scoring(self, n: int, d: int) -> tuple[int, str]:
        rows, blocks = -(-n // self.shared_by), -(-n // self.block)
        if self.given_choice:
            return 0, ""
        if self.scorer in ("max", "mass", "dot"):
            return 2 * rows * n * d, "scores of all keys"
        products = 2 if self.scorer == "bound" else 1
        return products * 2 * rows * blocks * d + n * d, "scores of all blocks"

    @classmethod
    def order(cls, given: Mapping[str, Scalar]) -> Scalar:
        size = given.get("size") or 1
        return Apply("/", (product(N, N), product(size, given.get("queries") or size)))

    @classmethod
    def factors(cls, given: Mapping[str, Any]) -> str:
        size, most = given.get("size") or 1, given.get("keys") or given.get("blocks")
        shared = given.get("queries") or size
        if not isinstance(size, int) or not isinstance(shared, int):
            return ""
        each = size * shared
        scores = "n**2 scores" if each == 1 else f"n**2 / {each:,} scores of blocks"
        pairs = f"at most {most * size:,} n pairs" if isinstance(most, int) else "pairs by these"
        return f"{scores}, and {pairs}"
