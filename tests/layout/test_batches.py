"""Tiles in batches: every pair of a layout once, in few blocks, none far larger than its tiles."""

from __future__ import annotations

import numpy as np
import pytest
from attention_checks import spec_of

from attnspec.layout import batches
from attnspec.layout.batches import strips_of, unfolded
from attnspec.layout.orders import NATURAL, Order
from attnspec.layout.tile_layout import FULL_TILE, StepLayout, step_layout
from attnspec.layout.tiling import classify
from attnspec.limits import LIMITS

GRAPHS = {
    "window": ("window(radius = 37)", NATURAL),
    "causal window": ("window(before = 50, after = 0)", NATURAL),
    "one that looks ahead": ("window(before = 3, after = 40)", NATURAL),
    "Longformer": ("window(radius = 20) | global(first(5))", NATURAL),
    "residues": ("where(abs(q - k) <= 60 and (q - k) % 12 == 0)", Order(12, 12)),
    "random": ("random(keys = 5, seed = 2)", NATURAL),
    "all before": ("where(k <= q)", NATURAL),
}


def layout_of(body: str, order: Order, n: int) -> StepLayout:
    relation = spec_of(f"attend {body}").relation(n)
    return step_layout(classify(relation, n, n, order, (8, 8)), relation, n)


def test_ends_of_windows_are_few_blocks() -> None:
    """Not one for each query tile that has fewer keys than those in the middle."""
    layout = layout_of("window(radius = 64)", NATURAL, 1000)
    assert len(np.unique(np.diff(layout.starts))) == 9
    strips = strips_of(layout, 64)
    assert len(strips) <= 4
    # those in the middle stay as they are
    assert max(len(strip.rows) for strip in strips) >= 1000 // 8 - 2 * 9


@pytest.mark.parametrize("name", GRAPHS)
def test_joined_tiles_are_a_little_more_than_they_were(name: str) -> None:
    layout = layout_of(*GRAPHS[name], 300)
    lengths = np.diff(layout.starts)
    for strip in strips_of(layout, 64):
        read = lengths[strip.rows].sum(axis=1)
        assert (strip.rows.shape[1] * strip.columns.shape[1] <= batches.WASTED * read + 1e-9).all()


@pytest.mark.limits("", "tiny")
def test_blocks_are_no_taller_and_masks_no_larger_than_they_may_be() -> None:
    layout = layout_of("window(radius = 64)", NATURAL, 1000)
    assert max(strip.rows.shape[1] for strip in strips_of(layout, 3)) <= 3
    for strip in strips_of(layout, 64):
        assert strip.rows.shape[1] == 1 or strip.mask is None or strip.mask.size <= LIMITS.mask_kept


def test_masks_of_kinds_that_hold_nothing_are_empty() -> None:
    masks = np.array([[[True, False]]])
    kinds = np.array([[[0, FULL_TILE, -2]]])
    assert unfolded(masks, kinds).tolist() == [[[True, False, True, True, False, False]]]
    assert unfolded(masks[:0], kinds[..., 1:]).tolist() == [[[True, True, False, False]]]
