"""Tiles of a relation are its pairs, for every pattern and for compositions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_checks import GRAPHS, spec_of
from pattern_samples import samples_of
from relation_checks import definition

from attnspec.backends.common import pieces
from attnspec.backends.common.pieces import TensorRun, keys_of, rows_of
from attnspec.graphs.patterns import PATTERNS
from attnspec.graphs.patterns.full import Full
from attnspec.graphs.patterns.window import Window
from attnspec.graphs.relation import Progressions, Relation, is_closed
from attnspec.layout.batches import unfolded
from attnspec.layout.edge_list import edge_layout
from attnspec.layout.orders import NATURAL
from attnspec.layout.runs import runs_of
from attnspec.layout.tile_layout import FULL_TILE, TileLayout, _from_edges, looked_into, tile_layout
from attnspec.layout.tiling import classify
from attnspec.spec import parse

SIZES = (1, 2, 7, 64, 127, 130, 257)


def faults(layout: TileLayout, held: np.ndarray) -> list[str]:
    """What the tiles say that the pairs [n_q, n_k] do not."""
    full, masked, times = layout.dense()
    found = []
    if not np.array_equal(full | masked, held):
        found.append("pairs")
    if (times > 1).any() or (full & masked).any():
        found.append("a pair twice")
    tile = layout.tile
    for row in range(layout.rows):
        entries = range(layout.starts[row], layout.starts[row + 1])
        for key in range(-(-layout.n_k // tile)):
            part = held[row * tile : (row + 1) * tile, key * tile : (key + 1) * tile]
            kinds = [int(layout.kinds[e]) for e in entries if layout.keys[e] == key]
            if (kinds == [FULL_TILE]) != bool(part.all()) or bool(kinds) != bool(part.any()):
                found.append(f"kind of tile ({row}, {key})")
    if len({mask.tobytes() for mask in layout.masks}) != len(layout.masks):
        found.append("a mask twice")
    return found


def samples() -> Iterator[Relation]:
    for pattern in PATTERNS:
        if not pattern.needs_grid:
            yield from samples_of(pattern)


@pytest.mark.parametrize(
    "n", [1, 2, 7, 64, 130, *(pytest.param(n, marks=pytest.mark.slow) for n in (127, 199))]
)
def test_tiles_of_every_sample_are_its_pairs(n: int) -> None:
    for relation in samples():
        if not relation.data_dependent:
            assert faults(tile_layout(relation, n, n, 32), definition(relation, n)) == [], relation


@pytest.mark.parametrize("name", GRAPHS)
def test_tiles_of_compositions_are_their_pairs(name: str) -> None:
    spec = spec_of(GRAPHS[name])
    for n in SIZES:
        relation = spec.relation(n)
        held = definition(relation, n)
        for n_q in {n, 1, n // 2, n - 1} - {0}:
            for tile in (32, 64):
                layout = tile_layout(relation, n_q, n, tile)
                assert faults(layout, held[n - n_q :]) == [], (n, n_q, tile)


def test_tiles_on_grids() -> None:
    for body, n in (("grid(8, 9) attend neighborhood(3, 5)", 72), ("grid(6, 11) attend axial", 66)):
        spec = spec_of(f"sequence {body}")
        relation = spec.relation(n)
        assert faults(tile_layout(relation, n, n, 16), definition(relation, n)) == []


@pytest.mark.parametrize("name", GRAPHS)
def test_both_ways_to_look_into_tiles_agree(name: str) -> None:
    relation = spec_of(GRAPHS[name]).relation(200)
    found = classify(relation, 150, 200, NATURAL, (32, 32))
    q, k = found.undecided
    if not len(q):
        return
    kinds, masks = looked_into(found.q, found.k, q, k, relation, 200)
    some = kinds >= FULL_TILE
    order = np.lexsort((k[some], q[some]))
    edge_q, edge_k, edge_kinds, edge_masks = _from_edges(relation, found)
    assert np.array_equal(q[some][order], edge_q)
    assert np.array_equal(k[some][order], edge_k)
    looked = unfolded(masks, kinds[some][order][:, None, None]) if len(masks) else None
    edges = unfolded(edge_masks, edge_kinds[:, None, None]) if len(edge_masks) else None
    assert (looked is None) == (edges is None)
    if looked is not None and edges is not None:
        assert np.array_equal(looked, edges)


@pytest.mark.parametrize("name", GRAPHS)
def test_runs_hold_every_pair_of_the_tiles_once(name: str) -> None:
    relation = spec_of(GRAPHS[name]).relation(257)
    for n_q in (257, 100):
        layout = tile_layout(relation, n_q, 257, 32)
        times = np.zeros((n_q, 257), np.int64)
        for run in runs_of(layout):
            held = np.ones((run.blocks, run.height, run.width), bool)
            if run.shared is not None:
                held &= run.shared
            if run.kinds is not None:
                held = unfolded(layout.masks, run.kinds)[:, : run.height, : run.width]
            np.add.at(times, (run.queries[:, :, None], run.keys[:, None]), held)
        assert times.max() <= 1
        assert np.array_equal(times == 1, layout.pairs())


def test_windows_cost_their_band() -> None:
    n = 1 << 20
    layout = tile_layout(Window(radius=256), n, n, 64)
    assert len(layout.keys) == 9 * n // 64 - 2 * (4 + 3 + 2 + 1)
    assert len(layout.masks) == 2
    assert len(tile_layout(Full(), 4096, 4096, 64).masks) == 0


def test_a_relation_without_a_cover_is_still_laid_out() -> None:
    class Opaque(Relation):
        def holds(self, q, k, n):  # type: ignore[no-untyped-def]
            return (q * 7 + k * 3) % 5 == 0

    assert not is_closed(Opaque())
    assert faults(tile_layout(Opaque(), 70, 100, 32), definition(Opaque(), 100)[30:]) == []


def test_wrong_layouts_are_caught() -> None:
    relation = Window(radius=40)
    layout = tile_layout(relation, 130, 130, 32)
    held = definition(relation, 130)
    kinds, keys = layout.kinds.copy(), layout.keys.copy()
    kinds[np.flatnonzero(kinds != FULL_TILE)[0]] = FULL_TILE
    assert faults(replace(layout, kinds=kinds), held)
    keys[-1] -= 1
    assert faults(replace(layout, keys=keys), held)
    assert faults(replace(layout, masks=layout.masks[::-1]), held)


def test_rows_of_many_lengths_are_asked_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    # a window at the start of a sequence has rows of every length up to its own
    graph = spec_of("causal attend window(before = 100, after = 0)").relation(193)
    asked: list[int] = []
    right = type(graph).progressions

    def counted(self: Relation, q: np.ndarray, n: int) -> Progressions | None:
        asked.append(len(q))
        return right(self, q, n)

    monkeypatch.setattr(type(graph), "progressions", counted)
    layout = edge_layout(graph, 193, 193)
    assert len(layout.rows) > 10
    assert len(asked) <= 3
    held = np.zeros((193, 193), bool)
    held[layout.queries, layout.keys] = True
    assert np.array_equal(held, definition(graph, 193))


@pytest.mark.parametrize("n_q", [0, 1, 17, 40])
@pytest.mark.parametrize(
    "text",
    [
        "attend window(radius = 3) & rows(every(4))",
        "attend random(keys = 3, seed = 1) & where(q % 5 > 1)",
        "attend columns(first(2)) & where(q > 30)",
        "attend window(radius = 2) & where(q < 0)",
    ],
)
def test_queries_without_keys_have_no_places(text: str, n_q: int) -> None:
    relation = parse(f"attention a {{ {text} }}").relation(40)
    meant = definition(relation, 40)[40 - n_q :]
    layout = edge_layout(relation, n_q, 40)
    assert layout.offsets[0] == 0
    assert layout.offsets[-1] == len(layout.keys)
    places = np.zeros((n_q, 40), int)
    np.add.at(places, (layout.queries, layout.keys), 1)
    assert np.array_equal(places > 0, meant)
    wide = {row: rows.width for rows in layout.rows for row in range(rows.first, rows.last)}
    assert np.diff(layout.offsets).tolist() == [wide.get(row, 0) for row in range(n_q)]


def test_the_longest_run_of_queries_with_most_keys_has_no_places_to_spare() -> None:
    text = "attend columns(first(8)) - (rows(positions(1)) & columns(first(1)))"
    layout = edge_layout(parse(f"attention a {{ {text} }}").relation(64), 64, 64)
    # query 0 has as many keys as the 62 from query 2 on
    assert [(rows.first, rows.last, rows.held is None) for rows in layout.rows] == [
        (0, 2, False),
        (2, 64, True),
    ]


@pytest.mark.parametrize(
    "body", ["block(size = 8)", "window(before = 20, after = 0)", "dilated(radius = 24, step = 3)"]
)
@pytest.mark.parametrize("least", [0, 400])
def test_pieces_have_the_rows_and_keys_of_their_runs(
    body: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether rows and keys follow one another, and are a slice, or are gathered; `least` is the
    size below which a temporary is one piece."""
    n = 96
    monkeypatch.setattr(pieces, "PIECE", least)
    layout = tile_layout(spec_of(f"attend {body}").relation(n), n, n, tile=8)
    runs = [TensorRun(run, 8, None, torch.device("cpu")) for run in runs_of(layout)]
    x = torch.arange(float(n))
    every = [piece for run in runs for piece in run.pieces(200, 10)]
    assert any(piece.low for piece in every)
    for piece in every:
        queries = rows_of(x.view(1, 1, 1, n, 1), piece).flatten()
        assert torch.equal(queries, x[piece.run.queries[piece.rows]])
        keys = keys_of(x.view(1, 1, n, 1), piece)[0, 0, ..., 0]
        assert torch.equal(keys, x[piece.run.keys(piece)])
