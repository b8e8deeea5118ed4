"""Which runs of one rank's queries read which runs of another rank's keys, in few blocks.

A graph is a union of terms, of each of which it is known which queries and which keys it is about.
Terms whose rows are alike for many queries are listed, run by run. Of others the cover answers for
pairs of runs; what it leaves undecided is cut where that tells something: into keys if some of
these are read by nobody, into queries, or into both. Blocks may say too much, never too little:
what stays undecided is a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from attnspec.analysis.counting.rectangles import Term, terms_of
from attnspec.backends.common.labels import ALL, possible
from attnspec.distributed.partitions import Partition
from attnspec.graphs.operators import Complement, Intersection
from attnspec.graphs.relation import (
    EMPTY,
    FULL,
    SOME,
    Progressions,
    Relation,
    Tiles,
    evaluate_pairs,
    is_closed,
    is_scattered,
    phase_of,
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

SHORT = 2 * FINE
"""Positions of a rank, in the mean, up to which blocks are single rows, and need no terms."""

ALIKE = 8
"""Queries that read the same keys, in the mean, from which on rows are listed."""

LISTED = 1 << 18
"""Blocks that are listed at most; of more, fewer may be large ones."""

WIDE = 16
"""Runs of keys that a query reads, up to which rows are listed."""

EVERY = -1
"""In place of the number of a set: all rows."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of a rank's queries `low <= i < high`, as its tensors count them, times another's keys
    alike, as far as these are in a set.

    `reader` and `owner` are the ranks, int64 [m]; `queries` and `keys` int64 [m, 2]; `full` says of
    which blocks every pair is known to be one, bool [m]. `of_queries` and `of_keys` are the numbers
    of their sets, int64 [m], `EVERY` for all rows; sets are bool [n], rank after rank.
    """

    reader: np.ndarray
    owner: np.ndarray
    queries: np.ndarray
    keys: np.ndarray
    full: np.ndarray
    of_queries: np.ndarray
    of_keys: np.ndarray
    query_sets: tuple[np.ndarray, ...] = ()
    key_sets: tuple[np.ndarray, ...] = ()

    @classmethod
    def plain(
        cls,
        reader: np.ndarray,
        owner: np.ndarray,
        queries: np.ndarray,
        keys: np.ndarray,
        full: np.ndarray,
    ) -> Blocks:
        """Blocks of all rows of their runs."""
        every = np.full(len(reader), EVERY)
        return cls(reader, owner, queries, keys, full, every, every)

    def take(self, some: np.ndarray) -> Blocks:
        """Some of the blocks."""
        names = "reader", "owner", "queries", "keys", "full", "of_queries", "of_keys"
        return replace(self, **{name: getattr(self, name)[some] for name in names})


@lru_cache(maxsize=32)
def blocks_between(relation: Relation, partition: Partition) -> Blocks:
    """The blocks that different ranks have with each other."""
    drawn = partition.n > DRAWN and is_scattered(relation)
    if drawn:
        relation = possible(relation, is_scattered)
    found = None if partition.n <= SHORT * partition.ranks else _by_terms(relation, partition)
    if found is None:
        found = _Search(relation, partition).found()
    return replace(found, full=np.zeros(len(found.full), bool)) if drawn else found


def _by_terms(relation: Relation, partition: Partition) -> Blocks | None:
    """The blocks of all terms; None where those of one would be looked into pair by pair."""
    terms, found = terms_of(relation, partition.n), []
    for term in terms:
        parts = *term.held, *map(Complement, term.left_out)
        whole = ALL if not parts else parts[0] if len(parts) == 1 else Intersection(parts)
        listed = _listed(whole, partition)
        if listed is None:
            search = _Search(whole, partition, ASKED // len(terms))
            if not search.known:
                return None
            listed = search.found()
        found.append(listed)
    return _together(found, terms, partition)


def _together(found: Sequence[Blocks], terms: Sequence[Term], partition: Partition) -> Blocks:
    """The blocks of all terms, with the sets of each."""
    rows, none = np.zeros(0, np.int64), np.zeros((0, 2), np.int64)
    found = [Blocks.plain(rows, rows, none, none, np.zeros(0, bool)), *found]
    reader, owner, queries, keys, full = (
        np.concatenate([getattr(each, name) for each in found])
        for name in ("reader", "owner", "queries", "keys", "full")
    )
    many = [len(each.full) for each in found]
    numbers: list[np.ndarray] = []
    sets: list[tuple[np.ndarray, ...]] = []
    for masks in ([term.rows for term in terms], [term.columns for term in terms]):
        held = tuple(mask[partition.order] for mask in masks if mask is not None)
        known = np.array([EVERY, *(EVERY if mask is None else 0 for mask in masks)])
        known[known != EVERY] = np.arange(len(held))
        numbers.append(np.repeat(known, many))
        sets.append(held)
    return Blocks(reader, owner, queries, keys, full, numbers[0], numbers[1], sets[0], sets[1])


def _listed(relation: Relation, partition: Partition) -> Blocks | None:
    """The blocks of a relation whose rows are runs of keys, alike for many queries; None where they
    are not, or are too many."""
    n, pieces = partition.n, partition.pieces
    sample = (_scattered_places() * (n - 1)).astype(np.int64)
    one, other = (_as_runs(relation.progressions(at, n)) for at in (sample, sample + 1))
    if partition.step > 1 or one is None or other is None:
        return None
    if one.shape != other.shape or one.shape[2] > WIDE:
        return None
    if (one != other).any((0, 2)).mean() > 1 / ALIKE:
        return None
    first: list[np.ndarray] = [np.zeros(0, np.int64)]
    runs: list[np.ndarray] = []
    for at, closed in relation.closed_rows(n):
        each = _as_runs(closed)
        if each is None or (runs and each.shape[2] != runs[0].shape[2]):
            return None
        new = np.ones(each.shape[1], bool)
        new[1:] = (each[:, 1:] != each[:, :-1]).any((0, 2))
        # a shard begins with a run of its own
        new[pieces.start[(pieces.start >= at) & (pieces.start < at + len(new))] - at] = True
        first.append(at + np.flatnonzero(new))
        runs.append(each[:, new])
    low = np.concatenate(first)
    start, stop = np.concatenate(runs, 1)
    if len(low) * ALIKE > n + ALIKE * len(pieces.rank):
        return None
    return _clipped(low, np.append(low[1:], n), start, stop, partition)


def _as_runs(closed: Progressions | None) -> np.ndarray | None:
    """Progressions as runs (start, stop), int64 [2, m, p], those of no key alike; None where there
    are none, or their steps are larger."""
    if closed is None:
        return None
    start, stop, step = np.broadcast_arrays(*closed)
    if ((step > 1) & (stop - start > 1)).any():
        return None
    none = stop <= start
    return np.stack([np.where(none, 0, start), np.where(none, 0, stop)])


def _clipped(
    low: np.ndarray, high: np.ndarray, start: np.ndarray, stop: np.ndarray, partition: Partition
) -> Blocks | None:
    """Blocks of runs of queries [m], each in one shard, times runs of keys [m, p], one for every
    shard that they meet; None where they are too many."""
    order = np.argsort(partition.pieces.start, kind="stable")
    pieces = partition.pieces
    order = order[pieces.count[order] > 0]
    begin = pieces.start[order]
    row, place = np.nonzero(stop > start)
    k_low, k_high = start[row, place], stop[row, place]
    one = np.searchsorted(begin, k_low, "right") - 1
    many = np.searchsorted(begin, k_high - 1, "right") - one
    if int(many.sum()) > LISTED:
        return None
    each = np.repeat(np.arange(len(row)), many)
    at = one[each] + np.arange(len(each)) - np.repeat(np.cumsum(many) - many, many)
    owner, reader = order[at], order[np.searchsorted(begin, low[row[each]], "right") - 1]
    away = pieces.rank[owner] != pieces.rank[reader]
    each, owner, reader = each[away], owner[away], reader[away]
    q, k = (
        np.stack([low[row[each]], high[row[each]]], 1) - pieces.start[reader, None],
        np.stack([k_low[each], k_high[each]], 1) - pieces.start[owner, None],
    )
    k = np.clip(k, 0, pieces.count[owner, None])
    return Blocks.plain(
        pieces.rank[reader],
        pieces.rank[owner],
        q + pieces.before[reader, None],
        k + pieces.before[owner, None],
        np.ones(len(each), bool),
    )


class _Search:
    def __init__(self, relation: Relation, partition: Partition, most: int = ASKED) -> None:
        self.relation, self.partition, self.n = relation, partition, partition.n
        self.most = most
        self.pieces = partition.pieces
        self.asked = 0
        self.known = is_closed(relation) or self.n * self.n <= DENSE

    def found(self) -> Blocks:
        """Level by level, until nothing is undecided or nothing more is told."""
        rank = self.pieces.rank
        q, k = np.nonzero(rank[:, None] != rank[None])
        ends = np.stack([np.zeros_like(self.pieces.count), self.pieces.count], 1)
        # columns: the two pieces, and the block's ends in them
        every = np.concatenate([q[:, None], k[:, None], ends[q], ends[k]], 1)
        none = every[:0]
        if not self.known:
            return self._blocks(none, every)
        every = every[self._kinds(every) != EMPTY]
        like = self._alike(every)
        open_ = every[np.unique(like)]
        # what is found of one is repeated: the blocks of all together are no more than before
        self.asked, self.most = 0, self.most * len(open_) // max(1, len(every))
        full, some = [none], [none]
        kinds = self._kinds(open_)
        while len(open_):
            full.append(open_[kinds == FULL])
            open_ = open_[kinds == SOME]
            fine = self._fine(np.concatenate([*full, *some, open_]), open_)
            some.append(open_[fine])
            open_, kinds, stuck = self._cut(open_[~fine])
            some.append(stuck)
        decided, others = (_repeated(np.concatenate(each), every, like) for each in (full, some))
        return self._blocks(decided, others)

    def _alike(self, every: np.ndarray) -> np.ndarray:
        """Of each block of two whole pieces the number of the one that is looked into in its place:
        of two other ranks whose pieces have the same pairs, counted in each piece."""
        ranks, rank = self.partition.ranks, self.pieces.rank
        q, k = self._tiles(every[:, 0], every[:, 2:4]), self._tiles(every[:, 1], every[:, 4:])
        each = [*phase_of(self.relation, q, k, self.n), q.count, k.count]
        masks = np.unique(np.stack(each, 1), axis=0, return_inverse=True)[1].ravel()
        pair = rank[every[:, 0]] * ranks + rank[every[:, 1]]
        order = np.argsort(pair, kind="stable")
        like, seen = np.empty_like(order), dict[bytes, np.ndarray]()
        ends = [0, *(1 + np.flatnonzero(np.diff(pair[order]))).tolist(), len(order)]
        for low, high in pairwise(ends):
            mine = order[low:high]
            like[mine] = seen.setdefault(masks[mine].tobytes(), mine)
        return like

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
        none = blocks[:0]
        if self.asked + len(blocks) * (CUTS + 2) * CUTS > self.most:
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
            size = blocks[:, at + 1] - blocks[:, at]
            drawn = (_scattered_places() * size[:, None]).astype(np.int64)
            every = np.arange(SEEN) % size[:, None]
            one = blocks[:, at, None] + np.where(size[:, None] > SEEN, drawn, every)
            some = np.repeat(blocks, SEEN, axis=0)
            some[:, at], some[:, at + 1] = one.ravel(), one.ravel() + 1
            tells[side] = (self._kinds(some).reshape(-1, SEEN) != SOME).any(1)
        return tells

    def _blocks(self, full: np.ndarray, some: np.ndarray) -> Blocks:
        """Blocks as ranks count their rows."""
        pieces, found = self.pieces, np.concatenate([full, some])
        return Blocks.plain(
            pieces.rank[found[:, 0]],
            pieces.rank[found[:, 1]],
            found[:, 2:4] + pieces.before[found[:, 0], None],
            found[:, 4:] + pieces.before[found[:, 1], None],
            np.arange(len(found)) < len(full),
        )


def _repeated(blocks: np.ndarray, every: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Parts of some blocks of whole pieces as those of all that are `like` them."""
    width = 1 + int(every[:, :2].max(initial=0))
    code = every[:, 0] * width + every[:, 1]
    order = np.argsort(code)
    whose = order[np.searchsorted(code, blocks[:, 0] * width + blocks[:, 1], sorter=order)]
    by_whose = np.argsort(whose, kind="stable")
    many = np.bincount(whose, minlength=len(every))
    first, times = (np.cumsum(many) - many)[like], many[like]
    of = np.repeat(np.arange(len(every)), times)
    within = np.arange(len(of)) - np.repeat(np.cumsum(times) - times, times)
    found = blocks[by_whose[first[of] + within]]
    return np.concatenate([every[of, :2], found[:, 2:]], 1)


def _scattered_places() -> np.ndarray:
    """Some places of a range, in parts of it, that stand in no step."""
    return (np.arange(SEEN) * 0.61803398875 + 0.37) % 1.0


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
