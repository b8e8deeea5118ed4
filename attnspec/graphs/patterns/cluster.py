"""Clusters of spherical k-means: q and k in one cluster.

Queries and keys are normalised and find the nearest of `count` centroids, ten times moved from
`count` of them; q reads k where both have one nearest. balanced: each centroid takes its n / count
nearest queries and keys, so that a token may be in none or in several clusters; centroids are kept,
and move slowly in training. of = q: queries are clustered, and the mean of a cluster's queries
attends for all of them.
Edges: sum over clusters of queries times keys; n**2 / count where they are equal.
Source: Roy et al. 2021, "Efficient Content-Based Sparse Attention with Routing Transformers",
section 4; Vyas et al. 2020, "Fast Transformers with Clustered Attention", section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import ClassVar

from attnspec.graphs.relation import Ahead, DataDependent
from attnspec.graphs.token_sets import Data
from attnspec.ir.linear import N, product
from attnspec.ir.mechanisms.declaration import Part
from attnspec.ir.parameters import RelationError, argument, context
from attnspec.ir.scalars import Apply, Scalar


@dataclass(frozen=True)
class Cluster(DataDependent):
    """Pairs within one cluster."""

    labels: Data | None = argument(
        "ids",
        "an input of kind `ids`, the clusters, in place of all else",
        default=None,
        positional=True,
    )
    count: int | None = argument(
        "integer", "clusters; the default is isqrt(n)", default=None, least=1
    )
    seed: int = argument("integer", "the random seed", default=0, least=0, most=2**62)
    assign: str = argument(
        "choice",
        "how tokens find their cluster",
        default="nearest",
        choices=("nearest", "balanced"),
    )
    of: str = argument(
        "choice",
        "what is clustered: queries and keys, or queries whose mean attends for them",
        default="qk",
        choices=("qk", "q"),
    )
    layer: int = context("layer")

    name: ClassVar = "cluster"
    one_sequence: ClassVar = "makes clusters of queries and keys of one sequence"
    replaced: ClassVar = {"labels": ("count", "seed", "assign", "of")}

    def __post_init__(self) -> None:
        if self.assign == "balanced" and self.of == "q":
            raise RelationError(
                "`of = q` gives a query one cluster, and `assign = balanced` gives it several or"
                " none: remove one of the two"
            )
        if self.assign == "balanced" and self.count is None:
            raise RelationError("`assign = balanced` needs a fixed number of clusters: add `count`")

    @property
    def learned(self) -> tuple[Part, ...]:
        if self.assign != "balanced" or self.count is None:
            return ()
        return (Part("centroids", (self.count, "d"), "drawn", self.seed, kept=True),)

    @property
    def weighs(self) -> str:
        return "lets the mean of a cluster's queries attend for them" if self.of == "q" else ""

    @property
    def averages(self) -> bool:
        return self.of == "q"

    @property
    def given_choice(self) -> bool:
        return self.labels is not None

    def ahead(self, n: int) -> Ahead | None:
        if self.given_choice or self.of == "q" or self.count_at(n) < 2:
            return None
        if self.assign == "balanced":
            why = "later tokens compete for the places of a cluster"
            return Ahead(0, 1, why)
        why = "centroids are those of the whole sequence"
        return Ahead(1, 2, why) if n > 2 else None

    @property
    def counts_by_length(self) -> str:
        if self.given_choice:
            return ""
        if self.assign == "balanced":
            return "takes n / count tokens into each cluster"
        return "" if self.count else "has isqrt(n) clusters"

    def count_at(self, n: int) -> int:
        """Clusters of n positions: isqrt(n) where not given, no more than n."""
        return min(n, self.count or isqrt(n))

    def about_keys(self, n: int) -> int:
        count = max(1, self.count_at(n))
        # of means of queries, `count` score all keys
        return count if self.of == "q" else -(-n // count)

    def scoring(self, n: int, d: int) -> tuple[int, str]:
        if self.given_choice:
            return 0, ""
        sides = 1 if self.of == "q" else 2
        turns = 1 if self.assign == "balanced" else 11
        return turns * sides * 2 * n * d * self.count_at(n), "distances from centroids"

    @classmethod
    def alone(cls, arguments: Mapping[str, object]) -> str:
        if arguments.get("of") == "q":
            return "with `of = q` gives all queries of a cluster one result"
        return ""

    @classmethod
    def order(cls, given: Mapping[str, Scalar]) -> Scalar:
        count = given.get("count") or Apply("isqrt", (N,))
        return Apply("max", (N, Apply("/", (product(N, N), count))))
