"""Which positions each rank holds, and candidates for it, which `attnspec.distributed.planning`
compares; none of them visits a single position in Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import gcd

import numpy as np

from attnspec.graphs.relation import Relation

MOST_RUNS = 512
"""The most runs of all ranks together."""

CHUNKS = 8
"""Runs of each rank where work is dealt out in chunks."""

EVEN = 1.05
"""A partition is left as it is where no rank has more work than this, by the mean; another is
examined where its balance is better by this factor."""

ROOM = 1.05
"""How many times its even share of the positions a rank may hold where work is dealt out."""


Ends = tuple[int, int]
"""Where a run of positions starts, and where it stops."""


@dataclass(frozen=True)
class Partition:
    """`runs` has for each rank its runs (start, stop) of positions start, start + step, … < stop,
    one behind the other in its tensors, each position below n once; a rank may have none."""

    name: str
    n: int
    runs: tuple[tuple[Ends, ...], ...]
    step: int = 1

    @property
    def ranks(self) -> int:
        return len(self.runs)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """How many positions each rank holds."""
        return tuple(sum(len(range(a, b, self.step)) for a, b in runs) for runs in self.runs)

    @property
    def in_order(self) -> bool:
        """Whether each rank's positions ascend and come behind those of the ranks before."""
        starts = [start for runs in self.runs for start, _ in runs]
        return self.step == 1 and starts == sorted(starts)

    def positions(self, rank: int) -> np.ndarray:
        """The positions of a rank in the order in which its tensors have them, int64."""
        parts = [np.arange(start, stop, self.step) for start, stop in self.runs[rank]]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    @cached_property
    def order(self) -> np.ndarray:
        """Where each position stands in the ranks' tensors one behind the other, int64 [n]."""
        every = np.concatenate([self.positions(rank) for rank in range(self.ranks)])
        return np.argsort(every, kind="stable")

    def sums(self, values: np.ndarray) -> np.ndarray:
        """The sum of values [n], or how many of a mask are True, over the positions of each rank,
        float64 [ranks]."""
        add = np.count_nonzero if values.dtype == bool else np.sum
        return np.array(
            [sum(float(add(values[a : b : self.step])) for a, b in runs) for runs in self.runs]
        )

    def __str__(self) -> str:
        return self.name


def contiguous(n: int, ranks: int) -> Partition:
    """One run each, as `torch.chunk` and `Shard` cut: all of one length but the last ones."""
    each = max(1, -(-n // ranks))
    ends = [min(n, rank * each) for rank in range(ranks + 1)]
    return Partition("contiguous", n, tuple((run,) for run in pairwise(ends)))


def head_tail(n: int, ranks: int) -> Partition:
    """Two runs each, from the front and from the back: triangles become even."""
    ends = _even(n, 2 * ranks)
    runs = zip(ends[:ranks], reversed(ends), strict=False)
    return Partition("head-tail", n, tuple(runs))


def by_residue(n: int, ranks: int, step: int) -> Partition | None:
    """Whole classes of positions modulo a step, or equal parts of one; None where uneven."""
    parts = max(1, ranks // step)
    if step * parts % ranks and step < 4 * ranks:
        return None
    pieces = [
        (residue + low * step, min(n, residue + high * step))
        for residue in range(step)
        for low, high in _even(len(range(residue, n, step)), parts)
    ]
    runs = tuple(tuple(map(pieces.__getitem__, share)) for share in dealt(len(pieces), ranks))
    return Partition(f"by residue modulo {step}", n, runs, step)


def dealt(count: int, ranks: int) -> list[range]:
    """Which of so many things, such as key heads, are each rank's, where they are dealt out."""
    ends = pairwise(rank * count // ranks for rank in range(ranks + 1))
    return [range(low, high) for low, high in ends]


def free_cuts(relation: Relation, n: int, longest: float) -> np.ndarray:
    """Whether no pair joins the positions before c with those from c on, bool [n - 1] for
    0 < c < n; nowhere if rows have no closed form, or one joins more than the `longest` part that
    is of use."""
    nowhere = np.zeros(n - 1, bool)
    first, last = np.arange(n), np.arange(n)
    for at, closed in relation.closed_rows(n):
        if closed is None:
            return nowhere
        start, stop, step = np.broadcast_arrays(*closed)
        rows = np.arange(at, at + len(start))
        nonempty = stop > start
        end = start + np.maximum(stop - 1 - start, 0) // step * step
        first[rows] = np.minimum(rows, np.where(nonempty, start, n).min(-1, initial=n))
        last[rows] = np.maximum(rows, np.where(nonempty, end, -1).max(-1, initial=-1))
        if (last[rows] - first[rows] >= longest).any():
            return nowhere
    reach = np.maximum.accumulate(last)
    back = np.minimum.accumulate(first[::-1])[::-1]
    cuts = np.arange(1, n)
    return (reach[:-1] < cuts) & (back[1:] >= cuts)


def candidates(
    relations: Sequence[Relation], n: int, ranks: int, works: Sequence[np.ndarray]
) -> Iterator[Partition]:
    """Partitions worth a plan, the simplest first; `works` are the pairs of each query, [n], of
    those relations whose rows are counted."""
    plain = contiguous(n, ranks)
    yield plain
    if ranks == 1 or n < 2 * ranks:
        return
    # steps whose residue classes bring pairs together, and what they have in common
    steps = {step for each in relations for pair in each.strides(n) for step in pair if step > 1}
    for step in sorted({*steps, gcd(*steps)}):
        partition = by_residue(n, ranks, step) if 1 < step < min(n, MOST_RUNS + 1) else None
        if partition is not None:
            yield partition
    if not works:
        yield head_tail(n, ranks)
        return
    least = max(balance_of(plain.sums(each)) for each in works)
    if least <= EVEN:
        return
    work = np.stack(works).sum(0, dtype=np.float64)
    spread = [head_tail(n, ranks)]
    if n >= 2 * CHUNKS * ranks and CHUNKS * ranks <= MOST_RUNS:
        chunks = _dealt(_even(n, CHUNKS * ranks), work, ranks)
        spread.append(Partition("chunks by work", n, chunks))
    for each in spread:
        # more runs have more rims: they are worth a plan where work comes out more evenly
        balance = max(balance_of(each.sums(one)) for one in works)
        if balance < least / EVEN:
            least = balance
            yield each
    free = np.ones(n - 1, bool)
    for relation in relations:
        if free.any():
            free &= free_cuts(relation, n, n / ranks)
    cuts = 1 + np.flatnonzero(free)
    if len(cuts) >= 2 * MOST_RUNS:
        # at most a few for each of so many even parts
        cuts = cuts[np.unique(cuts * (2 * MOST_RUNS) // n, return_index=True)[1]]
    ends = list(pairwise([0, *cuts.tolist(), n]))
    if max(b - a for a, b in ends) <= n / ranks:
        yield Partition("whole documents", n, _dealt(ends, work, ranks))


def balance_of(work: np.ndarray) -> float:
    """The most work of a rank by the mean, of that of each."""
    return float(work.max() / work.mean()) if work.any() else 1.0


def _even(count: int, parts: int) -> list[Ends]:
    each, more = divmod(count, parts)
    ends = [part * each + min(part, more) for part in range(parts + 1)]
    return list(pairwise(ends))


def _dealt(ends: Sequence[Ends], work: np.ndarray, ranks: int) -> tuple[tuple[Ends, ...], ...]:
    """The runs of each rank: the heaviest first, each to the rank with least work that has room;
    where none has, to the one that holds least."""
    total = np.append(0.0, np.cumsum(work, dtype=np.float64))
    mine: list[list[Ends]] = [[] for _ in range(ranks)]
    counts, load, room = np.zeros(ranks), np.zeros(ranks), ROOM * len(work) / ranks
    for low, high in sorted(ends, key=lambda run: float(total[run[0]] - total[run[1]])):
        full = counts + high - low > room
        rank = np.lexsort((load, counts * full.all(), full))[0]
        mine[rank].append((low, high))
        counts[rank] += high - low
        load[rank] += total[high] - total[low]
    return tuple(tuple(sorted(runs)) for runs in mine)
