"""Hops, paths, depth, diameter and the rest, against boolean products and networkx."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator

import networkx
import numpy as np
import pytest
from random_specs import spec_text
from reach_brute import FAR, Small, small_zoo
from relation_checks import definition
from zoo import OF_EACH_KIND

from attnspec.analysis.quality import Figure
from attnspec.analysis.reach import bitsets, reach, spread, walks
from attnspec.analysis.reach.chain import Chain, layers_of, union_of
from attnspec.analysis.reach.spans import layers_needed, spans_of
from attnspec.analysis.reach.spread import period
from attnspec.graphs.stack import Stack
from attnspec.spec import parse
from attnspec.text.diagnostics import AttnSpecError

BODIES = [
    "causal attend window(before = 3, after = 0)",
    "attend window(radius = 1)",
    "attend window(before = 2, after = 0)",
    "attend dilated(radius = 4, step = 2)",
    "attend block(size = 5, before = 1)",
    "causal attend block(size = 6, before = 1)",
    "causal attend fixed(stride = 5, cells = 2)",
    "causal attend strided(stride = 6) - self",
    "causal heads 2 attend block(size = 4) head 1 { attend summary(stride = 6, cells = 1) }",
    "causal attend global(every(4))",
    "causal attend columns(every(3, offset = 7)) | window(before = 1, after = 0)",
    "layers 3 attend window(radius = layer + 1)",
    "heads 2 attend dilated(radius = 6, step = 3) head 1 { attend dilated(radius = 3, step = 3) }",
    "causal layers 3 attend window(before = 3 - layer, after = 0)",
    "layers 2 attend dilated(radius = 4, step = 2) layer 1 { attend self }",
    "layers 3 attend self layer 1 { attend where((q - k) % n == 1) }",
    "layers 4 attend residue(step = 2 + layer) layer 2 { attend random(keys = 1, seed = 3) }",
    "attend where(q == k + 1) | window(radius = 0)",
]


def stacks(part: int, every: bool) -> Iterator[Small]:
    """Stacks of one and of several layers at several lengths, or at some of these in turn."""
    for number, body in enumerate(BODIES if part == 0 else ()):
        spec = parse(f"attention a {{ {body} }}")
        for n in (1, 2, 7, 33, 64) if every else ((1, 7, 64), (2, 33))[number % 2]:
            yield Small(spec, n)
    for seed in range(part * 12, part * 12 + 12):
        source = random.Random(seed)
        one, other = (spec_text(seed + more).split("attend", 1)[1] for more in (1000, 2000))
        graphs = [text.split("\n")[0].rstrip("} ") for text in (one, other)]
        causal = "causal" if source.random() < 0.5 else ""
        body = f"{causal} layers 2 attend {graphs[0]} layer 1 {{ attend {graphs[1]} }}"
        specs = parse(spec_text(seed)), parse(f"attention a {{ {body} }}")
        for n in (2, 13, 40) if every else ((2, 40), (13,))[seed % 2]:
            for spec in specs:
                yield Small(spec, n)


def expected(found: np.ndarray, allowed: np.ndarray, levels: int) -> list[tuple[int, object]]:
    """How many allowed pairs take more than 0, 1, … layers, and the first of them."""
    answer: list[tuple[int, object]] = []
    for layers in range(levels):
        pairs = np.argwhere(allowed & (found > layers))
        answer.append((len(pairs), tuple(pairs[0].tolist()) if len(pairs) else None))
    return answer


def assert_right(small: Small) -> None:
    """Every figure of a stack, against its boolean products."""
    stack, n = small.stack, small.n
    hops, distances, allowed = small.hops, small.distances, small.allowed
    for query in {0, n // 2, n - 1}:
        found = reach.hops(stack, n, query)
        assert found.dtype == np.int64
        assert np.array_equal(found, np.where(hops[query] == FAR, -1, hops[query]))
        mine = distances[query][allowed[query]].max()
        assert reach.eccentricity(stack, n, query).value == (None if mine == FAR else mine)
        for key in {0, n // 3, n - 1}:
            assert_path(small, query, key)
        column = hops[:, query]
        assert np.array_equal(reach.told(stack, n, query), np.where(column == FAR, -1, column))
    far = distances[allowed]
    never = far.max() == FAR
    assert reach.diameter(stack, n).value == (None if never else far.max())
    mean = reach.path_length(stack, n).value
    others = far.sum() / max(1, len(far) - n)
    assert mean is None if never else mean == pytest.approx(others)
    joined = hops[allowed]
    never = joined.max() == FAR
    assert reach.depth(stack, n).value == (None if never else joined.max())
    for chain, found in ((layers_of(stack, n), hops), (union_of(stack, n), distances)):
        assert_spread(chain, found, allowed)


def assert_spread(chain: Chain, found: np.ndarray, allowed: np.ndarray) -> None:
    """Every way to the spread says the same."""
    ways = [spread._by_bits(chain, 10_000)]
    spans = spans_of(chain)
    if spans is not None:
        ways.append(spread._by_spans(chain, spans, 10_000))
        assert layers_needed(chain, spans) == ways[0].layers
    repeats = period(chain)
    if repeats is not None and repeats <= chain.n:
        ways.append(spread._by_period(chain, repeats, None))
    for way in ways:
        levels = list(zip(way.missing, way.first, strict=True))
        assert levels == expected(found, allowed, len(levels))
        assert way.missing[-1] == (found[allowed] == FAR).sum()
        assert (way.pairs, way.own) == (allowed.sum(), chain.n)


def assert_path(small: Small, query: int, key: int) -> None:
    """Paths lead from query to key, each step an edge of its head, and take the fewest layers."""
    stack, n = small.stack, small.n
    steps = reach.path(stack, n, query, key)
    if small.hops[query, key] == FAR:
        assert steps is None
    else:
        assert steps is not None
        layers = [layer for layer, _, _ in steps]
        assert layers == sorted(layers, reverse=True)
        assert len(set(layers)) == len(layers)
        assert (layers[0] + 1 if layers else 0) == small.hops[query, key]
        assert_edges(small, query, key, steps)
    steps = reach.path_in_union(stack, n, query, key)
    if small.distances[query, key] == FAR:
        assert steps is None
    else:
        assert steps is not None
        assert len(steps) == small.distances[query, key]
        assert_edges(small, query, key, steps)


def assert_edges(small: Small, query: int, key: int, steps: reach.Steps) -> None:
    at = query
    for layer, head, position in steps:
        assert small.mask(min(layer, small.spec.layers - 1), head)[at, position]
        at = position
    assert at == key


@pytest.mark.parametrize(
    ("part", "every"),
    [(0, False), *(pytest.param(part, True, marks=pytest.mark.slow) for part in range(5))],
)
def test_figures_are_those_of_boolean_products(part: int, every: bool) -> None:
    for small in stacks(part, every):
        assert_right(small)


@pytest.mark.parametrize("kinds", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_figures_of_the_zoo(kinds: bool) -> None:
    of_each = {name for _, name in OF_EACH_KIND}
    for name, small in small_zoo().items():
        if (name in of_each) == kinds:
            assert_right(small)


def test_networkx_agrees() -> None:
    for small in small_zoo().values():
        graph = networkx.from_numpy_array(
            np.logical_or.reduce(small.layers), create_using=networkx.DiGraph
        )
        found = dict(networkx.all_pairs_shortest_path_length(graph))
        lengths = [found[q].get(k, FAR) for q, k in np.argwhere(small.allowed).tolist()]
        diameter = reach.diameter(small.stack, small.n).value
        assert diameter == (None if max(lengths) == FAR else max(lengths))


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


def test_long_sequences_are_not_looked_at_pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of lengths at which not every pair is looked at, at lengths where each is."""
    for module in (reach, spread):
        monkeypatch.setattr(module, "EVERY_PAIR", 8)
    monkeypatch.setattr(spread, "FEW_QUERIES", 0)
    qualities: Counter[str] = Counter()
    bodies = ("causal attend causal | random(keys = 2)", "attend full | random(keys = 2)")
    specs = [parse(spec_text(seed)) for seed in range(30)]
    for spec in (*specs, *(parse(f"attention a {{ {body} }}") for body in (*bodies, *BODIES))):
        small = Small(spec, 19)
        for figure, chain, hops in (
            (reach.depth, layers_of(small.stack, 19), small.hops),
            (reach.diameter, union_of(small.stack, 19), small.distances),
        ):
            most = int(hops[small.allowed].max())
            found = figure(small.stack, 19)
            qualities[found.quality] += 1
            if found.value is None:
                # a pair that is never joined is named
                assert most == FAR
                query, key = map(int, re.findall(r"\d+", found.note))
                assert hops[query, key] == FAR
                assert small.allowed[query, key]
            elif found.quality == "exact":
                assert found.value == most
            else:
                _, query, key, after = map(int, re.findall(r"\d+", found.note))
                assert hops[query, key] == after == found.value <= most
            bound = reach._at_most(chain)
            assert bound is None or bound >= most
            whole = any(definition(one, 19)[small.allowed].all() for one in chain.at(0))
            assert (bound == 1) == (whole and chain.distinct == 1)
    assert min(qualities["exact"], qualities["estimate"]) > 10


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


def test_many_keys_are_taken_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = layers_of(long("attend window(radius = 3) | columns(last(1))"), 300)
    whole = bitsets.levels(chain, 1000)
    monkeypatch.setattr(bitsets, "BLOCK", 1)
    assert [(level.missing, level.first) for level in bitsets.levels(chain, 1000)] == [
        (level.missing, level.first) for level in whole
    ]


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
    for body in BODIES:
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
