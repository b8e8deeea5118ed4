"""Tiles of a relation are its pairs, for every pattern and for compositions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_checks import spec_of
from relation_checks import definition

from attnspec.backends.common.pieces import TensorRun, keys_of, rows_of
from attnspec.graphs.patterns.full import Full
from attnspec.graphs.patterns.window import Window
from attnspec.graphs.relation import Progressions, Relation
from attnspec.layout.edge_list import edge_layout
from attnspec.layout.runs import runs_of
from attnspec.layout.tile_layout import tile_layout
from attnspec.spec import parse


def test_windows_cost_their_band() -> None:
    n = 1 << 20
    layout = tile_layout(Window(radius=256), n, n, 64)
    assert len(layout.keys) == 9 * n // 64 - 2 * (4 + 3 + 2 + 1)
    assert len(layout.masks) == 2
    assert len(tile_layout(Full(), 4096, 4096, 64).masks) == 0


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
@pytest.mark.limits("tiny")
def test_pieces_have_the_rows_and_keys_of_their_runs(body: str) -> None:
    """Whether rows and keys follow one another, and are a slice, or are gathered."""
    n = 96
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
