"""Closed forms at lengths where nothing else would end: a million positions, in little memory."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import comb

import numpy as np
import pytest

from attnspec.graphs.operators import Intersection, Union
from attnspec.graphs.patterns.block import Block
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.patterns.columns_rows import Columns
from attnspec.graphs.patterns.dilated import Dilated
from attnspec.graphs.patterns.fixed import Fixed
from attnspec.graphs.patterns.full import Full
from attnspec.graphs.patterns.global_ import Global
from attnspec.graphs.patterns.neighborhood import Neighborhood
from attnspec.graphs.patterns.powers import Powers
from attnspec.graphs.patterns.random_ import Random
from attnspec.graphs.patterns.random_blocks import RandomBlocks
from attnspec.graphs.patterns.residue import Residue
from attnspec.graphs.patterns.strided import Strided
from attnspec.graphs.patterns.summary import Summary
from attnspec.graphs.patterns.where import Where
from attnspec.graphs.patterns.window import Window
from attnspec.graphs.relation import (
    EMPTY,
    FULL,
    SOME,
    Relation,
    Tiles,
    evaluate_pairs,
    probes,
)
from attnspec.graphs.token_sets import First
from attnspec.ir.scalars import Apply, Symbol
from attnspec.spec import parse

MILLION = 1 << 20

GROWING: list[Relation] = [
    Full(),
    Causal(),
    Window(radius=256),
    Window(before=100, after=3),
    Dilated(300, 7),
    Residue(64),
    Strided(64),
    Block(64, 1, 2),
    Summary(64, 5),
    Fixed(64, 5),
]


def test_rows_in_the_middle_of_a_million() -> None:
    first, last = 700_000, 704_096
    q, k = Window(radius=256).rows(first, last, MILLION)
    assert len(q) == 4096 * 513
    assert q[0] == first
    assert k[0] == first - 256
    assert k[-1] == last - 1 + 256
    assert np.array_equal(np.bincount(q - first), np.full(4096, 513))
    assert abs(q - k).max() == 256


def test_edges_of_a_window_by_its_published_formula() -> None:
    n, r = MILLION, 256
    assert Window(radius=r).edges(n) == n * (2 * r + 1) - r * (r + 1)
    assert Causal().edges(10**12) == 10**12 * (10**12 + 1) // 2


@pytest.mark.parametrize("relation", GROWING, ids=str)
def test_edges_are_a_polynomial_within_each_residue_class(relation: Relation) -> None:
    # at n = base + period t the count is a polynomial in t of degree two at most, so that three
    # counts by progressions at small n predict the closed form at large n exactly
    period = 64 * 7
    for offset in (0, 5, 63):
        small = [_by_progressions(relation, 4 * period + offset + period * t) for t in range(3)]
        for n in (MILLION // period * period + offset, 10**9 // period * period + offset):
            assert relation.edges(n) == _extrapolated(small, n // period - 4)


def _by_progressions(relation: Relation, n: int) -> int:
    closed = relation.progressions(np.arange(n), n)
    assert closed is not None
    start, stop, step = np.broadcast_arrays(*closed)
    return sum(
        len(range(*ends))
        for ends in zip(*(a.ravel().tolist() for a in (start, stop, step)), strict=True)
    )


def _extrapolated(values: list[int], t: int) -> int:
    """The polynomial through (0, values[0]), (1, values[1]), … at t, in Newton's form."""
    total, differences = Fraction(0), list(values)
    for order in range(len(values)):
        total += differences[0] * comb(t, order)
        differences = [b - a for a, b in pairwise(differences)]
    return int(total)


def test_powers_of_a_million() -> None:
    assert Powers(2).edges(MILLION) == MILLION + 2 * sum(MILLION - 2**i for i in range(20))
    assert len(Powers(2).rows(500_000, 500_001, MILLION)[0]) == 1 + 19 + 20


def test_a_cover_of_a_million_is_a_formula() -> None:
    starts = np.arange(0, MILLION, 1 << 14)
    q = Tiles(starts[:, None], starts[:, None] + (1 << 14))
    k = Tiles(starts[None, :], starts[None, :] + (1 << 14))
    said = Intersection((Union((Window(radius=256), Global(First(1 << 14)))), Causal())).cover(
        q, k, MILLION
    )
    i = np.arange(len(starts))
    offset = i[:, None] - i[None, :]
    assert (said[offset < 0] == EMPTY).all()
    assert (said[1:, 0] == FULL).all()
    assert (said[(offset == 0) | ((offset == 1) & (i[None, :] > 0))] == SOME).all()
    assert (said[(offset > 1) & (i[None, :] > 0)] == EMPTY).all()


def test_random_rows_and_cover_of_many_positions() -> None:
    n, keys, side = 65_536, 32, 512
    relation = Random(keys, seed=11)
    q, k = relation.rows(60_000, 60_100, n)
    assert len(q) == 100 * keys
    assert relation.edges(n) == n * keys
    assert set(relation.degrees(n).tolist()) == {keys}
    starts = np.arange(0, n, side)
    said = relation.cover(
        Tiles(starts[:, None], starts[:, None] + side),
        Tiles(starts[None, :], starts[None, :] + side),
        n,
    )
    touched = np.zeros_like(said)
    every_q, every_k = relation.rows(0, n, n)
    touched[every_q // side, every_k // side] = SOME
    assert np.array_equal(said, touched)
    # about as many keys of each query fall on either side as chance has it
    assert abs((k < n // 2).mean() - 0.5) < 0.05


def test_random_blocks_at_a_million() -> None:
    relation = RandomBlocks(64, 3, seed=1)
    assert relation.edges(MILLION) == MILLION * 64 * 3
    _, k = relation.rows(777_777, 777_778, MILLION)
    assert len(np.unique(k // 64)) == 3
    assert len(k) == 192


def test_global_rows_without_all_pairs() -> None:
    relation = Global(First(3))
    _, k = relation.rows(MILLION - 5, MILLION, MILLION)
    assert k.tolist() == [0, 1, 2] * 5
    assert relation.edges(MILLION) == 3 * (2 * MILLION - 3)
    assert Columns(First(3)).edges(MILLION) == 3 * MILLION
    assert len(relation.rows(1, 2, MILLION)[0]) == MILLION


def test_a_neighborhood_of_a_large_grid() -> None:
    relation = Neighborhood((13, 13), (1024, 1024))
    assert relation.edges(MILLION) == 169 * MILLION
    _, k = relation.rows(1024 * 500 + 7, 1024 * 500 + 8, MILLION)
    assert len(k) == 169
    assert {int(x) for x in k % 1024} == set(range(1, 14))


def test_rows_of_a_predicate_look_only_where_its_bounds_leave_doubt() -> None:
    gap = Apply("abs", (Apply("-", (Symbol("q"), Symbol("k"))),))
    relation = Where(Apply("<=", (gap, 100)))
    q, k = relation.rows(500_000, 500_300, MILLION)
    wanted_q, wanted_k = Window(radius=100).rows(500_000, 500_300, MILLION)
    assert np.array_equal(q, wanted_q)
    assert np.array_equal(k, wanted_k)


def test_a_sample_of_rows_is_counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = parse(
        "attention a { sequence grid(14, 14) attend where((q.row * k.col) % 5 == 0) | axial }"
    ).relation(196)
    assert graph.progressions(np.arange(3), 196) is None
    held = graph.typical_degree(196)
    monkeypatch.setattr(type(graph), "rows", None)
    assert graph.typical_degree(196) == held
    sample = probes(196)
    assert held == evaluate_pairs(graph, sample[:, None], np.arange(196)[None], 196).sum() / 9
