"""FlexAttention under conditions of run-time inputs: pairs and blocks are those of the definition,
one compilation serves all values, nothing is asked of the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from attention_checks import spec_of
from flex_checks import as_on_a_gpu, run_plainly
from torch._dynamo.utils import counters

from attnspec.backends.common.masks import mask_of
from attnspec.backends.dense.kernel import DenseKernel
from attnspec.backends.flex import attention
from attnspec.backends.flex.attention import mask_mod, with_condition
from attnspec.backends.flex.backend import FlexBackend
from attnspec.backends.flex.block_lists import BLOCK
from attnspec.backends.flex.kernel import Asked, FlexStep
from attnspec.graphs.gathered import Gathered, Numbering
from attnspec.lower.lower import stand_ins, works_of
from attnspec.lower.work import Call, Work
from attnspec.spec import Spec

CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

READING = (
    "input x: ids attend same(x)",
    "causal input x: ids input y: ids attend same(x) - same(y) & residue(step = 7)",
    "input t: tokens attend window(radius = 9) | global(t)",
    "input t: tokens attend full - rows(t) - columns(t & ~first(3))",
    "input p: length attend causal | prefix(p)",
    "input x: ids input t: tokens attend same(x) & (causal | columns(t | every(50)))",
    "input x: ids input t: tokens attend transpose(same(x) & causal | rows(t)) & residue(step = 2)",
    "input t: tokens input x: ids attend shift(~(rows(t) | window(radius = 3)) & same(x), by = 30)",
    "causal input z: numbers attend where(0 <= z(q) - z(k) <= 2.5)",
    "input z: numbers input x: ids attend where(max(z(q), z(k)) < 3 or abs(x(q) - x(k)) == 2)",
    "input x: ids attend where((x(q) + x(k)) % 3 == 1 and not x(k) == q // 100)",
    "input x: ids attend where(floor(x(q) / (x(k) + 2)) in {0, 2} or 2 * x(q) * x(k) >= n)",
    "sequence grid(15, 20) input z: numbers attend where(abs(q.row - k.row) <= z(q) or -z(k) > 2)",
    "input z: numbers attend where(z(q) != z(k)) | self",
)
"""What inputs may ask of pairs: every kind of input, every operator around it."""


def work_of(spec: Spec, n: int, n_q: int | None = None) -> tuple[Work, tuple[int, ...]]:
    ((work, heads),) = works_of(spec.program, 0, 2, n_q or n, n, stand_ins(spec.program))
    return work, heads


def given(spec: Spec, n: int) -> dict[str, torch.Tensor]:
    """Inputs of two samples as kernels take them, with what is no number among them."""
    generator = np.random.default_rng(n)
    made = {
        "ids": np.stack([np.arange(n) // 40, generator.integers(0, 6, n)]),
        "tokens": generator.random((2, n)) < [[0.02], [0.4]],
        "length": np.array([[[n // 3]], [[0]]]),
        "numbers": np.stack([np.arange(n) / 8, generator.normal(size=n) * 3]),
    }
    odd = made["numbers"]
    odd[1, 5::90], odd[1, 7::90], odd[0, n // 2 :: 71] = np.nan, np.inf, -np.inf
    return {entry.name: torch.from_numpy(made[entry.kind]) for entry in spec.program.inputs}


def held_by(step: FlexStep, asked: Asked) -> torch.Tensor:
    """The pairs of places of two samples by the mask alone, bool [2, q places, k places]."""
    tables = step.blocks.numbers, step.blocks.width, step.blocks.bits
    parts = tuple(mask_mod(numbers, tables[1], bits) for numbers, bits in asked.parts)
    places = [torch.tensor(side.places) for side in (step.q, step.k)]
    shown = asked.shape, asked.numbers, parts
    holds = with_condition(mask_mod(*tables), *shown, torch.tensor(1), *places)
    sample, q, k = (torch.arange(size) for size in (2, step.q.places, step.k.places))
    held = holds(sample[:, None, None], q[:1], q[:, None], k[None])
    # places where nothing stands have no key, and what their queries read is cut off
    assert not held[..., ~step.k.held].any()
    return held & step.q.held[:, None]


def tiles_of(held: torch.Tensor, step: FlexStep) -> tuple[torch.Tensor, torch.Tensor]:
    """Which blocks have a pair, and which all pairs of queries that there are."""
    every = held | ~step.q.held[:, None]
    tiles = 2, step.q.places // BLOCK, BLOCK, step.k.places // BLOCK, BLOCK
    return held.view(tiles).any(4).any(2), every.view(tiles).all(4).all(2)


def listed_by(asked: Asked) -> tuple[torch.Tensor, torch.Tensor]:
    """Which blocks are visited under their masks, and which without, alike in both directions."""
    lists = asked.blocks.lists
    masked, whole, q_masked, q_whole = (unlisted(*lists[i : i + 2]) for i in range(0, 8, 2))
    assert torch.equal(masked, q_masked.mT)
    assert torch.equal(whole, q_whole.mT)
    assert not (masked & whole).any()
    return masked, whole


def unlisted(counts: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Lists [samples, 1, rows] and [samples, 1, rows, columns] as bool [samples, rows, columns]."""
    rank = torch.arange(at.shape[-1]) < counts[:, 0, :, None]
    return torch.zeros(at[:, 0].shape, dtype=torch.bool).scatter(2, at[:, 0].long(), rank)


@pytest.mark.parametrize("body", READING)
@pytest.mark.parametrize(("n", "n_q"), [(300, 300), (300, 157)])
def test_masks_and_blocks_are_the_relation(body: str, n: int, n_q: int) -> None:
    spec = spec_of(body)
    work, heads = work_of(spec, n, n_q)
    kernel, call = as_on_a_gpu(work, heads), Call(data=given(spec, n))
    total = torch.zeros(2, n_q, n, dtype=torch.int64)
    for step in kernel.steps:
        asked = kernel.asked(step, call, 2)
        held = held_by(step, asked)
        some, every = tiles_of(held, step)
        masked, whole = listed_by(asked)
        assert not (some & ~(masked | whole)).any()
        assert not (whole & ~every).any()
        # every pair is in one step
        rows, columns = (side.index[side.held] for side in (step.q, step.k))
        total[:, rows[:, None], columns] += held[:, step.q.held][..., step.k.held]
    exact = mask_of(work, call.data, CPU)[:, 0]
    assert torch.equal(total, exact.expand(2, -1, -1).long())


BLOCKED = (
    "causal input x: ids attend same(x)",
    "input x: ids attend where(x(k) <= x(q) and not x(q) - x(k) > 2)",
    "input z: numbers attend where(abs(z(q) - z(k)) < 20)",
    "input t: tokens attend window(radius = 200) | rows(t)",
    "input p: length attend causal | prefix(p)",
)


@pytest.mark.parametrize("body", BLOCKED)
def test_blocks_are_those_of_the_pairs_where_inputs_are_in_order(body: str) -> None:
    n, spec = 1024, spec_of(body)
    work, heads = work_of(spec, n)
    data = {
        "x": torch.arange(n).expand(2, n) // 256,
        "z": torch.arange(n).expand(2, n) / 8,
        "t": (torch.arange(n) // 128 == 2).expand(2, n),
        "p": torch.tensor([[[500]], [[0]]]),
    }
    kernel = as_on_a_gpu(work, heads)
    (step,) = kernel.steps
    asked = kernel.asked(step, Call(data=data), 2)
    some, every = tiles_of(held_by(step, asked), step)
    masked, whole = listed_by(asked)
    assert 0 < int(some.sum()) < some.numel()
    assert every.any() or body.startswith("causal")
    assert torch.equal(masked | whole, some)
    assert torch.equal(whole, every)


FEW = READING[7:8]
"""Of those the one that is run whole every time."""


@pytest.mark.parametrize(
    "body", [x if x in FEW else pytest.param(x, marks=pytest.mark.slow) for x in READING]
)
def test_outputs_and_log_sum_exps(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_plainly(monkeypatch)
    n, spec = 300, spec_of(body)
    work, heads = work_of(spec, n)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 16, generator=generator) for _ in range(3))
    padding = torch.arange(n) < torch.tensor([[n], [n - 70]])
    kernel, exact = as_on_a_gpu(work, heads), DenseKernel(work, heads, CPU)
    for mask in (None, padding):
        call = Call(mask, data=given(spec, n))
        out, lse = kernel._fast(q, k, v, call)
        expected, sums = exact.partial(q.double(), k.double(), v.double(), call)
        assert sums is not None
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), sums, atol=2e-5, rtol=1e-5)


def compared(body: str, n: int, data: dict[str, torch.Tensor]) -> None:
    """Compiled, beside the definition in float64."""
    generator = torch.Generator().manual_seed(n)
    spec = spec_of(body)
    q, k, v = (torch.randn(2, heads, n, 16, generator=generator) for heads in (4, 2, 2))
    padding = torch.arange(n) < torch.tensor([[n], [n - n // 3]])
    with torch.no_grad():
        out = spec.compile(backend="flex")(q, k, v, inputs=data, key_padding_mask=padding)
        wide = q.double(), k.double(), v.double()
        exact = spec.compile(backend="dense")(*wide, inputs=data, key_padding_mask=padding)
    torch.testing.assert_close(out.double(), exact, atol=2e-5, rtol=1e-5)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is traced is run by torch's plain operations: test_flex.py has machine code made."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    attention._compiled.cache_clear()
    yield
    attention._compiled.cache_clear()


@pytest.mark.usefixtures("traced")
def test_one_compilation_serves_all_values_constants_and_lengths() -> None:
    counters.clear()
    for n, most in ((300, 9), (129, 60), (700, 0), (1, 3)):
        ids = torch.stack([torch.arange(n) // 7, torch.arange(n) % 50])
        body = f"input x: ids attend where(0 <= x(q) - x(k) <= {most}) | window(radius = {most})"
        compared(body, n, {"x": ids})
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("body", READING)
def test_every_condition_compiled(body: str) -> None:
    data = given(spec_of(body), 300)
    compared(body, 300, {name: x.flatten() if x.dim() > 2 else x for name, x in data.items()})


def test_what_is_numbered_anew_is_refused() -> None:
    work, _ = work_of(spec_of("input x: ids attend same(x)"), 64)
    some = Numbering(np.arange(0, 64, 2))
    relation = Gathered(work.relation, 64, some, some, 0)
    part = replace(work, relation=relation, n_q=32, n_k=32)
    assert FlexBackend().refuses(part, "cuda") == (
        "it reads inputs in the numbering of another sequence"
    )
    assert FlexBackend().refuses(work, "cuda") is None
