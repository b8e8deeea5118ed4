"""In 16 bits each row of an output errs by a few roundings, and each of a gradient by some more:
beside the slow view of all specs, long rows, steps, ranks, choices, files and autocast."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from population import population, spec_of
from ranks_in_turn import Rank
from ranks_in_turn import in_turn as of_ranks
from sweeps import checkered
from test_views import WEIGHED
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from views import Call, Case, gradients, numbers, row_errors, worst

from attnspec.backends.common.merging import merge, merged
from attnspec.distributed import parallelize
from attnspec.graphs.relation import evaluate_pairs

HALF = (torch.bfloat16, torch.float16)

WINDOW = "causal attend window(before = 127, after = 0) | columns(first(1))"
BIASED = "heads 1 attend window(radius = 40) score bias(buckets = 8)"
SUMS = (
    "attend linear(feature = exp)",
    "causal attend linear()",
    "causal attend taylor()",
    "causal attend favor(features = 32)",
    "attend rbf(features = 32)",
    "causal attend rfa(features = 16, gated = true)",
    "attend window(radius = 9) + favor(features = 32)",
    "causal attend (residue(step = 16) | columns(first(1))) + linear(feature = exp)",
)


def call_of(body: str, n: int, kind: torch.dtype) -> Call:
    return Call(Case(spec_of(body), n), "plain", kind)


@pytest.mark.parametrize(
    ("case", "kind"),
    checkered(
        [
            (WINDOW, 1024),
            ("causal attend window(before = 63, after = 0) | residue(step = 32)", 1024),
            ("attend window(radius = 40) | rows(first(3)) | columns(first(3))", 500),
            (BIASED, 500),
            ("causal heads 2 head 0 { attend full } head 1 { attend residue(step = 16) }", 500),
            (f"{WINDOW} score alibi()", 500),
            (f"{WINDOW} normalize softmax1", 500),
            ("causal attend full score softcap(cap = 5)", 500),
            ("attend random(keys = 9) normalize sigmoid", 500),
            ("attend window(radius = 40) normalize relu", 500),
            ("causal attend topk(blocks = 3, size = 16) | window(before = 40, after = 0)", 90),
            ("causal attend topk(blocks = 3, size = 16) scale 0.3", 90),
            *((body, 300) for body in SUMS),
            (f"heads 1 {SUMS[6]} score bias(buckets = 8)", 300),
        ],
        HALF,
        of=4,
    ),
    ids=str,
)
def test_rows_err_by_a_few_roundings(case: tuple[str, int], kind: torch.dtype) -> None:
    call = call_of(*case, kind)
    module = call.learning(call.case.spec.compile()).to(kind)
    assert row_errors(call, call.said(module)) == []


@pytest.mark.parametrize("kind", HALF)
def test_the_definition_computes_in_float32(kind: torch.dtype) -> None:
    call = call_of(WINDOW, 500, kind)
    assert row_errors(call, call.said(call.case.spec.compile("dense"))) == []


@pytest.mark.parametrize(
    ("body", "kind"), checkered([WINDOW, "causal attend full normalize softmax1", *SUMS[:2]], HALF)
)
def test_ranks_are_as_exact_as_one(body: str, kind: torch.dtype) -> None:
    call = call_of(body, 300, kind)
    module = call.learning(call.case.spec.compile()).float()

    def one(rank: Rank) -> list[Tensor]:
        par = parallelize(module, cast(Any, rank))
        leaves = [par.shard(x).detach().requires_grad_() for x in call.tensors]
        weights = par.shard(numbers((*call.tensors[0].shape[:3], 5), 2))
        out = par(*leaves)
        return [par.unshard(x) for x in (out.detach(), *gradients(out, None, leaves, weights))]

    out, *grads = of_ranks(3, one)[0]
    assert row_errors(call, [out, torch.zeros(0), *grads]) == []


@pytest.mark.parametrize("body", [BIASED, SUMS[1], SUMS[6]])
def test_backward_within_autocast_computes_in_the_types_of_the_call(body: str) -> None:
    call, grads = call_of(body, 300, torch.float32), []
    module = call.learning(call.case.spec.compile()).float()
    for cast_there in (False, True):
        out = module(*call.tensors)
        with torch.autocast("cpu", enabled=cast_there):
            grads.append(torch.autograd.grad(out.square().sum(), call.tensors))
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("score", ["alibi()", "bias(buckets = 4)"])
def test_standalone_files_change_scores_in_float32(score: str) -> None:
    call = call_of(f"heads 1 causal attend full score {score}", 1500, torch.bfloat16)
    space: dict[str, Any] = {"__name__": "alone"}
    exec(call.case.spec.emit(standalone=True), space)
    module, parts = call.learning(space["Sample"]()).bfloat16(), [x.detach() for x in call.tensors]
    out = module(*parts)
    assert torch.equal(out, module.float()(*(x.float() for x in parts)).bfloat16())


@pytest.mark.parametrize(("steps", "kind"), checkered([1, 70], HALF))
def test_a_step_is_as_exact_as_the_whole_pass(steps: int, kind: torch.dtype) -> None:
    call, outs, state = call_of(WINDOW, 700, kind), [], None
    module = call.case.spec.compile()
    for q, k, v in zip(*(torch.split(x.detach(), steps, 2) for x in call.tensors), strict=True):
        out, state = module.step(q, k, v, state)
        outs.append(out)
    meant = call.meant(torch.float64, sums=False)[0]
    assert worst(torch.cat(outs, 2), meant) <= 4 * torch.finfo(kind).eps


@pytest.mark.parametrize("backend", ["auto", "tables"])
def test_a_small_share_is_not_rounded_away(backend: str) -> None:
    body = "causal attend window(before = 2047, after = 0) | columns(first(1))"
    q = torch.zeros(1, 1, 4096, 16, dtype=torch.bfloat16)
    v = torch.zeros_like(q)
    v[:, :, 0] = 1000.0
    out = spec_of(body).compile(backend=backend)(q, q, v)
    assert out[0, 0, -1, 0].item() == pytest.approx(1000 / 2049, rel=2**-8)


@pytest.mark.parametrize("kind", HALF)
def test_shares_beside_a_score_of_0_are_rounded_with_the_output(kind: torch.dtype) -> None:
    module = spec_of("causal attend full normalize softmax1").compile(backend="torch")
    parts = torch.randn(3, 1, 1, 40, 16).to(kind)
    assert torch.equal(module(*parts), module(*parts.float()).to(kind))


@pytest.mark.parametrize(("body", "kind"), checkered(SUMS[:4], HALF))
def test_long_sums_are_rounded_once(body: str, kind: torch.dtype) -> None:
    module, parts = spec_of(body).compile(), torch.randn(3, 1, 1, 8192, 16).to(kind)
    assert worst(module(*parts), module(*parts.float()).double()) <= 2 * torch.finfo(kind).eps


@pytest.mark.parametrize("kind", HALF)
def test_partial_results_are_merged_in_float32_and_rows_of_nothing_stay_0(
    kind: torch.dtype,
) -> None:
    lse = 3 * torch.randn(2, 500)
    lse[:, :9], lse[0, 9:20], lse[1, 20:30] = -torch.inf, -torch.inf, -torch.inf
    outs = (torch.randn(2, 500, 8) * (lse > -torch.inf)[..., None]).to(kind)
    weights = torch.exp(lse.double())[..., None]
    meant = (weights * outs.double()).sum(0) / weights.sum(0).clamp(min=1e-9)
    leaves = outs.requires_grad_(), lse.requires_grad_()
    out, sums = merged((outs[0], lse[0]), (outs[1], lse[1]))
    assert ((out - meant).abs() <= 0.501 * torch.finfo(kind).eps * meant.abs() + 1e-6).all()
    torch.testing.assert_close(sums, lse.logsumexp(0))
    grads = torch.autograd.grad(out.sum() + sums[9:].sum(), leaves)
    assert all(x.isfinite().all() for x in grads)
    with torch.no_grad():
        into = outs[0].float(), lse[0].clone()
        merge(into, (outs[1], lse[1]))
    torch.testing.assert_close(into, (meant.float(), sums))


@pytest.mark.slow
@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize("name", [name for name in WEIGHED if ":" in name])
def test_rows_of_long_sequences_err_no_more_than_those_of_torch(
    name: str, kind: torch.dtype
) -> None:
    spec, n = population()[name], 16_384
    if spec.inputs or spec.program.grid or spec.program.cross:
        pytest.skip("its pairs are not those of positions alone, or its length is its own")
    heads, at = spec.heads or 1, torch.arange(3, n, 97)
    q, k, v = torch.randn(3, 1, heads, n, 64).to(kind)
    with torch.no_grad():
        out = spec.compile()(q, k, v)
    for head in range(heads):
        pairs = evaluate_pairs(
            spec.relation(n, 0, head), at.numpy()[:, None], np.arange(n)[None], n
        )
        mask = torch.from_numpy(np.broadcast_to(pairs, (len(at), n)).copy())
        rows, one = at[mask.any(-1)], slice(head, head + 1)
        parts = q[:, one, rows], k[:, one], v[:, one]
        some = mask[mask.any(-1)]
        meant, torchs = (
            scaled_dot_product_attention(a, b, c, attn_mask=some)
            for a, b, c in ([x.double() for x in parts], parts)
        )
        assert worst(out[:, one, rows], meant) <= 2 * worst(torchs, meant), head
