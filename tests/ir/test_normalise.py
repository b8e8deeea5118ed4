"""The normal form: the same pairs, found again by normalising twice, one for equal spellings."""

from __future__ import annotations

import random

import numpy as np
import pytest
from random_terms import leaf, mask, term
from sweeps import thinned

from attnspec.ir.normal_form import normal_term, normalise, substitute
from attnspec.ir.program import Attend, Compound, Leaf, Program, Term, leaves
from attnspec.ir.scalars import Apply, Symbol

FULL = Leaf("full", ())
A, B, C = (Leaf("residue", (("step", step),)) for step in (2, 3, 5))


def union(*terms: Term) -> Compound:
    return Compound("|", terms)


def both(*terms: Term) -> Compound:
    return Compound("&", terms)


def without(*terms: Term) -> Compound:
    return Compound("-", terms)


def no(part: Term) -> Compound:
    return Compound("~", (part,))


@pytest.mark.parametrize("part", thinned(range(4)))
def test_a_normal_form_is_final_and_has_the_same_pairs(part: int) -> None:
    for seed in range(part * 50, part * 50 + 50):
        graph = term(random.Random(seed))
        normal = normal_term(graph)
        assert normal_term(normal) == normal, seed
        for n in (0, 1, 2, 5, 12):
            assert np.array_equal(mask(graph, n), mask(normal, n)), (seed, graph, n)


def shuffled(graph: Term, draw: random.Random) -> Term:
    """The graph with the operands of `|` and `&` in another order, grouped and repeated."""
    if isinstance(graph, Leaf):
        return graph
    parts = [shuffled(part, draw) for part in graph.terms]
    if graph.op in "|&":
        parts.append(draw.choice(parts))
        draw.shuffle(parts)
        if len(parts) > 2:
            parts = [Compound(graph.op, tuple(parts[:2])), *parts[2:]]
    return Compound(graph.op, tuple(parts), graph.by)


def test_order_grouping_and_repetition_do_not_matter() -> None:
    for seed in range(100):
        draw = random.Random(seed)
        graph = union(term(draw), leaf(draw), both(leaf(draw), leaf(draw)))
        assert normal_term(shuffled(graph, draw)) == normal_term(graph), seed


@pytest.mark.parametrize(
    ("graph", "wanted"),
    [
        (no(no(A)), A),
        (Compound("transpose", (Compound("transpose", (A,)),)), A),
        (without(A, B), both(A, no(B))),
        (without(A, B, C), both(A, no(B), no(C))),
        (without(A, no(B)), both(A, B)),
        (union(A, FULL), FULL),
        (both(A, FULL), A),
        (both(FULL, FULL), FULL),
        (union(A, both(B, FULL)), union(A, B)),
        (union(A, A), A),
        (union(union(A, B), C), union(A, B, C)),
        (both(union(A, both(FULL, union(B, A))), C), both(union(A, B), C)),
    ],
)
def test_rewrites(graph: Term, wanted: Term) -> None:
    assert normal_term(graph) == normal_term(wanted)
    assert len(list(leaves(normal_term(graph)))) == len(list(leaves(wanted)))


@pytest.mark.parametrize(
    ("graph", "other"),
    [
        (without(A, B), without(B, A)),
        (union(A, B), both(A, B)),
        (no(A), A),
        (Compound("shift", (A,), 1), Compound("shift", (A,), 2)),
        (Compound("transpose", (A,)), A),
    ],
)
def test_other_meanings_stay_apart(graph: Term, other: Term) -> None:
    assert normal_term(graph) != normal_term(other)


def test_equal_heads_become_one() -> None:
    attends = (Attend(union(A, B)), Attend(C), Attend(union(B, A)))
    program = Program("p", attends, ((0, 1, 2), (2, 1, 0)), layers=2, heads=3)
    normal = normalise(program)
    assert len(normal.attends) == 2
    assert normal.slots == ((0, 1, 0), (0, 1, 0))
    assert normalise(normal) == normal
    assert normal.attend(1, 2) == normal.attend(0, 0)


def test_layer_and_head_become_numbers() -> None:
    size = Apply("**", (2, Apply("+", (Symbol("head"), Symbol("layer")))))
    graph = no(Leaf("window", (("radius", size),)))
    assert substitute(graph, {"head": 1, "layer": 2}) == no(Leaf("window", (("radius", 8),)))
    assert substitute(graph, {"head": 1}) == no(
        Leaf("window", (("radius", Apply("**", (2, Apply("+", (1, Symbol("layer")))))),))
    )
