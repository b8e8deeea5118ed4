"""Steps as chosen and parted: each pair in one of them, values and gradients as defined."""

from __future__ import annotations

import numpy as np
import pytest
from attention_checks import spec_of

from attnspec.graphs.patterns.dilated import Dilated
from attnspec.graphs.relation import Relation
from attnspec.layout.axes import Axis
from attnspec.layout.orders import Order
from attnspec.layout.steps import BANDS, banded
from attnspec.layout.tile_layout import StepLayout, parted, step_layout
from attnspec.layout.tiling import classify

RECTANGLES = "attend where(abs(q % 12 - k % 12) < 5) - (rows(first(7)) | columns(first(3)))"


def rectangles(n: int) -> tuple[Relation, list[StepLayout]]:
    """A relation by residues with tiles whose masks are rectangles, in parts."""
    relation = spec_of(RECTANGLES).relation(n)
    found = classify(relation, n, n, Order(12, 12), (5, 5))
    return relation, parted(step_layout(found, relation, n))


@pytest.mark.parametrize("n", [61, 85, 133])
@pytest.mark.limits("tiny")
def test_trimmed_tiles_say_how_many_places_they_have(n: int) -> None:
    _, parts = rectangles(n)
    trimmed = [axis for part in parts for axis in (part.q, part.k) if axis.size < 5]
    assert trimmed
    for axis in trimmed:
        assert isinstance(axis, Axis)
        # a short tile may have lost all of its places
        assert np.array_equal(np.maximum(axis.tiles.count, 0), axis.lengths)
        assert axis.positions.max() < n


@pytest.mark.parametrize("target", [2 * BANDS.targets[-1], 8 * BANDS.targets[-1]])
def test_large_tiles_are_long_on_the_side_that_is_in_order(target: int) -> None:
    n, relation = 1 << 18, Dilated(radius=64, step=8)
    long, short = banded(relation, n, n, Order(1, 8), target).sizes
    assert long == 16 * short
    assert banded(relation, n, n, Order(8, 1), target).sizes == (short, long)
