"""Lengths that share a plan: what is chosen, what runs, and which relations have ranges at all."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from relation_checks import times_held
from sweeps import checkered

from attnspec import parse
from attnspec.backends.planner import choose
from attnspec.graphs.operators import Intersection, Union
from attnspec.graphs.patterns.random_blocks import RandomBlocks
from attnspec.graphs.patterns.where import Where
from attnspec.graphs.relation import Relation, is_of_any_length
from attnspec.layout.steps import bands_of, chosen_at, layouts_of
from attnspec.limits import LIMITS
from attnspec.lower.ranges import RANGES, as_planned, drawn_alike, planned_length
from attnspec.lower.work import Work

BODIES = (
    "window(radius = 70)",
    "strided(stride = 40)",
    "columns(last(5)) | window(radius = 9)",
    "block(size = 64, before = 1) | random_blocks(size = 64, blocks = 2, seed = 1)",
)


def relation_of(body: str, n: int) -> Relation:
    return parse(f"attention a {{ attend {body} }}").relation(n)


def test_ranges_are_an_eighth_of_an_octave_and_hold_their_lengths() -> None:
    window = relation_of(BODIES[0], 1)
    found = [planned_length(window, n, n) for n in range(1, 5000)]
    for n, planned in enumerate(found, 1):
        assert n <= planned <= n + max(0, n - 1) / RANGES
        assert n > LIMITS.planned_alone or planned == n
    assert all(before <= after for before, after in pairwise(found))
    # 1,000 lengths need few plans
    assert len({planned for n, planned in enumerate(found, 1) if 1024 < n <= 2048}) == RANGES
    assert planned_length(window, 3, 1100) == 1100


def test_what_has_a_length_of_its_own_has_no_range() -> None:
    grid = parse("attention a { sequence grid(24, 24) attend neighborhood(3, 3) }").relation(576)
    asks = relation_of("where((q - k) % n < 3)", 1100)
    own = (grid, asks, Intersection((asks, relation_of(BODIES[0], 1100))))
    assert isinstance(asks, Where)
    assert not any(map(is_of_any_length, own))
    assert not is_of_any_length(np.ones(1100, bool))
    assert all(is_of_any_length(relation_of(body, 1100)) for body in BODIES)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("n", [257, 1100, 1151])
def test_what_is_chosen_for_a_range_covers_every_length_of_it(body: str, n: int) -> None:
    relation = relation_of(body, n)
    planned = planned_length(relation, n, n)
    found, longest = bands_of(relation, n, n), chosen_at(relation, planned, planned)
    assert [band.sizes for band in found] == [band.sizes for band in longest]
    held = times_held(layouts_of(found, n, n), n)
    assert np.array_equal(held, relation.holds(np.arange(n)[:, None], np.arange(n), n))


@pytest.mark.parametrize("body", BODIES)
def test_one_backend_runs_all_lengths_of_a_range(body: str) -> None:
    names = set()
    for n in (1030, 1099, 1152):
        names.add(choose(Work(relation_of(body, n), n, n), "cpu").name)
        spec = parse(f"attention a {{ attend {body} }}")
        (step,) = spec.plan(n).steps
        names.add(step.chosen.name)
    assert len(names) == 1


def test_a_backend_that_is_asked_for_runs_or_refuses_at_the_length_itself() -> None:
    # its edges are few enough to be listed here, and too many at the end of the range
    spec, n = parse("attention a { attend random(keys = 780, seed = 0) }"), 5200
    work = Work(spec.relation(n), n, n)
    planned = as_planned(work)
    assert planned.n_k == 5632
    scattered = choose(work, "cpu", "scattered")
    assert scattered.refuses(planned, "cpu") is not None
    assert spec.plan(n, backend="scattered").steps[0].chosen is scattered


def test_a_relation_without_a_value_at_the_end_of_its_range_is_planned_at_its_own_length() -> None:
    relation = relation_of("where((q - k) // (1120 - q) < 3)", 1100)
    assert is_of_any_length(relation)
    assert planned_length(relation, 1100, 1100) == 1152
    assert choose(Work(relation, 1100, 1100), "cpu").name
    bands_of(relation, 1100, 1100)


DRAWN = (
    "block(size = 64, before = 1, after = 1) | random_blocks(size = 64, blocks = 2, seed = 7)",
    "window(radius = 3) | random(keys = 20, seed = 1, per_head = false) | expander(degree = 4)",
    "random_blocks(size = 32, blocks = 3, seed = 2) & ~dilated(step = 3, radius = 20)",
)


@pytest.mark.parametrize(("body", "n"), checkered(DRAWN, [200, 1100, 1152]))
def test_heads_that_draw_alike_share_a_plan(body: str, n: int) -> None:
    spec = parse(f"attention a {{ heads 4 attend {body} }}")
    found = [spec.relation(n, head=head) for head in range(4)]
    assert len(set(found)) == 4
    chosen_at.cache_clear()
    bands = [bands_of(relation, n, n) for relation in found]
    assert chosen_at.cache_info().misses == 1
    planned = {as_planned(Work(relation, n, n)) for relation in found}
    assert len(planned) == 1
    for relation, mine in zip(found, bands, strict=True):
        assert [band.sizes for band in mine] == [band.sizes for band in bands[0]]
        held = times_held(layouts_of(mine, n, n), n)
        assert np.array_equal(held, relation.holds(np.arange(n)[:, None], np.arange(n), n))


def test_a_relation_of_several_heads_draws_is_planned_as_it_is() -> None:
    both = Union(tuple(RandomBlocks(16, 2, head=head) for head in (1, 2)))
    assert drawn_alike(both) == (both, None)
    assert drawn_alike(both.terms[0]) == (RandomBlocks(16, 2), 1)
    bands = bands_of(both, 1100, 1100)
    held = times_held(layouts_of(bands, 1100, 1100), 1100)
    assert np.array_equal(held, both.holds(np.arange(1100)[:, None], np.arange(1100), 1100))
