"""Terms that are written for messages are read back as what they are."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from random_terms import mask, term, tokens

from attnspec.graphs.forms.written import written
from attnspec.ir.program import Compound, Leaf, Term
from attnspec.ir.scalars import NEGATED, OPERATIONS, Apply, Scalar, Symbol, symbols
from attnspec.spec import Spec, parse


@pytest.mark.parametrize(
    "text",
    [
        "window(before = 2 * isqrt(n), after = 0)",
        "window(radius = (n - 1) // 2)",
        "where(q - k < 4 and not (k == 0 or q % 2 == 1))",
        "where(-(q - k) ** 2 in -4..0)",
        "where(k in {1, 2, 4})",
        "columns((first(2) | every(4)) - positions(1, 3..5))",
        "columns(~last(3))",
        "random(keys = 3, seed = 5)",
        "residue(step = 3) & ~(self | full - causal)",
        "transpose(shift(causal, by = -1))",
        "block(size = 4, before = 1)",
        "neighborhood(3, 5)",
        "where(t(k) <= t(q))",
    ],
)
def test_terms_are_written_so_that_they_can_be_read(text: str) -> None:
    def meaning(body: str) -> Spec:
        given = "sequence grid(n // 4, 4) input t: numbers"
        return parse(f"attention a {{ {given} attend {body} }}")

    spec = meaning(text)
    graph = spec.program.attends[0].graph
    assert graph is not None
    assert meaning(written(graph)) == spec


def test_a_leaf_leaves_its_defaults_out() -> None:
    graph = parse("attention a { attend random(keys = 3) }").program.attends[0].graph
    assert isinstance(graph, Leaf)
    assert written(graph) == "random(keys = 3)"


SIDES = Symbol("q"), Symbol("k"), Symbol("n")


def number(draw: random.Random, depth: int = 2) -> Scalar:
    """A number that has a value at every pair."""
    if not depth or draw.random() < 0.2:
        return draw.choice((*SIDES, 0, 3, -2, 2.5, -0.5))
    first, second = number(draw, depth - 1), number(draw, depth - 1)
    divisor, many = draw.choice((1, 3, -2, 2.5)), (Apply("abs", (first,)),)
    match draw.randrange(7):
        case 0:
            return Apply(draw.choice(("/", "//", "%")), (first, divisor))
        case 1:
            return Apply("**", (first, draw.choice((0, 1, 2))))
        case 2:
            rest = draw.choice((many, (Apply("neg", (first,)),), (first, second)))
            return Apply("max" if len(rest) > 1 else "neg", rest)
        case 3:
            return Apply(draw.choice(("isqrt", "sqrt", "ceil", "floor")), many)
        case 4:
            return Apply("item", (Apply("%", (draw.choice(SIDES), 2)), first, second))
        case 5:
            return Apply("min", (first, second, number(draw, depth - 1)))
        case _:
            return Apply(draw.choice("+-*"), (first, second))


def truth(draw: random.Random, depth: int = 2) -> Scalar:
    numbers = tuple(number(draw) for _ in range(3))
    match draw.randrange(6):
        case 0 | 1 if depth:
            parts = tuple(truth(draw, depth - 1) for _ in range(draw.choice((2, 3))))
            return Apply(draw.choice(("and", "or")), parts)
        case 2 if depth:
            return Apply("not", (truth(draw, depth - 1),))
        case 3:
            return Apply("within", numbers)
        case 4:
            return Apply("one_of", (numbers[0], *draw.sample((-1, 0, 2, 3.5), 2)))
        case _:
            return Apply(draw.choice([*NEGATED]), numbers[:2])


def operations(scalar: Scalar) -> set[str]:
    parts = scalar.args if isinstance(scalar, Apply) else ()
    own = {scalar.op} if isinstance(scalar, Apply) else set()
    return own.union(*map(operations, parts))


def read(graph: Term) -> Term:
    found = parse(f"attention a {{ attend {written(graph)} }}").program.attends[0].graph
    assert found is not None
    return found


def test_predicates_of_every_operator_are_read_back() -> None:
    draw, seen = random.Random(0), set()
    for _ in range(60):
        predicate = truth(draw)
        if not {"q", "k"} & set(symbols(predicate)):
            continue
        graph = Leaf("where", (("predicate", predicate),))
        again = read(graph)
        seen |= operations(predicate)
        assert np.array_equal(mask(again, 5), mask(graph, 5)), written(graph)
        # what was read is written in the one way in which it is read
        assert read(again) == again
    assert seen == {*OPERATIONS} - {"log2"}


def test_operators_in_operators_are_read_back() -> None:
    one, two, three, four = (
        Leaf("residue", (("step", 2),)),
        Leaf("residue", (("step", 3),)),
        Leaf("window", (("radius", 4),)),
        Leaf("causal", ()),
    )
    for outer, inner in product("|&-~", repeat=2):
        within = Compound(inner, (one,) if inner == "~" else (one, two))
        for at in range(1 if outer == "~" else 3):
            others = () if outer == "~" else (three, four)
            graph = Compound(outer, (*others[:at], within, *others[at:]))
            assert np.array_equal(mask(read(graph), 13), mask(graph, 13)), written(graph)


def test_arithmetic_in_arithmetic_is_read_back() -> None:
    q, k, n = SIDES
    for outer, inner in product(("+", "-", "*", "/", "//", "%", "**", "neg"), repeat=2):
        within = Apply(inner, (q,) if inner == "neg" else (q, 2) if inner == "**" else (q, k))
        other = 2 if outer == "**" else n
        pairs = [(within,)] if outer == "neg" else [(within, other), (other, within)]
        for pair in pairs[:1] if outer == "**" else pairs:
            graph = Leaf("where", (("predicate", Apply("<", (Apply(outer, pair), k))),))
            assert read(graph) == graph, written(graph)


@pytest.mark.parametrize(
    "text",
    [
        "where(q - k - 1 < n)",
        "where(q - (k - 1) < n)",
        "where(-q + k < n)",
        "where(q - k in -n + 1..n - 1)",
        "where(q * (k + 1) // 2 < n ** 2)",
        "where(k ** 0.5 < q)",
        "where(q ** 0 < k)",
        "where(t(q) - t(k) < 3)",
    ],
)
def test_brackets_stand_where_they_are_needed(text: str) -> None:
    spec = parse(f"attention a {{ input t: numbers attend {text} }}")
    graph = spec.program.attends[0].graph
    assert graph is not None
    assert written(graph) == text


def test_operators_group_from_the_left() -> None:
    a, b, c = (Leaf(name, ()) for name in ("self", "causal", "full"))
    for op in "|&-":
        inner = Compound(op, (a, b))
        assert written(Compound(op, (inner, c))) == f"self {op} causal {op} full"
        assert written(Compound(op, (c, inner))) == f"full {op} (self {op} causal)"


def test_graphs_and_token_sets_are_read_back() -> None:
    draw = random.Random(1)
    for turn in range(60):
        chosen = Leaf("columns", (("tokens", tokens(draw)),)) if turn % 3 == 0 else term(draw)
        again = read(chosen)
        for n in (1, 7):
            assert np.array_equal(mask(again, n), mask(chosen, n)), written(chosen)
        assert read(again) == again
