"""Tables of blocks: each pair of a graph stands in them once, and both ways of computing them read
the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from population import spec_of

from attnspec.backends.common.composed import ComposedTables
from attnspec.backends.common.masks import with_data
from attnspec.backends.tables.kernel import SteppedKernel, tables_of_work
from attnspec.layout.steps import bands_of, natural_tables, stepped_tables
from attnspec.layout.tables import FULL_TILE, Batch, Tables, Tiled, times
from attnspec.lower.lower import Binder
from attnspec.lower.work import Call, Work

GRAPHS = (
    "attend window(radius = 40)",
    "causal attend window(before = 37, after = 0) | residue(step = 13)",
    "attend window(radius = 5) | global(first(3) | last(2))",
    "attend block(size = 16, before = 1) | random_blocks(size = 16, blocks = 2)",
    "attend dilated(radius = 60, step = 4) - self",
    "attend random(keys = 3) & where(q != 7)",
    "sequence grid(5, 26) attend neighborhood(5, 5)",
)


@pytest.mark.parametrize("body", GRAPHS)
def test_each_pair_stands_once(body: str) -> None:
    spec = spec_of(body)
    for n, n_q in ((130, 130), (130, 41), (37, 37), (1, 1)):
        if spec.program.fixed_length not in (None, n):
            continue
        ((work, _),) = Binder(spec.program).works(0, 1, n_q, n)
        mask = spec.mask(n)[n - n_q :]
        assert np.array_equal(times(tables_of_work(work)), mask)
        assert np.array_equal(times(natural_tables(work, 32)), mask)


X, Y = "input x: ids ", "input y: ids "

LABELLED = {
    f"{X}attend same(x)": True,
    f"causal {X}attend same(x)": True,
    # in natural order there is less to compute
    f"causal {X}attend same(x) & window(before = 20, after = 0)": False,
    f"{X}{Y}attend same(x) & where(y(q) == y(k)) - self": True,
    f"{Y}attend where(y(q) == y(k)) | rows(first(2))": True,
    f"{X}attend same(x) | columns(first(3))": True,
    f"{X}attend same(x) & random(keys = 5)": True,
}


@pytest.mark.parametrize("body", LABELLED)
def test_equal_labels_are_brought_together(body: str) -> None:
    spec, drawn = spec_of(body), np.random.default_rng(0)
    for n, n_q in ((700, 700), (700, 300), (40, 40), (1, 1)):
        data = {"x": drawn.integers(0, 12, n), "y": np.arange(n) % 7}
        inputs = {name: data[name] for name in spec.inputs}
        ((work, _),) = Binder(spec.program).works(0, 1, n_q, n)
        bands = bands_of(with_data(work.relation, inputs), n_q, n)
        assert np.array_equal(times(stepped_tables(bands)), spec.mask(n, inputs=inputs)[n - n_q :])
        if n == n_q == 700:
            assert any("labels" in str(band) for band in bands) == LABELLED[body]
        # of labels that lie together nothing is moved
        order = np.lexsort([inputs[name] for name in sorted(inputs, reverse=True)])
        together = {name: values[order] for name, values in inputs.items()}
        again = bands_of(with_data(work.relation, together), n_q, n)
        assert not any("labels" in str(band) for band in again)


def differing(tables: Tables, work: Work) -> list[str]:
    """Which ways of computing tables give another output than their pairs."""
    n_q, n_k = tables.n_q, tables.n_k
    q, k, v = torch.randn(2, 1, 2, n_q, 4), torch.randn(2, 1, n_k, 4), torch.randn(2, 1, n_k, 4)
    mask = torch.from_numpy(times(tables) > 0)
    weights = (q @ k[:, :, None].mT / 2).masked_fill(~mask, -torch.inf).softmax(-1)
    kernel = work, (0,), torch.device("cpu"), tables
    steps, _ = SteppedKernel(*kernel).forward(q, k, v, Call(), 0.5)
    plain = ComposedTables(*kernel)
    fused = plain.traced(q, k, v, Call())
    found = {"steps": steps, "plain": plain.composed(q, k, v, Call())[0], "fused": fused}
    meant = weights.nan_to_num() @ v[:, :, None]
    return [name for name, out in found.items() if not torch.allclose(out, meant, atol=1e-5)]


@pytest.mark.limits("", "tiny")
def test_places_without_a_row_are_read_by_neither() -> None:
    binder = Binder(spec_of("attend full").program)
    batch = Batch(np.array([[4, 0, -1], [2, 3, 1]]), np.array([[5, -1], [0, 6]]), None)
    assert differing(Tables((batch,), 5, 7), binder.works(0, 1, 5, 7)[0][0]) == []
    ((work, _),) = binder.works(0, 1, 128, 128)
    rows = np.arange(128)[::-1].copy().reshape(16, 8)
    short = np.where(rows % 7, rows, -1)
    for k, mask in ((rows, np.tri(8, dtype=bool)[None]), (short, None), (rows, None)):
        for q in (rows, short):
            assert differing(Tables((Batch(q, k, mask),), 128, 128), work) == []


def test_blocks_with_masks_of_their_own_are_read_by_tiles() -> None:
    spec = spec_of(
        "attend random_blocks(size = 32, blocks = 3) | residue(step = 7) & rows(last(9))"
    )
    ((work, _),) = Binder(spec.program).works(0, 1, 600, 600)
    kinds = set()
    for tables in (tables_of_work(work), natural_tables(work, 16)):
        masks = [batch.mask for batch in tables.batches if isinstance(batch.mask, Tiled)]
        kinds |= {int(kind) for mask in masks for kind in mask.kinds.ravel().clip(-2, 0)}
        assert differing(tables, work) == []
    # whole tiles among others
    assert kinds >= {FULL_TILE, 0}
