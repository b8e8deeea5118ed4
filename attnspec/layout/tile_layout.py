"""The tiles of one step in its order.

Masks of tiles that the cover leaves undecided are evaluated once for each phase: numbers that agree
only where masks do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TypeAlias

import numpy as np

from attnspec.graphs.relation import evaluate_pairs, is_closed, phase_of
from attnspec.layout.axes import Axis
from attnspec.layout.orders import Listed
from attnspec.layout.tables import EMPTY_TILE, FULL_TILE
from attnspec.layout.tiling import Tiling, classify
from attnspec.limits import LIMITS

Groups: TypeAlias = "tuple[np.ndarray, np.ndarray]"
"""The first of each group, ascending, and the number of the group of each."""


@dataclass(frozen=True, eq=False)
class StepLayout:
    """The non-empty tiles of one step.

    Query tile i has entries `starts[i]:starts[i + 1]` of `keys`, the key tiles that it reads, each
    once, and of `kinds`, FULL_TILE or the number of a mask. `masks` is bool
    [m, q.size, k.size], without repetitions, False beyond the keys of a short tile.
    """

    q: Axis
    k: Axis
    starts: np.ndarray
    keys: np.ndarray
    kinds: np.ndarray
    masks: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """The query tile of each entry."""
        return np.repeat(np.arange(self.q.count), np.diff(self.starts))

    def chosen(self, entries: np.ndarray) -> StepLayout:
        """The same of some entries, bool."""
        starts = np.append(0, np.cumsum(entries))[self.starts]
        return replace(self, starts=starts, keys=self.keys[entries], kinds=self.kinds[entries])


@lru_cache(maxsize=64)
def step_layout(tiling: Tiling) -> StepLayout:
    """The tiles of a step, every one of them decided; raises TooFine where they are too many."""
    (q, k), ((q_full, k_full), (rows, columns)) = tiling.axes, classify(tiling)
    # where there are too few keys a mask leaves out the places behind them
    short = k.positions[k_full, -1] < 0
    rows, columns = np.append(rows, q_full[short]), np.append(columns, k_full[short])
    q_full, k_full = q_full[~short], k_full[~short]
    first, phase = _same_masks(tiling, rows, columns)
    kinds, masks = _examined(tiling, rows[first], columns[first])
    kinds = kinds[phase]
    kept = kinds != EMPTY_TILE
    q_all, k_all = np.concatenate([q_full, rows[kept]]), np.concatenate([k_full, columns[kept]])
    kinds = np.concatenate([np.full(len(q_full), FULL_TILE), kinds[kept]])
    inside = np.argsort(q_all * k.count + k.ranked(k_all))
    starts = np.append(0, np.cumsum(np.bincount(q_all, minlength=q.count)))
    return StepLayout(q, k, starts, k_all[inside], kinds[inside], masks)


def _examined(
    tiling: Tiling, rows: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The kind of each tile by evaluating `holds` in it, EMPTY_TILE for an empty one, and the
    distinct masks, bool [m, q.size, k.size], in the order of their first appearance."""
    numbers: dict[bytes, int] = {}
    pairs = prod(tiling.sizes)
    q_at, k_at = (side.positions for side in tiling.axes)
    kinds = np.full(len(rows), EMPTY_TILE)
    step = max(1, LIMITS.pairs_at_once // pairs)
    for low in range(0, len(rows), step):
        part = np.s_[low : low + step]
        queries, keys = q_at[rows[part]][:, :, None], k_at[columns[part]][:, None, :]
        at = np.maximum(queries, 0), np.maximum(keys, 0)
        # a place without a query may be anything, and is what most others are
        mask = (evaluate_pairs(tiling.relation, *at, tiling.n_k) | (queries < 0)) & (keys >= 0)
        full = mask.all(axis=(1, 2))
        some = (mask & (queries >= 0)).any(axis=(1, 2)) & ~full
        found = np.where(full, FULL_TILE, EMPTY_TILE)
        packed = np.packbits(mask[some].reshape(-1, pairs), axis=1)
        found[some] = [numbers.setdefault(row.tobytes(), len(numbers)) for row in packed]
        kinds[part] = found
    packed = np.frombuffer(b"".join(numbers), np.uint8).reshape(-1, -(-pairs // 8))
    masks = np.unpackbits(packed, axis=1, count=pairs).view(bool)
    return kinds, masks.reshape(-1, *tiling.sizes)


def _same_masks(tiling: Tiling, rows: np.ndarray, columns: np.ndarray) -> Groups:
    """The tiles of each phase."""
    relation, (q, k) = tiling.relation, tiling.axes
    if isinstance(q.side, Listed) or isinstance(k.side, Listed) or not is_closed(relation):
        # phases speak of progressions; lists are few
        return np.arange(len(rows)), np.arange(len(rows))
    q_tiles, k_tiles = q.tiles.take(rows), k.tiles.take(columns)
    phases = *phase_of(relation, q_tiles, k_tiles, tiling.n_k), *q_tiles.shape, *k_tiles.shape
    return equal(np.stack([np.broadcast_to(phase, len(rows)) for phase in phases]))


def equal(table: np.ndarray) -> Groups:
    """Equal columns of integers [m, count]."""
    order = np.lexsort(table)
    begins = np.ones(table.shape[1], bool)
    begins[1:] = (np.diff(table[:, order]) != 0).any(0)
    firsts = order[begins]
    group = np.empty_like(order)
    group[order] = np.argsort(np.argsort(firsts))[np.cumsum(begins) - 1]
    return np.sort(firsts), group
