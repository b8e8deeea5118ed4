"""Data-dependent graphs: every backend that takes one computes what the definition does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_checks import learner_of
from population import spec_of
from sweeps import few
from views import KERNELS, Call, Case, errors, taken

DECIDED = (
    "attend topk(blocks = 3, size = 16, queries = 1)",
    "heads 4 attend topk(blocks = 3, size = 16, share = group)",
    "causal attend topk(blocks = 2, size = 16, queries = 1) | window(before = 3, after = 0)",
    "attend topk(blocks = 2, size = 16, queries = 1, within = window(radius = 50))",
    "heads 4 attend topk(keys = 4) | window(radius = 2) score alibi()",
    "heads 4 causal attend topk(blocks = 3, size = 8)"
    " score bias(buckets = 8) score softcap(cap = 3)",
    "causal attend lsh(buckets = 6, rounds = 3, chunk = 8, multiplicity = true) score alibi()",
    "attend lsh(buckets = 6, rounds = 2, chunk = 8, cut = bucket, multiplicity = true)",
    "attend lsh(buckets = 2, rounds = 1, chunk = 512, look = 0, share_qk = false)",
    "attend lsh(rounds = 3, chunk = 8, buckets = 16, combine = mean) normalize softmax1",
    "attend lsh(buckets = 6, rounds = 2, chunk = 8) | window(radius = 3)",
    "attend cluster(count = 3) & window(before = 60, after = 0)",
    "attend cluster(count = 9) | topk(blocks = 1, size = 16, queries = 1)",
    "attend cluster(count = 3, of = q) score softcap(cap = 3) normalize softmax1",
    "causal attend sinkhorn(size = 7) score alibi() normalize softmax1",
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
"""Longer than the oracle, which goes by plain loops, and together with graphs."""

SHAPES = ("plain", "grouped", "left", "last queries", "right", "several", "one query")


@pytest.mark.limits("", "tiny")
@pytest.mark.parametrize(
    ("body", "n"),
    few([(body, n) for n in (130, 65, 1) for body in DECIDED if n > 65 or "|" in body]),
)
def test_backends_compute_what_the_definition_does(body: str, n: int) -> None:
    turn = DECIDED.index(body)
    call = Call(Case(spec_of(body), n), SHAPES[(turn + n) % 7], torch.float64)

    def said(backend: str) -> Any:
        spec = call.case.spec
        return taken(backend, lambda: call.said(call.learning(spec.compile(backend)).double()))

    meant = said("dense")
    made = {each: said(each) for each in KERNELS if each != "dense"}
    found = {each: errors(x, meant, meant) for each, x in made.items() if x is not None}
    assert {each: faults for each, faults in found.items() if faults} == {}
    assert "auto" in found


def test_bent_scores_of_low_tiles_with_several_key_tiles_in_a_piece() -> None:
    spec = spec_of("heads 2 attend topk(blocks = 4, size = 8, queries = 4) score softcap(cap = 2)")
    call = Call(Case(spec, 256), "plain", torch.float64)
    made, meant = (call.said(spec.compile(x).double()) for x in ("tables", "dense"))
    assert not errors(made, meant, meant)


@pytest.mark.parametrize("body", ["attend sinkhorn(size = 4)", "attend cluster(of = q, count = 3)"])
def test_second_derivatives_of_learned_parts_agree(body: str) -> None:
    given, grads = [torch.randn(1, 1, 11, 6).double().requires_grad_() for _ in range(3)], []
    for backend in ("auto", "tables", "dense"):
        module = learner_of(body, 6, backend)
        asked = [*given, *module.parameters()]
        first = torch.autograd.grad((module(*given) ** 2).sum(), asked, create_graph=True)
        second = torch.cat([x.flatten() for x in first]).square().sum()
        grads.append(torch.autograd.grad(second, asked))
    for each in grads[:-1]:
        torch.testing.assert_close(each, grads[-1], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kernel", [each for each in KERNELS if each not in ("auto", "dense")])
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


@pytest.mark.parametrize(
    "body",
    ["topk(blocks = 2, size = 16, queries = 1)", "lsh(share_qk = false)", "cluster(count = 3)"],
)
def test_nan_and_infinity_stay_in_their_sample(body: str) -> None:
    module = spec_of(f"attend {body}").compile("tables")
    leaves = [x.requires_grad_() for x in torch.randn(3, 2, 1, 70, 6)]
    with torch.no_grad():
        for x in leaves:
            x[0, 0, 0] = torch.nan
    real = torch.ones(2, 70, dtype=torch.bool)
    real[1, :5] = False
    out = module(*leaves, key_padding_mask=real)[1]
    grads = torch.autograd.grad(out.square().sum(), leaves)
    assert all(x.isfinite().all() for x in (out, *(grad[1] for grad in grads)))


@pytest.mark.parametrize("share", ["all", "group", "head"])
def test_heads_that_share_scores_are_forced_one_by_one(share: str) -> None:
    always = f"always = chosen(c), share = {share}"
    body = f"input c: choices(size = 4) heads 4 attend topk(blocks = 3, size = 4, {always})"
    q, k, v = torch.randn(2, 4, 40, 6), torch.randn(2, 2, 40, 6), torch.randn(2, 2, 40, 6)
    inputs = {"c": torch.randint(-1, 10, (2, 4, 40, 1))}
    meant, got = (spec_of(body).compile(x)(q, k, v, inputs=inputs) for x in ("dense", "tables"))
    torch.testing.assert_close(got, meant)


def test_long_choices_are_listed_and_short_ones_are_not() -> None:
    spec = spec_of("attend topk(blocks = 4, size = 64, queries = 1)")
    names = [spec.plan(n).steps[0].chosen.name for n in (4096, 32)]
    assert names[0] != "dense"
    assert names[0] != names[1]


def test_means_over_rounds_count_rows_whose_keys_weigh_nothing() -> None:
    """Beside the zero of `softmax1` their log-sum-exps are 0, as those of rows without a key."""
    body = "lsh(buckets = 4, rounds = 4, chunk = 4, combine = mean, share_qk = false)"
    spec = spec_of(f"attend {body} normalize softmax1")
    q, k, v = 2 * torch.randn(3, 8, 1, 64, 8, generator=torch.Generator().manual_seed(0))
    q[..., 0], k[..., 0] = 60.0, torch.where(v[..., 0] < 3.0, -8.0, 8.0)
    meant, tables = (spec.compile(backend=each)(q, k, v) for each in ("dense", "tables"))
    assert (meant - tables).abs().max() < 1e-3


def test_tiles_that_read_nothing_in_a_round_have_no_result_there() -> None:
    spec = spec_of("causal attend cluster(count = 32, assign = balanced, seed = 0)")
    parts, module = torch.randn(3, 1, 1, 520, 8).double(), spec.compile(head_size=8).double()
    found, dense = module(*parts), spec.compile("dense", head_size=8).double()
    dense.load_state_dict(module.state_dict())
    torch.testing.assert_close(found, dense(*parts))
