"""What is plain of a predicate whose sides change places or are one: proofs against all pairs."""

from __future__ import annotations

import random

import numpy as np
import pytest

from attnspec.graphs.patterns.where import Where
from attnspec.graphs.predicates.symmetry import (
    asks_coordinates,
    holds_for_itself,
    says_the_same_turned,
)
from attnspec.ir.scalars import Apply, Scalar, Symbol
from attnspec.spec import parse

GRID = (4, 5)


def spec_of(predicate: str, grid: bool = False, tokens: int = 0):  # type: ignore[no-untyped-def]
    lines = [f"sequence grid{GRID}"] if grid else []
    lines += [f"extra_tokens {tokens}"] if tokens else []
    return parse("attention a {\n" + "\n".join([*lines, f"attend where({predicate})"]) + "\n}")


def predicate_of(text: str, grid: bool = False) -> Scalar:
    graph = spec_of(text, grid).program.attends[0].graph
    found = dict(graph.arguments)["predicate"]
    assert isinstance(found, Apply)
    return found


TURNED = [
    ("abs(q - k) <= 3", False),
    ("(q - k) % 4 == 0", False),
    ("0 != (q - k) % isqrt(n)", False),
    ("q // 4 == k // 4 or q * k <= n", False),
    ("q <= k and k <= q", False),
    ("q < k or q > k", False),
    ("q % 2 == 0 and k % 2 == 0", False),
    ("(q - k) ** 2 < n", False),
    ("max(q, k) - min(q, k) <= 2", False),
    ("not (q + k == n)", False),
    ("q.row == k.row or q.col == k.col", True),
    ("(q.row - k.row) % 2 == 0 and (q.col - k.col) % 2 == 0", True),
    ("abs(q.row - k.row) + abs(q.col - k.col) <= 2", True),
]

NOT_TURNED = [
    ("q - k <= 3", False),
    ("(q - k) % 4 == 1", False),
    ("(q - k) % 4 <= 0 + 1", False),
    ("(q - k) ** 3 < n", False),
    ("abs(q - 2 * k) <= 3", False),
    ("q // 4 == k // 5", False),
    ("q <= k", False),
    ("k % 2 == 0", False),
    ("q.row == k.col", True),
    ("k.row == 0", True),
]


@pytest.mark.parametrize(("text", "grid"), TURNED)
def test_turned_predicates_are_recognised(text: str, grid: bool) -> None:
    spec = spec_of(text, grid)
    assert says_the_same_turned(predicate_of(text, grid))
    for n in (20,) if grid else (1, 2, 7, 20):
        mask = spec.mask(n)
        assert (mask == mask.T).all()


@pytest.mark.parametrize(("text", "grid"), NOT_TURNED)
def test_one_sided_predicates_are_not(text: str, grid: bool) -> None:
    mask = spec_of(text, grid).mask(20)
    assert (mask != mask.T).any()
    assert not says_the_same_turned(predicate_of(text, grid))


@pytest.mark.parametrize(
    "text",
    [
        "abs(q - k) <= 3",
        "(q - k) % 4 == 0",
        "q // 4 == k // 4 and q <= k",
        "q < k or q == k",
        "q.row == k.row or q.col < k.col",
        "abs(q.row - k.row) + abs(q.col - k.col) <= 2",
    ],
)
def test_who_reads_itself_is_seen(text: str) -> None:
    grid = "." in text
    assert holds_for_itself(predicate_of(text, grid))
    assert spec_of(text, grid).mask(20).diagonal().all()


@pytest.mark.parametrize("text", ["q < k", "(q - k) % 4 == 1", "q == 3", "q != k", "q % 2 == 0"])
def test_who_does_not_is_no_proof(text: str) -> None:
    assert not holds_for_itself(predicate_of(text))
    assert not spec_of(text).mask(20).diagonal().all()


def _number(dice: random.Random, depth: int) -> Scalar:
    if depth == 0 or dice.random() < 0.2:
        plain: list[Scalar] = [Symbol("q"), Symbol("k"), 0, 1, 2, 3]
        return dice.choice(plain)
    op = dice.choice("+ - - * // % min max abs ** neg".split())
    first = _number(dice, depth - 1)
    if op in ("abs", "neg"):
        return Apply(op, (first,))
    second = dice.choice([2, 3]) if op in ("//", "%", "**") else _number(dice, depth - 1)
    return Apply(op, (first, second))


def _mirrored(scalar: Scalar, dice: random.Random) -> Scalar:
    """The same with q and k in each other's place, and some sides in another order."""
    if isinstance(scalar, Symbol):
        return Symbol({"q": "k", "k": "q"}[scalar.name])
    if not isinstance(scalar, Apply):
        return scalar
    args = tuple(_mirrored(arg, dice) for arg in scalar.args)
    commuting = scalar.op in ("+", "*", "min", "max", "==", "!=", "and", "or")
    return Apply(scalar.op, args[::-1] if commuting and dice.random() < 0.5 else args)


def _condition(dice: random.Random, depth: int) -> Scalar:
    if depth and dice.random() < 0.5:
        op = dice.choice(["and", "or", "not"])
        args = [_condition(dice, depth - 1) for _ in range(1 if op == "not" else 2)]
        return Apply(op, tuple(args))
    op = dice.choice("< <= > >= == !=".split())
    return Apply(op, (_number(dice, 2), dice.choice([0, 1, _number(dice, 2)])))


def _table(predicate: Scalar) -> np.ndarray:
    held = Where(predicate).holds(np.arange(13)[:, None], np.arange(13), 13)
    return np.broadcast_to(held, (13, 13))


def test_random_predicates_are_what_is_proven() -> None:
    dice, turned, itself, refuted = random.Random(11), 0, 0, 0
    for index in range(600):
        predicate = _condition(dice, 2)
        if index % 2:
            join = dice.choice(["and", "or"])
            predicate = Apply(join, (predicate, _mirrored(predicate, dice)))
        table = _table(predicate)
        if index % 2:
            assert (table == table.T).all()
        if says_the_same_turned(predicate):
            turned += 1
            assert (table == table.T).all(), predicate
        if holds_for_itself(predicate):
            itself += 1
            assert table.diagonal().all(), predicate
        refuted += not (table == table.T).all()
    assert min(turned, 2 * refuted, itself) >= 100


def test_tokens_before_a_grid_are_no_cells() -> None:
    """A predicate of coordinates holds for no extra token: its row is empty, and no proof says
    otherwise."""
    assert asks_coordinates(predicate_of("q.row == k.row", True))
    assert not asks_coordinates(predicate_of("q == k"))
    spec = spec_of("q.row <= k.row", True, tokens=2)
    assert not spec.mask(22)[:2].any()
    claimed = parse(
        f"attention a {{ sequence grid{GRID} extra_tokens 2 attend where(q.row == k.row)"
        " require rows_nonempty require symmetric }"
    )
    nonempty, symmetric = claimed.verdicts
    assert nonempty.status == "refuted"
    assert symmetric.status == "proven"


def test_claims_of_predicates_are_proven_for_every_n() -> None:
    spec = parse(
        "attention a { attend where(abs(q - k) % 3 == 0) require symmetric require rows_nonempty }"
    )
    assert [verdict.status for verdict in spec.verdicts] == ["proven", "proven"]
