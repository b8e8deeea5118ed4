"""Steps as chosen and parted: each pair in one of them, values and gradients as defined."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_checks import spec_of
from relation_checks import times_held

from attnspec.backends.bands.attention import SteppedAttention
from attnspec.graphs.patterns.dilated import Dilated
from attnspec.graphs.relation import Relation, evaluate_pairs
from attnspec.layout.axes import Axis
from attnspec.layout.orders import Order
from attnspec.layout.steps import BANDS, banded, bands_of, layouts_of
from attnspec.layout.tile_layout import StepLayout, parted, step_layout
from attnspec.layout.tiling import classify


def pairs_of(relation: Relation, n: int) -> np.ndarray:
    at = np.arange(n)
    return np.array(evaluate_pairs(relation, at[:, None], at[None], n))


@pytest.mark.parametrize(
    ("body", "n_q"),
    [
        ("attend residue(step = 16) | residue(step = 24) | window(radius = 16)", 900),
        ("causal attend residue(step = 16) | residue(step = 24) | window(radius = 16)", 1024),
        ("attend strided(stride = 16) | residue(step = 24) | dilated(radius = 12, step = 3)", 1024),
        (
            "causal attend"
            " window(radius = 30) | residue(step = 12) | summary(stride = 8, cells = 2)",
            1024,
        ),
    ],
)
def test_two_orders_and_a_rest_hold_each_pair_once(body: str, n_q: int) -> None:
    n = 1024
    relation = spec_of(body).relation(n)
    bands = bands_of(relation, n_q, n)
    orders = [band.step.order for band in bands]
    assert len(orders) == len(set(orders)) == 3
    meant = pairs_of(relation, n)
    meant[: n - n_q] = False
    assert np.array_equal(times_held(layouts_of(bands, n_q, n), n), meant)


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


@pytest.mark.parametrize("n", [61, 85, 133])
@pytest.mark.limits("tiny")
def test_gradients_of_trimmed_tiles(n: int) -> None:
    relation, parts = rectangles(n)
    mask = torch.from_numpy(pairs_of(relation, n))
    grad, q, k, v = torch.randn(4, 1, 1, n, 8, dtype=torch.float64).unbind()
    attention = SteppedAttention(parts)
    out, lse = attention.forward(q[:, :, None], k, v, None, 1.0)
    saved = q[:, :, None], k, v, out, lse
    found = attention.backward(grad[:, :, None], saved, None, 1.0)
    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = (exact[0] @ exact[1].mT).masked_fill(~mask, -1e300)
    meant = scores.softmax(-1).masked_fill(~mask, 0.0) @ exact[2]
    meant.backward(grad)  # type: ignore[no-untyped-call]
    wanted = [meant, *(x.grad for x in exact)]
    for ours, theirs in zip([out, *found], wanted, strict=True):
        assert theirs is not None
        torch.testing.assert_close(ours.reshape(theirs.shape), theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("body", ["residue(step = 3) | residue(step = 4)", "strided(stride = 5)"])
def test_two_steps_without_a_key_merge_to_nothing(body: str, kind: torch.dtype) -> None:
    """A query all of whose keys are padding or left out: 0 and a log-sum-exp of minus infinity."""
    n = 40
    relation = spec_of(f"attend ({body}) - rows(positions(0, 7, 33))").relation(n)
    halves = [spec_of(f"attend {half}").relation(n) for half in _halves(body)]
    layouts = [step_layout(classify(half, n, n, Order(), (8, 8)), half, n) for half in halves]
    mask = torch.from_numpy(times_held(layouts, n) == 1)
    assert np.array_equal(mask.numpy(), pairs_of(relation, n))
    q, k, v = torch.randn(3, 1, 1, n, 8, dtype=kind).unbind()
    padding = torch.arange(n)[None] >= 20
    out, lse = SteppedAttention(layouts).forward(q[:, :, None], k, v, padding, 1.0)
    empty = ~(mask & padding).any(-1)
    assert empty.sum() >= 3
    assert torch.equal(out[0, 0, 0][empty], torch.zeros_like(out[0, 0, 0][empty]))
    assert torch.equal(lse[0, 0, 0] == -torch.inf, empty)
    scores = (q @ k.mT)[0, 0].double().masked_fill(~(mask & padding), -torch.inf)
    meant = scores.softmax(-1).nan_to_num() @ v[0, 0].double()
    torch.testing.assert_close(out[0, 0, 0].double(), meant, rtol=0, atol=1e-5)


def _halves(body: str) -> list[str]:
    """Two graphs that share no pair, of which the union is the body without some rows."""
    left = f"({body}) - rows(positions(0, 7, 33))"
    return [f"({left}) & where(k % 2 == 0)", f"({left}) & where(k % 2 == 1)"]


@pytest.mark.parametrize("target", [2 * BANDS.targets[-1], 8 * BANDS.targets[-1]])
def test_large_tiles_are_long_on_the_side_that_is_in_order(target: int) -> None:
    n, relation = 1 << 18, Dilated(radius=64, step=8)
    long, short = banded(relation, n, n, Order(1, 8), target).sizes
    assert long == 16 * short
    assert banded(relation, n, n, Order(8, 1), target).sizes == (short, long)
