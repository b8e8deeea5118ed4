"""Random blocks: r distinct key blocks for each query block, every subset equally likely.

Edges, where b divides n: n b min(r, n / b); under `causal`, before k <= q cuts them, b**2 times the
sum over the blocks i of min(r, i + 1).
Source: Zaheer et al. 2020, "Big Bird", appendix D; the draws are those of `graphs.counter_rng`,
from
all blocks, under `causal` from those up to the query's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.graphs.counter_rng import RANDOM_BLOCKS, Stream, distinct
from attnspec.graphs.edge_table import EdgeTable, table_of
from attnspec.graphs.relation import Changing, Elementwise, Progressions, Relation, Tiles
from attnspec.ir.linear import N, product
from attnspec.ir.parameters import argument, context
from attnspec.ir.scalars import Scalar
from attnspec.limits import LIMITS


@dataclass(frozen=True)
class RandomBlocks(Relation):
    """Distinct random blocks of keys for each block of queries, the last of which may be shorter;
    in a causal spec among the blocks up to the query's own, or all of them."""

    size: int = argument("integer", "positions in a block", least=1)
    blocks: int = argument("integer", "key blocks of each query block", least=0)
    seed: int = argument("integer", "the random seed", default=0, least=0, most=2**62)
    per_head: bool = argument("boolean", "draw anew for each head and layer", default=True)
    layer: int = context("layer")
    head: int = context("head")
    causal: bool = context("causal")

    name: ClassVar = "random_blocks"
    one_sequence: ClassVar = "draws by the places of one sequence"
    changes: ClassVar = Changing(
        "draws among all blocks of n positions",
        "add the statement `causal`, under which it draws among the blocks up to the query's own",
        under_causal=False,
    )
    numpy_only: ClassVar = True

    def __post_init__(self) -> None:
        if not self.per_head:
            object.__setattr__(self, "layer", 0)
            object.__setattr__(self, "head", 0)

    def draw(self, n: int) -> np.ndarray:
        """The key blocks of each query block, int32 [n, m]; n counts blocks."""
        stream = Stream(self.seed, RANDOM_BLOCKS, self.layer, self.head)
        row = np.arange(n)
        population = row + 1 if self.causal else np.full(n, n)
        return distinct(stream, row, population, min(self.blocks, n))

    def table(self, n: int) -> EdgeTable:
        """The table between the blocks of n positions."""
        return table_of(self, -(-n // self.size))

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return self.table(n).holds(q // self.size, k // self.size)

    def progressions(self, q: np.ndarray, n: int) -> Progressions:
        table, row = self.table(n), q // self.size
        # the first rows of a causal table are shorter: what is left over stays empty
        count = np.diff(table.starts)[row][:, None]
        place = np.arange(min(self.blocks, table.n))
        at = table.starts[row][:, None] + np.minimum(place, np.maximum(0, count - 1))
        start = table.keys[at].astype(np.int64) * self.size
        return start, np.where(place < count, np.minimum(start + self.size, n), start), 1

    def edges(self, n: int) -> int:
        q, k = self.table(n).rows(0, n)
        size = np.minimum(n - np.arange(self.table(n).n) * self.size, self.size)
        return int((size[q] * size[k]).sum())

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        first = q.start // self.size, k.start // self.size
        last = q.last // self.size, k.last // self.size
        high, wide = (int(np.max(b - a, initial=0)) + 1 for a, b in zip(first, last, strict=True))
        if q.step * k.step > 1 or high * wide > LIMITS.blocks_touched:
            return super().phase(q, k, n)
        # which of the pairs of blocks that a tile touches are edges, a bit for each
        bits = np.zeros(np.broadcast_shapes(q.start.shape, k.start.shape), np.int64)
        for i, j in np.ndindex(high, wide):
            inside = (first[0] + i <= last[0]) & (first[1] + j <= last[1])
            mask = self.table(n).holds(
                np.minimum(first[0] + i, last[0]), np.minimum(first[1] + j, last[1])
            )
            bits = 2 * bits + (inside & mask)
        return [q.start % self.size, k.start % self.size, bits]

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        def blocks(tiles: Tiles) -> Tiles:
            return Tiles(tiles.start // self.size, tiles.last // self.size + 1)

        return self.table(n).cover(blocks(q), blocks(k))

    @classmethod
    def order(cls, given: Mapping[str, Scalar]) -> Scalar:
        return product(N, given["size"], given["blocks"])
