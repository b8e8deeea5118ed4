"""The keys of queries as disjoint arithmetic progressions: their unions and intersections."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnspec.graphs.relation import Progressions
from attnspec.limits import LIMITS

BEYOND = 1 << 31
"""A step from one position beyond the end of every sequence; longer ones say no more."""


def union_progressions(parts: Sequence[Progressions | None]) -> Progressions | None:
    """The union of parts, each with disjoint progressions per row; None where there is no form."""
    present = [part for part in parts if part is not None]
    if len(present) < len(parts):
        return None
    ranges = [part for part in present if np.all(np.equal(part[2], 1))]
    stepped = [part for part in present if not np.all(np.equal(part[2], 1))]
    if len(stepped) > 1:
        return None
    width = sum(_width(part) for part in ranges)
    if width + sum(_width(part) for part in stepped) * (width + 1) > LIMITS.width:
        return None
    if not ranges:
        return stepped[0]
    rows = max(len(part[0]) for part in present)
    start = np.concatenate([np.broadcast_to(p[0], (rows, _width(p))) for p in ranges], axis=1)
    stop = np.concatenate([np.broadcast_to(p[1], (rows, _width(p))) for p in ranges], axis=1)
    start, stop = _separated(start, stop)
    if not stepped:
        return start, stop, 1
    cut_start, cut_stop, cut_step = _cut(stepped[0], start, stop)
    step = np.concatenate([np.ones_like(start), np.broadcast_to(cut_step, cut_start.shape)], axis=1)
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


def _cut(part: Progressions, start: np.ndarray, stop: np.ndarray) -> Progressions:
    """The pieces of progressions that lie in the gaps between disjoint sorted ranges."""
    rows = len(start)
    # empty ranges start no later than the next one, so their gaps are empty or real gaps
    low = np.concatenate([np.zeros((rows, 1), np.int64), stop], axis=1)
    high = np.concatenate([start, np.full((rows, 1), np.iinfo(np.int64).max)], axis=1)
    return _clipped(part, (np.maximum.accumulate(low, axis=1), high, 1))


def shared_progressions(parts: Sequence[Progressions | None]) -> Progressions | None:
    """What parts share, each with disjoint progressions per row; None where there is no form."""
    answer = parts[0]
    for part in parts[1:]:
        if answer is None or part is None:
            return None
        if min(_width(answer), _width(part)) > 1 and _width(answer) * _width(part) > LIMITS.width:
            return None
        answer = _meet(answer, part)
    return answer


def _meet(first: Progressions, second: Progressions) -> Progressions:
    """The members that two progressions of each row share: one progression for each two."""
    if np.all(np.equal(first[2], 1)):
        return _clipped(second, first)
    if np.all(np.equal(second[2], 1)):
        return _clipped(first, second)
    a, a_end, s = (np.asarray(part)[..., :, None] for part in wide(first))
    b, b_end, t = (np.asarray(part)[..., None, :] for part in wide(second))
    a, b, s, t = np.broadcast_arrays(a, b, np.minimum(s, BEYOND), np.minimum(t, BEYOND))
    common_step = np.gcd(s, t)
    turn = t // common_step
    solvable = (b - a) % common_step == 0
    # a + s x = b modulo t has one x modulo t / gcd, by the Chinese remainder theorem
    x = ((b - a) // common_step % turn) * _inverses(s // common_step % turn, turn) % turn
    start, step = a + s * x, np.minimum(s * turn, BEYOND)
    start = start + np.maximum(0, -((start - np.maximum(a, b)) // step)) * step
    stop = np.where(solvable, np.minimum(a_end, b_end), start)
    shape = (start.shape[0], start.shape[1] * start.shape[2])
    return start.reshape(shape), stop.reshape(shape), step.reshape(shape)


def _clipped(part: Progressions, ranges: Progressions) -> Progressions:
    """The members of progressions inside each of the ranges of their row."""
    start, stop, step = (array[:, :, None] for array in wide(part))
    low, high = (array[:, None, :] for array in wide(ranges)[:2])
    if np.all(np.equal(part[2], 1)):
        begin = np.maximum(start, low)
    else:
        begin = start + np.maximum(0, -((start - low) // step)) * step
    begin, end, each = np.broadcast_arrays(begin, np.minimum(stop, high), step)
    shape = (begin.shape[0], begin.shape[1] * begin.shape[2])
    # one step for all stays one number: groups are then told apart without a look at every entry
    steps = part[2] if np.ndim(part[2]) == 0 else each.reshape(shape)
    return begin.reshape(shape), end.reshape(shape), steps


def wide(part: Progressions) -> tuple[np.ndarray, ...]:
    """Start, stop and step as matrices, a row for each query."""
    return tuple(np.atleast_2d(np.asarray(array, np.int64)) for array in part)


def _inverses(numbers: np.ndarray, modulus: np.ndarray) -> np.ndarray:
    """The inverses of numbers modulo what they have no factor in common with; few differ."""
    answer = np.zeros(numbers.shape, np.int64)
    if (modulus == 1).all():
        return answer
    for value in np.unique(modulus).tolist():
        same = modulus == value
        wanted, place = np.unique(numbers[same], return_inverse=True)
        inverses = [pow(number, -1, value) for number in wanted.tolist()]
        answer[same] = np.array(inverses, np.int64)[place.ravel()]
    return answer
