"""The tiles of one step in its order.

Positions of one residue class stand together; each class is cut into tiles of equal size, the last
of which may be short. Tiles are arithmetic progressions, so the cover of the relation decides them
in closed form, coarse tiles first. Masks of tiles that stay undecided are evaluated once for each
phase: numbers that agree only where masks do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from attnspec.relations import FULL, SOME, Relation, Tiles, evaluate_pairs, phase_of
from attnspec.steps import Listed, Order, Side

FULL_TILE = -1
"""Stands in place of a mask's number for a tile whose every pair is an edge."""

_FANOUT = 4
_COARSEST = 64
_LOOKED = 1 << 22
_PAIRS = 1 << 23


@dataclass(frozen=True, eq=False)
class Axis:
    """One side of a step: the positions first <= p < last, class by class, in tiles.

    `offsets[c]:offsets[c + 1]` are the tiles of class c, whose positions are first + c modulo the
    step. The tiles of a list are the spans of its positions.
    """

    first: int
    last: int
    side: Side
    size: int
    tiles: Tiles
    offsets: np.ndarray

    @property
    def count(self) -> int:
        """The number of tiles."""
        return int(self.offsets[-1])

    @cached_property
    def positions(self) -> np.ndarray:
        """The position of every place of every tile, int64 [count * size]; -1 beyond short ones."""
        if isinstance(self.side, Listed):
            found = np.full(self.count * self.size, -1, np.int64)
            chosen = _listed_in(self.side, self.first, self.last)
            found[: len(chosen)] = chosen
            return found
        at = self.tiles.start[:, None] + np.arange(self.size) * self.side
        return np.where(at < self.tiles.stop[:, None], at, -1).ravel()

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of positions of every tile."""
        return np.asarray((self.positions.reshape(-1, self.size) >= 0).sum(axis=1))

    @property
    def natural(self) -> bool:
        """Whether the tiles follow one another as the positions do."""
        return self.side == 1


@lru_cache(maxsize=64)
def axis(first: int, last: int, side: Side, size: int) -> Axis:
    """The tiles of a range of positions, grouped by residue, or of those that are listed."""
    if isinstance(side, Listed):
        chosen = _listed_in(side, first, last)
        # what is known of a tile's span is true of the positions listed in it
        begin, end = chosen[::size], np.append(chosen[size - 1 :: size], chosen[-1:])
        end = end[: len(begin)] + 1
        return Axis(first, last, side, size, Tiles(begin, end), np.array([0, len(begin)]))
    step = side
    starts = np.arange(first, min(last, first + step), dtype=np.int64)
    lengths = -((starts - last) // step)
    counts = -(-lengths // size)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    chunk = np.arange(int(offsets[-1])) - np.repeat(offsets[:-1], counts)
    begin = np.repeat(starts, counts) + chunk * size * step
    end = np.minimum(begin + size * step, last)
    return Axis(first, last, step, size, Tiles(begin, end, step), offsets)


def _listed_in(side: Listed, first: int, last: int) -> np.ndarray:
    positions = np.array(side.positions, np.int64)
    return np.asarray(positions[(positions >= first) & (positions < last)])


@dataclass(frozen=True, eq=False)
class StepLayout:
    """The non-empty tiles of one step.

    Query tile i has entries `starts[i]:starts[i + 1]` of `keys`, the key tiles that it reads,
    ascending, and of `kinds`, FULL_TILE or the number of a mask. `masks` is bool
    [m, q.size, k.size], without repetitions, False beyond the keys of a short tile.
    """

    q: Axis
    k: Axis
    starts: np.ndarray
    keys: np.ndarray
    kinds: np.ndarray
    masks: np.ndarray

    def pairs(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Every pair that the tiles hold, as arrays q, k; a pair held twice stands twice."""
        q_at = self.q.positions.reshape(-1, self.q.size)
        k_at = self.k.positions.reshape(-1, self.k.size)
        found = []
        for row in range(self.q.count):
            for entry in range(self.starts[row], self.starts[row + 1]):
                column, kind = int(self.keys[entry]), int(self.kinds[entry])
                held = (q_at[row][:, None] >= 0) & (k_at[column][None] >= 0)
                if kind != FULL_TILE:
                    held &= self.masks[kind]
                q, k = np.nonzero(held)
                found.append((q_at[row][q], k_at[column][k]))
        if not found:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        return np.concatenate([f[0] for f in found]), np.concatenate([f[1] for f in found])


@dataclass(frozen=True, eq=False)
class Classified:
    """What the cover alone says of pairs of fine tiles: those that are FULL, those undecided."""

    q: Axis
    k: Axis
    full: tuple[np.ndarray, np.ndarray]
    undecided: tuple[np.ndarray, np.ndarray]

    @property
    def area(self) -> tuple[int, int]:
        """Pairs of positions in FULL tiles and in undecided ones."""
        size = self.q.size * self.k.size
        return len(self.full[0]) * size, len(self.undecided[0]) * size


class TooFine(Exception):
    """A classification would look at more pairs of tiles than is worth it."""


@lru_cache(maxsize=32)
def classify(
    relation: Relation, n_q: int, n_k: int, order: Order, sizes: tuple[int, int]
) -> Classified:
    """The cover of all pairs of tiles, from coarse to fine; raises TooFine."""
    factors = [1]
    while True:
        q = axis(n_k - n_q, n_k, order.q, sizes[0] * factors[-1])
        k = axis(0, n_k, order.k, sizes[1] * factors[-1])
        if q.count <= _coarsest(order.q) and k.count <= _coarsest(order.k):
            break
        factors.append(factors[-1] * _FANOUT)
    if q.count * k.count > _PAIRS:
        raise TooFine
    rows, columns = (part.ravel() for part in np.indices((q.count, k.count)))
    full: list[tuple[np.ndarray, np.ndarray]] = []
    for factor in reversed(factors):
        above = q, k
        q = axis(n_k - n_q, n_k, order.q, sizes[0] * factor)
        k = axis(0, n_k, order.k, sizes[1] * factor)
        if q is not above[0] or k is not above[1]:
            rows, columns = _children(above, (q, k), rows, columns)
            full = [_children(above, (q, k), *part) for part in full]
        if len(rows) > _PAIRS:
            raise TooFine
        kinds = _cover(relation, q, k, rows, columns, n_k)
        full.append((rows[kinds == FULL], columns[kinds == FULL]))
        rows, columns = rows[kinds == SOME], columns[kinds == SOME]
    together = tuple(np.concatenate([part[side] for part in full]) for side in (0, 1))
    return Classified(q, k, (together[0], together[1]), (rows, columns))


def _coarsest(side: Side) -> int:
    return _COARSEST if isinstance(side, Listed) else max(_COARSEST, side)


def _cover(
    relation: Relation, q: Axis, k: Axis, rows: np.ndarray, columns: np.ndarray, n: int
) -> np.ndarray:
    kinds = np.empty(len(rows), np.uint8)
    for low in range(0, len(rows), 1 << 18):
        part = np.s_[low : low + (1 << 18)]
        kinds[part] = relation.cover(_chosen(q, rows[part]), _chosen(k, columns[part]), n)
    return kinds


def _chosen(side: Axis, index: np.ndarray) -> Tiles:
    return Tiles(side.tiles.start[index], side.tiles.stop[index], side.tiles.step)


def _children(
    above: tuple[Axis, Axis], below: tuple[Axis, Axis], rows: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of finer tiles inside pairs of coarse ones."""
    fine_rows = _finer(above[0], below[0], rows)[:, :, None]
    fine_columns = _finer(above[1], below[1], columns)[:, None, :]
    fine_rows, fine_columns = np.broadcast_arrays(fine_rows, fine_columns)
    exist = (fine_rows >= 0) & (fine_columns >= 0)
    return fine_rows[exist], fine_columns[exist]


def _finer(above: Axis, below: Axis, index: np.ndarray) -> np.ndarray:
    """The tiles below each tile above, -1 where there are fewer."""
    group = np.searchsorted(above.offsets, index, side="right") - 1
    factor = above.size // below.size
    child = (index - above.offsets[group])[:, None] * factor + np.arange(factor)
    child = child + below.offsets[group][:, None]
    return np.where(child < below.offsets[group + 1][:, None], child, -1)


def step_layout(found: Classified, relation: Relation, n: int) -> StepLayout:
    """The tiles of a step, every one of them decided."""
    rows, columns = found.undecided
    kinds, masks = _looked_into(found.q, found.k, rows, columns, relation, n)
    kept = kinds != _NOTHING
    q_all = np.concatenate([found.full[0], rows[kept]])
    k_all = np.concatenate([found.full[1], columns[kept]])
    kinds = np.concatenate([np.full(len(found.full[0]), FULL_TILE), kinds[kept]])
    kinds, masks = _short(found.k, k_all, kinds, masks)
    order = np.lexsort((k_all, q_all))
    starts = np.zeros(found.q.count + 1, np.int64)
    np.cumsum(np.bincount(q_all, minlength=found.q.count), out=starts[1:])
    return StepLayout(found.q, found.k, starts, k_all[order], kinds[order], masks)


def _short(
    k: Axis, columns: np.ndarray, kinds: np.ndarray, masks: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """FULL tiles with too few keys get a mask that leaves out the places behind them."""
    counts = k.lengths[columns]
    short = (kinds == FULL_TILE) & (counts < k.size)
    lengths, which = np.unique(counts[short], return_inverse=True)
    held = np.arange(k.size) < lengths[:, None]
    more = np.broadcast_to(held[:, None], (len(lengths), *masks.shape[1:]))
    kinds = kinds.copy()
    kinds[short] = len(masks) + which
    return kinds, np.concatenate([masks, more])


_NOTHING = -2


def _looked_into(
    q: Axis,
    k: Axis,
    rows: np.ndarray,
    columns: np.ndarray,
    relation: Relation,
    n: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The kind of each undecided tile, `_NOTHING` for an empty one, and the distinct masks."""
    shape = (q.size, k.size)
    if not len(rows):
        return np.zeros(0, np.int64), np.zeros((0, *shape), bool)
    first, group = _same_masks(q, k, rows, columns, relation, n)
    q_at = q.positions.reshape(-1, q.size)
    k_at = k.positions.reshape(-1, k.size)
    numbers: dict[bytes, int] = {}
    kinds = np.empty(len(first), np.int64)
    step = max(1, _LOOKED // (q.size * k.size))
    for low in range(0, len(first), step):
        part = first[low : low + step]
        queries, keys = q_at[rows[part]][:, :, None], k_at[columns[part]][:, None, :]
        real = (queries >= 0) & (keys >= 0)
        held = evaluate_pairs(relation, np.maximum(queries, 0), np.maximum(keys, 0), n) & real
        full = (held == real).all(axis=(1, 2))
        some = held.any(axis=(1, 2))
        packed = np.packbits(held.reshape(len(held), -1), axis=1)
        for index in range(len(part)):
            if not some[index]:
                kinds[low + index] = _NOTHING
            elif full[index]:
                kinds[low + index] = FULL_TILE
            else:
                kinds[low + index] = numbers.setdefault(packed[index].tobytes(), len(numbers))
    packed_size = -(-q.size * k.size // 8)
    bits = np.frombuffer(b"".join(numbers), np.uint8).reshape(len(numbers), packed_size)
    masks = np.unpackbits(bits, axis=1, count=q.size * k.size).astype(bool)
    return kinds[group], masks.reshape(-1, *shape)


def _same_masks(
    q: Axis, k: Axis, rows: np.ndarray, columns: np.ndarray, relation: Relation, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """One representative of each phase, and the phase of every tile."""
    if isinstance(q.side, Listed) or isinstance(k.side, Listed):
        # phases speak of progressions; lists are few
        return np.arange(len(rows)), np.arange(len(rows))
    q_tiles, k_tiles = _chosen(q, rows), _chosen(k, columns)
    phases = [*phase_of(relation, q_tiles, k_tiles, n), q_tiles.count, k_tiles.count]
    table = np.stack([np.broadcast_to(phase, rows.shape) for phase in phases], axis=1)
    order = np.lexsort(table.T)
    ordered = table[order]
    new = np.concatenate([[True], (ordered[1:] != ordered[:-1]).any(axis=1)])
    group = np.empty(len(rows), np.int64)
    group[order] = np.cumsum(new) - 1
    return order[new], group
