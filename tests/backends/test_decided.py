"""Graphs that the data decide: every backend that takes one computes what the definition does."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import pytest
import torch
from population import spec_of
from sweeps import in_turn
from views import KERNELS, Call, Case, errors, taken

from attnspec import Spec

DECIDED = (
    "attend topk(keys = 5)",
    "attend topk(blocks = 3, size = 16, queries = 1)",
    "heads 4 attend topk(blocks = 3, size = 16, share = group)",
    "causal attend topk(blocks = 2, size = 16, queries = 1) | window(before = 3, after = 0)",
    "causal attend topk(mass = 0.5, size = 8)",
    "attend topk(blocks = 2, size = 16, queries = 1, within = window(radius = 50))",
    "heads 4 attend topk(keys = 4) | window(radius = 2) score alibi()",
    "heads 4 causal attend topk(blocks = 3, size = 8)"
    " score bias(buckets = 8) score softcap(cap = 3)",
    "attend topk(keys = 4) scale 0.7 normalize softmax1",
    "attend lsh(buckets = 6, rounds = 3, chunk = 8)",
    "causal attend lsh(buckets = 6, rounds = 3, chunk = 8)",
    "attend lsh(buckets = 6, rounds = 2, chunk = 8, cut = bucket)",
    "attend lsh(buckets = 6, rounds = 2, chunk = 16, share_qk = false)",
    "attend lsh(buckets = 4, rounds = 4, chunk = 16, multiplicity = true)",
    "attend lsh(buckets = 6, rounds = 2, chunk = 8, bucket_mask = false, look = 2)",
    "attend lsh(buckets = 2, rounds = 1, chunk = 512, look = 0, share_qk = false)",
    "attend lsh(rounds = 3, chunk = 16, combine = mean)",
    "attend lsh(rounds = 3, chunk = 8, buckets = 16, combine = mean) normalize softmax1",
    "attend lsh(buckets = 6, rounds = 2, chunk = 8) | window(radius = 3)",
    "attend cluster(count = 5)",
    "attend cluster(count = 4, assign = balanced)",
    "attend cluster(count = 3) & window(before = 60, after = 0)",
    "attend cluster(count = 9) | topk(blocks = 1, size = 16, queries = 1)",
    "attend cluster(count = 3, of = q) score softcap(cap = 3) normalize softmax1",
    "attend sinkhorn(size = 8)",
    "causal attend sinkhorn(size = 7) score alibi() normalize softmax1",
    "attend sinkhorn(size = 8, cut = 2) score softcap(cap = 3)",
    "input c: choices(size = 16) input d: ids"
    " causal attend (chosen(c) | window(before = 9, after = 0)) & same(d)",
    "heads 2 input c: choices(size = 16) input d: ids attend chosen(c)"
    " | window(radius = 5) & same(d) score alibi() score bias(buckets = 8)",
    "input c: choices(size = 16) input e: choices(size = 8)"
    " causal attend chosen(c) & (chosen(e) & window(before = 60, after = 0)) | self",
    "input m: tokens attend topk(blocks = 2, size = 16, queries = 1) | columns(m)",
    "input d: ids attend lsh(rounds = 2, chunk = 16) & same(d) | window(radius = 3)",
    "input c: choices(size = 16) input s: length attend chosen(c) | prefix(s)",
)
SHAPES = ("plain", "grouped", "left", "last queries", "right", "several", "one query")


@dataclass(frozen=True)
class Hashed(Call):
    """Whose keys are its queries, where the graph asks for that."""

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        q, k, v = Call(self.case, self.shape, self.dtype).tensors
        if hashed(self.case.spec):
            q = k.detach()[:, :, k.shape[2] - q.shape[2] :].clone().requires_grad_()
        return [q, k, v]


def hashed(spec: Spec) -> bool:
    return "lsh" in spec.source and "share_qk = false" not in spec.source


def learning(spec: Spec, backend: str) -> Any:
    module = spec.compile(backend, head_size=6).double()
    with torch.no_grad():
        for x in module.parameters():
            x.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    return module


def differing(call: Call, backend: str) -> list[str] | None:
    spec = call.case.spec

    def ask() -> list[str]:
        said = call.said(learning(spec, backend).to(torch.promote_types(call.dtype, torch.float32)))
        wide = Hashed(call.case, call.shape, torch.float64)
        wide.__dict__["tensors"] = [x.detach().double().requires_grad_() for x in call.tensors]
        meant = wide.said(learning(spec, "dense"))
        if call.dtype == torch.float64:
            return errors(said, meant, meant)
        return errors(said, meant, call.said(learning(spec, "dense").float()))

    found: list[str] | None = taken(backend, ask)
    return found


@pytest.mark.limits("", "tiny")
@pytest.mark.parametrize(
    ("body", "n"), [(body, n) for n in (130, 65, 1) for body in DECIDED if n > 65 or "|" in body]
)
def test_backends_compute_what_the_definition_does(body: str, n: int) -> None:
    turn = DECIDED.index(body)
    for shape in (SHAPES[turn % 7], SHAPES[(turn + n) % 7]):
        if hashed(spec_of(body)) and shape in ("grouped", "several"):
            # each head of queries has keys of its own
            shape = "left"
        call = Hashed(Case(spec_of(body), n), shape, torch.float64)
        found = {each: differing(call, each) for each in KERNELS if each != "dense"}
        assert {each: faults for each, faults in found.items() if faults} == {}, shape
        assert found["auto"] is not None


@pytest.mark.parametrize(
    ("body", "dtype"),
    in_turn([DECIDED[3], DECIDED[12], DECIDED[26]], [torch.float32, torch.bfloat16, torch.float16]),
    ids=str,
)
def test_short_types_err_as_the_definition_does(body: str, dtype: torch.dtype) -> None:
    call = Hashed(Case(spec_of(body), 130), "plain", dtype)
    # what is chosen must not turn on a rounding: it is the same for the numbers of the type
    for each in KERNELS:
        assert not differing(call, each)


@pytest.mark.parametrize("body", ["attend sinkhorn(size = 4)", "attend cluster(of = q, count = 3)"])
def test_what_is_learned_is_differentiated_twice(body: str) -> None:
    given, grads = [torch.randn(1, 1, 11, 6).double().requires_grad_() for _ in range(3)], []
    for backend in ("auto", "tables", "dense"):
        module = taken(backend, partial(learning, spec_of(body), backend))
        if module is None:
            continue
        asked = [*given, *module.parameters()]
        first = torch.autograd.grad((module(*given) ** 2).sum(), asked, create_graph=True)
        second = torch.cat([x.flatten() for x in first]).square().sum()
        grads.append(torch.autograd.grad(second, asked))
    for each in grads[:-1]:
        torch.testing.assert_close(each, grads[-1], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "kernel", [each for each in KERNELS if each not in ("auto", "dense", "torch")]
)
def test_a_query_without_keys_takes_nothing_of_others_and_of_earlier_calls(kernel: str) -> None:
    """Not even where what they read is infinite, or was NaN."""
    spec = spec_of("input c: choices(size = 8) attend chosen(c)")
    if taken(kernel, lambda: spec.compile(kernel)) is None:
        return
    module = spec.compile(kernel)
    q, k, v = torch.randn(3, 1, 1, 40, 6).double()
    choices = torch.zeros(1, 1, 40, 2, dtype=torch.int64)
    choices[:, :, 20] = -1
    wild = v.clone()
    wild[:, :, :8] = torch.inf
    out, lse = module(q, k, wild, inputs={"c": choices}, return_lse=True)
    assert not out[0, 0, 0].isfinite().any()
    assert lse[0, 0, 20] == -torch.inf
    assert not out[0, 0, 20].any()
    module(q * torch.nan, k, v, inputs={"c": choices})
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = module(*leaves, inputs={"c": choices.fill_(-1)})
    assert not any(x.any() for x in (out, *torch.autograd.grad(out.sum(), leaves)))


def test_long_choices_are_listed_and_short_ones_are_not() -> None:
    spec = spec_of("attend topk(blocks = 4, size = 64, queries = 1)")
    names = [spec.plan(n).steps[0].chosen.name for n in (4096, 32)]
    assert names[0] != "dense"
    assert names[0] != names[1]
