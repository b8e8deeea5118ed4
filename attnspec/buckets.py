"""Buckets of relative positions: exact for near keys, logarithmic for far ones.

Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer", section 2.1 and the published code. With b buckets for one direction, m = b // 2 and
distance x >= m, the bucket is m + floor(log(x / m) / log(max_distance / m) * (b - m)), at most
b - 1. It is decided here in integers, so that no rounding of a logarithm moves a boundary.
"""

from __future__ import annotations

import numpy as np


def thresholds(buckets: int, max_distance: int) -> list[int]:
    """The least distance of every bucket but the first, for one direction."""
    exact = buckets // 2
    if exact == 0:
        return []
    wide = buckets - exact
    near = list(range(1, exact + 1))
    return near + [_least(step, wide, exact, max_distance) for step in range(1, wide)]


def _least(step: int, wide: int, exact: int, max_distance: int) -> int:
    """The least x >= exact with (x / exact)^wide >= (max_distance / exact)^step."""
    right = max_distance**step * exact ** (wide - step)

    def reaches(x: int) -> bool:
        return bool(x**wide >= right)

    low, high = exact, max(exact, max_distance)
    while low < high:
        middle = (low + high) // 2
        if reaches(middle):
            high = middle
        else:
            low = middle + 1
    return low


def farthest(buckets: int, max_distance: int, two_sided: bool) -> int:
    """The distance from which on all have the same bucket."""
    return max(thresholds(buckets // 2 if two_sided else buckets, max_distance), default=0)


def bucket_of(distance: np.ndarray, buckets: int, max_distance: int, two_sided: bool) -> np.ndarray:
    """The bucket of each distance q - k, int64; later keys have the upper half if `two_sided`."""
    side = buckets // 2 if two_sided else buckets
    steps = np.array(thresholds(side, max_distance), np.int64)
    far = np.abs(distance) if two_sided else np.maximum(distance, 0)
    bucket = np.searchsorted(steps, far, side="right")
    if two_sided:
        bucket = bucket + side * (distance < 0)
    return np.asarray(bucket, np.int64)
