"""The keys of a union as pairwise disjoint progressions.

Ranges (progressions of step one) are made disjoint by sorting them along each row; one part with
larger steps may join them, cut at every range. Two parts with larger steps stay undecided: their
difference is no short list of progressions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnspec.relations import Progressions

MOST = 64
"""The most progressions per row that a closed form is worth."""


def union_progressions(parts: Sequence[Progressions | None]) -> Progressions | None:
    """The union of parts, each with disjoint progressions per row; None where there is no form."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    ranges = [part for part in known if np.all(np.equal(part[2], 1))]
    stepped = [part for part in known if not np.all(np.equal(part[2], 1))]
    if len(stepped) > 1:
        return None
    width = sum(_width(part) for part in ranges)
    if width + sum(_width(part) for part in stepped) * (width + 1) > MOST:
        return None
    if not ranges:
        return stepped[0]
    rows = max(len(part[0]) for part in known)
    start = np.concatenate([np.broadcast_to(p[0], (rows, _width(p))) for p in ranges], axis=1)
    stop = np.concatenate([np.broadcast_to(p[1], (rows, _width(p))) for p in ranges], axis=1)
    start, stop = _separated(start, stop)
    if not stepped:
        return start, stop, 1
    cut_start, cut_stop, cut_step = _cut(stepped[0], start, stop)
    step = np.concatenate([np.ones_like(start), cut_step], axis=1)
    return (
        np.concatenate([start, cut_start], axis=1),
        np.concatenate([stop, cut_stop], axis=1),
        step,
    )


def _width(part: Progressions) -> int:
    return int(np.broadcast_shapes(*(np.shape(array) for array in part))[-1])


def _separated(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorted by start; each range begins no earlier than those before it end."""
    order = np.argsort(start, axis=1, kind="stable")
    start, stop = np.take_along_axis(start, order, 1), np.take_along_axis(stop, order, 1)
    ended = np.maximum.accumulate(stop, axis=1)
    start = start.copy()
    start[:, 1:] = np.maximum(start[:, 1:], ended[:, :-1])
    return start, np.maximum(start, stop)


def _cut(
    part: Progressions, start: np.ndarray, stop: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pieces of progressions that lie in the gaps between disjoint sorted ranges."""
    first, last, step = (
        np.broadcast_to(array, (len(start), _width(part)))[:, :, None] for array in part
    )
    rows = len(start)
    # empty ranges start no later than the next one, so their gaps are empty or real gaps
    low = np.concatenate([np.zeros((rows, 1), np.int64), stop], axis=1)[:, None]
    low = np.maximum.accumulate(low, axis=2)
    high = np.concatenate([start, np.full((rows, 1), np.iinfo(np.int64).max)], axis=1)[:, None]
    begin = first + np.maximum(0, -((first - low) // step)) * step
    end = np.minimum(last, high)
    begin, end, wide = np.broadcast_arrays(begin, end, step)
    shape = (rows, begin.shape[1] * begin.shape[2])
    return begin.reshape(shape), end.reshape(shape), wide.reshape(shape)
