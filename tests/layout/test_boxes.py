"""Grids in boxes: the tiles hold each pair once, and what runs over them is the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attnspec.backends.bands.attention import SteppedAttention
from attnspec.layout.axes import axis
from attnspec.layout.orders import Boxed, Order, orders_of
from attnspec.layout.steps import banded, layouts_of
from attnspec.spec import parse

GRIDS = (
    ("sequence grid(7, 13) attend neighborhood(3, 5)", 91),
    ("sequence grid(16, 16) attend neighborhood(7, 7)", 256),
    ("sequence grid(20, 20) attend neighborhood(7, 7) & causal", 400),
    ("sequence grid(20, 20) attend neighborhood(7, 7) - residue(step = 3)", 400),
    (
        "sequence grid(18, 20) attend where(abs(q.row - k.row) <= 2 and abs(q.col - k.col) <= 3)",
        360,
    ),
    ("sequence grid(6, 7, 9) attend neighborhood(3, 3, 5)", 378),
    ("sequence grid(9, 10) extra_tokens 3 attend neighborhood(5, 5)", 93),
)


def boxed_orders(text: str, n: int) -> list[Order]:
    orders = orders_of(parse(f"attention grids {{ {text} }}").relation(n), n)
    return [order for order in orders if isinstance(order.q, Boxed)]


@pytest.mark.parametrize(("text", "n"), GRIDS)
def test_boxes_hold_each_pair_once_and_compute_the_definition(text: str, n: int) -> None:
    spec = parse(f"attention grids {{ {text} }}")
    relation, held = spec.relation(n), spec.mask(n)
    orders = boxed_orders(text, n)
    assert orders
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, 2, 1, n, 8, dtype=torch.float64, generator=generator) for _ in range(4)
    )
    rows = [x.clone().requires_grad_() for x in (q, k[:, :, 0], v[:, :, 0])]
    scores = (rows[0] @ rows[1][:, :, None].mT * 0.3).masked_fill(
        ~torch.from_numpy(held), -torch.inf
    )
    meant = torch.softmax(scores, -1).nan_to_num(0.0) @ rows[2][:, :, None]
    meant_grads = torch.autograd.grad(meant, rows, grad)
    for order in orders:
        layouts = layouts_of((banded(relation, n, n, order, 64),), n, n)
        times = np.zeros((n, n), np.int64)
        for layout in layouts:
            np.add.at(times, layout.pairs(n), 1)
        np.testing.assert_array_equal(times, held)
        attention = SteppedAttention(layouts)
        parts = q, k[:, :, 0], v[:, :, 0]
        out, lse = attention.forward(*parts, None, 0.3)
        torch.testing.assert_close(out, meant)
        found = attention.backward(grad, (*parts, out, lse), None, 0.3)
        for one, other in zip(found, meant_grads, strict=True):
            torch.testing.assert_close(one, other)


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
