"""How many edges a relation has: exact where nothing is left to a sample, near where one is."""

from __future__ import annotations

import random

import pytest
from attention_checks import spec_of
from random_terms import term
from relation_checks import definition

from attnspec.graphs.bind import Situation, bind
from attnspec.graphs.operators import Union
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.relation import Relation, is_scattered
from attnspec.layout import edge_count
from attnspec.limits import LIMITS

edges_of = edge_count.edges_of.__wrapped__


def relations(n: int, number: int) -> list[Relation]:
    draw = random.Random(n)
    at = Situation(n=n, patterns=BY_NAME)
    return [bind(term(draw), at) for _ in range(number)]


@pytest.mark.limits("", "tiny")
@pytest.mark.parametrize("n", [1, 6, 20])
def test_edges_of_few_queries_are_counted(n: int) -> None:
    """All of them, by what is known of rows, by looking, by covers of ranges of keys, in lists."""
    for relation in relations(n, 40):
        held = definition(relation, n)
        for n_q in {n, (n + 1) // 2, 1, 0}:
            exact = int(held[n - n_q :].sum())
            if not is_scattered(relation):
                assert edges_of(relation, n_q, n) == exact, relation
            else:
                assert 0 <= edges_of(relation, n_q, n) <= n_q * n


def relation_of(body: str, n: int) -> Relation:
    return spec_of(f"attend {body}").relation(n)


MONOTONE = [
    "window(radius = 9)",
    "causal & prefix(300)",
    "~causal",
    "causal & ~block(size = 7)",
    "causal - window(radius = 5) - columns(every(3))",
]
"""Graphs whose rows, nearly all, grow or shrink with the query."""


@pytest.mark.limits("", "tiny")
@pytest.mark.parametrize("body", MONOTONE)
def test_edges_of_many_queries_are_those_of_some(body: str) -> None:
    """One query of each range of queries, and where covers are asked one range of keys of some:
    none is further from its range than the ends of that."""
    n = 800
    relation = relation_of(body, n)
    for n_q in (n, 333):
        exact = int(definition(relation, n)[n - n_q :].sum())
        found = edges_of(relation, n_q, n)
        assert abs(found - exact) <= n_q * n / 20
        assert found == pytest.approx(exact, rel=0.12)


def test_edges_of_what_is_drawn_are_counted_with_what_is_not() -> None:
    n = 500
    drawn, other = relation_of("random(keys = 8)", n), relation_of("window(radius = 4)", n)
    assert edges_of(drawn, 40, n) == 40 * drawn.typical_degree(n)
    # both are counted, where they meet too, but no pair twice
    assert edges_of(Union((drawn, other)), 40, n) == 40 * drawn.typical_degree(n) + 40 * 9 - 10
    assert edges_of(Union((drawn, relation_of("full", n))), 40, n) == 40 * n
    some = relation_of("causal & random(keys = 8)", n)
    exact = len(some.rows(0, n, n)[0])
    assert edges_of(some, n, n) == exact


@pytest.mark.limits("", "tiny")
@pytest.mark.parametrize("n_q", [300, 500])
def test_edges_of_what_is_drawn_are_estimated_from_runs(n_q: int) -> None:
    some = relation_of("causal & random(keys = 8)", 500)
    exact = len(some.rows(500 - n_q, 500, 500)[0])
    near = 0.0 if n_q <= LIMITS.rows_written else 0.3
    assert edges_of(some, n_q, 500) == pytest.approx(exact, rel=near)
