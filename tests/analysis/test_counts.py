"""Counts of pairs, of keys and of readers, against masks, and at lengths that no mask has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_specs import spec_text
from relation_checks import definition
from views import FIGURES, Case, differing

from attnspec.analysis.counting import degrees, differences, progressions
from attnspec.analysis.counting.degrees import (
    degrees_of,
    edges_of,
    readers_of,
    weighted,
)
from attnspec.analysis.reach.mirrored import asymmetry, one_way
from attnspec.graphs.operators import Complement, Intersection, Transpose, Union
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.patterns.columns_rows import Columns, Rows
from attnspec.graphs.patterns.expander import Expander
from attnspec.graphs.patterns.full import Full
from attnspec.graphs.patterns.powers import Powers
from attnspec.graphs.patterns.random_ import Random
from attnspec.graphs.patterns.residue import Residue
from attnspec.graphs.patterns.where import Where
from attnspec.graphs.patterns.window import Window
from attnspec.graphs.predicates.comparisons import Ranked
from attnspec.graphs.relation import Elementwise, Progressions, Relation, evaluate_pairs
from attnspec.graphs.stack import TooMuch
from attnspec.graphs.token_sets import Every
from attnspec.ir.scalars import Apply, Symbol
from attnspec.limits import LIMITS
from attnspec.spec import parse

COUNTS = {
    name: FIGURES[name] for name in "edges degree readers empty_rows unread_keys symmetric".split()
}


@pytest.mark.parametrize("seed", range(80, 92))
@pytest.mark.limits("", "tiny")
def test_what_is_too_large_to_list_is_counted_alike(
    seed: int,
) -> None:
    spec = parse(spec_text(seed))
    for n in ((1, 29), (2, 40))[seed % 2]:
        for _, _, relation in spec.stack().bound(n).found:
            mask = definition(relation, n)
            np.testing.assert_array_equal(degrees_of(relation, n), mask.sum(axis=1))
            np.testing.assert_array_equal(readers_of(relation, n), mask.sum(axis=0))
            weights = np.arange(n) ** 2
            np.testing.assert_array_equal(weighted(relation, n, weights), mask @ weights)
            assert (asymmetry(relation, n)[0] is not None) == bool((mask != mask.T).any())


def test_inputs_that_are_not_given_are_unknown() -> None:
    spec = parse("attention a { input marked: tokens attend global(marked) }")
    assert spec.stack().unknown == "its pairs depend on run-time inputs"
    assert spec.stack({"marked": np.zeros(3, bool)}).unknown is None


# --- lengths that no mask has ---------------------------------------------------------------------

LONG = 1 << 20


def test_a_million_positions() -> None:
    n, m = LONG, 1 << 18
    assert degrees_of(Full(), n).tolist()[:2] == [n, n]
    assert edges_of(Intersection((Full(), Causal())), n) == n * (n + 1) // 2
    window = Intersection((Window(radius=300), Causal()))
    assert degrees_of(window, n).sum() == edges_of(window, n) == 301 * n - 300 * 301 // 2
    both = Union((Residue(64), Columns(Every(4, 0))))
    # of four residues modulo 64 that differ by 16 one holds the column
    assert edges_of(both, n) == n * (n // 64 + m) - (n // 4) * (n // 64)
    np.testing.assert_array_equal(readers_of(Powers(), n), degrees_of(Powers(), n))


def test_what_has_no_closed_form_is_counted_as_far_as_it_can_be() -> None:
    product = Apply("%", (Apply("*", (Symbol("q"), Symbol("k"))), 7))
    odd = Where(Apply("==", (product, 3)))
    n = 300
    at = np.arange(n)
    held = at[:, None] * at % 7 == 3
    np.testing.assert_array_equal(degrees_of(odd, n), held.sum(axis=1))
    with pytest.raises(TooMuch, match="not looked at"):
        degrees_of(odd, int(LIMITS.pairs_evaluated**0.5) + 1)


@pytest.mark.limits("", "tiny")
def test_a_drawn_part_beside_what_is_not_listed() -> None:
    body = "attend where((q - k) % n <= 3) | random(keys = 3, seed = 2) | expander(degree = 2)"
    assert differing(Case(parse(f"attention a {{ {body} }}"), 90), COUNTS) == []


@settings(max_examples=40)
@given(
    st.lists(st.integers(-5, 60), min_size=1, max_size=40).map(sorted),
    st.lists(st.integers(-100, 200), max_size=20),
)
def test_values_are_looked_up_as_they_are_searched(values: list[int], limits: list[int]) -> None:
    for array in (np.array(values), np.array(values, float), np.array(values) * 1000):
        ranked = Ranked(None, array)
        for wanted in (np.array(limits, int), np.array(limits, float) + 0.5):
            assert np.array_equal(ranked.below(wanted), np.searchsorted(array, wanted, "left"))
            assert np.array_equal(ranked.up_to(wanted), np.searchsorted(array, wanted, "right"))


def test_drawn_graphs_are_counted_from_their_tables() -> None:
    n = 50_000
    drawn = Random(5, seed=3)
    relation = Union((drawn, Window(radius=1)))
    table = drawn.rows(0, n, n)
    near = np.abs(table[0] - table[1]) <= 1
    assert edges_of(relation, n) == 5 * n + 3 * n - 2 - int(near.sum())
    np.testing.assert_array_equal(
        readers_of(Complement(drawn), n), n - np.bincount(table[1], minlength=n)
    )


def test_closed_forms_of_some_rows_alone_do_not_mislead() -> None:
    # the queries of the set read one range, the others a progression that no union can hold
    text = "attend global(every(24)) | summary(stride = 22, cells = 2) | residue(step = 5)"
    assert differing(Case(parse(f"attention a {{ {text} }}"), 97), COUNTS) == []


# --- symmetry -------------------------------------------------------------------------------------


def test_symmetry_of_graphs_too_large_to_compare_pair_by_pair() -> None:
    n = 40_000
    even = Union((Window(radius=500), Columns(Every(7, 0))))
    assert asymmetry(even, n)[0] is not None
    whole = Union((Window(radius=500), Columns(Every(97, 0)), Rows(Every(97, 0))))
    assert asymmetry(whole, n) == (None, False)
    # as many keys as readers everywhere, and still no mirror image
    for relation, length in ((Onward(500), n), (Onward(5), 40)):
        position, certain = asymmetry(relation, length)
        assert certain
        assert position is not None
        q, k = one_way(relation, length, position)
        pair = np.array([q]), np.array([k])
        assert relation.holds(*pair, length)
        assert not relation.holds(*pair[::-1], length)


@dataclass(frozen=True)
class Onward(Relation):
    """The keys that follow the query, with the sequence closed to a ring."""

    count: int

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return (k - q - 1) % n < self.count

    def progressions(self, q: np.ndarray, n: int) -> Progressions:
        start = np.stack([q + 1, np.zeros_like(q)], axis=1)
        stop = np.stack([np.minimum(q + 1 + self.count, n), q + 1 + self.count - n], axis=1)
        return start, stop, 1


@pytest.mark.parametrize("n", [1, 2, 40, 301])
def test_what_is_closed_is_not_listed_beside_what_is_drawn(n: int) -> None:
    drawn, later = Random(3, seed=1), Expander(2, seed=2)
    near = Union((Window(radius=2), Residue(7)))
    weights = np.arange(n)
    for relation in (
        Union((near, drawn, later)),
        Union((Columns(Every(3, 0)), drawn)),
        Intersection((Causal(), Union((near, drawn)))),
        Intersection((Causal(), Union((drawn, later)))),
    ):
        for asked in (relation, Transpose(relation)):
            mask = evaluate_pairs(asked, np.arange(n)[:, None], np.arange(n)[None], n)
            np.testing.assert_array_equal(degrees._listed(asked, n, None), mask.sum(axis=1))
            np.testing.assert_array_equal(degrees._listed(asked, n, weights), mask @ weights)


def test_what_is_shared_is_counted_where_what_is_not_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = Window(radius=5), Window(radius=3)
    wanted = differences.only_in(first, second, 40)
    assert wanted.count == 2 * (36 + 35)

    def refused(*_: Relation) -> Relation:
        raise TooMuch("too many")

    monkeypatch.setattr(differences, "difference", refused)
    assert differences.only_in(first, second, 40) == wanted


@pytest.mark.limits("", "tiny")
def test_a_group_of_progressions_answers_as_its_members_do() -> None:
    """Sums, tallies and marks of ranges of places, in the order of positions or in another."""
    draws = np.random.default_rng(0)
    for turn in range(300):
        n = int(draws.integers(1, 90))
        step = int(draws.integers(1, min(n, 9) + 1))
        many = int(draws.integers(1, 1 + max(1, n // (16 if turn % 3 else 2))))
        start = draws.integers(n, size=many)
        if turn % 2:
            # classes that are held whole lie beside each other
            start %= step
        whole = -(-(n - start) // step)
        count = whole if turn % 4 == 1 else draws.integers(1, whole + 1)
        row = draws.integers(n, size=many)
        order = draws.permutation(n) if turn % 5 == 0 and step == 1 else None
        group = progressions.Group(n, step, row, start, count, order)
        held = np.zeros((many, n), bool)
        for each, first, length in zip(held, start, count, strict=True):
            at = first + step * np.arange(length)
            each[at if order is None else order[at]] = True
        np.testing.assert_array_equal(group.tally(), held.sum(axis=0))
        for values in (draws.integers(9, size=n), draws.normal(size=n), held[0]):
            sums = group.sums(values)
            np.testing.assert_allclose(sums, held @ values.astype(float), atol=1e-12)
            assert sums.dtype == (float if values.dtype == float else np.int64)
        weights = draws.integers(9, size=n)
        np.testing.assert_array_equal(group.tally(weights), weights[row] @ held)
        into = held[0] & (draws.random(n) < 0.5)
        wanted = into | held.any(axis=0)
        low, high = group.mark(into)
        np.testing.assert_array_equal(into, wanted)
        assert not held[:, :low].any()
        assert not held[:, high:].any()
        if order is None:
            np.testing.assert_array_equal(group.positions(group.place), start)
