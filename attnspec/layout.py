"""From a relation to tiles, the only stage that depends on the length.

Queries are the last n_q of n_k positions. Query tiles count from the first query, key tiles from
position 0, both in natural order. The cover of the relation decides most tiles in closed form,
coarse tiles first, so that a window costs its band and not n²; only tiles that stay undecided are
looked into, and each distinct mask is stored once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache

import numpy as np

from attnspec.relations import FULL, SOME, Relation, Tiles, evaluate_pairs, phase_of

FULL_TILE = -1
"""Stands in place of a mask's number for a tile whose every pair is an edge."""

_NO_PAIR = -2
"""Stands in place of a mask's number for a tile that turns out to be empty."""

_LOOKED = 1 << 22
"""Pairs evaluated in one go."""

_FANOUT = 4
"""A coarse tile is as long as this many tiles of the next finer level."""

_COARSEST = 64
"""The coarsest level has at most this many tiles on a side."""

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
    found = classify(relation, n_q, n_k, tile)
    q_full, k_full = _expanded(found)
    q_some, k_some = found.undecided
    kinds, masks = np.zeros(0, np.int64), np.zeros((0, tile, tile), bool)
    if len(q_some):
        chosen, phase = _phases(relation, found)
        if len(chosen) * tile * tile > _ROWS_GAIN * relation.typical_degree(n_k) * n_q:
            q_some, k_some, kinds, masks = _from_edges(relation, found)
        else:
            kinds, masks = _looked_into(relation, found, chosen)
            kinds = kinds[phase]
            some = kinds != _NO_PAIR
            q_some, k_some, kinds = q_some[some], k_some[some], kinds[some]
    q_all, k_all = np.concatenate([q_full, q_some]), np.concatenate([k_full, k_some])
    kinds = np.concatenate([np.full(len(q_full), FULL_TILE), kinds])
    order = np.lexsort((k_all, q_all))
    starts = np.zeros(found.rows + 1, np.int64)
    np.cumsum(np.bincount(q_all, minlength=found.rows), out=starts[1:])
    return TileLayout(n_q, n_k, tile, starts, k_all[order], kinds[order], masks)


@dataclass(frozen=True)
class Classified:
    """What the cover alone says: per level (tiles of `size` fine tiles) the FULL pairs of tiles,
    and the pairs of fine tiles that it leaves undecided."""

    n_q: int
    n_k: int
    tile: int
    full: tuple[tuple[int, np.ndarray, np.ndarray], ...]
    undecided: tuple[np.ndarray, np.ndarray]

    @property
    def rows(self) -> int:
        return -(-self.n_q // self.tile)

    @property
    def columns(self) -> int:
        return -(-self.n_k // self.tile)

    @property
    def full_count(self) -> int:
        """The number of fine tile pairs that are FULL."""
        return sum(
            int(
                (
                    (np.minimum(self.rows, (q + 1) * size) - q * size)
                    * (np.minimum(self.columns, (k + 1) * size) - k * size)
                ).sum()
            )
            for size, q, k in self.full
        )


@lru_cache(maxsize=16)
def classify(relation: Relation, n_q: int, n_k: int, tile: int) -> Classified:
    """The cover of all pairs of tiles, from coarse to fine."""
    rows, columns = -(-n_q // tile), -(-n_k // tile)
    size = 1
    # a relation that has no closed form would be evaluated again on every level
    while is_closed(relation) and max(rows, columns) > size * _COARSEST:
        size *= _FANOUT
    q, k = (axis.ravel() for axis in np.indices((-(-rows // size), -(-columns // size))))
    if not is_closed(relation):
        return Classified(n_q, n_k, tile, (), (q, k))
    full = []
    while True:
        kinds = _covers(relation, n_q, n_k, tile * size, q, k)
        if (kinds == FULL).any():
            full.append((size, q[kinds == FULL], k[kinds == FULL]))
        q, k = q[kinds == SOME], k[kinds == SOME]
        if size == 1:
            return Classified(n_q, n_k, tile, tuple(full), (q, k))
        size //= _FANOUT
        q, k = _children(q, k, _FANOUT, -(-rows // size), -(-columns // size))


def is_closed(relation: Relation) -> bool:
    """Whether every pattern in the relation has a cover of its own."""
    parts = [part for part in _parts(relation) if isinstance(part, Relation)]
    if parts:
        return all(is_closed(part) for part in parts)
    return type(relation).cover is not Relation.cover


def _parts(value: object) -> list[object]:
    found: list[object] = []
    if is_dataclass(value):
        for entry in fields(value):
            content = getattr(value, entry.name)
            found.extend(content if isinstance(content, tuple) else [content])
    return found


def _covers(
    relation: Relation, n_q: int, n_k: int, length: int, q: np.ndarray, k: np.ndarray
) -> np.ndarray:
    kinds = np.empty(len(q), np.uint8)
    # token sets may look at every position of a tile
    step = max(1024, _LOOKED // length)
    for low in range(0, len(q), step):
        part = np.s_[low : low + step]
        kinds[part] = relation.cover(*_tiles(n_q, n_k, length, q[part], k[part]), n_k)
    return kinds


def _tiles(n_q: int, n_k: int, length: int, q: np.ndarray, k: np.ndarray) -> tuple[Tiles, Tiles]:
    """Query and key tiles by their numbers."""
    q_start, k_start = n_k - n_q + q * length, k * length
    return (
        Tiles(q_start, np.minimum(q_start + length, n_k)),
        Tiles(k_start, np.minimum(k_start + length, n_k)),
    )


def _children(
    q: np.ndarray, k: np.ndarray, size: int, rows: int, columns: int
) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of finer tiles inside coarse ones, as far as they exist."""
    steps_q, steps_k = (axis.ravel() for axis in np.indices((size, size)))
    q = (q[:, None] * size + steps_q).ravel()
    k = (k[:, None] * size + steps_k).ravel()
    exist = (q < rows) & (k < columns)
    return q[exist], k[exist]


def _expanded(found: Classified) -> tuple[np.ndarray, np.ndarray]:
    parts = [_children(q, k, size, found.rows, found.columns) for size, q, k in found.full]
    empty = np.zeros(0, np.int64)
    return (
        np.concatenate([empty, *[part[0] for part in parts]]),
        np.concatenate([empty, *[part[1] for part in parts]]),
    )


class _Masks:
    """Distinct masks in the order of their first appearance."""

    def __init__(self, tile: int) -> None:
        self.tile = tile
        self.numbers: dict[bytes, int] = {}

    def number(self, held: np.ndarray) -> np.ndarray:
        """The number of each mask of bool [m, tile, tile]."""
        if not len(held):
            return np.zeros(0, np.int64)
        packed = np.packbits(held.reshape(len(held), -1), axis=1)
        return np.array(
            [self.numbers.setdefault(row.tobytes(), len(self.numbers)) for row in packed],
            np.int64,
        )

    def stacked(self) -> np.ndarray:
        """All masks, bool [m, tile, tile]."""
        pairs = self.tile * self.tile
        packed = np.frombuffer(b"".join(self.numbers), np.uint8).reshape(-1, -(-pairs // 8))
        bits = np.unpackbits(packed, axis=1, count=pairs).astype(bool)
        return bits.reshape(-1, self.tile, self.tile)


def _phases(relation: Relation, found: Classified) -> tuple[np.ndarray, np.ndarray]:
    """One undecided tile of each phase, and the phase of every undecided tile."""
    q, k = found.undecided
    if not is_closed(relation):
        return np.arange(len(q)), np.arange(len(q))
    q_tiles, k_tiles = _tiles(found.n_q, found.n_k, found.tile, q, k)
    phases = [*phase_of(relation, q_tiles, k_tiles, found.n_k), q_tiles.count, k_tiles.count]
    table = np.stack([np.broadcast_to(phase, q.shape) for phase in phases], axis=1)
    _, chosen, phase = np.unique(table, axis=0, return_index=True, return_inverse=True)
    return chosen, phase.ravel()


def _looked_into(
    relation: Relation, found: Classified, chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The kinds of the chosen undecided tiles by evaluating `holds` in them, and the masks."""
    q, k = (side[chosen] for side in found.undecided)
    tile, first = found.tile, found.n_k - found.n_q
    masks, kinds = _Masks(tile), []
    inside = np.arange(tile)
    step = max(1, _LOOKED // (tile * tile))
    for low in range(0, len(q), step):
        q_at = first + q[low : low + step, None, None] * tile + inside[:, None]
        k_at = k[low : low + step, None, None] * tile + inside
        real = (q_at < found.n_k) & (k_at < found.n_k)
        last = found.n_k - 1
        held = evaluate_pairs(relation, np.minimum(q_at, last), np.minimum(k_at, last), found.n_k)
        held = held & real
        some = held.any(axis=(1, 2))
        full = (held | ~real).all(axis=(1, 2))
        kind = np.where(full, FULL_TILE, _NO_PAIR)
        kind[some & ~full] = masks.number(held[some & ~full])
        kinds.append(kind)
    return np.concatenate(kinds), masks.stacked()


def _from_edges(
    relation: Relation, found: Classified
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The undecided tiles by writing out the edges of their rows: for sparse, scattered graphs."""
    tile, n_k = found.tile, found.n_k
    first = n_k - found.n_q
    masks = _Masks(tile)
    wanted = np.sort(found.undecided[0] * found.columns + found.undecided[1])
    q_found, k_found, kinds = [], [], []
    for row in np.unique(found.undecided[0]):
        low = first + int(row) * tile
        q, k = relation.rows(low, min(low + tile, n_k), n_k)
        column, place = np.unique(k // tile, return_inverse=True)
        held = np.zeros((len(column), tile, tile), bool)
        held[place, q - low, k % tile] = True
        looked = np.isin(row * found.columns + column, wanted)
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
