"""Layouts of several sequences as one: their tiles lie one behind the other.

Heads of different graphs, and samples of different padding, are then computed in the calls of one
sequence that is as many times as long. No tile has positions of two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnspec.layout.tile_layout import FULL_TILE, Masks, Places, StepLayout


@dataclass(frozen=True, eq=False)
class StackedAxis:
    """One side of the tiles of several sequences of `length` positions each, in places 0, 1, …"""

    parts: tuple[Places, ...]
    length: int

    first = 0

    @property
    def last(self) -> int:
        return len(self.parts) * self.length

    @property
    def size(self) -> int:
        return self.parts[0].size

    @cached_property
    def count(self) -> int:
        return sum(part.count for part in self.parts)

    @property
    def sequence(self) -> int:
        """The positions of the shortest sequences that it consists of."""
        return self.parts[0].sequence

    @cached_property
    def natural(self) -> bool:
        """Whether the tiles follow one another as the places do."""
        return np.array_equal(self.positions, np.arange(self.last))

    @cached_property
    def positions(self) -> np.ndarray:
        """The place of every position of every tile, int64 [count * size]; -1 beyond short ones."""
        found = [
            np.where(part.positions < 0, -1, part.positions - part.first + number * self.length)
            for number, part in enumerate(self.parts)
        ]
        return np.concatenate(found)


def stacked(layouts: Sequence[StepLayout], n_q: int, n_k: int) -> StepLayout:
    """The layouts of sequences with n_q queries and n_k keys each as that of one; their tiles have
    the same sizes."""
    masks = Masks(layouts[0].masks.shape[1:])
    starts, keys, kinds = [np.zeros(1, np.int64)], [], []
    before = entries = 0
    numbers: dict[int, np.ndarray] = {}
    for layout in layouts:
        known = numbers.get(id(layout.masks))
        if known is None:
            known = numbers[id(layout.masks)] = masks.number(layout.masks)
        starts.append(layout.starts[1:] + entries)
        keys.append(layout.keys + before)
        # FULL_TILE is the last number
        table = np.append(known, FULL_TILE)
        kinds.append(table[layout.kinds])
        before, entries = before + layout.k.count, entries + len(layout.keys)
    return StepLayout(
        StackedAxis(tuple(layout.q for layout in layouts), n_q),
        StackedAxis(tuple(layout.k for layout in layouts), n_k),
        np.concatenate(starts),
        np.concatenate(keys),
        np.concatenate(kinds),
        masks.stacked(),
    )
