"""What covers are made of: the values that tiles hold, and answers from truths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnspec.graphs.relation import EMPTY, FULL, SOME, Tiles


@dataclass(frozen=True, kw_only=True)
class Spans(Tiles):
    """Tiles of listed positions, in any order: rows `which` of `lists` int64 [m, size], short ones
    filled up with their last.

    As tiles they are their spans: what is known of a span is true of the positions listed in it.
    """

    lists: np.ndarray
    which: np.ndarray

    def take(self, index: np.ndarray) -> Spans:
        start, stop, which = self.start[index], self.stop[index], self.which[index]
        return Spans(start, stop, lists=self.lists, which=which)


def values_of(tiles: Tiles, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What [n] values are at the positions of tiles: a row for each different tile, short ones
    filled up with their last, and which row each tile has, of the shape of the tiles.

    Pairs of tiles repeat tiles: each is examined once.
    """
    if isinstance(tiles, Spans):
        return values[tiles.lists], tiles.which
    start, stop = np.broadcast_arrays(tiles.start, tiles.stop)
    ends = np.stack([start.ravel(), stop.ravel()], axis=1)
    single, which = np.unique(ends, axis=0, return_inverse=True)
    once = Tiles(single[:, 0], single[:, 1], tiles.step)
    steps = np.arange(int(np.max(once.count, initial=1))) * tiles.step
    listed = values[np.minimum(once.start[:, None] + steps, once.last[:, None])]
    return listed, which.reshape(start.shape)


def covered(full: np.ndarray, some: np.ndarray) -> np.ndarray:
    """FULL where every pair holds, EMPTY where none does, uint8."""
    return np.where(full, FULL, np.where(some, SOME, EMPTY)).astype(np.uint8)
