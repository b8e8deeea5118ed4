"""Forms of graphs: the pairs of every form are those of its graph, and what follows from what."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from random_terms import mask, scalar, term, tokens

from attnspec.graphs.forms.conditions import (
    Among,
    Condition,
    Conjunction,
    Ends,
    Form,
    Held,
    Multiple,
    TooMany,
    Within,
    complement,
    contained,
    crossed,
    joined,
    merged,
)
from attnspec.graphs.forms.dnf import Place, form_of, place_of
from attnspec.graphs.forms.properties import is_symmetric, never_reads_later, reads_itself
from attnspec.ir.program import Compound, Leaf, Term, TokenCompound, Tokens
from attnspec.ir.scalars import Apply, Scalar, Symbol, evaluate
from attnspec.limits import LIMITS
from attnspec.spec import parse

Q, K, N = Symbol("q"), Symbol("k"), Symbol("n")

ROOT = Apply("isqrt", (N,))
"""A size that reads the length."""

LENGTHS = (2, 5, 13)


# --- the pairs of a form --------------------------------------------------------------------------


def pairs_of(form: Form, n: int, causal: bool = False) -> np.ndarray:
    """The pairs of a form by what its conditions say, bool [n, n]."""
    found = np.zeros((n, n), bool)
    for conjunction in form:
        found |= pairs_of_all(conjunction, n, causal)
    return found


def pairs_of_all(conjunction: Conjunction, n: int, causal: bool) -> np.ndarray:
    found = np.ones((n, n), bool)
    for one in conjunction:
        found &= holds(one, n, causal)
    return found


def holds(one: Condition, n: int, causal: bool) -> np.ndarray:
    """The pairs of a condition, bool [n, n]."""
    q, k = np.arange(n)[:, None], np.arange(n)[None]

    def number(size: Scalar) -> float:
        return float(evaluate(size, {"n": n}))

    match one:
        case Within(most, later, size):
            apart = q // number(size) - k // number(size)
            return np.asarray((-apart if later else apart) <= number(most))
        case Multiple(step, wanted):
            return np.asarray(((q - k) % number(step) == 0) == wanted)
        case Among(side, Ends(stride, cells), wanted):
            place = (q if side == "q" else k) + 0 * (q + k)
            return np.asarray((place % number(stride) >= number(stride) - number(cells)) == wanted)
        case Among(side, members, wanted):
            assert not isinstance(members, Ends)
            pattern = Leaf("rows" if side == "q" else "columns", (("tokens", members),))
            return np.asarray(mask(pattern, n) == wanted)
        case Held(held, _, wanted):
            return np.asarray(mask(held, n, causal) == wanted)


def where(predicate: Scalar) -> Leaf:
    return Leaf("where", (("predicate", predicate),))


def apart(draw: random.Random, size: Scalar) -> Scalar:
    """How far apart a query and a key are, in positions or in blocks, written in some way."""
    ends = [Apply("//", (end, size)) if size != 1 else end for end in (Q, K)]
    draw.shuffle(ends)
    found: Scalar = Apply("-", tuple(ends))
    match draw.randrange(4):
        case 0:
            return Apply(draw.choice("+-"), (found, scalar(draw)))
        case 1:
            return Apply("neg", (found,))
        case _:
            return found


def comparison(draw: random.Random) -> Scalar:
    """A comparison of the kinds that forms take apart, and of some that they do not."""
    order, equal = draw.choice("< <= > >=".split()), draw.choice(("==", "!="))
    position, size, step = draw.choice((Q, K)), draw.choice((1, 1, 2, 5)), scalar(draw, 1)
    distance, number = apart(draw, size), scalar(draw)
    match draw.randrange(12):
        case 0 | 1:
            return Apply(draw.choice((order, order, equal)), (distance, number))
        case 2:
            return Apply(draw.choice((order, equal)), (Apply("abs", (distance,)), number))
        case 3:
            return Apply("within", (distance, Apply("neg", (number,)), scalar(draw)))
        case 4:
            sides = [Apply("%", (end, step)) for end in draw.sample((Q, K), 2)]
            return Apply(equal, tuple(sides))
        case 5:
            return Apply(equal, (Apply("%", (distance, step)), 0))
        case 6:
            return Apply(equal, (Apply("%", (position, step)), draw.choice((0, 0, 1))))
        case 7:
            left = draw.choice((step, Apply("-", (step, draw.randint(1, 3))), draw.randint(0, 3)))
            return Apply(order, (Apply("%", (position, step)), left))
        case 8:
            return Apply("<", (Apply("%", (position, draw.randint(1, 5))), draw.choice((Q, K, 2))))
        case 9:
            end = draw.choice((number, Apply("-", (N, number)), Apply("+", (N, number))))
            ends: list[Scalar] = [position, end]
            if draw.random() < 0.3:
                ends = [Apply("neg", (position,)), -3]
            return Apply(order, tuple(ends if draw.random() < 0.7 else ends[::-1]))
        case 10:
            return Apply(order, (Apply("*", (2, Q)), Apply("+", (K, number))))
        case _:
            return Apply(order, (Apply("+", (Q, K)), number))


def predicate(draw: random.Random, depth: int = 2) -> Scalar:
    if not depth or draw.random() < 0.4:
        return comparison(draw)
    op = draw.choice(("and", "or", "not"))
    parts = 1 if op == "not" else 2
    return Apply(op, tuple(predicate(draw, depth - 1) for _ in range(parts)))


def graph(draw: random.Random, depth: int = 2) -> Term:
    """A graph of predicates, token sets and patterns."""
    if not depth or draw.random() < 0.3:
        match draw.randrange(4):
            case 0:
                return term(draw, 0)
            case 1:
                return Leaf(draw.choice(("rows", "columns")), (("tokens", tokens(draw)),))
            case _:
                return where(predicate(draw))
    op = draw.choice(("|", "&", "~", "transpose", "shift", "-"))
    parts = 2 if op in "|&-" else 1
    by = draw.randint(-2, 2) if op == "shift" else None
    return Compound(op, tuple(graph(draw, depth - 1) for _ in range(parts)), by)


def test_the_pairs_of_a_form_are_those_of_its_graph() -> None:
    draw = random.Random(0)
    taken_apart = 0
    for _ in range(240):
        one, causal = graph(draw), draw.random() < 0.3
        form = form_of(one, Place(causal=True) if causal else Place())
        for n in LENGTHS if form is not None else ():
            taken_apart += 1
            wanted = mask(one, n, causal)
            wanted = np.tril(wanted) if causal else wanted
            assert (pairs_of(form or frozenset(), n, causal) == wanted).all(), (one, causal, n)
    assert taken_apart > 600


# --- what is taken apart --------------------------------------------------------------------------


def form(text: str) -> Form:
    """The form of a graph as users write it."""
    spec = parse(f"attention a {{ attend {text} }}")
    found = form_of(spec.program.attends[0].graph or where(True), place_of(spec.program))
    assert found is not None
    return found


def one_of(*conditions: Condition) -> Form:
    return frozenset(frozenset([one]) for one in conditions)


def all_of(*conditions: Condition) -> Form:
    return frozenset([frozenset(conditions)])


def first(count: Scalar) -> Tokens:
    return Tokens("first", (count,))


def last(count: int) -> Tokens:
    return Tokens("last", (count,))


@pytest.mark.parametrize(
    ("predicate", "meant"),
    [
        ("q - k <= 3", one_of(Within(3, False))),
        ("q - k < 3", one_of(Within(2, False))),
        ("k - q >= 3", one_of(Within(-3, False))),
        ("q - k > 3", one_of(Within(-4, True))),
        ("q - k <= isqrt(n)", one_of(Within(Apply("isqrt", (N,)), False))),
        ("q <= k + 2", one_of(Within(2, False))),
        ("q // 4 - k // 4 <= 1", one_of(Within(1, False, 4))),
        ("k // 4 > q // 4", one_of(Within(-1, False, 4))),
        ("abs(q - k + 1) <= 3", all_of(Within(2, False), Within(4, True))),
        ("abs(k - q + 1) < 3", all_of(Within(3, False), Within(1, True))),
        ("abs(q - k) > 3", one_of(Within(-4, False), Within(-4, True))),
        ("abs(q - k) >= 3", one_of(Within(-3, False), Within(-3, True))),
        ("q - k == 2", all_of(Within(2, False), Within(-2, True))),
        ("k - q == 2", all_of(Within(-2, False), Within(2, True))),
        ("k - q != 2", one_of(Within(-3, False), Within(1, True))),
        ("q // 3 == k // 3", all_of(Within(0, False, 3), Within(0, True, 3))),
        ("q % 4 == k % 4", one_of(Multiple(4))),
        ("k % 4 != q % 4", one_of(Multiple(4, False))),
        ("(k - q) % 4 == 0", one_of(Multiple(4))),
        ("(q - k) % 1 == 0", all_of()),
        ("q % 3 == 0", one_of(Among("q", Tokens("every", (3, 0))))),
        ("k % 3 != 0", one_of(Among("k", Tokens("every", (3, 0)), False))),
        ("k % 4 >= 3", one_of(Among("k", Ends(4, 1)))),
        ("q % 4 < 2", one_of(Among("q", Ends(4, 2), False))),
        ("k < 3", one_of(Among("k", first(3)))),
        ("3 >= q", one_of(Among("q", first(4)))),
        ("k >= 3", one_of(Among("k", first(3), False))),
        ("-k < -3", one_of(Among("k", first(4), False))),
        ("k >= n - 3", one_of(Among("k", last(3)))),
        ("n - 3 < q", one_of(Among("q", last(2)))),
        ("q < n - 3", one_of(Among("q", last(3), False))),
        ("k - n <= -3", one_of(Among("k", last(2), False))),
    ],
)
def test_comparisons_are_taken_apart(predicate: str, meant: Form) -> None:
    assert form(f"where({predicate})") == meant


@pytest.mark.parametrize(
    "predicate",
    [
        *("k % 4 == 1", "q % 4 <= 2", "k % 4 < q", "k % q < 2", "q % 4 == k % 5", "k % 4 >= 4"),
        *("(q - k + 1) % 4 == 0", "2 * k < n", "k < n + 3", "k < -1", "k < isqrt(n)", "k == 2"),
        *("abs(q - k) == 2", "abs(q - k) <= k", "abs(q) <= 2", "2 * q <= k", "q * k <= 3"),
        *("q // 2 <= k // 3", "q / 2 - k / 2 <= 1", "q // k <= 1"),
    ],
)
def test_what_is_not_taken_apart_is_held_whole(predicate: str) -> None:
    ((one,),) = form(f"where({predicate})")
    assert isinstance(one, Held)
    assert one.wanted


def test_sizes_are_those_of_the_place_where_a_graph_stands() -> None:
    program = parse("attention a { layers 2 heads 3 attend full }").program
    far = Apply("+", (Apply("*", (8, Symbol("layer"))), Symbol("head")))
    count = Apply("+", (Symbol("layers"), Symbol("heads")))
    parts = Leaf("window", (("radius", far),)), Leaf("columns", (("tokens", first(count)),))
    for layer, head in product(range(2), range(3)):
        here = form_of(Compound("|", parts), place_of(program, layer, head))
        assert here == form(f"window(radius = {8 * layer + head}) | columns(first(5))")
    # nothing is said of any layer and head that is not so in all of them
    anywhere = form_of(Compound("|", parts), place_of(program, None, None))
    assert anywhere is not None
    assert contained(form("columns(first(5))"), anywhere)
    assert not contained(form("window(radius = 3)"), anywhere)


# --- what follows from what -----------------------------------------------------------------------

WIDE = 24
"""Positions at which the pairs of small sizes show everything that they are at any length."""

SIDES = [(later, most) for later in (False, True) for most in range(-4, 5)]

FAMILIES: dict[str, list[Form]] = {
    "limits": [one_of(Within(most, later)) for later, most in SIDES],
    **{
        f"limits and blocks of {size}": [
            one_of(Within(most, later, each)) for later, most in SIDES for each in (1, size)
        ]
        for size in (2, 3)
    },
    "bands": [
        all_of(Within(high, False), Within(-low, True))
        for low in range(-3, 4)
        for high in range(low, 4)
    ],
    "steps": [one_of(Multiple(step, wanted)) for step in range(2, 13) for wanted in (True, False)],
    **{
        kind: [
            one_of(Among(side, Tokens(kind, (count,)), wanted))
            for side, count, wanted in product("qk", range(1, 5), (True, False))
        ]
        for kind in ("first", "last")
    },
    "ends of strides": [
        one_of(Among(side, Ends(stride, cells), wanted))
        for side, stride, wanted in product("qk", (4, 5), (True, False))
        for cells in range(1, stride)
    ],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_one_lies_in_another_where_its_pairs_do(family: str) -> None:
    every = [(one, pairs_of(one, WIDE)) for one in FAMILIES[family]]
    for (one, pairs), (other, others) in product(every, every):
        assert contained(one, other) == (not (pairs & ~others).any()), (one, other)


def test_a_query_itself_is_at_every_distance_that_no_size_can_exclude() -> None:
    own = all_of(Within(0, False), Within(0, True))
    for step in (2, ROOT):
        assert contained(own, one_of(Multiple(step)))
        assert not contained(own, one_of(Multiple(step, False)))
    for later in (True, False):
        # the size of a pattern is never below zero, that of a predicate may be
        assert contained(own, one_of(Within(ROOT, later, natural=True)))
        assert not contained(own, one_of(Within(ROOT, later)))
    assert contained(own, form("window(radius = isqrt(n))"))
    assert not contained(form("where(q - k in 0..1)"), form("window(radius = isqrt(n))"))
    assert contained(one_of(Within(0, True)), one_of(Within(ROOT, True, natural=True)))
    assert not contained(one_of(Within(1, True)), one_of(Within(ROOT, True, natural=True)))
    assert contained(own, form("powers(base = 2) | random_blocks(size = 2, blocks = 1)"))
    assert not contained(own, form("where(q - k <= isqrt(n) - 5)"))


def test_sizes_that_read_the_length_are_compared_by_what_is_added_to_them() -> None:
    def limit(number: int) -> Form:
        added = [Apply("+", (N, number)), Apply("-", (N, -number))][number < 0]
        return one_of(Within(added if number else N, False))

    for one, other in product(range(-3, 4), repeat=2):
        assert contained(limit(one), limit(other)) == (one <= other)
    assert not contained(limit(0), one_of(Within(Apply("isqrt", (N,)), False)))
    assert not contained(limit(0), one_of(Within(5, False)))
    assert not contained(one_of(Within(5, False)), limit(0))
    assert contained(one_of(Among("k", Ends(N, 2))), one_of(Among("k", Ends(N, 3))))
    assert not contained(one_of(Among("k", Ends(N, 2))), one_of(Among("k", Ends(4, 3))))
    assert not contained(one_of(Multiple(N)), one_of(Multiple(2)))


@pytest.mark.parametrize(
    ("steady", "conditions"),
    [
        (True, [Within(2, True), Within(1, False, 3), Multiple(3)]),
        (True, [Among("q", first(3)), Among("k", Ends(4, 1)), Among("q", Tokens("every", (3, 1)))]),
        (True, [Among("k", TokenCompound("|", (first(1), first(4))))]),
        (False, [Within(ROOT, True), Within(1, False, ROOT), Within(ROOT, False, 2)]),
        (False, [Multiple(ROOT), Among("q", last(3)), Among("k", Tokens("first", (ROOT,)))]),
        (False, [Among("k", Tokens("every", (ROOT, 1))), Among("k", Tokens("every", (2, ROOT)))]),
        (False, [Among("k", Ends(ROOT, 1)), Among("k", Ends(9, ROOT))]),
    ],
)
def test_a_condition_is_steady_where_its_pairs_are(
    steady: bool, conditions: list[Within | Multiple | Among]
) -> None:
    for one in conditions:
        short, long = (pairs_of(one_of(one), n) for n in (12, 30))
        assert one.steady is steady
        assert bool((short == long[:12, :12]).all()) is steady, one


# --- unions and intersections ---------------------------------------------------------------------


def condition(draw: random.Random) -> Condition:
    wanted = draw.random() < 0.6
    match draw.randrange(4):
        case 0 | 1:
            return Within(draw.randint(-3, 4), not wanted, draw.choice((1, 1, 1, 3)))
        case 2:
            return Multiple(draw.randint(2, 3), wanted)
        case _:
            members = draw.choice((first(2), last(2), Ends(3, 1)))
            return Among(draw.choice("qk"), members, wanted)


def conjunctions(draw: random.Random) -> Iterator[Conjunction]:
    for _ in range(draw.randint(0, 3)):
        yield frozenset(condition(draw) for _ in range(draw.randint(1, 3)))


def test_operators_of_forms_are_those_of_their_pairs() -> None:
    draw = random.Random(1)
    for _ in range(150):
        one, other = frozenset(conjunctions(draw)), frozenset(conjunctions(draw))
        pairs, others = pairs_of(one, 9), pairs_of(other, 9)
        assert (pairs_of(joined([one, other]), 9) == pairs | others).all()
        assert (pairs_of(crossed([one, other]), 9) == pairs & others).all()
        assert (pairs_of(complement(one), 9) == ~pairs).all()
        assert (pairs_of(merged(one), 9) == pairs).all()


def test_of_an_intersection_one_number_is_kept_on_each_side() -> None:
    far, near = one_of(Within(5, False)), one_of(Within(2, False))
    assert crossed([far, near]) == near
    assert crossed([near, one_of(Within(2, True)), far]) == all_of(
        Within(2, False), Within(2, True)
    )
    assert crossed([near, one_of(Within(0, False, 4))]) == all_of(
        Within(2, False), Within(0, False, 4)
    )
    assert crossed([near, one_of(Within(ROOT, False))]) == all_of(
        Within(2, False), Within(ROOT, False)
    )
    # a size of a pattern, never below zero, says nothing beside zero
    none = one_of(Within(0, False))
    assert crossed([none, one_of(Within(ROOT, False, natural=True))]) == none


@pytest.mark.parametrize(
    "one", [Multiple(3), Among("k", first(2)), Held(Leaf("full", ()), (), True), Within(2, False)]
)
def test_what_contradicts_itself_has_no_pair(one: Condition) -> None:
    assert crossed([one_of(one), complement(one_of(one))]) == frozenset()


@pytest.mark.parametrize("rest", [(), (Multiple(3),), (Among("q", last(1)), Within(1, True, 4))])
def test_bands_that_touch_are_one(rest: tuple[Condition, ...]) -> None:
    draw = random.Random(2)
    for _ in range(60):
        bands = []
        for _ in range(draw.randint(1, 4)):
            low = draw.randint(-6, 6)
            high = low + draw.randint(0, 3)
            ends = [Within(high, False), Within(-low, True)]
            chance = draw.random()
            if chance < 0.2:
                ends.pop(chance < 0.1)
            bands.append(frozenset([*ends, *rest]))
        found = merged(frozenset(bands))
        held = pairs_of(frozenset(each - set(rest) for each in bands), WIDE)
        distances = np.array([held.diagonal(-apart).any() for apart in range(-12, 13)])
        runs = int(distances[0]) + int((distances[1:] & ~distances[:-1]).sum())
        assert len(found) == runs
        assert (pairs_of(found, WIDE) == pairs_of(frozenset(bands), WIDE)).all()


def test_bands_beside_other_conditions_stay_apart() -> None:
    low, high = (
        all_of(Within(0, False), Within(2, True)),
        all_of(Within(3, False), Within(-1, True)),
    )
    assert len(merged(joined([low, high]))) == 1
    stepped = crossed([high, one_of(Multiple(2))])
    assert merged(joined([low, stepped])) == joined([low, stepped])
    # what lies in another is left out, whatever else it says
    within = crossed([all_of(Within(0, False), Within(1, True)), one_of(Multiple(2))])
    assert merged(joined([low, within])) == low


def test_forms_have_so_many_conjunctions_and_no_more() -> None:
    few = frozenset(frozenset([Among("k", first(count))]) for count in range(1, 9))
    other = frozenset(frozenset([Among("q", first(count))]) for count in range(1, 9))
    assert len(crossed([few, other])) == LIMITS.terms
    more = other | one_of(Multiple(2))
    with pytest.raises(TooMany):
        crossed([few, more])
    steps = one_of(*(Multiple(step + 2) for step in range(LIMITS.terms)))
    assert joined([steps]) == steps
    with pytest.raises(TooMany):
        joined([steps, one_of(Multiple(LIMITS.terms + 2))])


# --- what is proven from how a graph is written ---------------------------------------------------


def test_properties_that_are_proven_hold() -> None:
    draw = random.Random(3)
    proven = [0, 0, 0]
    for _ in range(400):
        one = graph(draw)
        said = [reads_itself(one), is_symmetric(one), never_reads_later(one)]
        proven = [count + each for count, each in zip(proven, said, strict=True)]
        for n in LENGTHS if any(said) else ():
            pairs = mask(one, n)
            shown = [pairs.diagonal().all(), (pairs == pairs.T).all(), not np.triu(pairs, 1).any()]
            assert all(so for so, wanted in zip(shown, said, strict=True) if wanted), (one, n)
    assert min(proven) > 10
