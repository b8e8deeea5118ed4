"""Of 16 bits no row errs by more than a few roundings: long ones, and other ways to run."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from population import spec_of
from ranks_in_turn import Rank, in_turn
from sweeps import in_turn as by_turns
from views import Call, Case, row_errors, worst, written

from attnspec.distributed import parallelize

HALF = (torch.bfloat16, torch.float16)
NEAR = "causal attend window(before = 127, after = 0) | columns(first(1))"
SHORT = (
    NEAR,
    f"{NEAR} score alibi()",
    f"{NEAR} normalize softmax1",
    "causal attend window(before = 63, after = 0) | residue(step = 32)",
    "attend window(radius = 40) | rows(first(3)) | columns(first(3))",
    "attend block(size = 64) | columns(first(2))",
    "causal heads 2 head 0 { attend full } head 1 { attend residue(step = 16) | self }",
    "heads 1 attend window(radius = 40) score bias(buckets = 8)",
    "causal attend full score softcap(cap = 5)",
    "attend random(keys = 9) normalize sigmoid",
    "causal attend taylor()",
    "causal attend rfa(features = 16, gated = true)",
    "attend window(radius = 9) + favor(features = 32)",
    "attend nystrom(landmarks = 16)",
)
LONG = (
    f"heads 1 {NEAR}",
    "heads 1 causal attend window(before = 63, after = 0) | residue(step = 32)",
    "heads 1 attend window(radius = 40) score bias(buckets = 8)",
    "heads 1 causal attend (residue(step = 16) | columns(first(1))) + linear(feature = exp)",
)


def call_of(body: str, n: int, dtype: torch.dtype) -> Call:
    return Call(Case(spec_of(body), n), "plain", dtype)


@pytest.mark.parametrize(
    ("place", "dtype"),
    by_turns([*((x, 500) for x in SHORT), *((x, 2048) for x in LONG)], HALF),
    ids=str,
)
def test_rows_and_gradients_err_by_a_few_roundings(
    place: tuple[str, int], dtype: torch.dtype
) -> None:
    call = call_of(*place, dtype)
    module = call.learning(call.case.spec.compile()).float()
    assert row_errors(call, call.said(module)) == []
    with torch.no_grad(), torch.autocast("cpu", dtype):
        out = module(*(x.detach().float() for x in call.tensors))
    assert worst(out, call.meant(torch.float64, True)[0]) <= 3 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "body", [NEAR, "causal attend full normalize softmax1", "causal attend linear()"]
)
def test_ranks_are_as_exact_as_one(body: str, dtype: torch.dtype) -> None:
    call = call_of(body, 300, dtype)
    module = call.case.spec.compile()

    def one(rank: Rank) -> list[torch.Tensor]:
        par = parallelize(module, cast(Any, rank))
        parts = [par.shard(x.detach()).requires_grad_() for x in call.tensors]
        out = par(*parts)
        upper = par.shard(torch.ones(*call.tensors[0].shape[:3], out.shape[-1], dtype=dtype))
        return [par.unshard(x) for x in (out.detach(), *torch.autograd.grad(out, parts, upper))]

    found = in_turn(3, one)[0]
    wide = [x.detach().double().requires_grad_() for x in call.tensors]
    out = module.double()(*wide)
    for number, (a, b) in enumerate(
        zip(found, (out, *torch.autograd.grad(out.sum(), wide)), strict=True)
    ):
        assert worst(a, b.detach()) <= (20 if number else 3) * torch.finfo(dtype).eps


@pytest.mark.parametrize("body", [SHORT[7], "causal attend linear()", SHORT[12]])
def test_backward_within_autocast_computes_in_the_types_of_the_call(body: str) -> None:
    call, grads = call_of(body, 300, torch.float32), []
    module = call.case.spec.compile()
    for cast_there in (False, True):
        leaves = [x.detach().requires_grad_() for x in call.tensors]
        out = module(*leaves)
        with torch.autocast("cpu", enabled=cast_there):
            grads.append(torch.autograd.grad(out.square().sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("score", ["alibi()", "bias(buckets = 4)"])
def test_standalone_files_change_scores_in_float32(score: str) -> None:
    call = call_of(f"heads 1 causal attend full score {score}", 1500, torch.bfloat16)
    with torch.no_grad():
        # of a single key errors of weights do not average out
        call.tensors[2][:, :, 1:] = 0
    outs = []
    for dtype in (torch.bfloat16, torch.float64):
        module = call.learning(written(call.case.spec, standalone=True)).to(dtype)
        outs.append(module(*(x.detach().to(dtype) for x in call.tensors)).detach())
    assert worst(outs[0], outs[1]) <= torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("steps", [1, 70])
def test_a_step_is_as_exact_as_the_whole_pass(steps: int) -> None:
    call = call_of(NEAR, 700, torch.bfloat16)
    module = call.case.spec.compile()
    state, outs = None, []
    for q, k, v in zip(*(torch.split(x.detach(), steps, 2) for x in call.tensors), strict=True):
        out, state = module.step(q, k, v, state)
        outs.append(out)
    meant = call.meant(torch.float64, True)[0]
    assert worst(torch.cat(outs, 2), meant) <= 3 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("backend", ["auto", "tables"])
def test_a_small_share_is_not_rounded_away(backend: str) -> None:
    body = "causal attend window(before = 2047, after = 0) | columns(first(1))"
    q = torch.zeros(1, 1, 4096, 16, dtype=torch.bfloat16)
    v = torch.zeros_like(q)
    v[:, :, 0] = 1000.0
    out = spec_of(body).compile(backend=backend)(q, q, v)
    assert out[0, 0, -1, 0].item() == pytest.approx(1000 / 2049, rel=2**-8)
