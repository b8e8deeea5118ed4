"""Bands in orders: the steps of any composition are disjoint, their union is the relation, and
running them gives the dense result, values and gradients."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

import attnspec
from attnspec.backends.bands.attention import _samples
from attnspec.backends.bands.views import _step
from attnspec.layout.axes import axis
from attnspec.layout.orders import Order
from attnspec.layout.tiling import TooFine, classify

ATTENTION = "attention a {{ attend {} }}"


def test_residues_of_unequal_classes() -> None:
    side = axis(3, 20, 5, 2)
    positions = side.positions[side.positions >= 0]
    assert sorted(positions.tolist()) == list(range(3, 20))
    assert len({p % 5 for p in side.tiles.start.tolist()}) == 5


@pytest.mark.parametrize("apart", [False, True])
def test_samples_with_the_same_real_keys_follow_one_another(apart: bool) -> None:
    paddings: list[torch.Tensor | None] = [None]
    for batch in range(1, 5):
        paddings += [torch.tensor(x) for x in product(([1, 1], [1, 0], [0, 1]), repeat=batch)]
    for padding in paddings:
        padding = None if padding is None else padding.bool()
        batch = 3 if padding is None else len(padding)
        parts = list(_samples(batch, padding, apart))
        covered = [list(range(batch)[samples]) for samples, _ in parts]
        assert [sample for some in covered for sample in some] == [*range(batch)]
        real = torch.ones(batch, 2, dtype=torch.bool) if padding is None else padding
        for some, (_, mine) in zip(covered, parts, strict=True):
            assert mine is None or not bool(real.all())
            assert all(torch.equal(real[x], real[0] if mine is None else mine) for x in some)
        # as few parts as may be, and none of no sample
        changes = int((real[1:] != real[:-1]).any(1).sum())
        assert len(parts) == (batch if apart else 1 + changes)


def test_too_many_pairs_of_tiles_are_refused() -> None:
    relation = attnspec.parse(ATTENTION.format("where((q * 7 + k * 3) % 11 == 0)")).relation(
        1 << 17
    )
    with pytest.raises(TooFine):
        classify(relation, 1 << 17, 1 << 17, Order(), (8, 8))


@pytest.mark.parametrize(
    ("rows", "step"),
    [
        ([[0, 3, 6], [1, 4, 7]], 3),
        ([[0, 3], [4, 7]], 3),
        ([[0, 3], [4, 6]], 0),
        ([[0, 3, 7]], 0),
        ([[2, 2, 2]], 0),
        ([[6, 3, 0]], 0),
        ([[5]], 1),
    ],
)
def test_the_step_of_rows_is_one_that_a_slice_may_have(rows: list[list[int]], step: int) -> None:
    assert _step(np.array(rows)) == step
