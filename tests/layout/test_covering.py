"""Surveys estimate what classifications list; both at lengths where nothing else would end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from attention_checks import GRAPHS, spec_of

from attnspec.backends.bands.attention import SteppedAttention
from attnspec.backends.dense.backend import Dense
from attnspec.backends.planner import candidates, choose
from attnspec.backends.scattered.backend import ScatteredBackend
from attnspec.backends.tiles import backend as tiles
from attnspec.backends.tiles.backend import TilesBackend
from attnspec.graphs.edge_table import table_from
from attnspec.graphs.relation import (
    EMPTY,
    FULL,
    SOME,
    Relation,
    Tiles,
    evaluate_pairs,
    is_scattered,
)
from attnspec.layout import tiling
from attnspec.layout.axes import Axis, axis
from attnspec.layout.edge_count import edges_of
from attnspec.layout.edge_list import edge_layout
from attnspec.layout.orders import NATURAL, Order
from attnspec.layout.steps import bands_of, layouts_of
from attnspec.layout.tile_layout import FULL_TILE, parted, step_layout
from attnspec.layout.tiling import TooFine, classify, survey
from attnspec.limits import LIMITS
from attnspec.lower.work import BackendError, Work

MILLION = 1 << 20


@pytest.fixture
def fresh() -> Iterator[None]:
    """No survey is remembered, before or after."""

    def forget() -> None:
        for cached in (survey, tiling._surveyed, classify):
            cached.cache_clear()

    forget()
    yield
    forget()


def relation_of(body: str, n: int) -> Relation:
    return spec_of(body).relation(n)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("sizes", [(8, 8), (16, 4)])
def test_a_survey_of_few_tiles_is_exact(name: str, sizes: tuple[int, int]) -> None:
    relation = relation_of(GRAPHS[name], 300)
    for n_q in (300, 77):
        found = classify(relation, n_q, 300, NATURAL, sizes)
        guess = survey(relation, n_q, 300, NATURAL, sizes)
        full, undecided = len(found.fine()[0]), len(found.undecided[0])
        if is_scattered(relation):
            assert guess.tiles == pytest.approx(full + undecided, rel=0.3)
            continue
        assert (guess.full, guess.undecided, guess.sampled) == (full, undecided, False)
        rows = np.concatenate([found.fine()[0], found.undecided[0]])
        columns = np.concatenate([found.fine()[1], found.undecided[1]])
        gathered = 0
        for row in set(rows.tolist()):
            keys = columns[rows == row]
            gathered += len(keys) if keys.max() - keys.min() + 1 > len(keys) else 0
        assert guess.gathered == gathered


@pytest.mark.parametrize(
    ("body", "order"),
    [
        ("window(radius = 3000)", NATURAL),
        ("causal & (window(radius = 300) | global(first(40)))", NATURAL),
        ("residue(step = 64)", Order(64, 64)),
        ("powers(base = 2)", NATURAL),
        ("causal", NATURAL),
    ],
)
def test_a_survey_of_many_tiles_is_close(body: str, order: Order, fresh: None) -> None:
    relation = relation_of(f"attend {body}", 1 << 18)
    found = classify(relation, 1 << 18, 1 << 18, order, (64, 64))
    guess = survey(relation, 1 << 18, 1 << 18, order, (64, 64))
    # what is sampled is some thousand tiles
    assert guess.full == pytest.approx(len(found.fine()[0]), rel=0.125)
    assert guess.undecided == pytest.approx(len(found.undecided[0]), rel=0.125)


@pytest.mark.parametrize("size", [8, 32])
def test_edges_of_a_random_graph_fall_into_tiles_as_balls_into_bins(size: int, fresh: None) -> None:
    n = 1 << 12
    relation = relation_of("attend random(keys = 8)", n)
    q, k = relation.rows(0, n, n)
    guess = survey(relation, n, n, NATURAL, (size, size))
    assert guess.sampled
    assert guess.tiles == pytest.approx(len({*zip(q // size, k // size, strict=True)}), rel=0.02)


def test_random_graphs_are_surveyed_without_drawing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: object) -> None:
        raise AssertionError("a table was drawn")

    monkeypatch.setattr("attnspec.graphs.edge_table.table_of", never)
    for body in ("random(keys = 8)", "self | expander(degree = 6)"):
        work = Work(relation_of(f"attend {body}", MILLION), MILLION, MILLION)
        assert choose(work, "cpu").name == "scattered"
    relation = relation_of("causal attend self | random(keys = 8)", MILLION)
    assert choose(Work(relation, MILLION, MILLION), "cpu").name == "scattered"


@pytest.mark.parametrize("body", ["full", "causal", "block(size = 32, before = n)"])
def test_graphs_of_nearly_all_pairs_are_laid_out_in_large_tiles(body: str) -> None:
    relation = relation_of(f"attend {body}", MILLION)
    layouts = layouts_of(bands_of(relation, MILLION, MILLION), MILLION, MILLION)
    assert sum(len(layout.keys) for layout in layouts) <= 1 << 20
    assert sum(layout.masks.nbytes for layout in layouts) <= 1 << 25
    work = Work(relation, MILLION, MILLION, normalize="relu")
    assert choose(work, "cpu").name == "tiles"
    assert TilesBackend().tile(work) > 128


def test_tiles_are_large_only_where_smaller_ones_are_too_many() -> None:
    """`TILES` while any of them is possible, else the smallest of `LARGE` that is."""
    for size in (*tiles.TILES, *tiles.LARGE):
        for n in (size << 10, (size << 10) + size):
            work = Work(relation_of("attend full", n), n, n)
            small, large = (
                [each for each in sizes if (n // each) ** 2 <= LIMITS.tiles]
                for sizes in (tiles.TILES, tiles.LARGE)
            )
            assert [*TilesBackend()._costs(work)] == (small or large[:1])
            refused = TilesBackend().refuses(work, "cpu")
            assert (refused is None) == bool(small or large)


def test_what_is_refused_for_its_size_says_so() -> None:
    work = Work(
        relation_of("attend full", MILLION), MILLION, MILLION, normalize="relu", reads=("x",)
    )
    with pytest.raises(BackendError, match=r"refuses: .*1,099,511,627,776"):
        candidates(work, "cpu", "dense")
    assert "1,099,511,627,776" in (Dense().refuses(work, "cpu") or "")
    relation = relation_of("attend where((q * 7 + k * 3) % 11 == 0)", MILLION)
    with pytest.raises(TooFine, match="pairs of tiles"):
        classify(relation, MILLION, MILLION, NATURAL, (64, 64))


@pytest.mark.parametrize("n", [61, 120, 133])
@pytest.mark.parametrize(
    "body",
    [
        "attend where(abs(q % 12 - k % 12) < 5) - (rows(first(7)) | columns(first(3)))",
        "causal attend where(abs(q % 12 - k % 12) < 5)",
    ],
)
@pytest.mark.limits("tiny")
def test_masks_that_are_rectangles_are_full_tiles_of_fewer_places(body: str, n: int) -> None:
    relation = relation_of(body, n)
    layout = step_layout(classify(relation, n, n, Order(12, 12), (5, 5)), relation, n)
    parts = parted(layout)
    held = np.zeros((n, n), int)
    for part in parts:
        np.add.at(held, part.pairs(n), 1)
    at = np.arange(n)
    meant = evaluate_pairs(relation, at[:, None], at[None], n)
    assert np.array_equal(held, meant.astype(int))
    smaller = [part for part in parts if part.q.size * part.k.size < 25]
    assert smaller or n % 60 == 0
    assert all((part.kinds == FULL_TILE).all() for part in smaller)
    masked = [np.diff(part.starts).max() for part in parts if (part.kinds != FULL_TILE).any()]
    assert max(masked, default=0) <= max(1, LIMITS.mask_shared // 25)
    q, k, v = torch.randn(3, 1, 1, n, 8, dtype=torch.float64).unbind()
    out, _ = SteppedAttention(parts).forward(q[:, :, None], k, v, None, 1.0)
    scores = (q @ k.mT).masked_fill(~torch.from_numpy(meant.copy()), -torch.inf)
    assert torch.allclose(out[:, :, 0], scores.softmax(-1).nan_to_num() @ v)


def tiles_of(side: Axis, at: np.ndarray) -> np.ndarray:
    """The number of the tile that each position stands in."""
    places = np.flatnonzero(side.positions >= 0)
    tile = np.empty(side.last - side.first, np.int64)
    tile[side.positions[places] - side.first] = places // side.size
    return np.asarray(tile[at - side.first])


@pytest.mark.parametrize("steps", [(1, 1), (1, 3), (4, 1), (5, 5)])
def test_edges_are_counted_in_tiles(steps: tuple[int, int]) -> None:
    drawn = np.random.Generator(np.random.PCG64(1))
    for n in (1, 2, 17, 64):
        table = table_from(drawn.integers(-1, n, (n, 3)).astype(np.int32))
        rows, columns = axis(0, n, steps[0], 5), axis(0, n, steps[1], 4)
        q = rows.at(np.arange(rows.count)[:, None])
        k = columns.at(np.arange(columns.count)[None])
        at = np.arange(n)
        held = np.asarray(table.holds(at[:, None], at[None]), bool)
        meant = np.zeros((rows.count, columns.count), int)
        tiles = tiles_of(rows, at)[:, None], tiles_of(columns, at)[None]
        np.add.at(meant, tiles, held.astype(int))
        sizes = rows.lengths[:, None] * columns.lengths
        cover = np.where(meant == sizes, FULL, np.where(meant > 0, SOME, EMPTY))
        assert np.array_equal(table.cover(q, k), cover)
        # overlapping tiles are counted in another way
        twice = Tiles(np.array([[0], [0]]), np.array([[1], [n]]))
        whole = Tiles(np.zeros((1, 1), int), np.full((1, 1), n))
        some = np.array([held[0], held.any(axis=0)]).any(axis=1)
        assert np.array_equal(table.cover(twice, whole)[:, 0] != EMPTY, some)


def test_layouts_of_small_masks_stay_in_one_part() -> None:
    relation = relation_of("attend window(radius = 20)", 130)
    layout = step_layout(classify(relation, 130, 130, NATURAL, (8, 8)), relation, 130)
    assert parted(layout) == [layout]


@pytest.mark.parametrize(
    "body", ["block(size = 128)", "where(q // 128 == k // 128)", "causal & block(size = 4096)"]
)
def test_edges_of_blocks_are_not_seen_at_their_starts_alone(body: str) -> None:
    relation = relation_of(f"attend {body}", MILLION)
    exact = relation_of("attend causal & block(size = 4096)", 4096).edges(4096) * 256
    meant = exact if "causal" in body else 128 * MILLION
    assert edges_of(relation, MILLION, MILLION) == pytest.approx(meant, rel=0.2)


def test_a_few_queries_with_every_key_do_not_cut_the_others_into_pieces() -> None:
    relation = relation_of("attend self | global(first(1))", 1 << 16)
    layout = edge_layout(relation, 1 << 16, 1 << 16)
    assert len(layout.keys) >= 3 * (1 << 16) - 2
    assert ScatteredBackend().refuses(Work(relation, 1 << 16, 1 << 16), "cpu") is None


def test_only_the_rows_at_the_ends_are_padded() -> None:
    layout = edge_layout(relation_of("causal attend window(radius = 9)", 300), 300, 300)
    assert layout.order is None
    assert [(rows.first, rows.last, rows.width) for rows in layout.rows] == [
        (0, 9, 9),
        (9, 300, 10),
    ]
    assert [rows.held is None for rows in layout.rows] == [False, True]


def test_axes_of_coarser_tiles_hold_the_finer_ones() -> None:
    for step in (1, 3, 7):
        coarse, fine = axis(5, 200, step, 16), axis(5, 200, step, 4)
        assert np.array_equal(
            coarse.positions[coarse.positions >= 0], fine.positions[fine.positions >= 0]
        )
