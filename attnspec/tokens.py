"""Token sets: which positions are special. `contains(i, n)` is the definition, elementwise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from attnspec.relations import EMPTY, FULL, SOME, Elementwise, Tiles

_LOOKED = 1 << 22
"""Positions looked at in one go."""


class Data:
    """A run-time input: an array of the last axis n (or lengths), compared by identity."""

    def __init__(self, values: Elementwise) -> None:
        self.values = values


class TokenSet:
    """A set of positions 0 <= i < n."""

    def contains(self, i: Elementwise, n: int) -> Elementwise:
        """Whether position i is in the set: the definition, elementwise."""
        raise NotImplementedError

    def cover(self, tiles: Tiles, n: int) -> np.ndarray:
        """EMPTY, SOME or FULL for each tile; SOME also where nothing is decided."""
        if tiles.step == 1:
            before = _members_before(self, n)
            found = before[np.minimum(tiles.stop, n)] - before[np.minimum(tiles.start, n)]
            count = tiles.stop - tiles.start
        else:
            position = tiles.start[..., None] + np.arange(int(np.max(tiles.count, initial=1))) * (
                tiles.step
            )
            real = position < tiles.stop[..., None]
            held = np.asarray(self.contains(np.where(real, position, 0), n), dtype=bool)
            found, count = (held & real).sum(-1), tiles.count
        return np.where(found == count, FULL, np.where(found > 0, SOME, EMPTY)).astype(np.uint8)

    def phase(self, tiles: Tiles, n: int) -> np.ndarray:
        """Integers for each tile, equal where equally many positions are in the set at the same
        places of it."""
        _, first, number = np.unique(tiles.start, return_index=True, return_inverse=True)
        start, stop = (
            tiles.start.ravel()[first],
            np.broadcast_to(tiles.stop, tiles.start.shape).ravel()[first],
        )
        held = np.zeros((len(start), -(-int(np.max(stop - start, initial=0)) // tiles.step)), bool)
        for low in range(0, len(start), max(1, _LOOKED // max(1, held.shape[1]))):
            part = np.s_[low : low + max(1, _LOOKED // max(1, held.shape[1]))]
            at = start[part, None] + np.arange(held.shape[1]) * tiles.step
            real = at < stop[part, None]
            held[part] = np.asarray(self.contains(np.where(real, at, 0), n), dtype=bool) & real
        _, alike = np.unique(np.packbits(held, axis=1), axis=0, return_inverse=True)
        return np.asarray(alike.ravel()[number].reshape(tiles.start.shape), np.int64)

    def members(self, n: int) -> np.ndarray:
        """The positions of the set in a sequence of n, ascending, int64."""
        return np.flatnonzero(np.asarray(self.contains(np.arange(n), n), dtype=bool))

    def progressions(self, n: int) -> tuple[np.ndarray, np.ndarray, int] | None:
        """The members as few progressions start, stop and their common step, or None."""
        return _progressions(self, n)


@dataclass(frozen=True)
class First(TokenSet):
    """The first `count` positions."""

    count: int

    def contains(self, i: Elementwise, n: int) -> Elementwise:
        return i < self.count

    def cover(self, tiles: Tiles, n: int) -> np.ndarray:
        return _range_cover(tiles, 0, self.count)


@dataclass(frozen=True)
class Last(TokenSet):
    """The last `count` positions."""

    count: int

    def contains(self, i: Elementwise, n: int) -> Elementwise:
        return i >= n - self.count

    def cover(self, tiles: Tiles, n: int) -> np.ndarray:
        return _range_cover(tiles, n - self.count, n)


@dataclass(frozen=True)
class Every(TokenSet):
    """Positions offset, offset + step, offset + 2 step, …"""

    step: int
    offset: int = 0

    def contains(self, i: Elementwise, n: int) -> Elementwise:
        return (i >= self.offset) & ((i - self.offset) % self.step == 0)


@dataclass(frozen=True)
class Positions(TokenSet):
    """Listed ranges of positions, each (first, last) with both ends included."""

    ranges: tuple[tuple[int, int], ...]

    def contains(self, i: Elementwise, n: int) -> Elementwise:
        held = i != i
        for first, last in self.ranges:
            held = held | ((i >= first) & (i <= last))
        return held

    def cover(self, tiles: Tiles, n: int) -> np.ndarray:
        if len(self.ranges) == 1:
            first, last = self.ranges[0]
            return _range_cover(tiles, first, last + 1)
        return TokenSet.cover(self, tiles, n)


@dataclass(frozen=True)
class InputTokens(TokenSet):
    """The positions that a run-time input marks, bool [..., n]."""

    data: Data

    def contains(self, i: Elementwise, n: int) -> Elementwise:
        return self.data.values[..., i]


@dataclass(frozen=True)
class TokenUnion(TokenSet):
    terms: tuple[TokenSet, ...]

    def contains(self, i: Elementwise, n: int) -> Elementwise:
        held = self.terms[0].contains(i, n)
        for term in self.terms[1:]:
            held = held | term.contains(i, n)
        return held

    def cover(self, tiles: Tiles, n: int) -> np.ndarray:
        return np.asarray(np.maximum.reduce([term.cover(tiles, n) for term in self.terms]))


@dataclass(frozen=True)
class TokenIntersection(TokenSet):
    terms: tuple[TokenSet, ...]

    def contains(self, i: Elementwise, n: int) -> Elementwise:
        held = self.terms[0].contains(i, n)
        for term in self.terms[1:]:
            held = held & term.contains(i, n)
        return held

    def cover(self, tiles: Tiles, n: int) -> np.ndarray:
        return np.asarray(np.minimum.reduce([term.cover(tiles, n) for term in self.terms]))


@dataclass(frozen=True)
class TokenComplement(TokenSet):
    term: TokenSet

    def contains(self, i: Elementwise, n: int) -> Elementwise:
        return self.term.contains(i, n) ^ True

    def cover(self, tiles: Tiles, n: int) -> np.ndarray:
        return np.asarray(FULL - self.term.cover(tiles, n), dtype=np.uint8)


@lru_cache(maxsize=32)
def _members_before(tokens: TokenSet, n: int) -> np.ndarray:
    """For each position 0 … n the number of members before it, int64 [n + 1]."""
    before = np.zeros(n + 1, np.int64)
    np.cumsum(np.asarray(tokens.contains(np.arange(n), n), dtype=bool), out=before[1:])
    return before


@lru_cache(maxsize=32)
def _progressions(tokens: TokenSet, n: int) -> tuple[np.ndarray, np.ndarray, int] | None:
    members = tokens.members(n)
    gaps = np.diff(members)
    if len(gaps) and gaps[0] > 1 and (gaps == gaps[0]).all():
        return members[:1], members[-1:] + 1, int(gaps[0])
    breaks = np.flatnonzero(gaps > 1)
    if len(breaks) >= 16:
        return None
    if len(members) == 0:
        return np.zeros(1, np.int64), np.zeros(1, np.int64), 1
    start = members[np.append(0, breaks + 1)]
    stop = members[np.append(breaks, len(gaps))] + 1
    return start, stop, 1


def _range_cover(tiles: Tiles, low: int, high: int) -> np.ndarray:
    """The cover of the range low <= i < high."""
    inside = (tiles.start >= low) & (tiles.last < high)
    outside = (tiles.last < low) | (tiles.start >= high)
    return np.where(inside, FULL, np.where(outside, EMPTY, SOME)).astype(np.uint8)
