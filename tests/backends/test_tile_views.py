"""Blocks of tiles are the rows that their positions say, as views, gathered, or by whole tiles."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, product

import numpy as np
import pytest
import torch

from attnspec.backends.bands.views import (
    Arrangement,
    Blocks,
    Frame,
    Ordered,
    Read,
    arrangement,
    frame_of,
    lattice_of,
    ordered_frame,
    scratch,
    side_by_side,
)
from attnspec.layout.axes import axis
from attnspec.layout.orders import Listed
from attnspec.layout.stacking import StackedAxis
from attnspec.limits import LIMITS

SHUFFLED = Listed(tuple(np.random.default_rng(1).permutation(20).tolist()))

KINDS = {
    "in a row": frame_of(axis(0, 24, 1, 3)),
    "with a short end": frame_of(axis(5, 27, 1, 3)),
    "residue classes": frame_of(axis(0, 24, 2, 3)),
    "short classes": frame_of(axis(0, 23, 3, 3)),
    "an order": frame_of(axis(0, 20, SHUFFLED, 3)),
    "tiles of one": frame_of(axis(0, 9, 2, 1)),
    "sequences": frame_of(StackedAxis((axis(0, 9, 1, 3),) * 2, 9)),
    "short sequences": frame_of(StackedAxis((axis(2, 12, 1, 3),) * 2, 10)),
    "short tiles of another distance": Frame(
        np.array([[0, 1, 2], [3, 4, 5], [6, 8, 0], [7, 9, 0]]),
        np.array([[True] * 3, [True] * 3, [True, True, False], [True, True, False]]),
        step=1,
        packed=False,
        length=10,
    ),
    "sequences of two orders": frame_of(StackedAxis((axis(0, 10, 1, 3), axis(0, 10, 2, 3)), 10)),
}


def length(frame: Frame) -> int:
    return 1 + int(frame.rows[frame.real].max(initial=0))


def tables(frame: Frame, rng: np.random.Generator) -> Iterator[tuple[np.ndarray, int | None]]:
    """Tiles of blocks [blocks, tiles], and the height to which these are cut: all tiles, blocks
    that follow one another, with gaps between them, some, in any order."""
    count, size = frame.rows.shape
    every = np.arange(count)
    for wide in (1, 2, 3):
        slid = every[: count - wide + 1, None] + np.arange(wide)
        for step in (1, 2):
            yield slid[::step], None
        yield slid[:1], None
        yield slid[rng.permutation(len(slid))], None
        yield rng.permutation(count)[: count // wide * wide].reshape(-1, wide), None
        real = frame.real[slid].reshape(len(slid), -1)
        for height in range((wide - 1) * size + 1, wide * size + 1):
            chosen = slid[real[:, :height].all(1)]
            if len(chosen):
                yield chosen, height
                yield chosen[-1:], height


def places_of(frame: Frame, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """The row of every place [blocks, height], and whether there is one."""
    rows, real = (
        torch.from_numpy(x[blocks.tiles].reshape(blocks.count, -1)[:, : blocks.height])
        for x in (frame.rows, frame.real)
    )
    return rows, real


def alone(heads: int, n: int) -> torch.Tensor:
    return torch.empty(heads, n, 2)


def part_of_more(heads: int, n: int) -> torch.Tensor:
    return torch.empty(heads + 1, n + 2, 4)[1:, 1:-1, 1:3]


def heads_inside(heads: int, n: int) -> torch.Tensor:
    return torch.empty(n, heads, 2).transpose(0, 1)


def arrangements(blocks: Blocks, heads: int) -> Iterator[Arrangement]:
    """Every way to arrange so many blocks."""
    yield side_by_side(blocks)
    for each in range(1, blocks.count + 1):
        if heads == 1 and blocks.count % each == 0:
            yield from (
                Arrangement(blocks.count // each, each, swapped) for swapped in (False, True)
            )


def cases(name: str) -> Iterator[tuple[Blocks, Arrangement, torch.Tensor]]:
    """Blocks of a kind, how they are arranged, and numbers [c, rows, 2] in turns in memory of their
    own, as a part of others, and with heads inside."""
    frame, rng = KINDS[name], np.random.default_rng(0)
    n = 1 + int(frame.rows[frame.real].max())
    room = cycle((alone, part_of_more, heads_inside))
    for tiles, height in tables(frame, rng):
        blocks = Blocks(frame, tiles, height)
        for heads in (1, 2):
            for to in arrangements(blocks, heads):
                yield blocks, to, next(room)(heads, n).normal_()


def compared(found: torch.Tensor, to: Arrangement, meant: torch.Tensor) -> None:
    assert torch.equal(to.back(found).reshape(meant.shape), meant)


@pytest.mark.parametrize("name", KINDS)
def test_blocks_are_read_written_and_added_to(name: str) -> None:
    frame, lying = KINDS[name], set()
    for blocks, to, x in cases(name):
        rows, real = places_of(frame, blocks)
        meant = x[:, rows]
        compared(blocks.read(x, to, "q"), to, meant)
        blank = meant.masked_fill(~real[..., None], 0.0)
        compared(blocks.read(x, to, "q", blank=True), to, blank)
        seen = blocks.view(x, to)
        lying.add(seen is not None)
        if seen is not None:
            compared(seen, to, meant)
        numbers = torch.randn(meant.shape)
        sums = x.clone().index_add_(1, rows[real], numbers[:, real])
        arranged = to.arrange(numbers)
        into = x.clone()
        blocks.add_overlapping(into, arranged, to)
        torch.testing.assert_close(into, sums)
        if len(set(rows[real].tolist())) == int(real.sum()):
            # no row stands twice
            into = x.clone()
            blocks.add(into, arranged, to)
            torch.testing.assert_close(into, sums)
            into = x.clone()
            blocks.write(into, arranged, to)
            assert torch.equal(into, x.index_copy(1, rows[real], numbers[:, real]))
    assert lying == ({True, False} if frame.step else {False})


def is_lattice(starts: np.ndarray) -> bool:
    """Whether starts, all different, are rows at one distance of starts at another."""
    tables = [
        starts.reshape(-1, each) for each in range(1, len(starts) + 1) if not len(starts) % each
    ]
    apart = [[np.unique(np.diff(table, axis=axis)) for axis in (0, 1)] for table in tables]
    # neighbours differ by one positive number, if there are any, along either
    return any(all(len(gaps) <= 1 and (gaps > 0).all() for gaps in both) for both in apart)


@pytest.mark.parametrize("count", range(1, 9))
def test_blocks_lie_in_a_lattice_where_there_is_one(count: int) -> None:
    rng = np.random.default_rng(count)
    lattices = [
        (3 + outer * np.arange(count // each)[:, None] + inner * np.arange(each)).ravel()
        for each in range(1, count + 1)
        if count % each == 0
        for outer, inner in product((1, 2, 5, 9), repeat=2)
    ]
    moved = [np.array([*starts[:-1], starts[-1] + 40]) for starts in lattices]
    others = [rng.permutation(9)[:count] for _ in range(20)]
    for starts in (*lattices, *moved, *others):
        if len(np.unique(starts)) < count:
            continue
        found = lattice_of(starts)
        assert (found is not None) == is_lattice(starts)
        if found is None:
            continue
        inner, outer = np.arange(found.each) * found.inner, np.arange(found.many) * found.outer
        assert (found.first + outer[:, None] + inner).ravel().tolist() == starts.tolist()
        # one line of blocks may be taken as several
        for each in range(1, count + 1):
            parts = found.split(count // each, each) if count % each == 0 else None
            may = count % each == 0 and (found.many == 1 or found.each == each)
            assert (parts is not None) == may
            if parts is not None:
                at = np.arange(parts.many)[:, None] * parts.outer + np.arange(each) * parts.inner
                assert (parts.first + at).ravel().tolist() == starts.tolist()


@pytest.mark.parametrize("name", KINDS)
def test_positions_behind_the_end_are_no_rows(name: str) -> None:
    """A shorter sequence has the tiles of a longer one, of which some places are no rows."""
    frame = KINDS[name]
    longest = frame.length
    for n in range(1, longest + 1):
        found = frame.below(n)
        sequence, at = frame.rows // longest, frame.rows % longest
        real = frame.real & (at < n)
        assert (found.real == real).all()
        assert (found.rows == np.where(real, sequence * n + at, 0)).all()
        assert (found.length, found.step, found.size) == (n, frame.step, frame.size)
        assert found.packed == (frame.packed and frame.single)
        assert (found.side.positions == np.where(real, at, -1)).all()
        assert (found.whole == real.all(1)).all()


@pytest.mark.parametrize("name", KINDS)
def test_rows_in_the_order_of_tiles_and_back(name: str) -> None:
    frame = KINDS[name]
    many = 1 + int(frame.rows[frame.real].max())
    ways = [(frame, Ordered(frame))]
    if frame.single:
        ways += [(frame.below(n), Ordered(frame).below(n)) for n in (1, many // 2, many)]
    for shape, ordered in ways:
        n = int(shape.real.sum())
        rows, real = (torch.from_numpy(x.ravel()) for x in (shape.rows, shape.real))
        x = heads_inside(2, n).normal_()
        meant = x[:, rows]
        assert torch.equal(ordered.take(x, "x"), meant)
        # what is read lies in a buffer, what was read before may be written over
        blank = ordered.take(x, "x", blank=True)
        assert torch.equal(blank, meant.masked_fill(~real[:, None], 0.0))
        found = torch.randn(meant.shape)
        into = torch.empty_like(x)
        ordered.put(into, found)
        assert torch.equal(into, torch.empty_like(x).index_copy_(1, rows[real], found[:, real]))
        sums = x.clone()
        ordered.add(sums, found)
        torch.testing.assert_close(sums, x + into)
        read = Read(ordered_frame(shape), ordered)
        assert torch.equal(read.take(x, "x"), meant)
        assert read.room(x, "y").shape == meant.shape
        again = torch.empty_like(x)
        read.put(again, found)
        assert torch.equal(again, into)


def test_frames_are_of_the_positions_of_tiles() -> None:
    side = axis(5, 27, 2, 3)
    frame, at = frame_of(side), side.positions.reshape(-1, 3)
    assert (frame.real == (at >= 0)).all()
    # a place that is no row reads the first
    assert (frame.rows == np.where(at >= 0, at - 5, 0)).all()
    assert (frame.step, frame.packed, frame.length) == (2, False, 22)
    assert KINDS["in a row"].packed
    put = ordered_frame(frame)
    assert put.rows.ravel().tolist() == [*range(at.size)]
    assert put.whole.all()
    assert (put.step, put.packed, put.length) == (1, True, at.size)


def test_what_lies_in_order_is_read_where_it_is() -> None:
    x = torch.randn(2, 24, 3)
    read = Read(KINDS["in a row"], None)
    assert read.take(x, "x") is x
    assert read.room(x, "x") is x
    read.put(x, x)
    assert read.below(5) is read


def test_blocks_of_one_head_are_arranged_as_the_first_side_with_runs() -> None:
    frame = KINDS["residue classes"]
    runs, line = Blocks(frame, np.array([[0], [1], [4], [5]])), Blocks(frame, np.arange(4)[:, None])
    assert runs.lattice is not None
    assert runs.lattice.many == 2
    assert arrangement(runs, line, 1) == arrangement(line, runs, 1) == Arrangement(2, 2, True)
    assert arrangement(runs, line, 2) == arrangement(line, line, 1) == Arrangement(1, 4, False)


def test_small_buffers_are_kept_for_their_use_and_type() -> None:
    first = scratch("a buffer", (3, 4), torch.float32).fill_(1.0)
    assert scratch("a buffer", (2, 5), torch.float32).data_ptr() == first.data_ptr()
    assert scratch("another", (3, 4), torch.float32).data_ptr() != first.data_ptr()
    assert scratch("a buffer", (3, 4), torch.float64).dtype == torch.float64
    with torch.inference_mode():
        larger = scratch("a buffer", (40,), torch.float32)
    # what was asked for first is a buffer of its own now
    assert larger.data_ptr() != first.data_ptr()
    assert not larger.is_inference()
    assert scratch("a buffer", (40,), torch.float32).data_ptr() == larger.data_ptr()
    scratch("a buffer", (LIMITS.buffer + 1,), torch.float32)
    assert scratch("a buffer", (40,), torch.float32).data_ptr() == larger.data_ptr()
