"""Layouts of tiles drawn at random, regular as none of a pattern is: what is made of them holds
their pairs, each once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from relation_checks import times_held

from attnspec.layout import edge_list, tile_layout
from attnspec.layout.axes import axis
from attnspec.layout.batches import strips_of, unfolded
from attnspec.layout.runs import runs_of
from attnspec.layout.stacking import StackedAxis, stacked
from attnspec.layout.tile_layout import FULL_TILE, Masks, StepLayout, TileLayout, parted
from attnspec.limits import LIMITS

HEIGHT, WIDTH = 2, 3
Entries = tuple[np.ndarray, np.ndarray]


def rows_of(rng: np.random.Generator, rows: int, columns: int) -> list[Entries]:
    """Key tiles and kinds of rows of tiles: some that return, some with the keys of others, some
    that are like no others, and none."""
    pool: list[Entries] = []
    for _ in range(rows):
        keys = np.flatnonzero(rng.random(columns) < rng.choice([0.2, 0.6, 1.0]))
        if pool and rng.random() < 0.7:
            keys = pool[rng.integers(len(pool))][0]
        kinds = rng.integers(-1, 3, len(keys)) if rng.random() < 0.6 else np.full(len(keys), -1)
        pool.append((keys, kinds) if not pool or rng.random() < 0.6 else pool[-1])
    return pool


def joined(rows: Sequence[Entries]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    starts = np.cumsum([0, *(len(keys) for keys, _ in rows)])
    keys, kinds = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    return starts, keys, kinds


def step_layouts(number: int, n_q: int = 21, n_k: int = 18) -> Iterator[StepLayout]:
    """Layouts whose last query tile, or some of each residue class, are short."""
    for seed in range(number):
        rng = np.random.default_rng(seed)
        q, k = axis(0, n_q, 1 + seed % 2, HEIGHT), axis(0, n_k, 1 + seed % 3 // 2, WIDTH)
        masks = rng.random((3, HEIGHT, WIDTH)) < 0.5
        masks[0] = [[True, True, False], [True, True, False]]
        masks[1, 0, 0] = masks[2, 0, 0] = True
        yield StepLayout(q, k, *joined(rows_of(rng, q.count, k.count)), masks)


def pairs_of(
    layout: StepLayout, rows: np.ndarray, columns: np.ndarray, held: np.ndarray
) -> Entries:
    """The pairs of a block of tiles."""
    q = layout.q.positions.reshape(-1, layout.q.size)[rows].ravel()
    k = layout.k.positions.reshape(-1, layout.k.size)[columns].ravel()
    real = held & (q[:, None] >= 0) & (k >= 0)
    i, j = np.nonzero(real)
    return q[i], k[j]


@pytest.mark.parametrize("tallest", [1, 2, 3, 64])
def test_strips_hold_each_pair_once(tallest: int) -> None:
    for layout in step_layouts(40):
        found = np.zeros((21, 18), int)
        seen: Counter[int] = Counter()
        for strip in strips_of(layout, tallest):
            assert 1 <= strip.rows.shape[1] <= tallest
            assert strip.mask is None or strip.kinds is None
            for block, (rows, columns) in enumerate(zip(strip.rows, strip.columns, strict=True)):
                held = np.ones((len(rows) * HEIGHT, len(columns) * WIDTH), bool)
                if strip.kinds is not None:
                    held = unfolded(layout.masks, strip.kinds[block : block + 1])[0]
                held = held if strip.mask is None else strip.mask
                np.add.at(found, pairs_of(layout, rows, columns, held), 1)
                seen.update(rows.tolist())
        assert (found == times_held([layout], 21)[:, :18]).all()
        # each tile that reads is in one block
        assert seen == Counter(np.flatnonzero(np.diff(layout.starts)).tolist())


def test_tiles_of_equal_keys_are_as_few_blocks_as_may_be() -> None:
    keys, other = np.array([0, 2]), np.array([1, 2])
    rows = [(keys, np.array([-1, -1]))] * 5 + [(other, np.array([-1, -1]))] * 4
    layout = StepLayout(
        axis(0, 18, 1, HEIGHT),
        axis(0, 9, 1, WIDTH),
        *joined(rows),
        np.zeros((0, HEIGHT, WIDTH), bool),
    )
    for tallest, heights in ((64, [5, 4]), (4, [4, 4, 1]), (2, [2, 2, 2, 2, 1]), (1, [1] * 9)):
        found = [row for strip in strips_of(layout, tallest) for row in strip.rows]
        assert sorted(map(len, found), reverse=True) == heights
        # the tiles of a block follow one another
        assert all((np.diff(row) == 1).all() for row in found)


@pytest.mark.limits("", "tiny")
def test_runs_hold_each_pair_once() -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        n_q, n_k = rng.integers(1, 20, 2).tolist()
        rows = rows_of(rng, -(-n_q // 3), -(-n_k // 3))
        masks = rng.random((3, 3, 3)) < 0.6
        layout = TileLayout(n_q, n_k, 3, *joined(rows), masks)
        found = np.zeros((n_q, n_k), int)
        for run in runs_of(layout):
            assert run.keys.shape == (run.blocks, run.width)
            held = np.ones((run.blocks, run.height, run.width), bool)
            if run.shared is not None:
                held[:] = run.shared
            if run.kinds is not None:
                held = unfolded(masks, run.kinds)[:, : run.height, : run.width]
            block, q, k = np.nonzero(held)
            np.add.at(found, (run.queries[block, q], run.keys[block, k]), 1)
        assert (found == layout.pairs()).all()


@pytest.mark.limits("tiny")
def test_parts_hold_each_pair_once() -> None:
    for layout in step_layouts(30):
        found = parted(layout)
        assert (times_held(found, 21) == times_held([layout], 21)).all()
        if len(found) == 1:
            continue
        masked = [part for part in found if (part.kinds != FULL_TILE).any()]
        assert all((part.kinds != FULL_TILE).all() for part in masked)
        if len(found) > 2:
            # no row of masks is longer than it may be
            most = max(1, LIMITS.mask_shared // (HEIGHT * WIDTH))
            assert all(np.diff(part.starts).max(initial=0) <= most for part in masked)


def test_numbers_of_masks_are_those_of_rows_that_differ() -> None:
    for layout in step_layouts(40):
        rows = set()
        for low, high in zip(layout.starts[:-1], layout.starts[1:], strict=True):
            kinds = tuple(layout.kinds[low:high].tolist())
            if any(kind != FULL_TILE for kind in kinds):
                rows.add(kinds)
        assert tile_layout._unfolded(layout) == sum(map(len, rows)) * HEIGHT * WIDTH


def test_stacked_layouts_hold_the_pairs_of_each_apart() -> None:
    every = [*step_layouts(12)]
    for first, second, third in zip(every, every[1:], every[2:], strict=False):
        # a layout may stand twice
        parts = [first, second, first, third]
        assert (times_held([stacked([first], 21, 21)], 21) == times_held([first], 21)).all()
        found = times_held([stacked(parts, 21, 21)], 4 * 21)
        for i, one in enumerate(parts):
            for j in range(4):
                block = found[i * 21 : (i + 1) * 21, j * 21 : (j + 1) * 21]
                assert (block == (times_held([one], 21) if i == j else 0)).all()


@pytest.mark.parametrize("length", [1, 2, 7, 12])
def test_stacks_are_natural_where_tiles_are_whole_and_in_order(length: int) -> None:
    for size in (1, 2, 3, 4):
        for steps in ((1, 1), (1, 2), (2, 2), (1,)):
            parts = tuple(axis(5, 5 + length, step, size) for step in steps)
            found = StackedAxis(parts, length)
            # residues modulo 2 of one or two positions are in order
            in_order = set(steps) == {1} or (length <= 2 and size == 1)
            assert found.natural == (in_order and length % size == 0)


def test_masks_are_numbered_by_their_first_appearance() -> None:
    rng = np.random.default_rng(0)
    masks = Masks((3, 5))
    known: list[object] = []
    for count in (1, 4, 0, 9):
        given = rng.random((count, 3, 5)) < rng.choice([0.1, 0.9])
        given[: count // 2] = given[:1]
        for mask in given.tolist():
            known += [] if mask in known else [mask]
        assert masks.number(given).tolist() == [known.index(mask) for mask in given.tolist()]
        assert masks.stacked().tolist() == known


def test_progressions_are_written_out_row_by_row() -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        rows, each = int(rng.integers(1, 6)), int(rng.integers(1, 4))
        # keys of different remainders, so that none stands twice
        start = each * rng.integers(0, 5, (rows, each)) + np.arange(each)
        stop, step = (
            start + rng.integers(-3, 12, start.shape),
            each * rng.integers(1, 3, start.shape),
        )
        if seed % 3 == 0:
            # the same in every row
            start, stop, step = (x[:1] for x in (start, stop, step))
        if seed % 3 == 1:
            step = step[:1, :1]
        count, keys = edge_list._expanded((start, stop, step), rows, 40)
        table = np.broadcast_arrays(start, stop, step, np.zeros((rows, 1)))[:3]
        meant = [
            sorted(k for ends in zip(*line, strict=True) for k in range(*(int(x) for x in ends)))
            for line in zip(*table, strict=True)
        ]
        assert count.tolist() == [len(line) for line in meant]
        assert keys.tolist() == [k for line in meant for k in line]
