"""Clusters of spherical k-means: q and k in one cluster.

Queries and keys are normalised and assigned to `count` centroids. argmax: every token to its
nearest centroid. balanced: each centroid takes its n / count nearest queries and keys, so that a
token may be in none or in several clusters.
Edges: sum over clusters of queries times keys; n**2 / count where they are equal.
Source: Roy et al. 2021, "Efficient Content-Based Sparse Attention with Routing Transformers",
section 4; Vyas et al. 2020, "Fast Transformers with Clustered Attention", section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from attnspec.graphs.relation import DataDependent
from attnspec.ir.linear import N, product
from attnspec.ir.parameters import argument
from attnspec.ir.scalars import Apply, Scalar


@dataclass(frozen=True)
class Cluster(DataDependent):
    """Pairs within one cluster."""

    count: int | None = argument(
        "integer", "clusters; isqrt(n) where not given", default=None, least=1
    )
    seed: int = argument("integer", "where the draws start", default=0, least=0, most=2**64 - 1)
    assign: str = argument(
        "choice",
        "how tokens find their cluster",
        default="argmax",
        choices=("argmax", "balanced"),
    )

    name: ClassVar = "cluster"

    @classmethod
    def order(cls, given: Mapping[str, Scalar]) -> Scalar:
        count = given["count"] or Apply("isqrt", (N,))
        return Apply("max", (N, Apply("/", (product(N, N), count))))
