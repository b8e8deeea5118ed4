"""Expressions of whole arrays: exactly what they are for each number, as Python has it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from attnspec.ir.linear import minus
from attnspec.ir.scalars import (
    FUNCTIONS,
    OPERATIONS,
    Apply,
    Scalar,
    ScalarError,
    Symbol,
    evaluate,
    evaluate_exactly,
)

COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
NUMBERS = (0, 1, -1, 2, 3, -7, 64, 10**9, 2.5, -0.25)


def number(draw: random.Random, depth: int) -> Scalar:
    """A number of x and y; every operation on numbers may be in it."""
    if depth == 0:
        return draw.choice((Symbol("x"), Symbol("y"), draw.choice(NUMBERS)))
    op = draw.choice(("+", "-", "*", "*", "/", "//", "%", "**", "neg", "item", *FUNCTIONS))
    if op == "item":
        index = Apply("%", (number(draw, 0), 3))
        return Apply(op, (index, *(number(draw, depth - 1) for _ in range(3))))
    counts = {"neg": 1, "min": 3, "max": 2} | dict.fromkeys({*FUNCTIONS} - {"min", "max"}, 1)
    return Apply(op, tuple(number(draw, depth - 1) for _ in range(counts.get(op, 2))))


def truth(draw: random.Random, depth: int) -> Scalar:
    """A predicate of such numbers; every operation on truths may be in it."""
    if depth == 0:
        return Apply(draw.choice(COMPARISONS), (number(draw, 2), number(draw, 1)))
    match draw.choice(("not", "and", "or", "within", "one_of")):
        case "not":
            return Apply("not", (truth(draw, depth - 1),))
        case ("and" | "or") as op:
            return Apply(op, (truth(draw, depth - 1), truth(draw, depth - 1)))
        case op:
            return Apply(op, tuple(number(draw, draw.randrange(3)) for _ in range(3)))


def outcome(scalar: Scalar, x: int, y: int) -> object:
    """What an expression is for single numbers, or what is wrong with it."""
    try:
        return bool(evaluate(scalar, {"x": x, "y": y}))
    except ScalarError:
        return ScalarError


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "seed", [*range(15), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(15, 60))]
)
def test_arrays_are_evaluated_exactly(seed: int) -> None:
    draw = random.Random(seed)
    x, y = np.array([-3, 0, 1, 5, 2**31, 2**61])[:, None], np.array([-2, 0, 2, 9, 2**40])
    for _ in range(40):
        scalar = truth(draw, draw.randrange(3))
        single = np.array([[outcome(scalar, int(i), int(j)) for j in y] for i in x[:, 0]], object)
        wrong = single == ScalarError
        if wrong.any():
            # where one number has no value, nor has the array
            i, j = np.argwhere(wrong)[0]
            with pytest.raises(ScalarError):
                evaluate_exactly(scalar, {"x": x[i : i + 1], "y": y[j : j + 1]})
            with pytest.raises(ScalarError):
                evaluate_exactly(scalar, {"x": x, "y": y})
        for i, j in np.argwhere(~wrong):
            found = evaluate_exactly(scalar, {"x": x[i : i + 1], "y": y[j : j + 1]})
            assert np.all(np.equal(found, single[i, j])), scalar
        if not wrong.any():
            found = np.broadcast_to(evaluate_exactly(scalar, {"x": x, "y": y}), single.shape)
            assert np.array_equal(found.astype(bool), single), scalar


def test_every_operation_is_drawn() -> None:
    text = " ".join(
        str(truth(random.Random(seed), random.Random(seed).randrange(3))) for seed in range(2400)
    )
    assert {op for op in OPERATIONS if f"op='{op}'" not in text} == set()


@pytest.mark.parametrize(
    ("left", "right", "short"),
    [
        (Apply("+", (Symbol("n"), 3)), Apply("+", (Symbol("n"), 1)), 2),
        (Apply("*", (Symbol("n"), Symbol("n"))), 0, Apply("*", (Symbol("n"), Symbol("n")))),
        (7, 3, 4),
        (Apply("+", (Symbol("q"), 3)), Symbol("q"), 3),
    ],
)
def test_a_difference_is_short(left: Scalar, right: Scalar, short: Scalar) -> None:
    assert minus(left, right) == short


def test_a_difference_that_is_not_linear_is_written_out() -> None:
    square = Apply("*", (Symbol("q"), Symbol("q")))
    assert minus(square, 1) == Apply("-", (square, 1))
