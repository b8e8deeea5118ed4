"""Covers of static relations: which tiles whole blocks of queries hold, by the definition."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from relation_checks import definition

from attnspec.backends.lists.cover import Cover, Covers
from attnspec.graphs.operators import Complement
from attnspec.graphs.patterns.block import Block
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.patterns.window import Window
from attnspec.graphs.relation import Relation
from attnspec.limits import LIMITS


@pytest.mark.parametrize(
    "relation",
    [Causal(), Window(before=9, after=2), Block(size=6, before=1), Complement(Window(radius=3))],
    ids=str,
)
@pytest.mark.limits("", "tiny")
def test_tiles_are_full_where_every_pair_is_held(relation: Relation) -> None:
    for n, size in product((1, 2, 9, 30), (1, 3, 4)):
        found, held = Cover(relation, n, size), definition(relation, n)
        # as few blocks as there may be, of the size that was asked for or larger
        assert found.size == max(size, -(-n // LIMITS.blocks_covered))
        starts = np.arange(0, n, found.size)
        tiles = [(a, b) for a in range(n) for b in range(a, min(n, a + 7))]
        first, last = torch.tensor(tiles).T
        # of keys too, blocks are looked at as a whole
        begin, end = first // found.size * found.size, (last // found.size + 1) * found.size
        meant = [
            [held[q : q + found.size, a:b].all() for a, b in zip(begin, end, strict=True)]
            for q in starts
        ]
        assert found.full(first, last).tolist() == np.array(meant).tolist()
        # tiles may be those of several samples
        several = torch.stack([first, first.flip(0)]), torch.stack([last, last.flip(0)])
        both = found.full(*several)
        assert both.shape == (2, len(starts), len(tiles))
        assert torch.equal(both[1].flip(1), both[0])


def test_covers_are_kept_by_their_relation_and_the_height_of_tiles() -> None:
    covers = Covers(200)
    found = covers.of(Causal(), 16)
    assert found.size == LIMITS.tile
    assert covers.of(Causal(), 8) is found
    assert covers.of(Causal(), 128).size == 128
    assert covers.of(Window(radius=3), 16) is not found


def test_a_device_is_told_once() -> None:
    found, tiles = Cover(Causal(), 200, 64), torch.tensor([[0, 70]])
    for _ in range(2):
        assert found.full(tiles, tiles + 5).shape == (1, 4, 2)
    assert set(found.before) == {torch.device("cpu")}
    far = tiles.to("meta")
    assert found.full(far, far + 5).device == torch.device("meta")
    told = found.before[torch.device("meta")]
    assert found.full(far, far + 5).shape == (1, 4, 2)
    assert found.before[torch.device("meta")] is told
