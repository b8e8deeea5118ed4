"""Every pattern's overrides against its definition, alone and composed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import product
from typing import ClassVar

import numpy as np
import pytest
import torch
from pattern_samples import samples_of
from relation_checks import EXACT, definition, faults

from attnspec.analysis.counting.degrees import edges_of
from attnspec.graphs.counter_rng import RANDOM_BLOCKS, Stream, distinct
from attnspec.graphs.forms.prelude import definitions
from attnspec.graphs.operators import (
    Complement,
    Intersection,
    Shift,
    Union,
    difference,
    transpose_of,
)
from attnspec.graphs.patterns import BY_NAME, PATTERNS
from attnspec.graphs.patterns.axial import Axial
from attnspec.graphs.patterns.block import Block
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.patterns.columns_rows import Rows
from attnspec.graphs.patterns.expander import Expander
from attnspec.graphs.patterns.global_ import Global
from attnspec.graphs.patterns.neighborhood import Neighborhood
from attnspec.graphs.patterns.prefix import Prefix
from attnspec.graphs.patterns.random_ import Random
from attnspec.graphs.patterns.random_blocks import RandomBlocks
from attnspec.graphs.patterns.residue import Residue
from attnspec.graphs.patterns.same import Same
from attnspec.graphs.patterns.sinkhorn import Sinkhorn
from attnspec.graphs.patterns.where import Where
from attnspec.graphs.patterns.window import Window
from attnspec.graphs.relation import (
    EMPTY,
    FULL,
    SOME,
    Elementwise,
    Progressions,
    Relation,
    Tiles,
    exact_cover,
)
from attnspec.graphs.token_sets import Data, First, InputTokens
from attnspec.ir.mechanisms import MECHANISMS
from attnspec.ir.parameters import RelationError
from attnspec.ir.scalars import Apply, Symbol
from attnspec.layout.axes import axis
from attnspec.layout.tile_layout import same_masks

STATIC = [pattern for pattern in PATTERNS if not pattern.data_dependent]
SAMPLES = [
    pytest.param(sample, id=f"{pattern.name}-{index}")
    for pattern in STATIC
    for index, sample in enumerate(samples_of(pattern))
]


@pytest.mark.parametrize("sample", SAMPLES)
def test_overrides_agree_with_the_definition(sample: Relation) -> None:
    found = [fault for n in (*range(5), 7, 12, 131) for fault in faults(sample, n)]
    assert found == []


def test_the_cover_of_a_tile_that_is_partly_held_is_some() -> None:
    rows, columns = np.arange(0, 13, 4), np.arange(0, 13, 5)
    q = Tiles(rows[:, None], np.minimum(rows + 4, 13)[:, None])
    k = Tiles(columns[None], np.minimum(columns + 5, 13)[None])
    mask = definition(Window(before=3, after=1), 13)
    tiles = [[mask[r : r + 4, c : c + 5] for c in columns] for r in rows]
    meant = [[FULL if x.all() else SOME if x.any() else EMPTY for x in row] for row in tiles]
    assert exact_cover(Window(before=3, after=1), q, k, 13).tolist() == meant


@pytest.mark.parametrize("pattern", STATIC, ids=lambda pattern: pattern.name)
def test_what_every_sample_does_is_said(pattern: type[Relation]) -> None:
    masks = [definition(sample, n) for sample in samples_of(pattern) for n in (5, 12, 31, 35)]
    assert pattern.symmetric == all((mask == mask.T).all() for mask in masks)
    # of others the predicate says it, or the grid
    if pattern.name not in definitions() and not pattern.needs_grid:
        assert pattern.reads_itself == all(mask.diagonal().all() for mask in masks)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_masks_of_random_blocks_are_looked_at_once_each(size: int) -> None:
    n, tile = 64, 4
    for relation in (RandomBlocks(size, 2), RandomBlocks(size, 5, causal=True)):
        q, k = axis(0, n, 1, tile), axis(0, n, 1, tile)
        rows, columns = (x.ravel() for x in np.indices((q.count, k.count)))
        first, _ = same_masks(q, k, rows, columns, relation, n)
        held = definition(relation, n).reshape(q.count, tile, k.count, tile).transpose(0, 2, 1, 3)
        # where borders of blocks lie in a tile goes by its number, modulo so many
        borders = size // math.gcd(size, tile)
        starts = [rows % borders, columns % borders]
        masks = held.reshape(len(rows), -1)
        most = len(np.unique(np.column_stack([*starts, masks]), axis=0))
        assert len(np.unique(masks, axis=0)) <= len(first) <= most


@pytest.mark.parametrize("pattern", STATIC, ids=lambda pattern: pattern.name)
def test_tiles_of_one_phase_have_one_mask(pattern: type[Relation]) -> None:
    for sample, steps, (n, size) in product(
        samples_of(pattern), [(1, 1), (1, 5), (4, 1), (6, 6)], [(13, 4), (67, 5)]
    ):
        q, k = axis(0, n, steps[0], size), axis(0, n, steps[1], size)
        rows, columns = (x.ravel() for x in np.indices((q.count, k.count)))
        q_at, k_at = (
            side.positions.reshape(-1, size)[index] for side, index in ((q, rows), (k, columns))
        )
        real = (q_at >= 0)[:, :, None] & (k_at >= 0)[:, None]
        held = definition(sample, n)[q_at[:, :, None], k_at[:, None]] & real
        first, phase = same_masks(q, k, rows, columns, sample, n)
        assert np.array_equal(held, held[first][phase]), (sample, n, steps)


@pytest.mark.parametrize("pattern", STATIC, ids=lambda pattern: pattern.name)
def test_samples_reach_every_argument(pattern: type[Relation]) -> None:
    samples = list(samples_of(pattern))
    assert samples
    assert len(set(samples)) == len(samples)
    for entry in fields(pattern):  # type: ignore[arg-type]
        parameter = entry.metadata["parameter"]
        if parameter.context not in ("layer", "head"):
            assert len({getattr(sample, entry.name) for sample in samples}) > 1, entry.name


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(PATTERNS)
    names = {*BY_NAME, *(mechanism.name for mechanism in MECHANISMS)}
    assert len(names) == len(PATTERNS) + len(MECHANISMS)


@pytest.mark.parametrize("declaration", [*PATTERNS, *MECHANISMS], ids=lambda c: c.name)
def test_defaults_are_admissible(declaration: type) -> None:
    for entry in fields(declaration):
        parameter = entry.metadata["parameter"]
        if parameter.kind == "choice":
            assert entry.default is None or entry.default in parameter.choices
        if isinstance(entry.default, int | float) and parameter.kind in ("integer", "real"):
            assert parameter.least is None or entry.default >= parameter.least
            assert not parameter.odd or entry.default % 2 == 1
            assert not parameter.even or entry.default % 2 == 0


def test_mechanisms_say_why_they_are_not_causal() -> None:
    assert [m.name for m in MECHANISMS if m.causal == bool(m.why_not_causal)] == []


# --- compositions ---------------------------------------------------------------------------------


def composition(source: random.Random, pool: list[Relation], depth: int) -> Relation:
    """A random term of at most that depth."""
    if depth == 0 or source.random() < 0.15:
        return source.choice(pool)
    one = composition(source, pool, depth - 1)
    other = composition(source, pool, depth - 1)
    match source.randrange(7):
        case 0:
            return Union((one, other))
        case 1:
            return Union((one, other, source.choice(pool)))
        case 2:
            return Intersection((one, other))
        case 3:
            return Complement(one)
        case 4:
            return difference(one, other)
        case 5:
            return transpose_of(one)
        case _:
            return Shift(one, source.choice((-7, -1, 0, 2, 30)))


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 40))]
)
def test_compositions_agree_with_the_definition(seed: int) -> None:
    source = random.Random(seed)
    pool = [sample for pattern in STATIC for sample in samples_of(pattern)]
    found: list[str] = []
    for _ in range(6):
        term = composition(source, pool, 3)
        for n in (0, 1, 2, 7, 37, source.randrange(50, 140)):
            found += faults(term, n, sizes=(1, 8))
    assert found == []


MOVED = [
    Window(radius=3),
    Window(radius=9),
    Block(5, 1),
    Residue(3),
    Global(First(4)),
    Random(2, seed=1),
    Union((Window(before=6, after=0), Residue(4))),
]


@pytest.mark.parametrize("steps", [(1, 1), (5, 5), (4, 1)])
@pytest.mark.parametrize("by", [-30, -7, -1, 1, 4, 6, 30])
def test_tiles_of_one_phase_have_one_mask_after_a_shift(by: int, steps: tuple[int, int]) -> None:
    n, size = 67, 5
    q, k = axis(0, n, steps[0], size), axis(0, n, steps[1], size)
    rows, columns = (x.ravel() for x in np.indices((q.count, k.count)))
    q_at, k_at = q.positions.reshape(-1, size)[rows], k.positions.reshape(-1, size)[columns]
    real = (q_at >= 0)[:, :, None] & (k_at >= 0)[:, None]
    for term in MOVED:
        for relation in (Shift(term, by), Union((Shift(term, by), Shift(term, 2 - by)))):
            held = definition(relation, n)[q_at[:, :, None], k_at[:, None]] & real
            first, phase = same_masks(q, k, rows, columns, relation, n)
            assert np.array_equal(held, held[first][phase]), relation
    # what is inside is not looked into tile by tile
    first, _ = same_masks(q, k, rows, columns, Shift(Window(radius=3), by), n)
    assert len(first) < len(rows)


class Bounded(Window):
    """Is asked of tiles of the sequence alone."""

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        for tiles in (q, k):
            assert (tiles.start >= 0).all()
            assert (tiles.stop <= n).all()
        return super().cover(q, k, n)


@pytest.mark.parametrize("by", [-4, -1, 0, 3, 20])
def test_a_shifted_tile_is_decided_as_the_one_that_it_comes_from(by: int) -> None:
    n, term = 13, Bounded(before=3, after=1)
    low, high = max(0, by), min(n, n + by)
    each = [(start, start + size) for size in (1, 2, 5) for start in range(n - size + 1)]
    start, stop = np.array(each).T
    q, k = Tiles(start[:, None], stop[:, None]), Tiles(start[None], stop[None])
    found = Shift(term, by).cover(q, k, n)
    inside, outside = (start >= low) & (stop <= high), (stop <= low) | (start >= high)
    assert (found[outside] == EMPTY).all()
    assert (found[:, outside] == EMPTY).all()
    start, stop = start[inside] - by, stop[inside] - by
    moved = Tiles(start[:, None], stop[:, None]), Tiles(start[None], stop[None])
    assert np.array_equal(found[np.ix_(inside, inside)], term.cover(*moved, n))


# --- the checker finds what is wrong --------------------------------------------------------------


@dataclass(frozen=True)
class WrongProgressions(Window):
    def progressions(self, q: np.ndarray, n: int) -> Progressions:
        start, stop, step = super().progressions(q, n)
        return start + (q[:, None] == n - 1), stop, step


@dataclass(frozen=True)
class WrongEdges(Window):
    def edges(self, n: int) -> int:
        return super().edges(n) + (n > 100)


@dataclass(frozen=True)
class WrongFull(Window):
    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        answer = super().cover(q, k, n)
        return np.where(q.start == k.start, FULL, answer).astype(np.uint8)


@dataclass(frozen=True)
class Undecided(Window):
    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        return np.full_like(super().cover(q, k, n), SOME)


@dataclass(frozen=True)
class WrongTranspose(Window):
    def transposed(self) -> Relation:
        return self


@dataclass(frozen=True)
class WrongRows(Window):
    def rows(self, first: int, last: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        q, k = super().rows(first, last, n)
        return q[::-1], k[::-1]


@dataclass(frozen=True)
class WrongOnIntegers(Window):
    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        held = super().holds(q, k, n)
        return held and (q, k) != (3, 3) if isinstance(q, int) else held


@dataclass(frozen=True)
class WrongOnTensors(Window):
    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        held = super().holds(q, k, n)
        return held | (q == 0) if isinstance(q, torch.Tensor) else held


@dataclass(frozen=True)
class NotSymmetric(Window):
    symmetric: ClassVar = True


@dataclass(frozen=True)
class NotItself(Window):
    reads_itself: ClassVar = True

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return super().holds(q, k, n) & (q != k)


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (NotSymmetric, "symmetric"),
        (NotItself, "reads_itself"),
        (WrongProgressions, "progressions of query"),
        (WrongEdges, "edges"),
        (WrongFull, "cover of tiles"),
        (Undecided, "exactness of cover"),
        (WrongTranspose, "transposed"),
        (WrongRows, "rows 0 to"),
        (WrongOnIntegers, "holds on integers"),
        (WrongOnTensors, "holds on tensors"),
    ],
)
def test_a_wrong_override_is_found(wrong: type[Window], fault: str) -> None:
    found = [f for n in (11, 131) for f in faults(wrong(before=5, after=2), n)]
    assert any(f.startswith(fault) for f in found)


# --- meaning, written down once more in another way -----------------------------------------------


def test_a_neighborhood_has_the_same_number_of_keys_everywhere() -> None:
    assert set(Neighborhood((5, 3), (9, 6)).degrees(54).tolist()) == {15}


def test_grids_that_do_not_fit() -> None:
    with pytest.raises(RelationError, match=r"needs `sequence grid\(H, W\)`"):
        Neighborhood((3, 3))
    with pytest.raises(RelationError, match="each of the grid's 3 axes, got 2"):
        Neighborhood((3, 3), (2, 3, 4))
    with pytest.raises(RelationError, match=r"odd extents .*, got 4"):
        Neighborhood((3, 4), (5, 5))
    with pytest.raises(RelationError, match="extents at least 1"):
        Axial((0, 5))
    with pytest.raises(RelationError, match="needs `sequence grid"):
        Axial()


# --- random graphs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "relation",
    [Random(4, seed=1, causal=True), Random(0, causal=True), Random(99, causal=True)]
    + [
        RandomBlocks(size, blocks, seed=1, causal=True)
        for size, blocks in ((1, 3), (4, 0), (5, 2), (7, 1), (8, 99), (64, 2))
    ],
)
def test_a_causal_row_does_not_depend_on_the_length(relation: Relation) -> None:
    later = definition(relation, 90)
    earlier = np.tril(np.ones((90, 90), bool))
    for n in range(90):
        # positions in the middle of a block among them
        own = definition(relation, n)
        assert np.array_equal(own & earlier[:n, :n], (later & earlier)[:n, :n])


def test_causal_blocks_are_drawn_up_to_the_own_one() -> None:
    n, size, blocks = 90, 8, 3
    mask = definition(RandomBlocks(size, blocks, seed=5, causal=True), n)[::size, ::size]
    assert not np.triu(mask, 1).any()
    assert mask.sum(axis=1).tolist() == [min(blocks, i + 1) for i in range(len(mask))]
    stream = Stream(5, RANDOM_BLOCKS)
    for i in range(blocks, len(mask)):
        drawn = distinct(stream, np.array([i]), np.array([i + 1]), blocks)[0]
        assert np.flatnonzero(mask[i]).tolist() == drawn.tolist()


def test_frozen_draws_of_patterns() -> None:
    # worked out from the page of the generator alone, in plain integers
    assert rows_of(Random(3, causal=True, seed=7, layer=1, head=2), 9) == [
        *([0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 2, 4]),
        *([1, 2, 4], [2, 3, 4], [0, 1, 5], [0, 2, 5]),
    ]
    assert rows_of(RandomBlocks(2, 2, causal=True, seed=7, layer=1, head=2), 11)[::2] == [
        *([0, 1], [0, 1, 2, 3], [0, 1, 2, 3]),
        *([0, 1, 6, 7], [2, 3, 4, 5], [2, 3, 10]),
    ]
    assert rows_of(RandomBlocks(2, 2, seed=7, layer=1, head=2), 11)[::2] == [
        *([0, 1, 10], [2, 3, 4, 5], [0, 1, 4, 5]),
        *([0, 1, 10], [2, 3, 6, 7], [2, 3, 10]),
    ]


def rows_of(relation: Relation, n: int) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in definition(relation, n)]


@pytest.mark.parametrize("make", [lambda **at: Random(3, **at), lambda **at: Expander(4, **at)])
def test_heads_and_layers_draw_anew(make: Callable[..., Relation]) -> None:
    n = 64
    masks = [definition(make(layer=i, head=h), n) for i, h in ((0, 0), (0, 1), (1, 0))]
    assert not any(np.array_equal(a, b) for a, b in zip(masks, [*masks[1:], masks[0]], strict=True))
    shared = make(layer=3, head=2, per_head=False)
    assert shared == make(per_head=False)
    assert np.array_equal(definition(shared, n), masks[0])


def test_an_expander_is_connected_and_regular_but_for_shared_pairs() -> None:
    n = 101
    mask = definition(Expander(6, seed=2), n)
    assert np.array_equal(mask, mask.T)
    assert mask.sum(axis=1).max() == 6
    assert mask.sum(axis=1).min() >= 2
    assert np.linalg.matrix_power((mask | np.eye(n, dtype=bool)).astype(float), n).all()
    assert definition(Expander(2), 1).tolist() == [[True]]
    assert definition(Expander(2), 2).tolist() == [[False, True], [True, False]]


# --- inputs and predicates ------------------------------------------------------------------------


def test_inputs_may_be_batched_tensors() -> None:
    n = 9
    i = torch.arange(n)
    marked = torch.zeros(2, n, dtype=torch.bool)
    marked[0, 3], marked[1, :2] = True, True
    held = Global(InputTokens(Data(marked))).holds(i[:, None], i[None, :], n)
    for at in range(2):
        wanted = marked[at][:, None] | marked[at][None, :]
        assert torch.equal(held[at], wanted)
    ids = torch.stack([i // 4, i % 2])
    held = Same(Data(ids)).holds(i[:, None], i[None, :], n)
    assert torch.equal(held, ids[:, :, None] == ids[:, None, :])
    held = Prefix(Data(torch.tensor([2, 5])[:, None, None])).holds(i[:, None], i[None, :], n)
    assert held.sum(dim=(1, 2)).tolist() == [2 * n, 5 * n]


def test_prefix_takes_counts_only() -> None:
    for wrong in (-1, 2.5, True):
        with pytest.raises(RelationError, match="a count of at least 0"):
            Prefix(wrong)  # type: ignore[arg-type]


def test_where_reports_what_has_no_value() -> None:
    q, k = Symbol("q"), Symbol("k")
    i = np.arange(5)
    relation = Where(Apply("==", (Apply("//", (q, k)), 1)))
    with pytest.raises(RelationError, match="`where` has no value: division by zero"):
        relation.holds(i[:, None], i[None, :], 5)
    with pytest.raises(RelationError, match="`where` has no value: division by zero"):
        relation.holds(3, 0, 5)
    divided = Apply("//", (7, Apply("-", (Symbol("n"), 5))))
    with pytest.raises(RelationError, match="`where` has no value at n = 5: division by zero"):
        Where(Apply("<", (q, divided))).holds(1, 1, 5)


def test_where_does_not_wrap() -> None:
    q, k = Symbol("q"), Symbol("k")
    ninth = Where(Apply("<", (Apply("*", (q, Apply("**", (k, 9)))), 0)))
    i = np.arange(300)
    assert not ninth.holds(i[:, None], i[None, :50], 300).any()
    with pytest.raises(RelationError, match=r"a number above 2\*\*62"):
        ninth.holds(i[:, None], i[None, :], 300)
    with pytest.raises(RelationError, match=r"a number above 2\*\*62"):
        ninth.holds(299, 299, 300)


def test_where_needs_the_grid_it_asks_for() -> None:
    with pytest.raises(RelationError, match="`where` needs `sequence grid"):
        Where(Apply("==", (Symbol("q.row"), 1)))
    with pytest.raises(RelationError, match=r"`q.time` needs `sequence grid\(T, H, W\)`"):
        Where(Apply("==", (Symbol("q.time"), 1)), (3, 4))


def test_data_dependent_patterns_say_so() -> None:
    with pytest.raises(RelationError, match=r"`sinkhorn` are decided .* `module\.pairs"):
        Sinkhorn(8).holds(1, 2, 5)


def test_causal_and_its_transpose_meet_on_the_diagonal() -> None:
    both = Intersection((Causal(), transpose_of(Causal())))
    assert np.array_equal(definition(both, 17), np.eye(17))


@pytest.mark.parametrize(
    "pattern",
    # how exactly sets of tokens are covered depends on the set
    [p for p in STATIC if not {"global", "rows", "columns"} & {p.name}],
    ids=lambda pattern: pattern.name,
)
def test_what_is_covered_exactly_says_so(pattern: type[Relation]) -> None:
    """So that the definition holds it to that, above."""
    exact = True
    for sample, n, size in product(samples_of(pattern), (5, 12, 31), (3, 8)):
        starts = np.arange(0, n, size)
        q, k = (Tiles(at, np.minimum(at + size, n)) for at in (starts[:, None], starts[None]))
        exact &= np.array_equal(sample.cover(q, k, n), exact_cover(sample, q, k, n))
    assert (pattern.name in EXACT) == exact


@pytest.mark.parametrize("pattern", [Global, Rows])
def test_patterns_are_also_looked_at_without_any_token(pattern: type[Relation]) -> None:
    assert 0 in [edges_of(sample, 40) for sample in samples_of(pattern)]
