"""Steps of shorter sequences, cut from those of the longest of their range."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_checks import module_of, tensors, with_gradients

from attnspec import parse
from attnspec.backends.bands.kernel import SteppedKernel
from attnspec.backends.torch_call.forms import Form
from attnspec.backends.torch_call.kernel import TorchCallKernel
from attnspec.graphs.look_back import counted_blocks, is_steady
from attnspec.graphs.relation import Relation
from attnspec.layout import edge_list, steps
from attnspec.layout.orders import Order
from attnspec.layout.tile_layout import step_layout
from attnspec.layout.tiling import classify
from attnspec.limits import LIMITS
from attnspec.lower.lower import Binder
from attnspec.lower.work import Work
from attnspec.runtime import engine

STEADY = (
    "window(radius = 13)",
    "causal window(before = 40, after = 0)",
    "causal window(before = 20, after = 0) | global(first(4))",
    "block(size = 24, before = 1, after = 1) | global(first(9))",
    "full",
    "where(q % 5 == k % 3)",
)


def relation_of(body: str, n: int) -> Relation:
    causal = "causal " if body.startswith("causal ") else ""
    return parse(f"attention a {{ {causal}attend {body.removeprefix('causal ')} }}").relation(n)


def kernel_of(relation: Relation, n: int, order: Order, sizes: tuple[int, int]) -> SteppedKernel:
    layout = step_layout(classify(relation, n, n, order, sizes), relation, n)
    return SteppedKernel(Work(relation, n, n), (0,), torch.device("cpu"), [layout])


def test_a_block_of_which_other_places_are_left_is_not_cut() -> None:
    # tiles of two classes are one block, whose places ascend in each of them
    whole = kernel_of(relation_of("full", 40), 40, Order(2, 2), (20, 20))
    assert whole.below(40) is not None
    assert whole.below(37) is None


def test_pairs_that_change_with_the_number_of_blocks_are_cut_up_to_their_next() -> None:
    blocks = parse("attention a { attend random_blocks(size = 24, blocks = 1) | self }")
    assert counted_blocks(blocks.relation(100)) == (24,)
    binder = Binder(blocks.program, {})
    assert [binder.longest(0, 2, n) for n in (96, 97, 257, 287, 300)] == [96, 120, 264, 288, 312]
    causal = parse("attention a { causal attend random_blocks(size = 24, blocks = 1) | self }")
    assert Binder(causal.program, {}).longest(0, 2, 97) == LIMITS.planned_alone
    for body in ("window(radius = n // 9)", "window(radius = 4) | global(last(3))"):
        program = parse(f"attention a {{ attend {body} }}").program
        assert Binder(program, {}).longest(0, 2, 97) is None
    grid = parse("attention a { sequence grid(4, 5) attend window(radius = 2) }").program
    assert Binder(grid, {}).longest(0, 2, 20) is None


def test_a_length_in_a_known_range_lays_out_its_end_alone() -> None:
    module = module_of("causal attend window(before = 90, after = 0)", "bands")
    q, k, v = tensors(1, 2, 600, 600)
    with torch.no_grad():
        module(*(x[:, :, :513] for x in (q, k, v)))
        laid_out = steps._whole.cache_info().misses
        for n in range(514, 577, 5):
            module(*(x[:, :, :n] for x in (q, k, v)))
    assert steps._whole.cache_info().misses == laid_out
    # the end is no longer than the window and two tiles
    (group,) = module.engine.prepare(0, 2, 2, 574, 574, "cpu").groups
    assert isinstance(group.kernel, SteppedKernel)
    (step,) = group.kernel.attention.steps
    # the end is no longer than the window and two tiles
    cut = [strip for strip in step.strips if strip.cut]
    assert 0 < sum(strip.blocks for strip in cut) <= 2 < sum(s.blocks for s in step.strips) / 2


@pytest.mark.parametrize(
    "body",
    [
        "causal attend full",
        "attend window(radius = 40) | global(first(3))",
        "causal attend strided(stride = 16)",
        "heads 4 attend block(size = 64) | random_blocks(size = 64, blocks = 1)",
    ],
)
def test_a_length_of_a_known_range_chooses_nothing(
    body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(body)

    def never(*given: object) -> None:
        raise AssertionError("this was chosen before")

    with torch.no_grad():
        for lengths in ((290, 300, 319), (200, 256, 193)):
            module(*tensors(1, 4, lengths[0], lengths[0]))
            with monkeypatch.context() as patched:
                patched.setattr(engine, "choose", never)
                for n in lengths[1:]:
                    assert module(*tensors(1, 4, n, n)).isfinite().all()


@pytest.mark.parametrize(
    "body",
    [
        "causal attend window(before = 40, after = 0)",
        "attend window(radius = 40) | global(first(3)) score alibi()",
        "heads 4 attend block(size = 64) | random_blocks(size = 64, blocks = 1)",
        "causal attend full",
    ],
)
def test_short_lengths_share_a_mask(body: str) -> None:
    module, same = module_of(body), module_of(body, "dense")
    for n in (70, 100, 41, 20, 128, 127, 256, 70):
        given = tensors(2, 4, n, n)
        padding = (torch.rand(2, n) < 0.8) if n % 2 else None
        found = module(*given, key_padding_mask=padding)
        meant = same(*given, key_padding_mask=padding)
        pairs = zip(with_gradients(found, given), with_gradients(meant, given), strict=True)
        for mine, right in ((found, meant), *pairs):
            torch.testing.assert_close(mine, right, rtol=0, atol=1e-11)
        (group,) = module.engine.prepare(0, 4, 4, n, n, "cpu").groups
        assert isinstance(group.kernel, TorchCallKernel)
        assert group.kernel._longer is not None
    assert len(module.engine._whole) <= 3


def test_a_cut_mask_says_no_more_than_it_must() -> None:
    module = module_of("causal attend window(before = 40, after = 0)")
    forms = []
    for n in (1 << 8, 42, 41, 20):
        (group,) = module.engine.prepare(0, 4, 4, n, n, "cpu").groups
        forms.append(group.kernel.form)  # type: ignore[attr-defined]
    assert forms == [Form.MASK, Form.MASK, Form.CAUSAL, Form.CAUSAL]


@pytest.mark.parametrize(
    "body",
    [*STEADY[:3], "full", "causal strided(stride = 7)", "dilated(radius = 17, step = 4)"],
)
def test_edges_of_a_range_are_listed_once(body: str) -> None:
    relation = relation_of(body, 240)
    whole = edge_list.edge_layout(relation, 240, 240)
    at = np.arange(240)
    held = np.broadcast_to(relation.holds(at[:, None], at[None], 240), (240, 240))
    for n in (1, 2, 17, 100, 239, 240):
        layout = whole.below(n)
        starts, queries, places = layout.by_key
        found = np.zeros((n, n), np.int64)
        np.add.at(found, (queries, layout.keys[places]), 1)
        np.testing.assert_array_equal(found, held[:n, :n])
        assert starts[-1] == found.sum()
        assert (layout.keys < n).all()
        assert np.diff(layout.offsets).max() <= n
        # a place that is too many repeats a key of its query
        assert held[layout.queries, layout.keys].all()


@pytest.mark.parametrize("backend", ["bands", "scattered"])
def test_a_length_is_laid_out_though_the_longest_of_its_range_has_no_value(backend: str) -> None:
    # at query 300 it has none, and 290 is planned as 320 is
    graph = "window(before = 2, after = 0) & where(k // (300 - q) >= 0)"
    assert is_steady(relation_of(f"causal {graph}", 290))
    body = f"causal attend {graph}"
    given = tensors(1, 2, 290, 290)
    found, meant = module_of(body, backend)(*given), module_of(body, "dense")(*given)
    torch.testing.assert_close(found, meant, rtol=0, atol=1e-11)
