"""Pairs between some queries and some keys against the definition: masks and every closed form."""

from __future__ import annotations

import numpy as np
import pytest
from relation_checks import definition, faults

from attnspec.graphs.bind import bind_attended, situation_of
from attnspec.graphs.gathered import Gathered, gathered
from attnspec.graphs.operators import Union
from attnspec.graphs.relation import Relation, is_of_any_length
from attnspec.spec import parse

N = 49

GRAPHS = (
    "full",
    "causal",
    "window(before = 7, after = 2)",
    "window(radius = 3) | global(first(3)) | columns(last(2))",
    "strided(stride = 4) & causal",
    "block(size = 8) | dilated(radius = 9, step = 3)",
    "full - residue(step = 5)",
    "shift(window(radius = 2), by = 4)",
    "transpose(fixed(stride = 6, cells = 2)) & ~self",
    "where(q * k < 3 * n and (q + k) % 2 == 0)",
    "random_blocks(size = 8, blocks = 2, seed = 3)",
    "powers(base = 2)",
)

PARTS = {
    "a range": np.arange(17, 40),
    "one": np.array([33]),
    "two ranges": np.r_[4:9, 30:47],
    "a class": np.arange(2, N, 4),
    "two classes": np.r_[np.arange(1, N, 4), np.arange(3, N, 4)],
    "many runs": np.r_[0:3, 5:6, 8:12, 14:15, 20:21, 25:31, 33:34, 38:42, 44:49],
    "no order": np.r_[40:48, 3:20, 30],
    "all": np.arange(N),
}


def relation_of(graph: str, n: int = N) -> Relation:
    program = parse(f"attention a {{ attend {graph} }}").program
    graph_of = program.attends[0].graph
    assert graph_of is not None
    return bind_attended(graph_of, situation_of(program, n))


@pytest.mark.parametrize("graph", GRAPHS)
def test_pairs_are_those_between_the_positions(graph: str) -> None:
    relation = relation_of(graph)
    whole = definition(relation, N)
    names = list(PARTS)
    for number, (name, queries) in enumerate(PARTS.items()):
        for other in (name, names[number - 3]):
            keys = PARTS[other]
            found, n, count = gathered(relation, N, queries, keys)
            assert (n, count) == (max(len(queries), len(keys)), len(queries))
            wanted = np.zeros((n, n), bool)
            wanted[n - count :, : len(keys)] = whole[np.ix_(queries, keys)]
            if found == relation:
                assert count == n
            else:
                assert not is_of_any_length(found)
            assert np.array_equal(definition(found, n), wanted), (name, other)
            assert faults(found, n, (1, 8)) == []


def test_a_range_of_what_asks_for_distances_alone_is_the_graph_itself() -> None:
    part = PARTS["a range"]
    for graph, itself in (("causal", True), ("block(size = 8)", False), ("full - self", True)):
        relation = relation_of(graph)
        assert (gathered(relation, N, part, part)[0] == relation) == itself
        moved = gathered(relation, N, part, part + 1)[0]
        assert moved != relation


def test_parts_keep_their_orders() -> None:
    relation = relation_of("window(radius = 3) | residue(step = 12)")
    classes = np.arange(1, N, 4)
    found, n, _ = gathered(relation, N, classes, classes)
    assert isinstance(found, Union)
    assert all(isinstance(term, Gathered) for term in found.terms)
    # positions 4 apart, so that a class of 12 is every third of them
    assert [term.strides(n) for term in found.terms] == [((3, 3),), ()]
