"""Locality-sensitive hashing: q and k in one bucket, and near in the order of the buckets.

Keys are the queries at unit length. In each round h(x) = argmax([x R; -x R]) with R Gaussian of
shape [d, buckets / 2]; positions are sorted by (bucket, position) and cut into chunks. A pair is an
edge if in some round both hash to one bucket and k lies in the query's chunk or the one before; a
query reads itself only where it has no other key. One softmax over the union of the rounds.
Edges: at most 2 rounds chunk n; their expectation depends on the angles between the vectors.
Source: Kitaev, Kaiser, Levskaya 2020, "Reformer: The Efficient Transformer", section 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from attnspec.graphs.relation import DataDependent
from attnspec.ir.linear import N, product
from attnspec.ir.parameters import argument
from attnspec.ir.scalars import Apply, Scalar


@dataclass(frozen=True)
class Lsh(DataDependent):
    """Pairs that a random rotation puts in one bucket."""

    buckets: int | None = argument(
        "integer", "hash buckets; 2 n / chunk where not given", default=None, least=2, even=True
    )
    rounds: int = argument("integer", "independent hashes", default=8, least=1)
    chunk: int = argument(
        "integer", "positions in a chunk of the sorted order", default=64, least=1
    )
    seed: int = argument("integer", "where the draws start", default=0, least=0, most=2**64 - 1)
    scale: str = argument(
        "choice",
        "what q . k is multiplied with: 1 / sqrt(d), or 1",
        default="inverse_sqrt",
        choices=("inverse_sqrt", "unit"),
    )
    multiplicity: bool = argument(
        "boolean", "weigh a key by the number of rounds that find it", default=False
    )
    bucket_mask: bool = argument(
        "boolean", "leave out keys of other buckets in the same chunks", default=True
    )

    name: ClassVar = "lsh"

    @classmethod
    def order(cls, given: Mapping[str, Scalar]) -> Scalar:
        return product(N, Apply("log2", (N,)), given["chunk"])

    @classmethod
    def factors(cls, given: Mapping[str, Any]) -> str:
        rounds, chunk = given.get("rounds", 8), given.get("chunk", 64)
        if not isinstance(rounds, int) or not isinstance(chunk, int):
            return ""
        return f"sorting {rounds} n log(n), and at most {2 * rounds * chunk:,} n pairs"
