"""Entries of lists of tiles in batches: each entry once, where it is looked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from attnspec.backends.lists import batches
from attnspec.backends.lists.batches import Batch, Batches, by_keys, by_queries, step_of
from attnspec.limits import LIMITS


def drawn() -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Lists [L, r] of key tiles, each once in a list: of any length, full ones, the same for all;
    with masks of some entries, of all, of none."""
    for seed in range(36):
        source = torch.Generator().manual_seed(seed)
        count, width = (int(torch.randint(1, 8, (), generator=source)) for _ in range(2))
        tiles = width + seed % 3
        lists = torch.rand(count, tiles, generator=source).argsort(1)[:, :width] + seed % 4
        there = torch.rand(count, width, generator=source) < (1.0, 0.8, 0.2, 0.0)[seed // 3 % 4]
        if seed % 5 == 1:
            lists = lists[:1].repeat(count, 1)
        lists = lists.masked_fill(~there, -1)
        masked = (torch.rand(count, width, generator=source) < 0.5) & there
        yield lists, (None, masked, there)[seed % 3]


def checked(
    found: Batches, lists: torch.Tensor, masked: torch.Tensor | None, *, whole: bool
) -> None:
    """`whole` where an entry that has a mask stands with all of its query tile."""
    width = lists.shape[1]
    entries: list[int] = []
    results: dict[int, int] = {}
    end = 0
    for batch in found.each:
        groups, rows, columns = batch.entries.shape
        assert (batch.rows.shape, batch.tiles.shape) == ((groups, rows), (groups, columns))
        # partial results of batches stand one behind the other
        assert batch.first == end
        end += groups * rows
        assert batch.part(5) == slice(5 * batch.first, 5 * end)
        for g in range(groups):
            for m in range(rows):
                if batch.real is not None and not batch.real[g, m]:
                    continue
                row = int(batch.rows[g, m])
                results[batch.first + g * rows + m] = row
                for c in range(columns):
                    entry = int(batch.entries[g, m, c])
                    assert entry // width == row
                    assert lists.flatten()[entry] == batch.tiles[g, c]
                    if masked is not None:
                        mine = masked[row].any() if whole else masked.flatten()[entry]
                        assert batch.masked == bool(mine)
                    if found.slots is not None:
                        assert found.slots[row, batch.column + c] == entry % width
                    entries.append(entry)
    assert sorted(entries) == (lists.flatten() >= 0).nonzero()[:, 0].tolist()
    assert end == found.partials
    # the results of each query tile are known, each once
    known = [(at, row) for row, line in enumerate(found.places.tolist()) for at in line if at >= 0]
    assert sorted(known) == sorted(results.items())


@pytest.mark.limits("", "tiny")
def test_tall_tiles_meet_their_key_tiles_at_once() -> None:
    together = LIMITS.tiles_together
    for lists, masked in drawn():
        found = by_queries(lists, masked)
        checked(found, lists, masked, whole=True)
        assert all(batch.tiles.shape[1] <= together for batch in found.each)
        # no more products than it takes
        longest = int((lists >= 0).sum(1).max())
        assert found.places.shape[1] == -(-lists.shape[1] // together)
        assert max((batch.column for batch in found.each), default=0) < max(1, longest)


def test_low_tiles_are_the_rows_of_a_product_for_each_key_tile() -> None:
    for lists, masked in drawn():
        found = by_keys(lists, masked)
        checked(found, lists, masked, whole=False)
        keys = [int(tile) for batch in found.each for tile in batch.tiles]
        kinds = [batch.masked for batch in found.each for _ in batch.tiles]
        # a key tile is read in one product, and in another one by entries with masks
        assert len(set(zip(keys, kinds, strict=True))) == len(keys)
        for batch in found.each:
            # what fills up is less than a quarter of an octave
            real = batch.rows.shape[1] if batch.real is None else int(batch.real.sum(1).min())
            assert batch.rows.shape[1] <= 2 ** (1 / batches.LEVELS) * real


@pytest.mark.parametrize("make", [by_keys, by_queries])
@pytest.mark.parametrize("most", [1, 12, 50, 1000])
def test_pieces_are_parts_of_batches(make: Callable[..., Batches], most: int) -> None:
    for lists, masked in drawn():
        for batch in make(lists, masked).each:
            pieces = [*batch.pieces(2, most)]
            numbers = 2 * batch.tiles.shape[1]
            for piece in pieces:
                # one pair of tiles at least
                assert piece.rows.numel() * numbers <= max(most, numbers)
                assert (piece.row_step, piece.tile_step) == (
                    step_of(batch.rows),
                    step_of(batch.tiles),
                )
                assert (piece.masked, piece.column) == (batch.masked, batch.column)
                same(piece, batch)
            assert sum(piece.rows.numel() for piece in pieces) == batch.rows.numel()
            firsts = [piece.first for piece in pieces]
            assert firsts == sorted(set(firsts))


def same(piece: Batch, batch: Batch) -> None:
    """The results of a piece are some of the batch's that follow one another."""
    low = piece.first - batch.first
    at = slice(low, low + piece.rows.numel())
    assert torch.equal(piece.rows.flatten(), batch.rows.flatten()[at])
    assert torch.equal(piece.entries.flatten(0, 1), batch.entries.flatten(0, 1)[at])
    group = low // batch.rows.shape[1]
    assert torch.equal(piece.tiles, batch.tiles[group : group + len(piece.tiles)])
    assert (piece.real is None) == (batch.real is None)
    if piece.real is not None and batch.real is not None:
        assert torch.equal(piece.real.flatten(), batch.real.flatten()[at])
