"""The bounds of an expression enclose every value that it takes."""

from __future__ import annotations

import random

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
    match source.randrange(5):
        case 0:
            return Apply(source.choice(FUNCTIONS), (one,))
        case 1:
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


def outside(scalar: Scalar, q: range, k: range) -> list[str]:
    """Pairs whose value the bounds do not enclose."""
    ranges = {name: (np.array([r[0]]), np.array([r[-1]])) for name, r in (("q", q), ("k", k))}
    low, high = bounds(scalar, ranges)
    found = []
    for at_q in q:
        for at_k in k:
            try:
                value = float(evaluate(scalar, {"q": at_q, "k": at_k}))
            except ScalarError:
                continue
            if not (low <= value).all() or not (value <= high).all():
                found.append(f"{scalar} at {at_q}, {at_k}: {value} not in {low}, {high}")
    return found


@pytest.mark.parametrize("seed", range(20))
def test_bounds_enclose_what_is_taken(seed: int) -> None:
    source = random.Random(seed)
    found: list[str] = []
    for _ in range(60):
        scalar = source.choice((number, truth))(source, 3)
        q, k = (range(a, a + source.randrange(1, 6)) for a in source.sample(range(12), 2))
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


def test_a_wrong_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(scalar: Scalar, values: object) -> tuple[np.ndarray, np.ndarray]:
        return np.array([0.0]), np.array([5.0])

    monkeypatch.setattr("test_intervals.bounds", half)
    assert outside(Apply("+", (Symbol("q"), Symbol("k"))), range(3, 5), range(1)) == []
    assert outside(Apply("+", (Symbol("q"), Symbol("k"))), range(3, 5), range(2, 3)) != []
