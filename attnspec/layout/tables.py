"""What is computed: batches of blocks, each of some queries and some keys, in any order.

`times` is the specification: every pair of a graph stands in the tables of it once. Tables
are arrays of numpy where they are planned, and tensors where the data make them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
class Batch(Generic[Array]):
    """G independent blocks of h queries and w keys.

    `q` int64 [G, h] are rows of the query tensor and `k` int64 [G, w] rows of the key tensor, -1
    for none; in a block no key stands twice. `mask` is bool [1, h, w] for every block, or by tile,
    and leaves out places without a key; None where every pair of rows is an edge. Within one `step`
    no query stands twice.
    """

    q: Array
    k: Array
    mask: Array | Tiled[Array] | None
    step: int = 0


@dataclass(frozen=True, eq=False)
class Tables(Generic[Array]):
    """The batches of a graph between `n_q` queries and `n_k` keys."""

    batches: tuple[Batch[Array], ...]
    n_q: int
    n_k: int

    @property
    def steps(self) -> tuple[tuple[Batch[Array], ...], ...]:
        """The batches of each step."""
        count = 1 + max((batch.step for batch in self.batches), default=-1)
        return tuple(tuple(x for x in self.batches if x.step == step) for step in range(count))


def times(tables: Tables[np.ndarray]) -> np.ndarray:
    """How often each pair stands in tables, int64 [n_q, n_k]."""
    counts = np.zeros((tables.n_q, tables.n_k), np.int64)
    for batch in tables.batches:
        for block, (q, k) in enumerate(zip(batch.q, batch.k, strict=True)):
            there = (q >= 0)[:, None] & (k >= 0)
            i, j = np.nonzero(there & mask_of(batch, block, block + 1)[0])
            np.add.at(counts, (q[i], k[j]), 1)
    return counts


def mask_of(batch: Batch[np.ndarray], low: int, high: int) -> np.ndarray:
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


def side_by_side(parts: Sequence[Tables[np.ndarray]]) -> Tables[np.ndarray]:
    """The tables of several sequences of equal lengths as those of one that is as many times as
    long; no block has rows of two of them."""
    n_q, n_k = parts[0].n_q, parts[0].n_k
    groups: dict[tuple[object, ...], list[Batch[np.ndarray]]] = {}
    for number, part in enumerate(parts):
        for batch in part.batches:
            q = np.where(batch.q < 0, -1, batch.q + number * n_q)
            k = np.where(batch.k < 0, -1, batch.k + number * n_k)
            moved = replace(batch, q=q, k=k)
            groups.setdefault((batch.step, q.shape[1], k.shape[1], *_mask_key(batch)), []).append(
                moved
            )
    joined = tuple(_joined(batches) for batches in groups.values())
    return Tables(joined, n_q * len(parts), n_k * len(parts))


def _mask_key(batch: Batch[np.ndarray]) -> tuple[object, ...]:
    """What batches that are joined have in common of their masks."""
    if batch.mask is None:
        return ("full",)
    if isinstance(batch.mask, Tiled):
        return "tiled", *batch.mask.tiles.shape[1:]
    return "shared", np.packbits(batch.mask).tobytes()


def _joined(batches: Sequence[Batch[np.ndarray]]) -> Batch[np.ndarray]:
    first = batches[0]
    q, k = (np.concatenate([getattr(x, side) for x in batches]) for side in ("q", "k"))
    if not isinstance(first.mask, Tiled):
        return replace(first, q=q, k=k)
    tiles, kinds, numbers = [], [], dict[int, int]()
    count = 0
    for mask in (batch.mask for batch in batches if isinstance(batch.mask, Tiled)):
        if id(mask.tiles) not in numbers:
            numbers[id(mask.tiles)] = count
            tiles.append(mask.tiles)
            count += len(mask.tiles)
        kinds.append(np.where(mask.kinds < 0, mask.kinds, mask.kinds + numbers[id(mask.tiles)]))
    return replace(first, q=q, k=k, mask=Tiled(np.concatenate(kinds), np.concatenate(tiles)))
