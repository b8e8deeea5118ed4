"""From a relation to tiles, the only stage that depends on the length.

Queries are the last n_q of n_k positions. Query tiles count from the first query, key tiles from
position 0, both in natural order. The cover of the relation decides most tiles in closed form; only
tiles that stay undecided are looked into, and each distinct mask is stored once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnspec.covering import Classified, classify
from attnspec.ordered import FULL_TILE, NOTHING, Masks, looked_into, same_masks
from attnspec.relations import Relation
from attnspec.steps import NATURAL

_ROWS_GAIN = 32
"""Writing out one edge costs about as much as evaluating this many pairs."""


@dataclass(frozen=True)
class TileLayout:
    """The non-empty tiles of a relation.

    Query tile i has entries `starts[i]:starts[i + 1]` of `keys`, the key tiles it reads, ascending,
    and of `kinds`, FULL_TILE or the number of a mask. `masks` is bool [m, tile, tile], without
    repetitions and False beyond the ends of the sequence.
    """

    n_q: int
    n_k: int
    tile: int
    starts: np.ndarray
    keys: np.ndarray
    kinds: np.ndarray
    masks: np.ndarray

    @property
    def rows(self) -> int:
        """The number of query tiles."""
        return len(self.starts) - 1

    def dense(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the tiles say, as [n_q, n_k]: the pairs of FULL tiles, the pairs of masked tiles,
        and how many tiles hold each pair."""
        size = self.tile
        shape = (self.rows * size, -(-self.n_k // size) * size)
        full, masked = np.zeros(shape, bool), np.zeros(shape, bool)
        times = np.zeros(shape, np.int64)
        for row in range(self.rows):
            for entry in range(self.starts[row], self.starts[row + 1]):
                key, kind = int(self.keys[entry]), int(self.kinds[entry])
                place = np.s_[row * size : (row + 1) * size, key * size : (key + 1) * size]
                if kind == FULL_TILE:
                    full[place] = True
                else:
                    masked[place] |= self.masks[kind]
                times[place] += 1
        inside = np.s_[: self.n_q, : self.n_k]
        return full[inside], masked[inside], times[inside]

    def pairs(self) -> np.ndarray:
        """The pairs as bool [n_q, n_k]."""
        full, masked, _ = self.dense()
        return np.asarray(full | masked)


def tile_layout(relation: Relation, n_q: int, n_k: int, tile: int) -> TileLayout:
    """The tiles of a relation, every one of them decided."""
    found = classify(relation, n_q, n_k, NATURAL, (tile, tile))
    q_full, k_full = found.fine()
    q_some, k_some = found.undecided
    kinds, masks = np.zeros(0, np.int64), np.zeros((0, tile, tile), bool)
    if len(q_some):
        first, phase = same_masks(found.q, found.k, q_some, k_some, relation, n_k)
        if len(first) * tile * tile > _ROWS_GAIN * relation.typical_degree(n_k) * n_q:
            q_some, k_some, kinds, masks = _from_edges(relation, found)
        else:
            chosen = q_some[first], k_some[first]
            kinds, masks = looked_into(found.q, found.k, *chosen, relation, n_k)
            kinds = kinds[phase]
            some = kinds != NOTHING
            q_some, k_some, kinds = q_some[some], k_some[some], kinds[some]
    q_all, k_all = np.concatenate([q_full, q_some]), np.concatenate([k_full, k_some])
    kinds = np.concatenate([np.full(len(q_full), FULL_TILE), kinds])
    order = np.argsort(q_all * found.k.count + k_all)
    starts = np.zeros(found.q.count + 1, np.int64)
    np.cumsum(np.bincount(q_all, minlength=found.q.count), out=starts[1:])
    return TileLayout(n_q, n_k, tile, starts, k_all[order], kinds[order], masks)


def _from_edges(
    relation: Relation, found: Classified
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The undecided tiles by writing out the edges of their rows: for sparse, scattered graphs."""
    tile, first, n_k, columns = found.q.size, found.q.first, found.k.last, found.k.count
    masks = Masks((tile, tile))
    wanted = np.sort(found.undecided[0] * columns + found.undecided[1])
    q_found, k_found, kinds = [], [], []
    for row in np.unique(found.undecided[0]):
        low = first + int(row) * tile
        q, k = relation.rows(low, min(low + tile, n_k), n_k)
        column, place = np.unique(k // tile, return_inverse=True)
        held = np.zeros((len(column), tile, tile), bool)
        held[place, q - low, k % tile] = True
        looked = np.isin(row * columns + column, wanted)
        column, held = column[looked], held[looked]
        heights = min(low + tile, n_k) - low
        full = held.sum(axis=(1, 2)) == heights * np.minimum(tile, n_k - column * tile)
        kind = np.full(len(column), FULL_TILE)
        kind[~full] = masks.number(held[~full])
        q_found.append(np.full(len(column), row))
        k_found.append(column)
        kinds.append(kind)
    return (
        np.concatenate(q_found),
        np.concatenate(k_found),
        np.concatenate(kinds),
        masks.stacked(),
    )
