"""The bounds of an expression enclose every value that it takes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations_with_replacement, product

import numpy as np
import pytest

from attnspec.ir.intervals import bounds
from attnspec.ir.scalars import Apply, Scalar, ScalarError, Symbol, evaluate

NUMBERS = ("+", "-", "*", "/", "//", "%", "min", "max")
FUNCTIONS = ("neg", "abs", "isqrt", "sqrt", "log2", "ceil", "floor")
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")


def number(source: random.Random, depth: int) -> Scalar:
    """A random expression whose value is a number."""
    if depth == 0 or source.random() < 0.2:
        constant: Scalar = source.choice((0, 1, 2, 3, 7, -4, 0.1, 2.5, 2**53 + 1))
        return source.choice((Symbol("q"), Symbol("k"), Symbol("q"), Symbol("k"), constant))
    one, other = number(source, depth - 1), number(source, depth - 1)
    match source.randrange(6):
        case 0:
            return Apply(source.choice(FUNCTIONS), (one,))
        case 1:
            index = source.choice((0, Apply("%", (Symbol("q"), 2)), other))
            return Apply("item", (index, one, other))
        case 2:
            return Apply("**", (one, source.choice((0, 1, 2, 3, other))))
        case _:
            return Apply(source.choice(NUMBERS), (one, other))


def truth(source: random.Random, depth: int) -> Scalar:
    """A random expression that is true or false."""
    numbers = tuple(number(source, depth - 1) for _ in range(3))
    match source.randrange(6):
        case 0:
            return Apply("within", numbers)
        case 1:
            return Apply("one_of", numbers)
        case 2 if depth > 1:
            return Apply("not", (truth(source, depth - 1),))
        case 3 if depth > 1:
            sides = truth(source, depth - 1), truth(source, depth - 1)
            return Apply(source.choice(("and", "or")), sides)
        case _:
            return Apply(source.choice(COMPARISONS), numbers[:2])


def outside(scalar: Scalar, q: Sequence[range], k: Sequence[range]) -> list[str]:
    """Pairs whose value the bounds do not enclose, in boxes that are bounded together."""
    boxes = [[np.array([r[end] for r in side]) for end in (0, -1)] for side in (q, k)]
    ranges = {"q": (boxes[0][0][:, None], boxes[0][1][:, None]), "k": (boxes[1][0], boxes[1][1])}
    lows, highs = (np.broadcast_to(end, (len(q), len(k))) for end in bounds(scalar, ranges))
    found = []
    for (row, in_q), (column, in_k) in product(enumerate(q), enumerate(k)):
        low, high = lows[row, column], highs[row, column]
        for at_q, at_k in product(in_q, in_k):
            try:
                value = float(evaluate(scalar, {"q": at_q, "k": at_k}))
            except ScalarError:
                continue
            if not low <= value <= high:
                found.append(f"{scalar} at {at_q}, {at_k}: {value} not in {low}, {high}")
    return found


@pytest.mark.parametrize("seed", range(20))
def test_bounds_enclose_what_is_taken(seed: int) -> None:
    source = random.Random(seed)
    found: list[str] = []
    for _ in range(30):
        scalar = source.choice((number, truth))(source, 3)
        q, k = (
            [range(first, first + source.randrange(1, 6)) for first in source.sample(range(12), 2)]
            for _ in "qk"
        )
        found += outside(scalar, q, k)
    assert found == []


@pytest.mark.parametrize("seed", range(20))
def test_arrays_take_the_values_of_integers(seed: int) -> None:
    source = random.Random(seed)
    q, k = np.arange(9)[:, None], np.arange(4, 11)[None, :]
    compared = 0
    for _ in range(40):
        scalar = truth(source, 2)
        try:
            wanted = [[evaluate(scalar, {"q": a, "k": b}) for b in range(4, 11)] for a in range(9)]
        except ScalarError:
            continue
        held = np.broadcast_to(np.asarray(evaluate(scalar, {"q": q, "k": k})), (9, 7))
        assert held.tolist() == wanted, scalar
        compared += 1
    assert compared > 5


@pytest.mark.parametrize(
    ("scalar", "decided"),
    [
        (Apply("<=", (Apply("abs", (Apply("-", (Symbol("q"), Symbol("k"))),)), 20)), 1),
        (Apply("==", (Apply("//", (Symbol("q"), 8)), Apply("//", (Symbol("k"), 8)))), 1),
        (Apply("==", (Apply("%", (Symbol("q"), 32)), 15)), 0),
        (Apply("<", (Apply("**", (Symbol("q"), 2)), 16)), 0),
        (Apply(">", (Apply("isqrt", (Symbol("q"),)), 4)), 0),
        (Apply("==", (Apply("%", (Symbol("q"), 4)), 1)), None),
        (Apply("<", (Apply("//", (1, Apply("-", (Symbol("q"), 9)))), 5)), None),
    ],
)
def test_what_is_decided_on_a_tile(scalar: Scalar, decided: int | None) -> None:
    tile = np.array([8]), np.array([14])
    low, high = bounds(scalar, {"q": tile, "k": tile})
    assert (low.item(), high.item()) == ((decided, decided) if decided is not None else (0, 1))


WHOLE = ("neg", "abs", "ceil", "floor", "+", "-", "*", "//", "%", "min", "max")
TRUTHS = ("==", "!=", "<", "<=", ">", ">=", "within", "one_of", "and", "or", "not")


def test_what_one_point_gives_is_one_number() -> None:
    for op in (*WHOLE, *TRUTHS):
        logical = op in ("and", "or", "not")
        names = "abc"[: 1 if op in (*WHOLE[:4], "not") else 3 if op == "within" else 2]
        applied = Apply(op, tuple(map(Symbol, names)))
        for values in product((False, True) if logical else range(-3, 4), repeat=len(names)):
            if op in ("//", "%") and values[1] <= 0:
                # there may be no value, and remainders are not bounded
                continue
            given = dict(zip(names, values, strict=True))
            wanted = float(evaluate(applied, given))
            box = {name: (np.array([x]), np.array([x])) for name, x in given.items()}
            assert [end.item() for end in bounds(applied, box)] == [wanted, wanted], (op, values)


def test_remainders_are_as_narrow_as_one_turn() -> None:
    ends = combinations_with_replacement(range(-6, 9), 2)
    for size, (first, last) in product((1, 2, 5, 0.5, 2.5), ends):
        box = {"q": (np.array([first]), np.array([last]))}
        found = tuple(end.item() for end in bounds(Apply("%", (Symbol("q"), size)), box))
        one_turn = first // size == last // size
        assert found == ((first % size, last % size) if one_turn else (0, size)), (size, first)


def test_a_wrong_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(scalar: Scalar, values: object) -> tuple[np.ndarray, np.ndarray]:
        return np.array([0.0]), np.array([5.0])

    monkeypatch.setattr("test_intervals.bounds", half)
    both = Apply("+", (Symbol("q"), Symbol("k")))
    assert outside(both, [range(3, 5)], [range(1), range(1)]) == []
    assert outside(both, [range(3, 5)], [range(1), range(2, 3)]) != []
