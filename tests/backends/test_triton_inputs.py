"""Graphs that read run-time inputs in Triton kernels, under the interpreter: what these leave of
each tile is made out where they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_checks import spec_of, tensors
from interpreted import interpreted
from listed_calls import CPU, assert_partials_agree
from zoo import ATTENTIONS, smaller

from attnspec.backends.common.labels import certain, possible
from attnspec.backends.common.masks import mask_of, with_data
from attnspec.backends.triton import tables, tuning
from attnspec.backends.triton.backend import TritonBackend
from attnspec.backends.triton.tuning import ON_GPU
from attnspec.graphs.gathered import Gathered, Numbering
from attnspec.graphs.relation import evaluate_pairs
from attnspec.lower.lower import stand_ins, works_of
from attnspec.lower.work import Call, Work

__all__ = ["interpreted"]

pytestmark = pytest.mark.usefixtures("interpreted", "small_tiles")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "ON_GPU", replace(ON_GPU, targets=(16,)))


INPUTS = "input t: numbers input x: numbers input i: ids input m: tokens input s: length"

BODIES = {
    "events": "attend where(t(k) <= t(q) and t(q) - t(k) <= 9)",
    "marked": "attend window(radius = 2) | global(m) | columns(first(1))",
    "prefix": "attend causal | prefix(s)",
    "rows and labels": "causal attend rows(m) | same(i)",
    "reals": "attend where(abs(x(q) - x(k)) <= 0.3) | self",
    "complement": "attend window(radius = 20) - global(m) - where((i(q) + i(k)) % 3 == 0)",
    "grid": "sequence grid(5, 7) attend where(q.row == k.row or t(q) > t(k) + 20)",
    "shifted": "attend shift(transpose(rows(m)), by = 3) | self",
    "looked up and moved": "attend shift(where(k % 3 == 0) & rows(m), by = 2) | self",
    "two orders": "causal attend (window(before = 3, after = 0) | residue(step = 6))"
    " & where(i(q) >= i(k))",
    "nothing": "attend (window(radius = 3) - full) & prefix(s)",
}


def work_of(body: str, n_q: int, n: int) -> Work:
    program = spec_of(f"heads 2 {INPUTS} {body}").program
    ((work, _),) = works_of(program, 0, 2, n_q, n, stand_ins(program))
    return work


def inputs(n: int) -> dict[str, torch.Tensor]:
    """Inputs of two samples, as kernels are given them; the first marks no token, and has a number
    that is none."""
    x = torch.rand(2, n)
    x[0, n // 2] = torch.nan
    return {
        "t": torch.randint(0, 30, (2, n)).sort(1).values,
        "x": x,
        "i": torch.randint(0, 4, (2, n)),
        "m": (torch.rand(2, n) < 0.15) & (torch.arange(2) > 0)[:, None],
        "s": torch.tensor([n // 3, 0])[:, None, None],
    }


def agree(kernel: Any, work: Work, call: Call, size: tuple[int, int]) -> None:
    given = tensors(2, 2, *size, key_heads=1, dtype=torch.float32)
    assert_partials_agree(kernel, work, (0, 1), given, call)


QUICK = ("events", "marked", "prefix", "looked up and moved", "two orders", "nothing")


@pytest.mark.parametrize(
    "body", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in BODIES]
)
def test_values_and_gradients(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if body in ("events", "two orders"):
        # long lists are several programs, of which some are left with nothing
        monkeypatch.setattr(tables, "SHORTEST", 1)
        monkeypatch.setattr(tables, "LONGEST", 1)
    torch.manual_seed(2)
    n = 35
    n_q = n if body == "grid" else 22
    work = work_of(BODIES[body], n_q, n)
    kernel: Any = TritonBackend().build(work, (0, 1), CPU)
    assert kernel.reading
    padding = torch.arange(n) > torch.tensor([0, 6])[:, None]
    dropped = 0.2 if body == "marked" else 0.0
    call = Call(padding, dropped, data=inputs(n), seed=torch.tensor([5]) if dropped else None)
    agree(kernel, work, call, (n_q, n))


def test_inputs_of_one_sample_are_those_of_all() -> None:
    work = work_of(BODIES["prefix"], 20, 20)
    kernel = TritonBackend().build(work, (0, 1), CPU)
    agree(kernel, work, Call(data={name: x[:1] for name, x in inputs(20).items()}), (20, 20))


@pytest.mark.parametrize("body", ["reals", "two orders", "prefix"])
def test_a_single_position(body: str) -> None:
    work = work_of(BODIES[body], 1, 1)
    agree(TritonBackend().build(work, (0, 1), CPU), work, Call(data=inputs(1)), (1, 1))


@pytest.mark.parametrize("body", BODIES)
def test_what_is_possible_and_what_is_certain(body: str) -> None:
    n = 35
    relation = work_of(BODIES[body], n, n).relation
    at = np.arange(n)[:, None], np.arange(n)[None]
    most, least = (evaluate_pairs(of(relation), *at, n) for of in (possible, certain))
    for sample in range(2):
        data = {name: x[sample].numpy() for name, x in inputs(n).items()}
        held = evaluate_pairs(with_data(relation, data), *at, n)
        assert not (held & ~most).any()
        assert not (least & ~held).any()


def test_tiles_that_inputs_leave_out_are_not_planned() -> None:
    for body, most, least in (
        ("causal attend rows(m)", "causal attend full", "attend window(radius = 1) - full"),
        ("attend window(radius = 2) & global(m)", "attend window(radius = 2)", None),
        ("attend window(radius = 2) | global(m)", None, "attend window(radius = 2)"),
        ("attend window(radius = 2) - global(m)", "attend window(radius = 2)", None),
    ):
        relation = work_of(body, 40, 40).relation
        at = np.arange(40)[:, None], np.arange(40)[None]
        for of, meant in ((possible, most), (certain, least)):
            if meant is not None:
                right = spec_of(meant).mask(40, 0, 0)
                assert np.array_equal(evaluate_pairs(of(relation), *at, 40), right)


@pytest.mark.parametrize("body", ["events", "marked", "two orders"])
def test_lists_name_what_holds_pairs_alone(body: str) -> None:
    """Whole tiles, then those with masks, and none that is empty, in both directions."""
    torch.manual_seed(0)
    n = 70
    work, data = work_of(BODIES[body], n, n), inputs(n)
    kernel: Any = TritonBackend().build(work, (0, 1), CPU)
    held = mask_of(work, data, CPU).expand(2, 1, n, n)[:, 0]
    seen = torch.zeros(2, n, n, dtype=torch.int64)
    for step in kernel.reading:
        found, (q_at, k_at) = step(data), step.places
        for lists, turned in ((found.rows, False), (found.columns, True)):
            for sample in range(2):
                for tile, low, middle, high, _ in lists.programs[sample].tolist():
                    for entry in range(low, high):
                        other = int(lists.tiles[entry])
                        places = q_at[other if turned else tile], k_at[tile if turned else other]
                        q, k = (x[x >= 0] for x in places)
                        words = found.words[int(lists.kinds[entry])]
                        bits = (words[..., None] >> torch.arange(32)) & 1
                        mask = bits.flatten(1)[: len(q), : len(k)] != 0
                        whole = entry < middle
                        assert bool(mask.all()) if whole else bool(mask.any())
                        seen[sample, q[:, None], k[None]] += (
                            torch.ones_like(mask) if whole else mask
                        )
    # once in each direction
    assert torch.equal(seen, 2 * held)


def test_what_is_laid_out_for_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MASKED", 9 * 16 * 16 // 8 - 1)
    n = 35
    work = work_of(BODIES["marked"], n, n)
    backend = TritonBackend()
    assert backend.steps(work) == ("as the inputs of a call decide, laid out for each sample",)
    kernel = backend.build(work, (0, 1), CPU)
    assert not hasattr(kernel, "reading")
    agree(kernel, work, Call(data=inputs(n)), (n, n))


def test_what_is_numbered_anew_is_laid_out_for_each_sample() -> None:
    work = work_of(BODIES["marked"], 35, 35)
    places = Numbering(np.arange(0, 35, 2))
    part = replace(work, relation=Gathered(work.relation, 35, places, places, 0), n_q=18, n_k=18)
    assert "for each sample" in str(TritonBackend().steps(part))


def test_the_plan_names_what_a_call_decides() -> None:
    lines = TritonBackend().steps(work_of(BODIES["prefix"], 35, 35))
    assert lines == ("natural order, tiles 16 x 16, masks as the inputs of a call decide",)


def test_no_graph_of_the_zoo_that_reads_inputs_is_laid_out_for_each_sample() -> None:
    seen = set()
    for path, name in ATTENTIONS:
        program = smaller(path, name).program
        n = program.fixed_length or 96
        for work, _ in works_of(program, 0, program.heads or 2, n, n, stand_ins(program)):
            if work.reads and not work.decided and work.mechanism is None:
                assert TritonBackend().refuses(work, "cpu") is None
                assert "for each sample" not in str(TritonBackend().steps(work))
                seen.add(name)
    assert len(seen) > 7
