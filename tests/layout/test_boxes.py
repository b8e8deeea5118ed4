"""Grids in boxes: the tiles hold each pair once, and what runs over them is the definition."""

from __future__ import annotations

import numpy as np
import pytest

from attnspec.layout.axes import axis
from attnspec.layout.orders import Boxed, Order, orders_of
from attnspec.spec import parse


def boxed_orders(text: str, n: int) -> list[Order]:
    orders = orders_of(parse(f"attention grids {{ {text} }}").relation(n), n)
    return [order for order in orders if isinstance(order.q, Boxed)]


@pytest.mark.parametrize(
    "side",
    [Boxed((7, 13), 0, (4, 8)), Boxed((5, 4, 6), 2, (2, 2, 2)), Boxed((1, 9), 0, (1, 2))],
)
def test_coarse_boxes_are_whole_fine_ones(side: Boxed) -> None:
    last = side.offset + int(np.prod(side.extents))
    fine = axis(0, last, side, side.size)
    cells = fine.positions[fine.positions >= 0]
    assert sorted(cells) == list(range(side.offset, last))
    for factor in (2, 4, 8, 16):
        coarse = axis(0, last, side, side.size * factor)
        first, end = coarse.inside(fine, np.arange(coarse.count))
        for index in range(coarse.count):
            inside = fine.positions.reshape(fine.count, -1)[first[index] : end[index]]
            own = coarse.positions.reshape(coarse.count, -1)[index]
            assert sorted(inside[inside >= 0]) == sorted(own[own >= 0])


def test_a_grid_with_other_pairs_is_not_boxed() -> None:
    assert boxed_orders("sequence grid(7, 13) attend window(radius = 3)", 91) == []
    # extra tokens may be read, and stand in no box
    text = "sequence grid(9, 10) extra_tokens 3 attend where(k.row == 0)"
    assert boxed_orders(text, 93) == []
