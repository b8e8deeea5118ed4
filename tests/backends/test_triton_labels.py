"""Pairs with labels in common in Triton kernels, under the interpreter: labels stay tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_checks import spec_of, tensors
from interpreted import interpreted
from listed_calls import CPU, assert_partials_agree

from attnspec.backends.triton import tables, tuning
from attnspec.backends.triton.backend import TritonBackend
from attnspec.backends.triton.tuning import ON_GPU
from attnspec.lower.lower import stand_ins, works_of
from attnspec.lower.work import Call, Work

__all__ = ["interpreted"]

pytestmark = pytest.mark.usefixtures("interpreted", "small_tiles")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "ON_GPU", replace(ON_GPU, targets=(16,)))


def work_of(body: str, n_q: int, n: int) -> Work:
    program = spec_of(body).program
    ((work, _),) = works_of(program, 0, 2, n_q, n, stand_ins(program))
    return work


BODIES = {
    "documents": "causal input x: ids attend same(x)",
    "two labels": "input x: ids input y: ids attend same(x) & same(y)"
    " & (window(radius = 9) | residue(step = 5))",
    "changed": "causal input x: ids attend same(x) score alibi() normalize softmax1",
}


@pytest.mark.parametrize("body", BODIES)
def test_values_and_gradients(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if body == "documents":
        # long lists are several programs, of which some are left with nothing
        monkeypatch.setattr(tables, "SHORTEST", 1)
        monkeypatch.setattr(tables, "LONGEST", 1)
    n_q, n = 18, 35
    work = work_of(f"heads 2 {BODIES[body]}", n_q, n)
    x = torch.stack([torch.arange(n) // 14, (torch.arange(n) * 7) % 3])
    data = {"x": x, "y": (torch.arange(n)[None] // 30).int()}
    padding = torch.arange(n) > torch.tensor([0, 6])[:, None]
    given = tensors(2, 2, n_q, n, key_heads=1, dtype=torch.float32)
    kernel: Any = TritonBackend().build(work, (0, 1), CPU)
    assert kernel.labels
    call = Call(padding, 0.2, data=data, seed=torch.tensor([5]))
    assert_partials_agree(kernel, work, (0, 1), given, call)


@pytest.mark.parametrize("body", ["causal input x: ids attend same(x)", BODIES["two labels"]])
def test_lists_of_documents_end_where_these_do(body: str) -> None:
    n = 200
    work = work_of(body, n, n)
    from attnspec.backends.triton.labelled import LabelledTables

    kernel: Any = TritonBackend().build(work, (0,), CPU)
    ends = torch.tensor([30, 31, 100, 160])
    labels = torch.searchsorted(ends, torch.arange(n), right=True)
    every = torch.stack([labels] * len(kernel.labels))
    given = torch.stack([every, torch.zeros_like(every)])
    for step in kernel.steps:
        found = LabelledTables(step, given, 0)
        for lists, whole, own, other in (
            (found.rows, step.rows, step.layout.q, step.layout.k),
            (found.columns, step.columns, step.layout.k, step.layout.q),
        ):
            assert torch.equal(lists.programs[1], whole.programs)
            for mine, before in zip(
                lists.programs[0].tolist(), whole.programs.tolist(), strict=True
            ):
                tile, low, middle, high, slot = before
                near = [
                    entry
                    for entry in range(low, high)
                    if overlap(labels, own, tile, other, int(whole.tiles[entry]))
                ]
                begin, end = (near[0], near[-1] + 1) if near else (min(high, mine[1]),) * 2
                assert mine == [tile, begin, min(max(middle, begin), end), end, slot]
    # of a causal graph in natural order no tile of another document is read
    if len(kernel.steps) == 1:
        read = (found.rows.programs[0, :, 3] - found.rows.programs[0, :, 1]).sum()
        assert read < 0.6 * len(step.rows.tiles)


def overlap(labels: torch.Tensor, own: object, tile: int, other: object, named: int) -> bool:
    """Whether the labels of two tiles lie between those of each other."""
    found = []
    for side, number in ((own, tile), (other, named)):
        places = side.positions.reshape(side.count, side.size)[number]  # type: ignore[attr-defined]
        mine = labels[torch.from_numpy(places[places >= 0])]
        found.append((int(mine.min()), int(mine.max())))
    (a, b), (c, d) = found
    return a <= d and c <= b
