"""Which blocks of positions hold every pair of a static relation: looked up for tiles at a call."""

from __future__ import annotations

import numpy as np
import torch

from attnspec.backends.common.torch_modes import apart
from attnspec.graphs.relation import FULL, Relation, Tiles
from attnspec.limits import LIMITS


class Cover:
    """Blocks of a sequence of n positions, `size` long at least, and how many before each do not
    have every pair of a relation, by blocks of queries: int32 [blocks, blocks + 1], on every device
    that asked."""

    def __init__(self, relation: Relation, n: int, size: int) -> None:
        self.size = max(size, -(-n // LIMITS.blocks_covered))
        starts = np.arange(0, n, self.size)
        stops = np.minimum(starts + self.size, n)
        count = len(starts)
        before = np.zeros((count, count + 1), np.int32)
        rows = max(1, (1 << 20) // max(1, count))
        for low in range(0, count, rows):
            part = slice(low, low + rows)
            q = Tiles(starts[part, None], stops[part, None])
            kinds = np.asarray(relation.cover(q, Tiles(starts[None], stops[None]), n))
            kinds = np.broadcast_to(kinds, (len(starts[part]), count))
            np.cumsum(kinds != FULL, axis=1, out=before[part, 1:])
        self.before = {torch.device("cpu"): torch.from_numpy(before)}

    def full(self, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Whether every pair of a block of queries and the keys first … last of a tile is known to
        be held: bool [.., blocks, T] for tiles [.., T]."""
        first, last = first // self.size, last // self.size
        before = self.before.get(first.device)
        if before is None:
            # a device is told once
            kept = next(iter(self.before.values()))
            before = self.before[first.device] = apart(lambda: kept.to(first.device))
        found: torch.Tensor = before[:, last + 1] == before[:, first]
        return found.movedim(0, -2)


class Covers:
    """The covers of static relations at n positions, kept."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._kept: dict[tuple[Relation, int], Cover] = {}

    def of(self, relation: Relation, height: int) -> Cover:
        """The cover for query tiles of so many positions."""
        key = relation, max(LIMITS.tile, height)
        found = self._kept.get(key)
        if found is None:
            # it is kept, so the modes of this call must not reach it
            found = self._kept[key] = apart(lambda: Cover(relation, self.n, key[1]))
        return found
