"""Hops, paths, depth, diameter and the rest, against boolean products and networkx."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from attnspec.analysis.quality import Figure
from attnspec.analysis.reach import bitsets, reach, spread, walks
from attnspec.analysis.reach.chain import layers_of
from attnspec.analysis.reach.spread import period
from attnspec.graphs.stack import Stack
from attnspec.spec import parse
from attnspec.text.diagnostics import AttnSpecError

# --- long sequences -------------------------------------------------------------------------------


def long(body: str) -> Stack:
    return parse(f"attention a {{ {body} }}").stack()


def test_hops_of_a_million_positions() -> None:
    n = 1 << 20
    found = reach.hops(long("causal attend window(before = 1, after = 0)"), n, n - 1)
    assert np.array_equal(found, np.arange(n)[::-1])
    found = reach.hops(long("attend dilated(radius = 64, step = 4)"), n, 6)
    assert (found >= 0).sum() == n // 4
    assert found[6 + 64 * 1000] == 1000
    found = reach.hops(long("attend strided(stride = isqrt(n))"), n, 12_345)
    assert np.bincount(found).tolist() == [1, 3069, n - 3070]
    found = reach.hops(long("attend self | global(first(1))"), n, 9)
    assert np.bincount(found).tolist() == [1, 1, n - 2]


def test_causal_graphs_that_repeat_are_exact_at_any_length() -> None:
    stack = long("causal attend strided(stride = isqrt(n))")
    assert reach.diameter(stack, 1 << 20) == Figure(2)
    stack = long("causal attend window(before = 31, after = 0)")
    n = 1 << 18
    found = reach.path_length(stack, n)
    gap = np.arange(1, n)
    exact = ((n - gap) * -(-gap // 31)).sum() / ((n - gap).sum())
    assert found.quality == "exact"
    assert found.value == pytest.approx(exact)
    assert reach.depth(stack, n).value == -(-(n - 1) // 31)


def test_spans_are_exact_at_any_length() -> None:
    stack = long("attend window(radius = 100)")
    assert reach.diameter(stack, 1 << 18) == Figure(-(-((1 << 18) - 1) // 100))
    assert reach.depth(long("attend block(size = 100)"), 1 << 16).value is None
    stack = long("layers 3 attend window(radius = 2 + layer)")
    assert reach.depth(stack, 10_000).value == 3 + -(-(9999 - 9) // 4)


def test_one_position_that_all_read_and_that_reads_all_bounds_the_diameter() -> None:
    stack = long("attend window(radius = 9) | global(positions(77)) | random(keys = 2)")
    assert reach.diameter(stack, 1 << 16) == Figure(2)
    assert reach.diameter(long("attend full"), 1 << 16) == Figure(1)


def test_what_is_only_sampled_says_so() -> None:
    stack = long("attend random(keys = 8, seed = 3) | window(radius = 1)")
    found = reach.diameter(stack, 10_000)
    assert found.quality == "estimate"
    assert "so it is no less" in found.note
    query, key = map(int, np.array(found.note.replace(";", "").split())[[4, 6]])
    assert reach.hops(stack, 10_000, query)[key] == found.value
    assert reach.path_length(stack, 10_000).quality == "estimate"
    # a pair that is never joined is a fact, wherever it was found
    split = long("attend random(keys = 8, seed = 3) & residue(step = 2)")
    assert reach.depth(split, 10_000).quality == "exact"


def test_symmetry_is_for_causal_graphs_alone() -> None:
    # near the end of the sequence a two-sided window is cut off, and the hops are others
    assert period(layers_of(long("attend window(radius = 3)"), 50)) is None
    assert period(layers_of(long("causal attend window(radius = 3)"), 50)) == 1
    stack = long("causal attend block(size = 6) | columns(every(4))")
    assert period(layers_of(stack, 50)) == 12
    assert period(layers_of(long("causal attend columns(every(4, offset = 4))"), 50)) is None
    assert period(layers_of(long("causal attend random(keys = 2)"), 50)) is None
    assert period(layers_of(long("causal attend shift(window(radius = 3), by = 2)"), 50)) is None


def test_levels_stop_where_they_are_told_to() -> None:
    chain = layers_of(long("attend window(radius = 1)"), 40)
    assert len(bitsets.levels(chain, 3)) == 4
    assert len(spread.spread(chain, 3).missing) == 4
    assert spread.spread(chain, 3).layers is None
    assert len(spread.spread(chain).missing) == 40


@pytest.mark.parametrize(
    "body",
    [
        "causal attend window(radius = 3) | residue(step = 11)",
        "causal layers 3 attend window(radius = layer + 1) | residue(step = 9 + layer)",
        "causal attend block(size = 6) | columns(every(4))",
        "causal layers 2 attend window(radius = 2 + layer)",
        "layers 2 attend window(radius = 2 + layer)",
        "layers 2 attend window(radius = 1) | columns(first(layer))",
    ],
)
def test_so_many_layers_are_the_first_of_all(body: str) -> None:
    chain = layers_of(long(body), 60)
    whole = spread.spread(chain)
    stop = len(whole.missing) + 2
    for most in (*range(min(stop, 6)), *range(6, stop - 3, 9), *range(max(6, stop - 3), stop)):
        part = spread.spread(chain, most)
        assert len(part.missing) <= most + 1
        assert [part.after(at) for at in range(most + 1)] == [
            whole.after(at) for at in range(most + 1)
        ]
        for query in (0, 17, 59):
            every = walks.hops(chain, query)
            assert (walks.hops(chain, query, most) == np.where(every <= most, every, -1)).all()


def test_terms_that_heads_share_are_read_once() -> None:
    stack = long("heads 4 attend window(radius = 3) | random(keys = 2)")
    graph = layers_of(stack, 50).graph(0)
    assert len(graph.readings) == 1 + 4
    apart = long("heads 2 attend columns(positions(head)) | rows(positions(0))")
    assert len(layers_of(apart, 50).graph(0).readings) == 2 + 1


def test_positions_are_checked() -> None:
    stack = long("attend full")
    for wrong in (-1, 5):
        with pytest.raises(AttnSpecError, match="between 0 and 4"):
            reach.hops(stack, 5, wrong)
        with pytest.raises(AttnSpecError, match="between 0 and 4"):
            reach.path(stack, 5, 0, wrong)
        with pytest.raises(AttnSpecError, match="between 0 and 4"):
            reach.eccentricity(stack, 5, wrong)


def test_no_position_at_all() -> None:
    for body in ("attend full", "causal layers 2 attend self", "attend window(radius = 3)"):
        stack = long(body)
        assert reach.depth(stack, 0) == Figure(0)
        assert reach.diameter(stack, 0) == Figure(0)
        assert reach.path_length(stack, 0) == Figure(0.0)


@pytest.mark.parametrize("way", [reach.path, reach.path_in_union])
def test_paths_are_between_positions(way: Callable[..., object]) -> None:
    stack = parse("attention a { attend full }").stack()
    for query, key in ((9, 0), (0, 9), (-1, 0), (0, -1)):
        with pytest.raises(AttnSpecError, match="a position must be between 0 and 8"):
            way(stack, 9, query, key)
