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

from attnspec.graphs.relation import Ahead, DataDependent
from attnspec.graphs.token_sets import Data
from attnspec.ir.linear import N, product
from attnspec.ir.parameters import RelationError, argument, context
from attnspec.ir.scalars import Apply, Scalar


@dataclass(frozen=True)
class Lsh(DataDependent):
    """Pairs that a random rotation puts in one bucket."""

    given: Data | None = argument(
        "buckets", "an input of kind `buckets` in place of the hash", default=None, positional=True
    )
    buckets: int | None = argument(
        "integer", "hash buckets; the default is 2 * n / chunk", default=None, least=2, even=True
    )
    rounds: int = argument("integer", "independent hashes", default=8, least=1)
    chunk: int = argument(
        "integer", "positions in a chunk of the sorted order", default=64, least=1
    )
    seed: int = argument("integer", "the random seed", default=0, least=0, most=2**62)
    scale: str = argument(
        "choice",
        "what q . k is multiplied with: 1 / sqrt(d), or 1",
        default="root",
        choices=("root", "unit"),
    )
    share_qk: bool = argument(
        "boolean", "whether keys are the queries, scored at unit length", default=True
    )
    look: int = argument("integer", "chunks that are looked back", default=1, least=0)
    cut: str = argument(
        "choice",
        "whether chunks are cut through the whole order or within each bucket",
        default="order",
        choices=("order", "bucket"),
    )
    multiplicity: bool = argument(
        "boolean", "weigh a key by the number of rounds that find it", default=False
    )
    combine: str = argument(
        "choice",
        "one softmax over all rounds, or the mean of theirs",
        default="union",
        choices=("union", "mean"),
    )
    bucket_mask: bool = argument(
        "boolean", "leave out keys of other buckets in the same chunks", default=True
    )
    hash: str = argument(
        "choice",
        "how vectors find their bucket",
        default="cross_polytope",
        choices=("cross_polytope", "hyperplanes"),
    )
    causal: bool = context("causal")
    layer: int = context("layer")

    name: ClassVar = "lsh"
    one_sequence: ClassVar = "sorts queries and keys into one order"
    replaced: ClassVar = {"given": ("buckets", "rounds", "seed", "hash")}
    governs: ClassVar = ("scale", "share_qk")

    def __post_init__(self) -> None:
        if self.cut == "bucket" and not self.bucket_mask:
            raise RelationError(
                "`cut = bucket` reads one bucket, and `bucket_mask = false` reads others: remove"
                " one of the two"
            )
        if self.hash == "hyperplanes" and self.given is None:
            if self.buckets is None or self.buckets & (self.buckets - 1):
                raise RelationError(
                    "with `hash = hyperplanes`, `buckets` must be a power of two, got"
                    f" {self.buckets or 'none'}"
                )

    @property
    def weighs(self) -> str:
        """What it changes of the scores and weights of its pairs."""
        if self.share_qk:
            return "scores q . k / |k|"
        if self.combine == "mean":
            return "averages the outputs of its rounds"
        return "weighs pairs by the rounds that find them" if self.multiplicity else ""

    @property
    def weighs_pairs(self) -> bool:
        return self.multiplicity

    def buckets_at(self, n: int) -> int:
        """Hash buckets for n keys: where not given, the even number nearest 2 n / chunk."""
        return self.buckets or 2 * max(1, (2 * n + self.chunk) // (2 * self.chunk))

    @property
    def given_choice(self) -> bool:
        return self.given is not None

    def ahead(self, n: int) -> Ahead | None:
        if self.cut == "bucket":
            if self.causal or not self.share_qk or n < 2:
                return None
            why = "a query reads itself only where it has no other key, earlier or later"
            return Ahead(0, 1, why)
        why = "later tokens move the borders of the chunks"
        reach = self.look * self.chunk
        if not self.share_qk:
            return Ahead(0, 1, why) if n > self.chunk else None
        query = reach + self.chunk - 1
        if not self.bucket_mask and n > reach + 2:
            query = min(query, n - 2)
        elif self.chunk == 1 or query + 1 >= n:
            # all that is between two positions of a bucket lies between them in the sequence, too
            return None
        return Ahead(query, query + 1, why)

    @property
    def counts_by_length(self) -> str:
        return "" if self.buckets or self.given else "has as many buckets as n asks for"

    @property
    def counts_queries(self) -> str:
        if self.share_qk or self.given is not None:
            return ""
        return "cuts queries alone into chunks, which change with the number of queries"

    def doubt(self, n: int) -> str:
        read, size = (self.look + 1) * self.chunk, n / self.buckets_at(n)
        if self.given is None and self.bucket_mask and size > read * self.rounds:
            return f"has buckets of {size:,.0f} positions and reads {read:,} of one: ask for more"
        return ""

    def most_keys(self, n: int) -> int:
        return min(n, self.rounds * (self.look + 1) * self.chunk)

    def about_keys(self, n: int) -> int:
        return self.most_keys(n)

    def scoring(self, n: int, d: int) -> tuple[int, str]:
        if self.given is not None:
            return 0, ""
        count = self.buckets_at(n)
        planes = count.bit_length() - 1 if self.hash == "hyperplanes" else count // 2
        sides = 1 if self.share_qk else 2
        return sides * self.rounds * 2 * n * d * planes, "projections; sorting comes beside"

    @classmethod
    def shares_keys(cls, arguments: Mapping[str, object]) -> bool:
        return arguments["share_qk"] is True

    @classmethod
    def own_scale(cls, arguments: Mapping[str, object]) -> float | None:
        return 1.0 if arguments["scale"] == "unit" else None

    @classmethod
    def beside(cls, arguments: Mapping[str, object]) -> bool:
        # unit keys are those of the mechanism, too
        return arguments["combine"] == "union" and not arguments["multiplicity"]

    @classmethod
    def order(cls, given: Mapping[str, Scalar]) -> Scalar:
        return product(N, Apply("log2", (N,)), given["chunk"])

    @classmethod
    def factors(cls, given: Mapping[str, Any]) -> str:
        rounds, chunk = given["rounds"], given["chunk"]
        if not isinstance(rounds, int) or not isinstance(chunk, int):
            return ""
        return f"sorting {rounds} n log(n), and at most {2 * rounds * chunk:,} n pairs"
