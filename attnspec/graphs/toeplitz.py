"""Patterns of the distance q - k alone: masks that are the same along every diagonal."""

from __future__ import annotations

from math import gcd
from typing import ClassVar, TypeAlias

import numpy as np

from attnspec.graphs.relation import Progressions, Relation, Tiles, covered

Diagonals: TypeAlias = "tuple[tuple[int, int, int], ...]"
"""Distances `first, first + step, …, last` as (first, last, step), both ends included."""


class Toeplitz(Relation):
    """A pattern whose mask is a Toeplitz matrix: it is known by its distances q - k."""

    anchored: ClassVar = False

    def diagonals(self, n: int) -> Diagonals:
        """The distances of the pairs, as few progressions that share none; one with last < first is
        empty, and those of n or more are of no pair."""
        raise NotImplementedError

    def progressions(self, q: np.ndarray, n: int) -> Progressions:
        # in one piece each, or what comes of them lies column by column, and is slower to add up
        first, last, step = np.ascontiguousarray(np.array(self.diagonals(n), np.int64).T)
        start, stop = q[:, None] - last, np.minimum(q[:, None] - first + 1, n)
        if (step == 1).all():
            return np.maximum(start, 0), stop, 1
        # the first of the keys that is not before the sequence
        start = np.where(start < 0, start % step, start)
        return start, stop, int(step[0]) if len(step) == 1 else step[None]

    def edges(self, n: int) -> int:
        total = 0
        for first, last, step in self.diagonals(n):
            after = max(first, first % step), last
            before = max(-last, step - first % step), -first
            # at d positions after, or before, the key there are n - d queries
            for low, high in (after, before):
                count = max(0, (min(high, n - 1) - low) // step + 1)
                total += count * (n - low) - step * (count * (count - 1) // 2)
        return total

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        return [q.start - k.start]

    def strides(self, n: int) -> tuple[tuple[int, int], ...]:
        return tuple({(step, step): None for _, _, step in self.diagonals(n) if step > 1})

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        least, most = q.start - k.last, q.last - k.start
        # all distances of a pair of tiles are members of this progression; where both steps are the
        # same, they are all of its members
        step = gcd(q.step, k.step)
        counts = np.zeros(np.shape(least), np.int64)
        for each in self.diagonals(n):
            counts += shared(least, most, step, *each)
        return covered(counts == (most - least) // step + 1, counts > 0)


def shared(
    least: np.ndarray, most: np.ndarray, by: int, first: int, last: int, step: int
) -> np.ndarray:
    """How many of the numbers least, least + by, …, most of each pair of tiles are among first,
    first + step, …, last."""
    if first == last:
        # one number is the member of a progression of any step
        step = by
    if by == step == 1:
        return np.asarray(np.maximum(0, np.minimum(most, last) - np.maximum(least, first) + 1))
    common = gcd(by, step)
    turn = step // common
    # least + m by is a member where m is `wanted` modulo `turn`, by the Chinese remainder theorem
    inverse = pow(by // common, -1, turn)
    wanted = (first - least) // common * inverse % turn
    begin = np.maximum(0, -((least - first) // by))
    begin = least + (begin + (wanted - begin) % turn) * by
    count = np.maximum(0, (np.minimum(most, last) - begin) // (by * turn) + 1)
    return np.asarray(np.where((first - least) % common == 0, count, 0))
