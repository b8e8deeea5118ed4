"""Keys as arithmetic progressions: which of them meet, what many of them cover, and how often.

Positions are laid out by residue class: with a step s and `width` = n // s + 2, position p has the
place (p % s) * width + p // s. A progression of step s is then one range of places, and no range
touches one of the next class: a place between them stays free. So every question about progressions
of one step is a question about ranges, which sums and differences along the places answer in O(n).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from attnspec.graphs.progressions import wide
from attnspec.graphs.relation import Progressions, in_runs
from attnspec.limits import LIMITS

Ends: TypeAlias = "tuple[int, int]"
"""The least position and one beyond the largest: all that was looked for lies between them."""

# --- groups of one step ---------------------------------------------------------------------------


class Group:
    """Progressions of one step that are not empty: their rows, places and numbers of members.

    With an `order` of the positions, int64 [n], they are ranges in that order instead.
    """

    def __init__(
        self,
        n: int,
        step: int,
        row: np.ndarray,
        start: np.ndarray,
        count: np.ndarray,
        order: np.ndarray | None = None,
    ) -> None:
        self.n, self.step, self.row, self.count, self.order = n, step, row, count, order
        self.width = n // step + 2
        self.place = start if step == 1 else start % step * self.width + start // step

    @property
    def places(self) -> int:
        return self.step * self.width

    def ordered(self, values: np.ndarray) -> np.ndarray:
        """Values of the positions [n, …] in the order of the places, zero where there is none."""
        padded = np.zeros((self.places, *values.shape[1:]), values.dtype)
        padded[: self.n] = values if self.order is None else values[self.order]
        if self.step == 1:
            return padded
        turned = padded.reshape(self.width, self.step, *values.shape[1:]).swapaxes(0, 1)
        return turned.reshape(padded.shape)

    def natural(self, values: np.ndarray) -> np.ndarray:
        """Values of the places in the order of the positions, [n]."""
        ordered = values.reshape(self.step, self.width).T.reshape(-1)[: self.n]
        if self.order is None:
            return np.asarray(ordered)
        placed = np.empty_like(ordered)
        placed[self.order] = ordered
        return placed

    def tally(self, weights: np.ndarray | None = None) -> np.ndarray:
        """How many of the progressions hold each position, int64 [n]; with `weights` of the rows
        their sums, exact below 2 ** 53."""
        size = self.places + 1
        each = None if weights is None else weights[self.row]
        change = np.bincount(self.place, each, size)
        change -= np.bincount(self.place + self.count, each, size)
        return self.natural(np.cumsum(change[:-1], out=change[:-1]).astype(np.int64, copy=False))

    def sums(self, values: np.ndarray) -> np.ndarray:
        """The sum of the values [n] of each progression's members, int64; float64 of floats."""
        kind = np.result_type(values, np.int64)
        before = np.zeros(self.places + 1, kind)
        np.cumsum(self.ordered(values), out=before[1:])
        return np.asarray(before[self.place + self.count] - before[self.place])

    def mark(self, into: np.ndarray) -> Ends:
        """Set `into`, bool [n], where a progression has a member; all of these lie between the
        ends that are returned."""
        if self.order is not None or 16 * len(self.place) > self.n:
            into |= self.tally() > 0
            return 0, self.n
        begin, end = merged(self.place, self.place + self.count)
        first, last = self.positions(begin), self.positions(end - 1)
        ends = int(first.min()), int(last.max()) + 1
        if len(begin) <= LIMITS.slices:
            for low, high in zip(first.tolist(), last.tolist(), strict=True):
                into[low : high + 1 : self.step] = True
            return ends
        lengths = end - begin
        if 4 * lengths.sum() > self.n:
            into |= self.tally() > 0
            return ends
        into[self.positions(in_runs(begin, lengths))] = True
        return ends

    def positions(self, place: np.ndarray) -> np.ndarray:
        """The positions at some places."""
        if self.step == 1:
            return place
        return np.asarray(place // self.width + place % self.width * self.step)


def merged(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The union of ranges, none of them empty, as disjoint ranges in ascending order."""
    order = np.argsort(start, kind="stable")
    start, stop = start[order], np.maximum.accumulate(stop[order])
    fresh = np.flatnonzero(start[1:] > stop[:-1])
    return start[np.append(0, fresh + 1)], stop[np.append(fresh, len(stop) - 1)]


def grouped(part: Progressions, n: int) -> Iterator[Group]:
    """The progressions of many rows by their steps; those with one member have step one."""
    steps = np.asarray(part[2])
    start, stop, step = np.broadcast_arrays(*wide(part))
    rows = np.broadcast_to(np.arange(len(start))[:, None], start.shape)
    by_one = steps.size == 1 and steps.item() == 1
    count = stop - start if by_one else -((start - stop) // step)
    for value in np.unique(np.append(steps, 1)).tolist():
        if by_one:
            kept = count > 0
        elif value > 1:
            kept = (count > 1) & (step == value)
        else:
            kept = (count > 0) & (step == 1) | (count == 1)
        if kept.size and kept.all():
            yield Group(n, value, rows.ravel(), start.ravel(), count.ravel())
        elif kept.any():
            yield Group(n, value, rows[kept], start[kept], count[kept])
