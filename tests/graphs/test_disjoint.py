"""Unions of progressions: the same keys, each once."""

from __future__ import annotations

import random

import numpy as np

from attnspec.graphs.progressions import union_progressions
from attnspec.graphs.relation import Progressions
from attnspec.limits import LIMITS

N = 60


def part(draw: random.Random, rows: int, width: int, step: int = 1) -> Progressions:
    """Progressions of one step, disjoint in each row, some of them empty."""
    starts, stops = [], []
    for _ in range(rows):
        ends = sorted(draw.sample(range(N + 1), 2 * width))
        pairs = list(zip(ends[::2], ends[1::2], strict=True))
        if draw.random() < 0.3:
            at = draw.randrange(width)
            pairs[at] = (pairs[at][1], pairs[at][0] - draw.randint(0, 4))
        draw.shuffle(pairs)
        starts.append([a for a, _ in pairs])
        stops.append([b for _, b in pairs])
    return np.array(starts), np.array(stops), step


def keys(progressions: Progressions, row: int) -> list[int]:
    start, stop, step = np.broadcast_arrays(*progressions)
    row = row if len(start) > 1 else 0
    spans = zip(start[row].tolist(), stop[row].tolist(), step[row].tolist(), strict=True)
    return [key for a, b, c in spans for key in range(a, b, c)]


def faults(parts: list[Progressions], union: Progressions, rows: int) -> list[int]:
    """The rows in which a union misses a key, has another, or has one twice."""
    return [
        row
        for row in range(rows)
        if sorted(keys(union, row)) != sorted({key for p in parts for key in keys(p, row)})
    ]


def test_unions_hold_every_key_once() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        rows = draw.choice((1, 2, 7))
        parts = [part(draw, rows, draw.randint(1, 4)) for _ in range(draw.randint(1, 4))]
        if draw.random() < 0.6:
            parts.insert(draw.randrange(len(parts) + 1), part(draw, rows, draw.randint(1, 3), 5))
        union = union_progressions(parts)
        assert union is not None, seed
        assert faults(parts, union, rows) == [], seed


def test_a_step_may_differ_from_row_to_row() -> None:
    stepped = (np.array([[1], [2]]), np.array([[N], [N]]), np.array([[3], [7]]))
    ranges = (np.array([[5], [0]]), np.array([[20], [0]]), 1)
    union = union_progressions([ranges, stepped])
    assert union is not None
    assert faults([ranges, stepped], union, 2) == []


def test_one_row_stands_for_all() -> None:
    everywhere = (np.array([[4]]), np.array([[9]]), 1)
    each = (np.arange(6)[:, None], np.arange(6)[:, None] + 3, 1)
    union = union_progressions([everywhere, each])
    assert union is not None
    assert faults([everywhere, each], union, 6) == []


def test_no_rows_and_no_progressions() -> None:
    none = (np.zeros((0, 2), int), np.zeros((0, 2), int), 1)
    union = union_progressions([none, none])
    assert union is not None
    assert np.shape(union[0])[0] == 0
    empty = (np.zeros((3, 0), int), np.zeros((3, 0), int), 1)
    union = union_progressions([empty, (np.zeros((3, 1), int), np.full((3, 1), 5), 1)])
    assert union is not None
    assert keys(union, 1) == [0, 1, 2, 3, 4]


def test_what_stays_undecided() -> None:
    draw = random.Random(0)
    ranges, stepped = part(draw, 3, 2), part(draw, 3, 2, 4)
    assert union_progressions([ranges, None]) is None
    assert union_progressions([stepped, part(draw, 3, 1, 3)]) is None
    wide = (np.arange(LIMITS.width + 1)[None] * 2, np.arange(LIMITS.width + 1)[None] * 2 + 1, 1)
    assert union_progressions([wide]) is None
    just = (wide[0][:, : LIMITS.width], wide[1][:, : LIMITS.width], 1)
    assert union_progressions([just]) is not None


def test_faults_are_found() -> None:
    draw = random.Random(1)
    parts = [part(draw, 4, 2), part(draw, 4, 2)]
    union = union_progressions(parts)
    assert union is not None
    start, stop, step = (np.array(array) for array in np.broadcast_arrays(*union))
    row = 2
    longest = int((stop - start)[row].argmax())
    stop[row, longest] -= 1
    assert faults(parts, (start, stop, step), 4) == [row]
    stop[row, longest] += 1
    assert faults(parts, (start, stop, step), 4) == []
    beside = [np.concatenate([p[i] for p in parts], axis=1) for i in range(2)]
    assert faults(parts, (beside[0], beside[1], 1), 4)
