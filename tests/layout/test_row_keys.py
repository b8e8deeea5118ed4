"""The keys of single queries, by set algebra, against the definition."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from attention_checks import GRAPHS, spec_of
from pattern_samples import samples_of
from random_terms import term
from relation_checks import definition
from zoo import loaded, of_each_kind, sample

from attnspec.backends.common.labels import ALL, possible
from attnspec.backends.rows.keys import (
    FEW,
    PIECES,
    Keys,
    RowLayout,
    known_keys,
    members,
    row_keys,
    row_layout,
)
from attnspec.graphs.bind import Situation, bind
from attnspec.graphs.operators import Intersection, Shift, Union
from attnspec.graphs.patterns import BY_NAME, PATTERNS
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.patterns.global_ import Global
from attnspec.graphs.patterns.residue import Residue
from attnspec.graphs.patterns.where import Where
from attnspec.graphs.patterns.window import Window
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import has_mechanism
from attnspec.graphs.token_sets import InputTokens, StandIn
from attnspec.ir.scalars import Apply, Symbol
from attnspec.lower.lower import decided_leaves, stand_ins, works_of
from attnspec.lower.work import Work

SIZES = (1, 2, 7, 64, 130)


def assert_well_formed(keys: Keys) -> None:
    """As the type promises: nothing empty, nothing twice, in order."""
    if isinstance(keys, np.ndarray):
        assert keys.dtype == np.int64
        assert (np.diff(keys) > 0).all()
        return
    assert all(part and part.step > 0 for part in keys)
    assert len(set(members(keys).tolist())) == sum(map(len, keys))
    if all(part.step == 1 for part in keys):
        assert all(a.stop <= b.start for a, b in pairwise(keys))


def assert_keys(relation: Relation, n: int) -> None:
    held = definition(relation, n)
    for q in range(n):
        keys = row_keys(relation, q, n)
        assert_well_formed(keys)
        assert sorted(members(keys).tolist()) == np.flatnonzero(held[q]).tolist(), (relation, n, q)


@pytest.mark.parametrize("name", [p.name for p in PATTERNS if not p.data_dependent])
def test_patterns(name: str) -> None:
    for relation in samples_of(BY_NAME[name]):
        extents = getattr(relation, "extents", ()) or getattr(relation, "shape", ())
        cells = int(np.prod(extents)) + getattr(relation, "extra_tokens", 0) if extents else None
        for n in SIZES if cells is None else (cells,):
            assert_keys(relation, n)


def test_random_terms() -> None:
    source = random.Random(11)
    for _ in range(300):
        n = source.choice((1, 2, 5, 17, 40))
        at = Situation(n=n, patterns=BY_NAME, causal=source.random() < 0.5)
        assert_keys(bind(term(source), at), n)


def test_operators_of_ranges_stay_ranges() -> None:
    window = Window(before=9, after=0)
    step = Residue(5)
    causal = Causal()
    assert row_keys(Intersection((window, causal)), 50, 100) == [range(41, 51)]
    assert row_keys(Intersection((Union((window, step)), causal)), 50, 100) == [
        range(0, 41, 5),
        range(41, 51),
    ]
    assert row_keys(Shift(window, 3), 50, 100) == [range(41, 51)]
    assert row_keys(Shift(window, 3), 1, 100) == []
    assert known_keys(Where(True), 3, 100) == [range(100)]
    unknown = Apply("==", (Apply("%", (Apply("*", (Symbol("q"), Symbol("k"))), 7)), 1))
    assert known_keys(Where(unknown), 3, 100) is None


# --- layouts -------------------------------------------------------------------------------------


def assert_layout(work: Work, held: np.ndarray) -> None:
    layout = row_layout(work)
    keys = layout.positions
    assert layout.count == len(keys) == len(set(keys.tolist()))
    assert isinstance(layout.keys, np.ndarray) or len(layout.keys) <= PIECES
    found = np.zeros((work.n_q, work.n_k), bool)
    found[:, keys] = True if layout.held is None else layout.held
    assert np.array_equal(found, held[work.n_k - work.n_q :])


@pytest.mark.parametrize("name", GRAPHS)
def test_layouts_of_several_queries(name: str) -> None:
    for n in SIZES:
        spec = spec_of(GRAPHS[name])
        for n_q in {1, 2, min(5, n), min(FEW, n)} - {2 if n == 1 else 0}:
            ((work, _),) = works_of(spec.program, 0, 1, n_q, n, {})
            assert_layout(work, spec.mask(n))


@of_each_kind
def test_layouts_of_the_zoo(path: Path, name: str) -> None:
    spec = loaded(path, name)
    fixed = spec.stack().program.fixed_length
    n = 257 if fixed is None else fixed
    if decided_leaves(spec.program) or has_mechanism(spec.program) or n > 1100:
        pytest.skip("nothing to lay out, or no short sequence")
    inputs = sample(spec, n)
    for n_q in (1, 3):
        for work, heads in works_of(
            spec.program, 0, spec.program.heads or 1, n_q, n, stand_ins(spec.program)
        ):
            held = spec.mask(n, 0, heads[0], inputs)
            if spec.program.cross:
                # the first queries of another sequence, laid out as the last positions
                rows = spec.mask(n, 0, heads[0], inputs, n_q)
                held = np.concatenate([np.zeros((n - n_q, n), bool), rows])
            if work.reads:
                # inputs take keys away from what is read, and add none
                outside = np.ones(n, bool)
                outside[row_layout(work).positions] = False
                assert not held[n - n_q :, outside].any()
            else:
                assert_layout(work, held)


def test_what_reads_inputs_is_bounded_by_what_does_not() -> None:
    marked = Global(InputTokens(StandIn("t")))
    window, causal = Window(radius=3), Causal()
    assert possible(window) is window
    assert possible(marked) == ALL
    assert possible(Union((window, marked))) == ALL
    assert possible(Intersection((window, marked))) is window
    both = Intersection((Union((window, marked)), window, causal))
    assert possible(both) == Intersection((window, causal))
    work = Work(Intersection((window, marked)), 1, 100, reads=("t",))
    assert row_layout(work).keys == [range(96, 100)]
    work = Work(Union((window, marked)), 1, 100, reads=("t",))
    assert row_layout(work).keys == [range(100)]


def test_layouts_are_shared_and_few() -> None:
    window = Window(radius=3)
    first = row_layout(Work(window, 1, 100))
    assert isinstance(first, RowLayout)
    assert row_layout(Work(Window(radius=3), 1, 100, scale=2.0)) is first
