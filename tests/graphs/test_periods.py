"""Periods of predicates: whatever is said to be alike is alike, for predicates drawn at random."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from attention_checks import spec_of
from relation_checks import definition, faults_of_rows
from sweeps import checkered, thinned

from attnspec.graphs.patterns.where import Where
from attnspec.graphs.predicates.comparisons import Among, Between
from attnspec.graphs.predicates.listable import listable, lists_rows
from attnspec.graphs.predicates.periods import Period, comparisons, period_of
from attnspec.graphs.predicates.predicates import disjuncts
from attnspec.graphs.relation import Tiles, evaluate_pairs, phase_of
from attnspec.ir.scalars import Apply, Scalar, Symbol, evaluate

N = 240


def predicate_of(text: str) -> Scalar:
    relation = spec_of(f"attend where({text})").relation(N)
    assert isinstance(relation, Where)
    return relation.predicate


@pytest.mark.parametrize(
    ("text", "period"),
    [
        ("(q + 5) // 12 == (k + 5) // 12", Period(0, 0, 12)),
        ("q // 3 // 4 - k // 12 <= 1", Period(0, 0, 12)),
        ("(7 - k % 8) // 2 == 1", Period(1, 8, 8)),
        ("(q - k) % 7 == 0", Period(7, 7, 1)),
        ("abs(q - k) <= 3", Period(0, 0, 1)),
        ("min(q, k + 2) <= k", Period(0, 0, 1)),
        ("3 * q <= 3 * k + 1", Period(0, 0, 1)),
        ("q / 2 < k / 2", Period(0, 0, 0)),
        ("q + 0.1 < k + 0.9", Period(0, 0, 0)),
        ("q * k % 5 == 0", Period(0, 0, 0)),
        ("q < 100", Period(0, 1, 0)),
        ("q // 2 == k", Period(0, 0, 0)),
        ("isqrt(q) == isqrt(k)", Period(0, 0, 0)),
    ],
)
def test_periods(text: str, period: Period) -> None:
    assert period_of(predicate_of(text)) == period


def test_predicates_are_taken_apart_where_they_are_joined() -> None:
    found = list(comparisons(predicate_of("q < 5 and (k < 3 or not q == k)")))
    assert len(found) == 3
    both = disjuncts(predicate_of("q < 5 and (k < 3 or not q == k)"))
    assert both == tuple(map(predicate_of, ("q < 5 and k < 3", "q < 5 and not q == k")))


def number(draw: random.Random, depth: int) -> Scalar:
    if depth == 0 or draw.random() < 0.2:
        leaves: list[Scalar] = [Symbol("q"), Symbol("k"), draw.randint(-9, 9)]
        return draw.choice(leaves)
    op = draw.choice(["+", "-", "*", "//", "%", "min", "max", "abs", "neg"])
    left = number(draw, depth - 1)
    if op in ("abs", "neg"):
        return Apply(op, (left,))
    if op in ("//", "%"):
        return Apply(op, (left, draw.choice([2, 3, 4, 6, 12])))
    return Apply(op, (left, number(draw, depth - 1)))


def drawn(seed: int) -> Scalar:
    draw = random.Random(seed)

    def comparison() -> Scalar:
        sides = number(draw, 3), number(draw, 2)
        return Apply(draw.choice(["<", "<=", "==", "!=", ">"]), sides)

    found = comparison()
    for _ in range(draw.randint(0, 2)):
        found = Apply(draw.choice(["and", "or"]), (found, comparison()))
    return Apply("not", (found,)) if draw.random() < 0.2 else found


@pytest.mark.parametrize("part", thinned(range(10)))
def test_moving_by_periods_changes_nothing(part: int) -> None:
    at = np.arange(N)
    seen = 0
    for seed in range(part * 40, part * 40 + 40):
        for each in comparisons(drawn(seed)):
            held = evaluate_pairs(Where(each), at[:, None], at[None], N)
            period = period_of(each)
            for q, k in ((period.q, 0), (0, period.k), (period.both, period.both)):
                if 0 < max(q, k) < N:
                    seen += 1
                    assert np.array_equal(held[q:, k:], held[: N - q, : N - k]), (seed, each)
    assert seen > 20


@pytest.mark.parametrize(("part", "steps"), checkered(range(4), [(1, 1), (12, 12), (1, 6), (4, 1)]))
def test_tiles_of_one_phase_have_one_mask(part: int, steps: tuple[int, int]) -> None:
    size = 5
    for seed in range(part * 40, part * 40 + 40):
        relation = Where(drawn(seed))
        q, k = (np.arange(0, N - size * step, 7) for step in steps)
        q, k = (x.ravel() for x in np.meshgrid(q, k, indexing="ij"))
        q_tiles = Tiles(q, q + size * steps[0], steps[0])
        k_tiles = Tiles(k, k + size * steps[1], steps[1])
        inside = np.arange(size)
        held = evaluate_pairs(
            relation,
            q[:, None, None] + inside[:, None] * steps[0],
            k[:, None, None] + inside * steps[1],
            N,
        )
        phases = np.stack(
            [np.broadcast_to(p, q.shape) for p in phase_of(relation, q_tiles, k_tiles, N)], 1
        )
        _, first, group = np.unique(phases, axis=0, return_index=True, return_inverse=True)
        assert np.array_equal(held, held[first][group.ravel()]), seed
        kinds = relation.cover(q_tiles, k_tiles, N)
        assert not held[kinds == 0].any()
        assert held[kinds == 2].all()


def test_what_is_taken_apart_has_the_same_pairs() -> None:
    apart = 0
    for seed in range(500, 580):
        predicate, n = drawn(seed), (1, 9, 14)[seed % 3]
        relation = Where(predicate)
        wanted = definition(relation, n)
        joined = [definition(Where(part), n) for part in disjuncts(predicate)]
        assert np.array_equal(np.logical_or.reduce(joined), wanted), seed
        found = listable(relation, n)
        apart += found is not relation
        for simpler in {found, relation.taken_apart(n) or relation}:
            assert np.array_equal(definition(simpler, n), wanted), seed
            assert faults_of_rows(simpler, wanted, n) == [], seed
        assert found is relation or lists_rows(found, n)
    assert apart > 12


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("(q - k) % 5 <= 2", True),
        ("(q - k) % 5 >= 3", True),
        ("(k - q) % 4 in 1..2", True),
        ("(q + k) % 3 == 1", True),
        ("(q + 3 * k) % 40 < 9", True),
        ("(q - k) % 1 == 0", True),
        # its ranges would be too many
        ("(q + 60 * k) % 3 >= 1", False),
        ("(q * k) % 5 == 2", False),
        ("(q - k) % 5 % 3 <= 1", True),
        ("q - k in {1, 4, 9}", True),
        ("abs(q - k) in {0, 2, 30}", True),
        ("k // 3 - q // 2 in {-1, 2}", True),
        ("q * k in {0, 6}", False),
        ("abs(q - k) in 2..4", True),
        ("abs(q - 2 * k) >= 5", True),
        ("abs(q - k) == 3 and k % 2 == 1", True),
        ("q % 4 == k % 4 and q * k < 50", True),
        ("q * k < 50 or q == k", False),
        ("q * k < 9 and k * q > 2", False),
        ("-(q - k) <= -2", True),
        ("q < 2 * k", True),
        ("q / 2 <= k / 3", True),
        ("q / 2 < k / 3", False),
        ("q / 2 < k", False),
        ("(q - k) % 7 in {1, 3, 5}", True),
        # numbers that are not exact as reals
        ("q + 9007199254740993 <= k + 9007199254740993", False),
    ],
)
@pytest.mark.parametrize("n", [1, 14])
def test_predicates_whose_rows_are_listed(text: str, known: bool, n: int) -> None:
    relation = spec_of(f"attend where({text})").relation(n)
    wanted = definition(relation, n)
    found = listable(relation, n)
    if n > 1:
        assert (found is not relation) == known
    assert np.array_equal(definition(found, n), wanted)
    assert faults_of_rows(found, wanted, n) == []


def test_limits_of_absolute_values_are_taken_apart() -> None:
    q, k = Symbol("q"), Symbol("k")
    for number, op, limit in product(
        (Apply("-", (q, k)), Apply("-", (Apply("*", (2, k)), q))),
        ("<", "<=", ">", ">=", "==", "!="),
        (-1, 0, 3),
    ):
        size = Apply("abs", (number,))
        for sides in ((size, limit), (limit, size)):
            relation = Where(Apply(op, sides))
            wanted, found = definition(relation, 6), listable(relation, 6)
            assert np.array_equal(definition(found, 6), wanted), relation
            assert faults_of_rows(found, wanted, 6) == [], relation
            # all but a complement, and what is at least a negative number: no ranges of their own
            assert limit < 0 or op == "!=" or found is not relation, relation


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("q.row == k.row", True),
        ("abs(q.row - k.row) + abs(q.col - k.col) <= 1", False),
        ("abs(q.row - k.row) <= 1 and abs(q.col - k.col) <= 2", True),
        ("(q.col - k.col) % 3 == 1", True),
        ("(q.col + k.col) % 6 >= 3", True),
        ("q.row - k.col in {0, 2}", True),
        ("k.row + k <= q.col", True),
    ],
)
def test_rows_of_predicates_of_a_grid_are_listed(text: str, known: bool) -> None:
    relation = spec_of(f"sequence grid(3, 6) attend where({text})").relation(18)
    wanted = definition(relation, 18)
    found = listable(relation, 18)
    assert (found is not relation) == known
    assert np.array_equal(definition(found, 18), wanted)
    assert faults_of_rows(found, wanted, 18) == []


def sides(draw: random.Random, name: str) -> Scalar:
    """A whole number of one position."""
    at, size = Symbol(name), draw.randint(2, 5)
    choices: list[Scalar] = [
        at,
        Apply("neg", (at,)),
        Apply("%", (at, size)),
        Apply("//", (at, size)),
        Apply("*", (at, size)),
        Apply("-", (7, Apply("//", (at, 2)))),
        Apply("*", (at, Apply("%", (at, 3)))),
        Apply("abs", (Apply("-", (at, 6)),)),
    ]
    return draw.choice(choices)


def test_comparisons_of_two_numbers_in_every_way_of_asking() -> None:
    draw = random.Random(4)
    for turn in range(150):
        n = (1, 2, 13)[turn % 3]
        low, value, high = sides(draw, "q"), sides(draw, "k"), sides(draw, "q")
        members = tuple(sorted(draw.sample(range(-6, 30), draw.randint(0, 4))))
        relation = draw.choice(
            (
                Between(low, value, high),
                Between(None, value, high),
                Between(low, value, None),
                Between(low, value, low),
                Among(low, value, members),
            )
        )
        mask = definition(relation, n)
        values = [[evaluate(x, {"q": at, "k": at}) for at in range(n)] for x in (low, value, high)]
        for q, k in product(range(n), repeat=2):
            start, number, end = values[0][q], values[1][k], values[2][q]
            meant = (
                start + number in members
                if isinstance(relation, Among)
                else (relation.low is None or start <= number)
                and (relation.high is None or number <= (start if low is relation.high else end))
            )
            assert mask[q, k] == meant, (relation, q, k)
        assert faults_of_rows(relation, mask, n) == []
