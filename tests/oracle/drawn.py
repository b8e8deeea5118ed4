"""The random graphs, from the generator that the reference writes down: Philox 4x32-10.

Counter words: the row; the index in the row, and the attempt from bit 24 on; the layer, and the
head from bit 16 on; the purpose, 1 for `random`, 2 for `random_blocks`, 3 for `expander`. The key
is the seed. Subsets by Floyd's algorithm, permutations by sorting 64-bit numbers, Gaussian
numbers by Box and Muller; purpose 4 for hashes, 2**31 for random features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_LOW = 2**32


def philox(words: tuple[int, int, int, int], seed: int) -> tuple[int, int, int, int]:
    """Ten rounds on four words."""
    a, b, c, d = words
    first, second = seed % _LOW, seed // _LOW
    for step in range(10):
        key0, key1 = (first + step * 0x9E3779B9) % _LOW, (second + step * 0xBB67AE85) % _LOW
        high0, low0 = divmod(a * 0xD2511F53, _LOW)
        high1, low1 = divmod(c * 0xCD9E8D57, _LOW)
        a, b, c, d = high1 ^ b ^ key0, low1, high0 ^ d ^ key1, low0
    return a, b, c, d


@dataclass(frozen=True)
class Draw:
    """Where numbers are drawn."""

    seed: int
    purpose: int
    layer: int
    head: int

    def words(self, row: int, index: int, attempt: int = 0) -> tuple[int, int, int, int]:
        place = (row, index + attempt * 2**24, self.layer + self.head * 2**16, self.purpose)
        return philox(place, self.seed)

    def below(self, row: int, number: int, bound: int) -> int:
        """Draw `number` of a row, uniform below the bound (Lemire)."""
        attempt = 0
        while True:
            product = self.words(row, number // 4, attempt)[number % 4] * bound
            if product % _LOW >= _LOW % bound:
                return product // _LOW
            attempt += 1

    def subset(self, row: int, population: int, count: int) -> set[int]:
        """`count` distinct numbers below `population`, or all of them."""
        if population <= count:
            return set(range(population))
        taken: set[int] = set()
        for t in range(count):
            top = population - count + t
            value = self.below(row, t, top + 1)
            taken.add(top if value in taken else value)
        return taken

    def permutation(self, index: int, n: int) -> list[int]:
        numbers = []
        for item in range(n):
            words = self.words(item, index)
            numbers.append((words[0] + _LOW * words[1], item))
        return [item for _, item in sorted(numbers)]

    def normals(self, rows: int, count: int) -> np.ndarray:
        """The first Gaussian numbers of each row, float64 [rows, count]."""
        words = np.array(
            [[self.words(row, index) for index in range(-(-count // 4))] for row in range(rows)]
        ).reshape(rows, -1, 2)
        length = np.sqrt(-2 * np.log((words[..., 0] + 1) / _LOW))
        angle = 2 * np.pi / _LOW * words[..., 1]
        pairs = np.stack([length * np.cos(angle), length * np.sin(angle)], axis=-1)
        return pairs.reshape(rows, -1)[:, :count]


@lru_cache(maxsize=256)
def directions(
    seed: int, layer: int, head: int, count: int, size: int, orthogonal: bool
) -> np.ndarray:
    """Gaussian rows [count, size], orthogonal in blocks of `size` if asked, with other lengths."""
    draw = Draw(seed, 2**31, layer, head)
    if not orthogonal:
        return draw.normals(count, size)
    drawn = draw.normals(-(-count // size) * size, 2 * size)
    rows = []
    for first in range(0, count, size):
        found, upper = np.linalg.qr(drawn[first : first + size, :size])
        rows.append((found * np.sign(np.diagonal(upper))).T)
    lengths = np.linalg.norm(drawn[:, size:], axis=1)[:, None]
    return np.asarray(np.concatenate(rows) * lengths)[:count]


@lru_cache(maxsize=256)
def rotations(seed: int, layer: int, head: int, rounds: int, size: int, columns: int) -> np.ndarray:
    """The Gaussian numbers [rounds, size, columns] of a hash."""
    return Draw(seed, 4, layer, head).normals(rounds * size, columns).reshape(rounds, size, columns)


@lru_cache(maxsize=256)
def random_keys(draw: Draw, n: int, keys: int, causal: bool) -> tuple[frozenset[int], ...]:
    """The keys of each query."""
    count = min(keys, n)
    return tuple(frozenset(draw.subset(q, q + 1 if causal else n, count)) for q in range(n))


@lru_cache(maxsize=256)
def random_blocks(draw: Draw, n: int, blocks: int, causal: bool) -> tuple[frozenset[int], ...]:
    """The key blocks of each query block; n counts blocks."""
    count = min(blocks, n)
    return tuple(frozenset(draw.subset(b, b + 1 if causal else n, count)) for b in range(n))


@lru_cache(maxsize=256)
def cycles(draw: Draw, n: int, count: int) -> tuple[tuple[int, ...], ...]:
    """So many random cycles through all positions, each in its order."""
    return tuple(tuple(draw.permutation(index, n)) for index in range(count))
