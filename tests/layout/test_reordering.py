"""Reverse Cuthill-McKee: graphs whose band no formula tells come together in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_checks import spec_of

from attnspec.backends.bands.attention import SteppedAttention
from attnspec.graphs.operators import Intersection
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.patterns.window import Window
from attnspec.layout.cuthill_mckee import ROOTS, is_irregular, reordered, reverse_cuthill_mckee
from attnspec.layout.orders import NATURAL, Order, Permuted
from attnspec.layout.steps import banded, bands_of, layouts_of
from attnspec.layout.tiling import survey
from attnspec.verification import verify

NEAR = "q * 5 % n - k * 5 % n <= {0} and k * 5 % n - q * 5 % n <= {0}"
HIDDEN = f"attend where({NEAR.format(40)})"
"""A window behind a multiplication modulo n."""


def width(q: np.ndarray, k: np.ndarray, order: np.ndarray) -> int:
    """The longest distance of an edge's ends in an order."""
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return int(np.abs(place[q] - place[k]).max(initial=0))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n", [1, 2, 50, 301])
def test_bands_come_near_those_that_names_hide(n: int, seed: int) -> None:
    generator = np.random.Generator(np.random.PCG64(seed))
    names = generator.permutation(n)
    a = generator.integers(0, n, 3 * n)
    b = np.minimum(a + generator.integers(0, 6, 3 * n), n - 1)
    q, k = names[a], names[b]
    order = reverse_cuthill_mckee(q, k, n)
    assert order is not None
    assert sorted(order) == list(range(n))
    assert width(q, k, names) <= 5
    assert width(q, k, order) <= 15


def test_graphs_of_many_pieces_are_left_alone() -> None:
    q = np.arange(0, 4 * ROOTS, 2)
    assert reverse_cuthill_mckee(q, q + 1, 4 * ROOTS) is None
    few = reverse_cuthill_mckee(q[:ROOTS], q[:ROOTS] + 1, 4 * ROOTS)
    assert few is not None
    assert sorted(few) == list(range(4 * ROOTS))
    for n in (0, 3):
        none = reverse_cuthill_mckee(q[:0], q[:0], n)
        assert none is not None
        assert sorted(none) == list(range(n))


def test_what_a_predicate_hides_comes_to_light() -> None:
    n = 4096
    relation = spec_of(HIDDEN).relation(n)
    found = bands_of(relation, n, n)
    assert [type(band.step.order.q) for band in found] == [Permuted]
    assert str(found[0]).startswith("reverse Cuthill-McKee order")
    sizes = found[0].sizes
    natural = survey(relation, n, n, NATURAL, sizes)
    assert survey(relation, n, n, found[0].step.order, sizes).tiles < natural.tiles / 3


def test_windows_random_graphs_and_few_keys_keep_their_order() -> None:
    n = 2048
    for body in (
        "attend where(abs(q - k) <= 40)",
        "attend random(keys = 32)",
        f"attend where({NEAR.format(4)})",
    ):
        for band in bands_of(spec_of(body).relation(n), n, n):
            assert not isinstance(band.step.order.q, Permuted), body


@pytest.mark.parametrize("part", ["", "& causal", "| window(radius = 9)", "- window(radius = 9)"])
@pytest.mark.parametrize("n_q", [0, 1, 5, 331, 400])
def test_steps_in_that_order_hold_each_pair_once_and_compute_the_definition(
    part: str, n_q: int
) -> None:
    n = 400
    relation = spec_of(f"{HIDDEN} {part}").relation(n)
    held = spec_of(f"{HIDDEN} {part}").mask(n)[n - n_q :]
    order = reordered(relation, n_q, n)
    assert isinstance(order, Order)

    layouts = layouts_of((banded(relation, n_q, n, order, 32),), n_q, n)
    times = np.zeros((n, n), np.int64)
    for layout in layouts:
        np.add.at(times, layout.pairs(n), 1)
    np.testing.assert_array_equal(times[n - n_q :], held)
    generator = torch.Generator().manual_seed(0)
    q, grad = (torch.randn(1, 2, 1, n_q, 8, dtype=torch.float64, generator=generator) for _ in "qg")
    k, v = (torch.randn(1, 2, n, 8, dtype=torch.float64, generator=generator) for _ in "kv")
    rows = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = (rows[0] @ rows[1][:, :, None].mT * 0.3).masked_fill(
        ~torch.from_numpy(held), -torch.inf
    )
    meant = torch.softmax(scores, -1).nan_to_num(0.0) @ rows[2][:, :, None]
    attention = SteppedAttention(layouts)
    out, lse = attention.forward(q, k, v, None, 0.3)
    torch.testing.assert_close(out, meant)
    found = attention.backward(grad, (q, k, v, out, lse), None, 0.3)
    for one, other in zip(found, torch.autograd.grad(meant, rows, grad), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 200, 257])
def test_that_order_is_verified(n: int) -> None:
    found = verify(spec_of(HIDDEN).program, n, backend="bands")
    assert found.ok, str(found)


def test_a_term_is_irregular_where_any_part_is() -> None:
    hidden, regular = spec_of(HIDDEN).relation(50), (Window(radius=3), Causal())
    assert [is_irregular(hidden), is_irregular(Window(radius=3))] == [True, False]
    assert is_irregular(Intersection((hidden, Causal())))
    assert not is_irregular(Intersection(regular))
