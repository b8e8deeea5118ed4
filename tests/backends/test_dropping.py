"""Weights that Triton kernels drop: by counters, which torch and plain integers count as well."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_checks import ALONG, GRAPHS, module_of, spec_of, tensors, with_gradients
from interpreted import interpreted
from listed_calls import CPU, a_call, assert_partials_agree, chosen
from torch.utils.checkpoint import checkpoint

from attnspec.backends.common.dropping import factor_of, first_words, kept, least_of
from attnspec.backends.dense.kernel import DenseKernel
from attnspec.backends.triton import tuning
from attnspec.backends.triton.backend import TritonBackend
from attnspec.backends.triton.tuning import ON_GPU
from attnspec.graphs.counter_rng import DROPOUT, philox
from attnspec.graphs.operators import Intersection, Union
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.patterns.same import Same
from attnspec.graphs.patterns.window import Window
from attnspec.graphs.token_sets import StandIn
from attnspec.lower.lower import works_of
from attnspec.lower.work import Call, Work

__all__ = ["interpreted"]

pytestmark = pytest.mark.usefixtures("interpreted")

SEED = torch.tensor([0x1234_5678_9ABC_DEF0])


def test_words_are_those_of_the_generator() -> None:
    rows = torch.tensor([0, 1, 77, (1 << 31) - 1])
    found = first_words(SEED, rows[:, None, None], rows[:, None], rows)
    key = int(SEED) & 0xFFFFFFFF, int(SEED) >> 32
    meant = [
        philox((q, k, line, DROPOUT), key)[0]
        for q in rows.tolist()
        for k in rows.tolist()
        for line in rows.tolist()
    ]
    assert found.flatten().tolist() == meant


def test_as_many_are_dropped_as_asked_for_and_no_two_alike() -> None:
    at = torch.arange(200)[None]
    left = kept(Call(dropout_p=0.3, seed=SEED), (2, 2, 2), at, at)
    assert left is not None
    # 40,000 weights of each of 8 heads
    rates = (~left).float().mean((3, 4, 5)).flatten()
    assert ((rates - 0.3).abs() < 0.01).all()
    lines = (~left).double().flatten(3).flatten(0, 2)
    others = torch.corrcoef(torch.cat([lines, lines[:1].view(200, 200).T.reshape(1, -1)]))
    assert (others - torch.eye(9)).abs().max() < 0.03
    assert kept(Call(), (1, 1, 1), at, at) is None
    assert (least_of(0.0), factor_of(0.0), factor_of(1.0)) == (0, 1.0, 0.0)


def test_what_is_kept_is_multiplied_in_the_type_of_the_call() -> None:
    ((work, heads),) = works_of(spec_of("attend self()").program, 0, 1, 32, 32, {})
    given = tensors(1, 1, 32, 32)
    out, _ = DenseKernel(work, heads, CPU).partial(*given, Call(dropout_p=0.3, seed=SEED))
    left = out != 0
    assert 0 < left.sum() < left.numel()
    torch.testing.assert_close(out, given[2] / 0.7 * left, rtol=1e-15, atol=0)


BODIES = {
    "strided": GRAPHS["strided"],
    "empty rows": GRAPHS["empty rows"],
    "changed": "attend window(radius = 9) score bias(buckets = 4, max_distance = 9) normalize"
    " softmax1",
}


@pytest.mark.parametrize(
    ("name", "target"), [("strided", 16), ("strided", 32), ("empty rows", 16), ("changed", 16)]
)
def test_any_tiling_drops_what_the_definition_drops(
    name: str, target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "ON_GPU", replace(ON_GPU, targets=(target,)))
    n_q, n = 17, 21
    spec = spec_of(f"heads 2 {BODIES[name]}")
    ((work, heads),) = works_of(spec.program, 0, 2, n_q, n, {})
    padding = torch.arange(n) > torch.tensor([0, 6])[:, None]
    table = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
    tables = dict.fromkeys(spec.compile().state_dict(), table)
    given = tensors(2, 2, n_q, n, key_heads=1, dtype=torch.float32)
    kernel = TritonBackend().build(work, heads, CPU)
    assert_partials_agree(kernel, work, heads, given, Call(padding, 0.4, tables, seed=SEED))


@pytest.mark.parametrize("heads", [1, 4])
def test_what_the_data_decide_drops_what_the_definition_drops(heads: int) -> None:
    torch.manual_seed(0)
    leaf, data = chosen(11, 13, 4, 2, heads)
    label = Same(StandIn("label"))
    data["label"] = torch.tensor([[0, 1], [2, 2]]).repeat_interleave(7, 1)[:, :13]
    relation = Intersection((Causal(), Union((leaf, Window(2, 0), label))))
    work = Work(relation, 11, 13, reads=("label",))
    given, call = a_call(work, 4, 2, None, data)
    wide = {x: y[:, None] if x == "label" else y for x, y in call.data.items()}
    call = replace(call, data=wide, dropout_p=0.4, seed=SEED)
    members = tuple(range(4))
    parts = [x.detach().requires_grad_() for x in given]
    results = [
        with_gradients(kernel.partial(*parts, call)[0], parts)  # type: ignore[attr-defined]
        for kernel in (TritonBackend().build(work, members, CPU), DenseKernel(work, members, CPU))
    ]
    for ours, meant in zip(*results, strict=True):
        torch.testing.assert_close(ours, meant)


KINDS = {
    "none": "causal attend full",
    "ids": "causal input x: ids attend same(x)",
    "tokens": "input x: tokens attend window(radius = 1) | global(x)",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_drops_anew_and_alike_in_all_derivatives(kind: str) -> None:
    module = module_of(KINDS[kind], "triton")
    labels = torch.tensor([[0, 0, 1], [3, 4, 4]])
    inputs = None if kind == "none" else {"x": labels if kind == "ids" else labels == 4}
    given = [x.detach().double() for x in tensors(2, 1, 3, 3, size=2)]

    def run(*parts: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        found: torch.Tensor = module(*parts, dropout_p=0.4, inputs=inputs)
        return found

    first = run(*given)
    assert torch.equal(run(*given), first)
    again = [module(*given, dropout_p=0.4, inputs=inputs) for _ in range(3)]
    assert any(not torch.equal(x, first) for x in again)
    assert not module(*given, dropout_p=1.0, inputs=inputs).any()
    parts = [x.requires_grad_() for x in given]
    assert torch.autograd.gradgradcheck(run, parts, **ALONG, check_undefined_grad=False)
    # what is computed again for its gradients drops the same
    right = with_gradients(run(*parts), parts)
    # and so does what is differentiated again
    twice = torch.autograd.grad(torch.cos(run(*parts)).sum(), parts, create_graph=True)
    once = torch.autograd.grad(torch.cos(run(*parts)).sum(), parts)
    for one, other in zip(twice, once, strict=True):
        torch.testing.assert_close(one, other)
    torch.manual_seed(5)
    forgotten = checkpoint(
        lambda *x: module(*x, dropout_p=0.4, inputs=inputs), *parts, use_reentrant=False
    )
    for one, other in zip(with_gradients(forgotten, parts), right, strict=True):
        assert torch.equal(one, other)


def test_the_operator_drops_alike_in_both_directions() -> None:
    module = module_of("heads 2 causal attend full", "triton")
    q, k, v = (x.detach() for x in tensors(1, 2, 20, 20, dtype=torch.float32))
    v.requires_grad_()
    seed = torch.tensor(7)
    call = torch.ops.attnspec.attention.default
    out = call(q, k, v, module.engine.text, [], [], None, 0, 0.5, seed)[0]
    upper = torch.randn_like(out)
    # what is linear in v is its gradient times v
    (grad,) = torch.autograd.grad(out, v, upper)
    torch.testing.assert_close((grad * v).sum(), (upper * out).sum(), rtol=1e-4, atol=1e-4)
