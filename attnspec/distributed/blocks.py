"""Which runs of one rank's queries read which runs of another rank's keys, in few blocks.

The cover of the relation answers for pairs of runs; what it leaves undecided is cut where that
tells something: into keys if some of these are read by nobody, into queries, or into both. Blocks
may say too much, never too little: what stays undecided is a block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from attnspec.distributed.known import without_draws
from attnspec.distributed.partitions import Partition
from attnspec.graphs.relation import (
    EMPTY,
    FULL,
    SOME,
    Relation,
    Tiles,
    evaluate_pairs,
    is_closed,
    is_scattered,
)

CUTS = 4
"""Parts into which a side of a block is cut."""

ASKED = 1 << 22
"""Blocks that are asked about in all, at most about."""

AT_ONCE = 1 << 18
"""Blocks that are asked about in one go."""

FINE = 128
"""A block is not cut finer than this part of what its ranks have to do with each other."""

SEEN = 16
"""Single positions by which it is judged whether finer cuts would tell something."""

DRAWN = 1 << 17
"""Positions up to which it is asked where pairs lie that are drawn one by one: of longer sequences
blocks are too large to be without some."""

DENSE = 1 << 24
"""Pairs of a relation without closed forms that are looked at."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of a rank's queries `low <= i < high`, as its tensors count them, times another's keys
    alike.

    `reader` and `owner` are the ranks, int64 [m]; `queries` and `keys` int64 [m, 2]; `full` says of
    which blocks every pair is known to be one, bool [m].
    """

    reader: np.ndarray
    owner: np.ndarray
    queries: np.ndarray
    keys: np.ndarray
    full: np.ndarray


@lru_cache(maxsize=32)
def blocks_between(relation: Relation, partition: Partition) -> Blocks:
    """The blocks that different ranks have with each other."""
    if partition.n > DRAWN and is_scattered(relation):
        found = _Search(without_draws(relation), partition).found()
        return replace(found, full=np.zeros(len(found.full), bool))
    return _Search(relation, partition).found()


class _Search:
    def __init__(self, relation: Relation, partition: Partition) -> None:
        self.relation, self.partition, self.n = relation, partition, partition.n
        self.pieces = partition.pieces
        self.asked = 0
        self.known = is_closed(relation) or self.n * self.n <= DENSE

    def found(self) -> Blocks:
        """Level by level, until nothing is undecided or nothing more is told."""
        rank = self.pieces.rank
        q, k = np.nonzero(rank[:, None] != rank[None])
        ends = np.stack([np.zeros_like(self.pieces.count), self.pieces.count], 1)
        # columns: the two pieces, and the block's ends in them
        open_ = np.concatenate([q[:, None], k[:, None], ends[q], ends[k]], 1)
        if not self.known:
            return self._blocks(open_[:0], open_)
        none = open_[:0]
        full, some = [none], [none]
        kinds = self._kinds(open_)
        while len(open_):
            full.append(open_[kinds == FULL])
            open_ = open_[kinds == SOME]
            fine = self._fine(np.concatenate([*full, *some, open_]), open_)
            some.append(open_[fine])
            open_, kinds, stuck = self._cut(open_[~fine])
            some.append(stuck)
        return self._blocks(np.concatenate(full), np.concatenate(some))

    def _kinds(self, blocks: np.ndarray) -> np.ndarray:
        """What the relation says of blocks; of single pairs exactly."""
        self.asked += len(blocks)
        found = [np.zeros(0, np.uint8)]
        for at in range(0, len(blocks), AT_ONCE):
            part = blocks[at : at + AT_ONCE]
            q, k = self._tiles(part[:, 0], part[:, 2:4]), self._tiles(part[:, 1], part[:, 4:])
            kinds = np.broadcast_to(self.relation.cover(q, k, self.n), len(part)).copy()
            single = np.flatnonzero((kinds == SOME) & (q.count == 1) & (k.count == 1))
            held = evaluate_pairs(self.relation, q.start[single], k.start[single], self.n)
            kinds[single] = np.where(held, FULL, EMPTY)
            found.append(kinds)
        return np.concatenate(found)

    def _tiles(self, piece: np.ndarray, ends: np.ndarray) -> Tiles:
        step, start = self.partition.step, self.pieces.start[piece]
        return Tiles(start + ends[:, 0] * step, start + (ends[:, 1] - 1) * step + 1, step)

    def _fine(self, every: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Whether blocks are fine enough beside what their ranks have to do with each other."""
        ranks = self.partition.ranks
        rank = self.pieces.rank
        pair = rank[every[:, 0]] * ranks + rank[every[:, 1]]
        sizes = []
        for piece, ends in ((every[:, 0], every[:, 2:4]), (every[:, 1], every[:, 4:])):
            # a run that stands in several blocks counts once
            code = np.lexsort((ends[:, 1], ends[:, 0], piece, pair))
            same = np.stack([pair, piece, *ends.T])[:, code]
            new = np.ones(len(code), bool)
            new[1:] = (same[:, 1:] != same[:, :-1]).any(0)
            rows = (same[3] - same[2]) * new
            sizes.append(np.bincount(same[0], rows, ranks * ranks))
        least = np.maximum(1, np.minimum(*sizes) // FINE)
        mine = least[rank[blocks[:, 0]] * ranks + rank[blocks[:, 1]]]
        sides = np.maximum(blocks[:, 3] - blocks[:, 2], blocks[:, 5] - blocks[:, 4])
        return np.asarray(sides <= mine)

    def _cut(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Smaller blocks with what is known of them, and those of which smaller ones would tell
        nothing, or for which it is too late."""
        none = np.zeros((0, 6), np.int64)
        if self.asked + len(blocks) * (CUTS + 2) * CUTS > ASKED:
            return none, np.zeros(0, np.uint8), blocks
        parts, kinds = [none], [np.zeros(0, np.uint8)]
        for queries, keys in ((False, True), (True, False), (True, True)):
            cut, of = _parts(blocks, queries, keys)
            told = self._kinds(cut)
            tells = np.zeros(len(blocks), bool)
            tells[of[told != SOME]] = True
            parts.append(cut[tells[of]])
            kinds.append(told[tells[of]])
            blocks = blocks[~tells]
        of_queries, of_keys = self._would_tell(blocks)
        for queries, keys in ((True, True), (True, False), (False, True)):
            cut, _ = _parts(blocks[(of_queries == queries) & (of_keys == keys)], queries, keys)
            parts.append(cut)
            kinds.append(np.full(len(cut), SOME, np.uint8))
        return np.concatenate(parts), np.concatenate(kinds), blocks[~(of_queries | of_keys)]

    def _would_tell(self, blocks: np.ndarray) -> np.ndarray:
        """Whether some single queries of blocks read no key of them, or all, and whether some
        single keys are read by no query, or by all: bool [2, m]."""
        tells = np.zeros((2, len(blocks)), bool)
        for side, at in enumerate((2, 4)):
            places = (np.arange(SEEN) * 0.61803398875 + 0.37) % 1.0
            size = blocks[:, at + 1] - blocks[:, at]
            drawn = (places * size[:, None]).astype(np.int64)
            every = np.arange(SEEN) % size[:, None]
            one = blocks[:, at, None] + np.where(size[:, None] > SEEN, drawn, every)
            some = np.repeat(blocks, SEEN, axis=0)
            some[:, at], some[:, at + 1] = one.ravel(), one.ravel() + 1
            tells[side] = (self._kinds(some).reshape(-1, SEEN) != SOME).any(1)
        return tells

    def _blocks(self, full: np.ndarray, some: np.ndarray) -> Blocks:
        """Blocks as ranks count their rows."""
        pieces, found = self.pieces, np.concatenate([full, some])
        return Blocks(
            pieces.rank[found[:, 0]],
            pieces.rank[found[:, 1]],
            found[:, 2:4] + pieces.before[found[:, 0], None],
            found[:, 4:] + pieces.before[found[:, 1], None],
            np.arange(len(found)) < len(full),
        )


def _parts(blocks: np.ndarray, queries: bool, keys: bool) -> tuple[np.ndarray, np.ndarray]:
    """Blocks cut on some sides, and which block each was."""
    of = np.arange(len(blocks))
    for at, wanted in ((2, queries), (4, keys)):
        if not wanted:
            continue
        low, high = blocks[:, at], blocks[:, at + 1]
        size = -((low - high) // CUTS)
        start = low[:, None] + size[:, None] * np.arange(CUTS)
        stop = np.minimum(start + size[:, None], high[:, None])
        real = (start < stop).ravel()
        blocks = np.repeat(blocks, CUTS, axis=0)
        blocks[:, at], blocks[:, at + 1] = start.ravel(), stop.ravel()
        blocks, of = blocks[real], np.repeat(of, CUTS)[real]
    return blocks, of
