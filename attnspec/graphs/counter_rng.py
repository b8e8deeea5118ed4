"""Counter-based random numbers: every number is a pure function of what it is drawn for.

The generator is Philox 4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel Random Numbers: As Easy
as 1, 2, 3"): a bijection of four 32-bit counter words under two 32-bit key words. There is no
state, so machines, devices, processes and orders of evaluation agree. This page is its definition
here; `philox` in plain integers is the reference and `philox_array` the same numbers in bulk.

Key, from a seed 0 <= seed < 2**64:

    key[0] = seed mod 2**32          key[1] = seed div 2**32

Counter, from a stream (purpose, layer, head) and what the number is drawn for:

    counter[0] = row                 the query, query block or item; below 2**32
    counter[1] = index + 2**24 * attempt        index below 2**24, attempt below 2**8
    counter[2] = layer + 2**16 * head           each below 2**16
    counter[3] = purpose             1 random, 2 random_blocks, 3 expander, 4 hashes, 5 centroids,
                                     2**31 + d random features, drawn for the time number d;
                                     6 dropout, whose other words `backends.common.dropping` has

The four words that come out are x[0] ... x[3].

Bounded integers. Draw number t of a row is word x[t mod 4] at index = t div 4, attempt = 0. For
0 <= v < b with 1 <= b <= 2**32 let m = word * b; if m mod 2**32 < 2**32 mod b, the word is
rejected and the same word of the next attempt taken, else v = m div 2**32. So every v has the same
probability (Lemire 2019, "Fast Random Integer Generation in an Interval").

Subsets (`distinct`). The r of p numbers that a row takes are found by Floyd's algorithm (Bentley
and Floyd 1987, "A Sample of Brilliance"): for t = 0 ... r - 1 let j = p - r + t and v = draw number
t below j + 1; take v, or j where v is taken already. All subsets are equally likely. A row with
p <= r takes all.

What is drawn from. Query q of `random` draws from the keys 0 ... n - 1, query block i of
`random_blocks` from the key blocks 0 ... ceil(n / b) - 1; under the statement `causal` from the
keys 0 ... q, and from the key blocks 0 ... i.

Permutations (`permutation`). Item i of permutation c has the 64-bit number x[0] + 2**32 x[1] of
row = i, index = c, attempt = 0; the items in ascending order of their numbers, and equal numbers in
ascending order of the items, are the permutation.

Gaussian numbers (`normals`, Box and Muller 1958). Words x[0] and x[1] of index = c, attempt = 0 are
the numbers 4 c and 4 c + 1 of their row, x[2] and x[3] the next two: with r = sqrt(-2 ln((x[0] + 1)
/ 2**32)) and a = 2 pi x[1] / 2**32, these are r cos a and r sin a.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnspec.limits import LIMITS

RANDOM, RANDOM_BLOCKS, EXPANDER, HASHES, CENTROIDS, DROPOUT = 1, 2, 3, 4, 5, 6
FEATURES = 1 << 31
"""Purposes: patterns with one seed share no numbers."""

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
MASK = 0xFFFFFFFF
_MOST_INDEX, _MOST_ATTEMPT = 1 << 24, 1 << 8


@dataclass(frozen=True)
class Stream:
    """Where numbers are drawn: streams that differ in any field share no numbers."""

    seed: int
    purpose: int
    layer: int = 0
    head: int = 0

    def __post_init__(self) -> None:
        for name, value, limit in (
            ("seed", self.seed, 1 << 64),
            ("purpose", self.purpose, 1 << 32),
            ("layer", self.layer, 1 << 16),
            ("head", self.head, 1 << 16),
        ):
            if not 0 <= value < limit:
                raise ValueError(f"the {name} must be at least 0 and below {limit}, got {value}")

    @property
    def key(self) -> tuple[int, int]:
        return self.seed & MASK, self.seed >> 32

    @property
    def tail(self) -> tuple[int, int]:
        """The last two words of every counter."""
        return self.layer | self.head << 16, self.purpose


def philox(counter: tuple[Any, ...], key: tuple[Any, Any]) -> tuple[Any, ...]:
    """The four words of a counter: the definition, of integers or of tensors that broadcast."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = MULTIPLIERS[0] * x0, MULTIPLIERS[1] * x2
        # a product above 2**63 is negative in int64
        x0, x2 = (p1 >> 32 & MASK) ^ x1 ^ k0, (p0 >> 32 & MASK) ^ x3 ^ k1
        x1, x3 = p1 & MASK, p0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return x0, x1, x2, x3


def philox_array(row: np.ndarray, place: np.ndarray, stream: Stream) -> np.ndarray:
    """The words of many counters, uint64 [4, …]; `row` and `place` are their first two words."""
    row, place = np.broadcast_arrays(row, place)
    words = np.empty((4, row.size), np.uint64)
    flat_row, flat_place = row.ravel(), place.ravel()
    for first in range(0, row.size, LIMITS.drawn_at_once):
        part = slice(first, first + LIMITS.drawn_at_once)
        _rounds(flat_row[part], flat_place[part], stream, words[:, part])
    return words.reshape(4, *row.shape)


def _rounds(row: np.ndarray, place: np.ndarray, stream: Stream, words: np.ndarray) -> None:
    half, mask = np.uint64(32), np.uint64(MASK)
    m0, m1 = (np.uint64(m) for m in MULTIPLIERS)
    k0, k1 = stream.key
    x0, x1 = row.astype(np.uint64), place.astype(np.uint64)
    x2, x3 = (np.full(row.shape, word, np.uint64) for word in stream.tail)
    for _ in range(ROUNDS):
        # a product of two words fits in 64 bits, so nothing ever wraps
        p0, p1 = m0 * x0, m1 * x2
        x0, x2 = (p1 >> half) ^ x1 ^ np.uint64(k0), (p0 >> half) ^ x3 ^ np.uint64(k1)
        x1, x3 = p1 & mask, p0 & mask
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    words[:] = x0, x1, x2, x3


def bounded(stream: Stream, row: int, draw: int, bound: int) -> int:
    """Draw number `draw` of a row, below `bound`: the definition."""
    for attempt in range(_MOST_ATTEMPT):
        place = draw // 4 | attempt << 24
        word: int = philox((row, place, *stream.tail), stream.key)[draw % 4]
        product = word * bound
        if product & MASK >= (1 << 32) % bound:
            return product >> 32
    raise RuntimeError("every attempt was rejected, which has a probability below 2**-256")


def bounded_array(stream: Stream, row: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """The first draws of each row: of `bound` [count, m] below each, int64 [count, m]."""
    count = len(bound)
    if count > 4 * _MOST_INDEX:
        raise ValueError(f"at most {4 * _MOST_INDEX} draws for a row, got {count}")
    calls = (count + 3) // 4
    words = philox_array(row[None, :], np.arange(calls)[:, None], stream)
    word = words.transpose(1, 0, 2).reshape(4 * calls, len(row))[:count]
    below = bound.astype(np.uint64)
    product = word * below
    rejected = (product & np.uint64(MASK)) < np.uint64(1 << 32) % below
    answer = (product >> np.uint64(32)).astype(np.int64)
    for draw, at in zip(*np.nonzero(rejected), strict=True):
        answer[draw, at] = bounded(stream, int(row[at]), int(draw), int(bound[draw, at]))
    return answer


def distinct(stream: Stream, row: np.ndarray, population: np.ndarray, count: int) -> np.ndarray:
    """`count` distinct numbers 0 <= v < population[i] for each row[i], a uniform subset.

    Returns int32 [m, count], ascending in each row; a row whose population is smaller takes all of
    it and begins with -1 in the places left over.
    """
    answer = np.empty((len(row), count), np.int32)
    for first in range(0, len(row), LIMITS.rows_drawn):
        part = slice(first, first + LIMITS.rows_drawn)
        answer[part] = _distinct(stream, row[part], population[part], count)
    return answer


def _distinct(stream: Stream, row: np.ndarray, population: np.ndarray, count: int) -> np.ndarray:
    table = np.empty((len(row), count), np.int32)
    small = population <= count
    table[small] = np.maximum(np.arange(count) - count + population[small, None], -1)
    large = ~small
    top = population[large] - count + np.arange(count)[:, None]
    drawn = bounded_array(stream, row[large], top + 1)
    columns = np.sort(drawn.T.astype(np.int32), axis=1)
    # no number is taken already in a row whose draws all differ
    again = (columns[:, 1:] == columns[:, :-1]).any(axis=1)
    drawn, top = drawn[:, again], top[:, again]
    for t in range(1, count):
        taken = (drawn[:t] == drawn[t]).any(axis=0)
        drawn[t] = np.where(taken, top[t], drawn[t])
    columns[again] = np.sort(drawn.T, axis=1)
    table[large] = columns
    return table


def permutation(stream: Stream, index: int, n: int) -> np.ndarray:
    """Permutation number `index` of 0 … n - 1, int64 [n]."""
    words = philox_array(np.arange(n), np.asarray(index), stream)
    number = words[0] | words[1] << np.uint64(32)
    order = np.argsort(number)
    ascending = number[order]
    if (ascending[1:] == ascending[:-1]).any():
        # only a stable sort leaves equal numbers in the order of their items, and it takes longer
        return np.argsort(number, kind="stable")
    return order


def normals(stream: Stream, row: np.ndarray, count: int) -> np.ndarray:
    """The first Gaussian numbers of each row, float64 [m, count]."""
    words = philox_array(row[:, None], np.arange(-(-count // 4)), stream).astype(np.float64)
    length = np.sqrt(-2 * np.log((words[::2] + 1) / 2**32))
    angle = 2 * np.pi / 2**32 * words[1::2]
    pairs = np.stack([length * np.cos(angle), length * np.sin(angle)], axis=-1)
    return pairs.transpose(1, 2, 0, 3).reshape(len(row), -1)[:, :count]
