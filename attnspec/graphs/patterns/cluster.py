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
from typing import ClassVar

from attnspec.graphs.relation import DataDependent
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
        "integer", "clusters; isqrt(n) where not given", default=None, least=1
    )
    seed: int = argument("integer", "where the draws start", default=0, least=0, most=2**64 - 1)
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
    layer: int = context("layer", 0)

    name: ClassVar = "cluster"
    replaced: ClassVar = {"labels": ("count", "seed", "assign", "of")}

    def __post_init__(self) -> None:
        if self.assign == "balanced" and self.of == "q":
            raise RelationError(
                "`of = q` gives every query one cluster, which `assign = balanced` does not"
            )
        if self.assign == "balanced" and self.count is None:
            raise RelationError("`assign = balanced` keeps its centroids and needs a `count`")

    @property
    def learned(self) -> tuple[Part, ...]:
        if self.assign != "balanced" or self.count is None:
            return ()
        return (Part("centroids", (self.count, "d"), "drawn", self.seed, kept=True),)

    @property
    def weighs(self) -> str:
        return "lets the mean of a cluster's queries attend for them" if self.of == "q" else ""

    @classmethod
    def steady(cls, arguments: Mapping[str, object], causal: bool) -> bool:
        return "labels" in arguments

    @classmethod
    def alone(cls, arguments: Mapping[str, object]) -> str:
        if arguments.get("of") == "q":
            return "with `of = q` is the attention of means of queries"
        return ""

    @classmethod
    def order(cls, given: Mapping[str, Scalar]) -> Scalar:
        count = given.get("count") or Apply("isqrt", (N,))
        return Apply("max", (N, Apply("/", (product(N, N), count))))
