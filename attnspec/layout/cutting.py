"""Blocks of a shorter sequence, cut from those of a longer one.

Where a pair is one at both lengths, a block of tiles is the same as long as its positions are
there, and others lose the places at their ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class Side:
    """The tiles of one side: the position of every place, int64 [tiles, size], -1 where there is
    none; of several sequences that lie one behind the other the position in its own."""

    positions: np.ndarray

    @cached_property
    def last(self) -> np.ndarray:
        """The last position of every tile."""
        return np.asarray(self.positions.max(axis=1, initial=-1))


@dataclass(frozen=True, eq=False)
class Cut:
    """Blocks of which the same is left: their numbers, ascending, and how many of their queries and
    keys, the first ones, are there; None where they are as they were."""

    blocks: np.ndarray
    places: tuple[int, int] | None = None


class Uncut(Exception):
    """What is left of a block is not its first places."""


@dataclass(frozen=True, eq=False)
class Whole:
    """Blocks of a longer sequence: query tiles [blocks, tall] and key tiles [blocks, wide] of two
    sides."""

    rows: np.ndarray
    columns: np.ndarray
    q: Side
    k: Side

    @cached_property
    def last(self) -> np.ndarray:
        """The last position of every block, of a query or key."""
        q, k = self.q.last[self.rows].max(axis=1), self.k.last[self.columns].max(axis=1)
        return np.asarray(np.maximum(q, k))

    @cached_property
    def every(self) -> np.ndarray:
        """The numbers of all blocks."""
        return np.arange(len(self.rows))


def cut(whole: Whole, n: int) -> tuple[list[Cut], bool]:
    """What is left of blocks where positions from n on are not there, and whether every query that
    is left has its block still. Raises Uncut."""
    there = whole.last < n
    if there.all():
        return [Cut(whole.every)], True
    found = [Cut(np.flatnonzero(there))] if there.any() else []
    rest = np.flatnonzero(~there)
    counts = zip(
        _left(whole.q, whole.rows[rest], n), _left(whole.k, whole.columns[rest], n), strict=True
    )
    groups: dict[tuple[int, int], list[int]] = {}
    complete = True
    for block, places in zip(rest.tolist(), counts, strict=True):
        if all(places):
            groups.setdefault(places, []).append(block)
        elif places[0]:
            complete = False
    found += [Cut(np.array(blocks), places) for places, blocks in groups.items()]
    return found, complete


def _left(side: Side, tiles: np.ndarray, n: int) -> list[int]:
    """How many places are left of each block [blocks, tiles]; raises Uncut where they are not its
    first ones."""
    positions = side.positions[tiles].reshape(len(tiles), -1)
    there = (positions >= 0) & (positions < n)
    counts = there.sum(axis=1)
    if (there != (np.arange(there.shape[1]) < counts[:, None])).any():
        raise Uncut
    found: list[int] = counts.tolist()
    return found
