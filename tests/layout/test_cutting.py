"""Steps of shorter sequences, cut from those of the longest of their range."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from attention_checks import module_of, tensors, with_gradients

from attnspec import parse
from attnspec.backends.bands.kernel import SteppedKernel
from attnspec.graphs.look_back import is_steady
from attnspec.graphs.relation import Relation
from attnspec.layout import edge_list, steps
from attnspec.layout.batches import strips_of, unfolded
from attnspec.layout.cutting import cut
from attnspec.layout.steps import natural_layouts
from attnspec.layout.tile_layout import StepLayout

STEADY = (
    "window(radius = 13)",
    "causal window(before = 40, after = 0)",
    "causal window(before = 20, after = 0) | global(first(4))",
    "block(size = 24, before = 1, after = 1) | global(first(9))",
    "full",
    "where(q % 5 == k % 3)",
)

LONGEST = 150


def relation_of(body: str, n: int) -> Relation:
    causal = "causal " if body.startswith("causal ") else ""
    return parse(f"attention a {{ {causal}attend {body.removeprefix('causal ')} }}").relation(n)


def times_of_cut(layout: StepLayout, n: int) -> np.ndarray:
    """How often whole blocks and the other tiles of the first n positions hold each pair."""
    strips = strips_of(layout, 4)
    whole, rest = cut(layout, strips, n)
    assert rest.q.last == rest.k.last == n
    times = np.zeros((n, n), np.int64)
    np.add.at(times, rest.pairs(n), 1)
    for strip, count in zip(strips, whole, strict=True):
        for block in range(count):
            q, k = (
                (tiles[block][:, None] * side.size + np.arange(side.size)).ravel()
                for tiles, side in ((strip.rows, layout.q), (strip.columns, layout.k))
            )
            held = np.ones((len(q), len(k)), bool)
            if strip.mask is not None:
                held = strip.mask
            elif strip.kinds is not None:
                held = unfolded(layout.masks, strip.kinds[block][None])[0]
            rows, columns = np.nonzero(held)
            np.add.at(times, (q[rows], k[columns]), 1)
    return times


@pytest.mark.parametrize("sizes", [(16, 16), (8, 20), (32, 5)])
@pytest.mark.parametrize("body", STEADY)
def test_every_pair_is_held_once_at_every_length(body: str, sizes: tuple[int, int]) -> None:
    relation = relation_of(body, LONGEST)
    assert is_steady(relation)
    (layout,) = natural_layouts(relation, LONGEST, sizes)
    at = np.arange(LONGEST)
    held = np.broadcast_to(relation.holds(at[:, None], at[None], LONGEST), (LONGEST, LONGEST))
    for n in (*range(1, 34), *range(34, LONGEST, 7), LONGEST - 1, LONGEST):
        np.testing.assert_array_equal(times_of_cut(layout, n), held[:n, :n], err_msg=f"n = {n}")


@pytest.mark.parametrize(
    "body",
    [
        "attend window(radius = 70)",
        "causal attend window(before = 100, after = 0) | global(first(4)) score alibi()",
        "heads 4 attend window(radius = 50) score bias(buckets = 4)",
        "attend block(size = 64, before = 1, after = 1) | global(first(64)) normalize softmax1",
        # what depends on the length is laid out by itself
        "attend window(radius = 40) | columns(last(5))",
        "attend window(radius = n // 20)",
        "causal attend strided(stride = 30)",
    ],
)
def test_lengths_that_come_and_go_are_computed_as_defined(body: str) -> None:
    module, same = module_of(body, "bands"), module_of(body, "dense")
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    same.load_state_dict(module.state_dict())
    drawn = random.Random(3)
    lengths = [257, 287, 288, 289, 320, *(drawn.randint(257, 640) for _ in range(4)), 258]
    for number, n in enumerate(lengths):
        given = tensors(2, 4, n, n, key_heads=2)
        # of none, of each sample, of all samples
        real = torch.rand(2, n) < 0.8
        padding = [None, real, real[:1].expand(2, n)][number % 3]
        found = module(*given, key_padding_mask=padding)
        meant = same(*given, key_padding_mask=padding)
        pairs = zip(with_gradients(found, given), with_gradients(meant, given), strict=True)
        for mine, right in ((found, meant), *pairs):
            torch.testing.assert_close(mine, right, rtol=0, atol=1e-11)


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
    end = np.diff(step.layout.starts) > 0
    assert 0 < end.sum() <= 2 < len(end) / 2


@pytest.mark.parametrize(
    "body", [*STEADY[:3], "causal strided(stride = 7)", "dilated(radius = 17, step = 4)"]
)
def test_edges_of_a_range_are_listed_once(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    relation = relation_of(body, 600)
    assert is_steady(relation)
    listed = edge_list._longest_edges.cache_info().misses
    at = np.arange(600)
    held = np.broadcast_to(relation.holds(at[:, None], at[None], 600), (600, 600))
    for n in (577, 600, 639, 601):
        layout = edge_list.edge_layout(relation, n, n)
        starts, queries, places = layout.by_key
        found = np.zeros((n, n), np.int64)
        np.add.at(found, (queries, layout.keys[places]), 1)
        np.testing.assert_array_equal(found[:577, :577], held[:577, :577])
        assert starts[-1] == found.sum()
    assert edge_list._longest_edges.cache_info().misses == listed + 1
    monkeypatch.setattr(edge_list, "_SHARED", 0)
    assert edge_list.edge_layout(relation, 577, 577).keys.size
    assert edge_list._longest_edges.cache_info().misses == listed + 1


@pytest.mark.parametrize("backend", ["bands", "scattered"])
def test_a_length_is_laid_out_though_the_longest_of_its_range_has_no_value(backend: str) -> None:
    # at query 300 it has none, and 290 is planned as 320 is
    graph = "window(before = 2, after = 0) & where(k // (300 - q) >= 0)"
    assert is_steady(relation_of(f"causal {graph}", 290))
    body = f"causal attend {graph}"
    given = tensors(1, 2, 290, 290)
    found, meant = module_of(body, backend)(*given), module_of(body, "dense")(*given)
    torch.testing.assert_close(found, meant, rtol=0, atol=1e-11)
