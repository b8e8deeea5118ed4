"""What is computed: batches of blocks, each of some queries and some keys, in any order.

`times` is the specification: every pair of a graph stands in the tables of it once. Tables
are arrays of numpy; masks by tile may be tensors, too, where a device has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import numpy as np

Array = TypeVar("Array")

FULL_TILE = -1
"""Stands in place of a mask's number for a tile whose every pair is an edge."""

EMPTY_TILE = -2
"""Stands in place of a mask's number for a tile without an edge."""


@dataclass(frozen=True, eq=False)
class Tiled(Generic[Array]):
    """Masks by tile: `kinds` int [G, a, b] are numbers of `tiles` bool [m, h / a, w / b], FULL_TILE
    or EMPTY_TILE."""

    kinds: Array
    tiles: Array


@dataclass(frozen=True, eq=False)
class Batch:
    """G independent blocks of h queries and w keys.

    `q` int64 [G, h] are rows of the query tensor and `k` int64 [G, w] rows of the key tensor, -1
    for none; in a block no key stands twice. `mask` is bool [1, h, w] for every block, or by tile,
    and leaves out places without a key; None where every pair of rows is an edge. Within one `step`
    no query stands twice.
    """

    q: np.ndarray
    k: np.ndarray
    mask: np.ndarray | Tiled[np.ndarray] | None
    step: int = 0


@dataclass(frozen=True, eq=False)
class Tables:
    """The batches of a graph between `n_q` queries and `n_k` keys."""

    batches: tuple[Batch, ...]
    n_q: int
    n_k: int

    @property
    def steps(self) -> tuple[tuple[Batch, ...], ...]:
        """The batches of each step."""
        count = 1 + max((batch.step for batch in self.batches), default=-1)
        return tuple(tuple(x for x in self.batches if x.step == step) for step in range(count))


def times(tables: Tables) -> np.ndarray:
    """How often each pair stands in tables, int64 [n_q, n_k]."""
    counts = np.zeros((tables.n_q, tables.n_k), np.int64)
    for batch in tables.batches:
        for block, (q, k) in enumerate(zip(batch.q, batch.k, strict=True)):
            there = (q >= 0)[:, None] & (k >= 0)
            i, j = np.nonzero(there & mask_of(batch, block, block + 1)[0])
            np.add.at(counts, (q[i], k[j]), 1)
    return counts


def mask_of(batch: Batch, low: int, high: int) -> np.ndarray:
    """The masks of blocks low <= b < high, bool [1 or high - low, h, w]."""
    if batch.mask is None:
        return np.ones((1, batch.q.shape[1], batch.k.shape[1]), bool)
    if isinstance(batch.mask, Tiled):
        return unfolded(batch.mask.tiles, batch.mask.kinds[low:high])
    return batch.mask


def unfolded(tiles: Array, kinds: Array) -> Array:
    """The masks of blocks from those of their tiles, one at least: [G, a, b] -> bool [G, h, w]."""
    masks, numbers = cast("tuple[Any, Any]", (tiles, kinds))
    (groups, tall, wide), (height, width) = numbers.shape, masks.shape[1:]
    mask = masks[numbers.clip(0)] | (numbers == FULL_TILE)[..., None, None]
    mask = mask & (numbers >= FULL_TILE)[..., None, None]
    return cast(Array, mask.swapaxes(2, 3).reshape(groups, tall * height, wide * width))
