"""Differences q - k of a pair of tiles, which are an arithmetic progression too.

Patterns that depend on q - k alone answer for tiles with these. The differences are all members of
the progression where both tiles have the same step, and some of them otherwise: an answer about
every member is then still right, and one about some member errs towards "yes".
"""

from __future__ import annotations

from math import gcd
from typing import TypeAlias

import numpy as np

from attnspec.graphs.relation import EMPTY, FULL, SOME, Tiles

Differences: TypeAlias = "tuple[np.ndarray, np.ndarray, int]"


def differences(q: Tiles, k: Tiles) -> Differences:
    """The least and the most q - k of each pair of tiles, and the step between them."""
    return q.start - k.last, q.last - k.start, gcd(q.step, k.step)


def meets(members: Differences, low: int, high: int, modulus: int = 1) -> np.ndarray:
    """Whether a multiple of `modulus` in low <= x <= high is among the members."""
    least, most, step = members
    common = gcd(step, modulus)
    turn = modulus // common
    # members are least + m step; those divisible by modulus have m = wanted modulo turn
    inverse = pow(step // common, -1, turn) if turn > 1 else 0
    wanted = (-(least // common) * inverse) % turn
    first = np.maximum(0, -((least - low) // step))
    first = first + (wanted - first) % turn
    return np.asarray((least % common == 0) & (least + first * step <= np.minimum(most, high)))


def multiples(members: Differences, modulus: int) -> np.ndarray:
    """Whether all members are multiples of `modulus`."""
    least, most, step = members
    return np.asarray((least % modulus == 0) & ((least == most) | (step % modulus == 0)))


def band_cover(members: Differences, low: int, high: int, modulus: int = 1) -> np.ndarray:
    """The cover of: low <= q - k <= high and `modulus` divides q - k."""
    least, most, _ = members
    full = (least >= low) & (most <= high) & multiples(members, modulus)
    return covered(full, meets(members, low, high, modulus))


def values_of(tiles: Tiles, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What [n] values are at the positions of tiles: a row for each different tile, short ones
    filled up with their last, and which row each tile has, of the shape of the tiles.

    Pairs of tiles repeat tiles: each is looked at once.
    """
    start, stop = np.broadcast_arrays(tiles.start, tiles.stop)
    ends = np.stack([start.ravel(), stop.ravel()], axis=1)
    single, which = np.unique(ends, axis=0, return_inverse=True)
    once = Tiles(single[:, 0], single[:, 1], tiles.step)
    steps = np.arange(int(np.max(once.count, initial=1))) * tiles.step
    found = values[np.minimum(once.start[:, None] + steps, once.last[:, None])]
    return found, which.reshape(start.shape)


def covered(full: np.ndarray, some: np.ndarray) -> np.ndarray:
    """FULL where every pair holds, EMPTY where none does, uint8."""
    return np.where(full, FULL, np.where(some, SOME, EMPTY)).astype(np.uint8)
