"""How far back causal graphs read: the bounds of predicates against every pair."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnspec.graphs.look_back import LookBack, lag_of_data, look_back
from attnspec.graphs.patterns.where import Where
from attnspec.graphs.predicates.distance_bounds import Extent, extent_of
from attnspec.graphs.relation import evaluate_pairs
from attnspec.ir.parameters import RelationError
from attnspec.ir.scalars import Apply, Scalar, ScalarError, Symbol
from attnspec.lower.lower import stand_ins, works_of
from attnspec.runtime.streaming import promised_inputs
from attnspec.spec import parse

N = 48
Q, K = Symbol("q"), Symbol("k")


Scalars: TypeAlias = "st.SearchStrategy[Scalar]"


def applied(ops: str, *args: Scalars) -> Scalars:
    """One of the operators on such arguments."""
    return st.builds(lambda op, *given: Apply(op, given), st.sampled_from(ops.split()), *args)


def whole() -> Scalars:
    """Whole numbers of q and k, differences among them more often than by chance."""
    apart = st.sampled_from([Q, K, Apply("-", (Q, K)), Apply("-", (K, Q))])
    number = st.integers(1, 7)

    def larger(part: Scalars) -> Scalars:
        return st.one_of(
            applied("+ - * min max", part, part),
            applied("// %", part, number),
            applied("neg abs", part),
            applied("ceil floor", applied("/", part, number)),
            applied("**", part, st.just(2)),
        )

    return st.recursive(st.one_of(apart, st.integers(-9, 40)), larger, max_leaves=6)


def predicates() -> Scalars:
    """Comparisons of them, and what `and`, `or` and `not` make of those."""
    few, limits = st.integers(-3, 40), st.one_of(st.integers(-3, 40), st.floats(-3, 40), whole())
    leaves = st.one_of(
        applied("< <= > >= == !=", whole(), limits),
        applied("within", whole(), few, few),
        applied("one_of", whole(), few, few),
    )
    return st.recursive(
        leaves,
        lambda part: st.one_of(applied("and or", part, part), applied("not", part)),
        max_leaves=4,
    )


def pairs_of(predicate: Scalar, n: int = N) -> tuple[np.ndarray, np.ndarray]:
    """The pairs k <= q of a predicate, one by one."""
    q, k = np.tril_indices(n)
    held = np.broadcast_to(Where(predicate).holds(q, k, n), q.shape).astype(bool)
    return q[held], k[held]


@settings(max_examples=30)
@given(predicates())
def test_no_pair_lies_beyond_the_bound(predicate: Scalar) -> None:
    assert_bounded(predicate)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(predicates())
def test_no_pair_of_many_predicates_lies_beyond_the_bound(predicate: Scalar) -> None:
    assert_bounded(predicate)


def assert_bounded(predicate: Scalar) -> None:
    extent = extent_of(predicate)
    try:
        q, k = pairs_of(predicate)
    except (RelationError, ScalarError):
        return
    if extent is not None:
        assert not ((k >= extent.first) & (q - k > extent.before)).any()


@settings(max_examples=30)
@given(
    st.sampled_from(["<", "<=", "==", "within", "one_of", "abs", "square", "steps", "or", "not"]),
    st.integers(0, 20),
    st.integers(1, 5),
)
def test_bounds_of_a_distance_are_the_least(form: str, limit: int, step: int) -> None:
    apart = Apply("-", (Q, K))
    predicate: Scalar = {
        "<": Apply("<", (apart, limit + 1)),
        "<=": Apply("<=", (Apply("+", (apart, 3)), limit + 3)),
        "==": Apply("==", (K, Apply("-", (Q, limit)))),
        "within": Apply("within", (apart, 0, limit)),
        "one_of": Apply("one_of", (apart, 0, limit, limit // 2)),
        "abs": Apply("<=", (Apply("abs", (Apply("-", (K, Q)),)), limit)),
        "square": Apply("<=", (Apply("**", (apart, 2)), limit * limit)),
        "steps": Apply(
            "<=", (Apply("*", (step, Q)), Apply("+", (Apply("*", (step, K)), step * limit)))
        ),
        "or": Apply("or", (Apply("==", (apart, limit)), Apply("<", (K, step)))),
        "not": Apply("not", (Apply(">", (apart, limit)),)),
    }[form]
    q, k = pairs_of(predicate)
    late = k >= step if form == "or" else np.ones(len(k), bool)
    assert (q - k)[late].max() == limit
    assert extent_of(predicate) == Extent(step if form == "or" else 0, limit)


@pytest.mark.parametrize(
    ("body", "meant"),
    [
        ("where(q - k in {0, 1, 5})", LookBack(0, 5)),
        ("where(q - k <= 7)", LookBack(0, 7)),
        ("where(q - k in 0..7)", LookBack(0, 7)),
        ("where(0 <= q - k and q - k < 8)", LookBack(0, 7)),
        ("where(q - k <= 7.5)", LookBack(0, 7)),
        ("where((q - k) / 3 <= 2)", LookBack(0, 6)),
        ("where(q // 4 == k // 4)", LookBack(0, 3)),
        ("where(q // 4 - k // 4 <= 1 and k % 3 != 1)", LookBack(0, 7)),
        ("where(k < 4 or q - k <= 7)", LookBack(4, 7)),
        ("where(q * k < 30)", LookBack(5, 0)),
        ("~where(q - k > 7)", LookBack(0, 7)),
        ("window(radius = 4) - where(k % 2 == 0)", LookBack(0, 4)),
        ("where(q - k <= 7) | columns(first(2))", LookBack(2, 7)),
        ("shift(columns(first(2)), by = 3)", LookBack(5, 0)),
        ("shift(window(radius = 4) | columns(first(2)), by = 3)", LookBack(5, 4)),
        ("shift(window(radius = 4) | columns(first(2)), by = 0)", LookBack(2, 4)),
        ("shift(window(radius = 4), by = -1)", None),
        ("block(size = 4, before = 1) | columns(positions(0, 4..5))", LookBack(6, 7)),
        ("columns(first(9)) | columns(first(2)) | dilated(radius = 6, step = 3)", LookBack(9, 6)),
        ("(window(radius = 9) | columns(first(20))) & window(radius = 12)", LookBack(0, 12)),
        ("columns(first(9) & positions(3..30))", LookBack(9, 0)),
        ("columns(first(2) | positions(5))", LookBack(6, 0)),
        ("rows(first(3))", LookBack(2, 0)),
        ("where(q - k > 7)", None),
        ("where(q % 8 == k % 8)", None),
        ("where(q - k < n)", None),
        ("where(q - k < 8 and k < n - 3)", None),
        ("window(radius = 4) & where(k < n - 3)", None),
    ],
)
def test_bounds_of_graphs_with_predicates(body: str, meant: LookBack | None) -> None:
    relation = parse(f"attention a {{ causal attend {body} }}").relation(N)
    assert look_back(relation) == meant
    if meant is None:
        return
    q, k = np.nonzero(evaluate_pairs(relation, np.arange(N)[:, None], np.arange(N), N))
    assert not ((k >= meant.first) & (q - k > meant.before)).any()


@pytest.mark.parametrize(
    ("body", "first", "before", "marks", "lag"),
    [
        ("columns(y) | window(before = 2, after = 0)", 0, 2, 1, 0),
        # what is near needs no marks to be kept
        ("columns(y) & window(before = 9, after = 0)", 0, 9, 0, 0),
        ("window(before = 9, after = 0) & (columns(y) | rows(y))", 0, 9, 0, 0),
        ("columns(y | first(2))", 2, 0, 1, 0),
        ("columns((y | first(2)) - every(3))", 2, 0, 1, 0),
        ("columns(y & first(5))", 5, 0, 0, 0),
        ("columns(y) | columns(z) | block(size = 4)", 0, 3, 2, 0),
        ("shift(same(x), by = 4) & window(before = 5, after = 0)", 0, 5, 0, 4),
        ("transpose(shift(same(x), by = 3)) & window(before = 6, after = 0)", 0, 6, 0, 3),
        ("shift(same(x) | shift(same(x), by = 1), by = 2) & block(size = 4)", 0, 3, 0, 3),
        ("window(before = 5, after = 0) - shift(same(x), by = 2)", 0, 5, 0, 2),
    ],
)
def test_bounds_of_graphs_with_inputs(
    body: str, first: int, before: int, marks: int, lag: int
) -> None:
    inputs = "input x: ids input y: tokens(at_most = 4) input z: tokens(at_most = 2)"
    program = parse(f"attention a {{ causal {inputs} attend {body} }}").program
    ((work, _),) = works_of(program, 0, 1, 1, 1, stand_ins(program))
    found = look_back(work.relation, promised_inputs(program))
    assert found is not None
    assert (found.first, found.before, len(found.marked)) == (first, before, marks)
    assert lag_of_data(work.relation) == lag
