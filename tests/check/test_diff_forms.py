"""Forms of graphs: what they prove is so, by brute force; what they must see."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from random_terms import mask, term

from attnspec.graphs.forms.conditions import Form, contained, equal
from attnspec.graphs.forms.dnf import Place, form_of, place_of
from attnspec.ir.program import Compound, Leaf, Term
from attnspec.spec import parse


def form(graph: str, before: str = "") -> Form:
    spec = parse(f"attention a {{ {before} attend {graph} }}")
    found = form_of(spec.program.attends[0].graph or Leaf("self", ()), place_of(spec.program))
    assert found is not None
    return found


def changed(graph: Term, draw: random.Random) -> Term:
    """A term that has something in common with another."""
    chance = draw.random()
    if chance < 0.2:
        return Compound("~", (Compound("~", (graph,)),))
    if chance < 0.4:
        return Compound("|", (graph, term(draw)))
    if chance < 0.6:
        return Compound("&", (graph, term(draw)))
    if chance < 0.7:
        return Compound("transpose", (graph,))
    if isinstance(graph, Compound):
        parts = tuple(changed(x, draw) if draw.random() < 0.5 else x for x in graph.terms)
        return Compound(graph.op, parts, graph.by)
    return term(draw)


@pytest.mark.parametrize(
    "part",
    [*range(1), *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 6))],
)
def test_what_forms_prove_is_so(part: int) -> None:
    draw = random.Random(part)
    proven = 0
    for _ in range(60):
        first = term(draw)
        second, causal = changed(first, draw), draw.random() < 0.4
        forms = [form_of(graph, Place(causal)) for graph in (first, second)]
        for one, other in ((0, 1), (1, 0)):
            small, large = forms[one], forms[other]
            if small is None or large is None or not contained(small, large):
                continue
            proven += 1
            for n in (1, 2, 3, 7, 13):
                pairs = [mask((first, second)[x], n, causal=causal) for x in (one, other)]
                missing = pairs[0] & ~pairs[1]
                assert not (np.tril(missing) if causal else missing).any(), (first, second, n)
    assert proven > 30


SPELLINGS = (
    ("window(radius = 2)", "window(before = 2, after = 2)", "where(abs(q - k) <= 2)"),
    ("window(before = 31, after = 0)", "where(k <= q and q - k < 32)", "where(q - k in 0..31)"),
    ("full", "causal | transpose(causal)", "window(radius = 2) | ~window(radius = 2)"),
    ("where(q - k in 0..2) | where(q - k in 3..6)", "where(q - k in 0..6)"),
    ("self", "causal & transpose(causal)", "where(q == k)", "window(radius = 0)"),
    ("block(size = 8)", "where(q // 8 == k // 8)", "transpose(block(size = 8))"),
    ("residue(step = 3)", "where((q - k) % 3 == 0)", "where(k % 3 == q % 3)"),
    ("dilated(radius = 6, step = 2)", "window(radius = 6) & residue(step = 2)"),
    (
        "strided(stride = isqrt(n))",
        "window(radius = isqrt(n) - 1) | residue(step = isqrt(n))",
        "transpose(strided(stride = isqrt(n)))",
    ),
    ("block(size = 8, before = 1)", "where(q // 8 - k // 8 in 0..1)"),
    ("transpose(block(size = 8, before = 2))", "block(size = 8, after = 2)"),
    ("transpose(summary(stride = 8, cells = 1))", "where(q % 8 >= 7)"),
    ("block(size = 8) & where(q - k >= 8)", "where(false)", "residue(step = 3) - full"),
    ("fixed(stride = 8, cells = 2)", "block(size = 8) | summary(stride = 8, cells = 2)"),
    (
        "global(first(1) | last(2))",
        "rows(first(1) | last(2)) | transpose(rows(last(2) | first(1)))",
        "global(first(1)) | global(last(2))",
    ),
    (
        "random(keys = 3, seed = 1) - causal",
        "random(keys = 3, seed = 1) & where(k > q)",
        "random(keys = 3, seed = 1) & ~~where(not k <= q)",
    ),
)


@pytest.mark.parametrize("spellings", SPELLINGS, ids=lambda each: each[0])
def test_spellings_of_one_graph_come_to_one_form(spellings: tuple[str, ...]) -> None:
    for first, second in pairwise(spellings):
        assert equal(form(first), form(second)), (first, second)
        assert (
            parse(f"attention a {{ attend {first} }}").mask(40)
            == parse(f"attention a {{ attend {second} }}").mask(40)
        ).all()


@pytest.mark.parametrize(
    ("small", "large"),
    [
        ("window(radius = 2)", "window(radius = 3)"),
        ("window(radius = isqrt(n) - 1)", "window(radius = isqrt(n))"),
        ("block(size = 8)", "window(radius = 7)"),
        ("window(radius = 8)", "block(size = 8, before = 1, after = 1)"),
        ("block(size = 5)", "block(size = 12, before = 1, after = 1)"),
        ("self", "block(size = isqrt(n))"),
        ("residue(step = 12)", "residue(step = 4)"),
        ("columns(first(1))", "global(first(2))"),
        ("summary(stride = 8, cells = 1)", "fixed(stride = 8, cells = 2)"),
    ],
)
def test_what_lies_in_what(small: str, large: str) -> None:
    assert contained(form(small), form(large))
    assert not contained(form(large), form(small))


def test_a_block_further_than_a_window_reaches() -> None:
    assert not contained(form("window(before = 9, after = 0)"), form("block(size = 8, before = 1)"))
    assert not contained(form("block(size = 8)"), form("window(radius = 6)"))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("window(radius = 2)", "window(radius = 3)"),
        ("window(radius = 2)", "window(before = 2, after = 1)"),
        ("block(size = 8)", "block(size = 9)"),
        ("random(keys = 3, seed = 1)", "random(keys = 3, seed = 2)"),
        ("strided(stride = isqrt(n))", "strided(stride = 16)"),
        ("shift(full, by = 1)", "full"),
        # a band with a gap is not one band
        ("where(q - k in 0..2) | where(q - k in 4..6)", "where(q - k in 0..6)"),
    ],
)
def test_what_is_not_the_same_is_not_proven(first: str, second: str) -> None:
    assert not equal(form(first), form(second))


def test_a_draw_depends_on_where_it_stands() -> None:
    drawn = "random(keys = 3)"
    assert equal(form(drawn), form(drawn))
    # under `causal`, the keys are drawn among those that are allowed
    assert not equal(form(drawn, "causal"), form(f"{drawn} & causal"))


def test_a_form_that_would_be_too_large_proves_nothing() -> None:
    parts = " & ".join(f"(residue(step = {i + 2}) | columns(first({i})))" for i in range(7))
    spec = parse(f"attention a {{ attend {parts} }}")
    graph = spec.program.attends[0].graph
    assert graph is not None
    assert form_of(graph, Place()) is None


def test_of_conjunctions_that_say_the_same_one_is_kept() -> None:
    # what 4 divides is even: both sides have the same pairs
    written = "residue(step = 4) | residue(step = 4) & residue(step = 2)"
    assert len(form(written)) == 1
    assert equal(form(written), form("residue(step = 4)"))
