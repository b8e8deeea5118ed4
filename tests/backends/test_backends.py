"""Every backend against the definition: values, gradients, padding, lengths, types."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import numpy as np
import pytest
import torch
from attention_checks import (
    ALONG,
    BACKEND_NAMES,
    GRAPHS,
    assert_agree,
    defined,
    module_of,
    spec_of,
    tensors,
    with_gradients,
)
from package_map import ROOT
from sweeps import checkered
from torch.nn import functional

import attnspec.backends.common.pieces
from attnspec.backends import BACKENDS
from attnspec.backends.common.score_formula import bucket_of, thresholds
from attnspec.backends.planner import candidates, plan
from attnspec.graphs.patterns import BY_NAME
from attnspec.ir.serial import plan_data
from attnspec.lower.work import BackendError, Work
from attnspec.runtime import CompiledAttention

SIZES = (1, 7, 64, 127, 257)
"""Lengths below, at and above the edges of blocks."""

SINGLE = (1, 64, 257)
"""Those that are tried in float32 too."""

Given: TypeAlias = "tuple[torch.Tensor, ...]"

every_backend = pytest.mark.parametrize("backend", BACKEND_NAMES)


def narrowed(given: tuple[torch.Tensor, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [x.detach().to(dtype).requires_grad_() for x in given]


@cache
def drawn(n: int, dtype: torch.dtype = torch.float64) -> Given:
    """The same numbers in any type."""
    return tensors(2, 2, n, n) if dtype == torch.float64 else tuple(narrowed(drawn(n), dtype))


@cache
def meant(name: str, n: int, dtype: torch.dtype = torch.float64) -> Given:
    """Outputs and gradients by the definition: which backend is held against them changes
    nothing."""
    parts = drawn(n, dtype)
    return tuple(with_gradients(defined(spec_of(GRAPHS[name]), *parts), parts))


@every_backend
@pytest.mark.parametrize("name", GRAPHS)
def test_values_and_gradients(name: str, backend: str) -> None:
    module = module_of(GRAPHS[name], backend)
    for n in SIZES:
        for dtype in (torch.float64, torch.float32) if n in SINGLE else (torch.float64,):
            given = drawn(n, dtype)
            found = with_gradients(module(*given), given)
            assert_agree(found, meant(name, n), meant(name, n, dtype))


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(backend: str, dtype: torch.dtype) -> None:
    body = GRAPHS["strided"]
    spec, module, base_module = spec_of(body), module_of(body, backend), module_of(body, "dense")
    given = tensors(1, 2, 200, 200)
    short = narrowed(given, dtype)
    wide = [x.detach().double().requires_grad_() for x in short]
    exact = with_gradients(defined(spec, *wide), wide)
    base = with_gradients(base_module(*short), short)
    found = with_gradients(module(*short), short)
    assert all(x.dtype == dtype for x in found)
    assert_agree(found, exact, base)


@every_backend
@pytest.mark.parametrize("name", ["causal", "strided", "blocks", "random", "empty rows"])
def test_queries_are_the_last_positions(name: str, backend: str) -> None:
    spec, module = spec_of(GRAPHS[name]), module_of(GRAPHS[name], backend)
    for n_q, n_k in ((1, 130), (64, 130), (129, 130), (1, 1), (33, 257)):
        given = tensors(1, 2, n_q, n_k)
        exact = with_gradients(defined(spec, *given), given)
        assert_agree(with_gradients(module(*given), given), exact, exact)
        full = torch.randn(1, 2, n_k, 8, dtype=torch.float64)
        full[:, :, n_k - n_q :] = given[0].detach()
        rows = module(full, given[1], given[2])[:, :, n_k - n_q :]
        torch.testing.assert_close(exact[0], rows.detach(), rtol=0, atol=1e-12)


@every_backend
@pytest.mark.parametrize("name", ["window", "blocks", "random blocks", "full"])
def test_grouped_queries_share_keys(name: str, backend: str) -> None:
    spec, module = spec_of(GRAPHS[name]), module_of(GRAPHS[name], backend)
    for heads, key_heads in ((4, 2), (6, 2), (3, 1)):
        given = tensors(2, heads, 100, 130, key_heads=key_heads)
        exact = with_gradients(defined(spec, *given), given)
        assert_agree(with_gradients(module(*given), given), exact, exact)
        repeated = [x.repeat_interleave(heads // key_heads, 1) for x in given[1:]]
        same = module(given[0], *repeated)
        torch.testing.assert_close(exact[0], same.detach(), rtol=0, atol=1e-12)


@every_backend
def test_heads_that_differ_share_keys_in_any_grouping(backend: str) -> None:
    body = "heads 6 attend window(radius = 9) head odd { attend residue(step = 5) }"
    body += " head 4 { attend full }"
    spec, module = spec_of(body), module_of(body, backend)
    for key_heads in (6, 3, 2, 1):
        given = tensors(1, 6, 70, 70, key_heads=key_heads)
        exact = with_gradients(defined(spec, *given), given)
        assert_agree(with_gradients(module(*given), given), exact, exact)


@pytest.mark.parametrize(
    ("name", "backend", "key_heads"),
    checkered(["causal", "strided", "blocks", "random", "where"], BACKEND_NAMES, [4, 2]),
)
def test_padding(name: str, backend: str, key_heads: int) -> None:
    spec, module = spec_of(GRAPHS[name]), module_of(GRAPHS[name], backend)
    n = 130
    padding = torch.ones(5, n, dtype=torch.bool)
    padding[1, 90:] = False
    padding[2, :50] = False
    padding[3, 40:80] = False
    padding[4] = False
    given = tensors(5, 4, n, n, key_heads=key_heads)
    exact = with_gradients(defined(spec, *given, padding=padding), given)
    found = with_gradients(module(*given, key_padding_mask=padding), given)
    assert_agree(found, exact, exact)
    assert not found[0][4].any()
    assert not any(grad[4].any() for grad in found[1:])
    # what stands in padded places does not matter
    changed = [x.detach().clone() for x in given[1:]]
    for x in changed:
        x.transpose(1, 2)[~padding] = 7.0
    torch.testing.assert_close(module(given[0], *changed, key_padding_mask=padding), found[0])


@every_backend
@pytest.mark.parametrize("sizes", [(8, 5), (5, 8), (1, 1), (3, 16), (64, 64)])
def test_sizes_of_heads(backend: str, sizes: tuple[int, int]) -> None:
    spec, module = spec_of(GRAPHS["strided"]), module_of(GRAPHS["strided"], backend)
    given = tensors(1, 2, 130, 130, size=sizes[0], out_size=sizes[1])
    exact = with_gradients(defined(spec, *given), given)
    assert_agree(with_gradients(module(*given), given), exact, exact)


@every_backend
def test_tensors_of_any_strides(backend: str) -> None:
    spec, module = spec_of(GRAPHS["window"]), module_of(GRAPHS["window"], backend)
    shared = torch.randn(2, 70, 3, 4, 8, dtype=torch.float64)
    before = shared.clone()
    views = [
        [shared[:, :, i].transpose(1, 2) for i in range(3)],
        [shared[:, ::2, 0].transpose(1, 2).flip(2)] * 3,
        [torch.randn(1, 1, 1, 8, dtype=torch.float64).expand(2, 4, 35, 8)] * 3,
        [torch.randn(2, 4, 8, 35, dtype=torch.float64).transpose(2, 3)] * 3,
        # values that are wider: what is filled up keeps the order of the strides it had
        [torch.randn(size, 5, 2, 1, dtype=torch.float64).permute(3, 2, 1, 0) for size in (1, 1, 4)],
        [torch.randn(2, 5, size, 3, dtype=torch.float64).permute(0, 3, 1, 2) for size in (2, 2, 4)],
        [torch.randn(size, 1, 2, 1, dtype=torch.float64).permute(3, 2, 1, 0) for size in (1, 1, 4)],
    ]
    for q, k, v in views:
        given = [x.clone().contiguous().requires_grad_() for x in (q, k, v)]
        exact = with_gradients(defined(spec, *given), given)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        assert_agree(with_gradients(module(*leaves), leaves), exact, exact)
        # the gradient of a sum has no strides at all
        sums = torch.autograd.grad(module(*leaves).sum(), leaves)
        wanted = torch.autograd.grad(defined(spec, *given).sum(), given)
        for found, right in zip(sums, wanted, strict=True):
            torch.testing.assert_close(found, right, rtol=0, atol=1e-12)
    assert torch.equal(shared, before)


@every_backend
def test_queries_without_keys_give_zero(backend: str) -> None:
    for name in ("empty rows", "nothing"):
        module = module_of(GRAPHS[name], backend)
        given = tensors(1, 1, 70, 70)
        out, *grads = with_gradients(module(*given), given)
        rows = spec_of(GRAPHS[name]).mask(70).any(1)
        assert not out[0, 0][~torch.from_numpy(rows)].any()
        assert not grads[0][0, 0][~torch.from_numpy(rows)].any()
        assert all(torch.isfinite(grad).all() for grad in grads)


@every_backend
@pytest.mark.parametrize("name", ["causal", "causal window", "strided"])
def test_the_future_leaves_causal_rows_alone(name: str, backend: str) -> None:
    module = module_of(GRAPHS[name].replace(", after = 3", ", after = 0"), backend)
    with torch.no_grad():
        q, k, v = tensors(1, 2, 200, 200, dtype=torch.float32)
        out = module(q, k, v)
        for x in (k, v):
            x[:, :, 111:] = torch.randn_like(x[:, :, 111:]) * 100
        assert torch.equal(module(q, k, v)[:, :, :111], out[:, :, :111])


def formula(normalize: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Weights from scores and a mask, in plain words."""
    none = torch.tensor(0.0, dtype=torch.float64)

    def weigh(scores: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        match normalize:
            case "relu":
                weights = torch.where(held & (scores > 0), scores, none)
                total = weights.sum(-1, keepdim=True)
                return weights / torch.where(total > 0, total, 1.0)
            case "sigmoid":
                return torch.where(held, 1 / (1 + torch.exp(-scores)), none)
            case "softmax1":
                weights = torch.where(held, torch.exp(scores), none)
                return weights / (1 + weights.sum(-1, keepdim=True))
            case _:
                weights = torch.where(held, torch.exp(scores), none)
                total = weights.sum(-1, keepdim=True)
                return weights / torch.where(total > 0, total, 1.0)

    return weigh


SCORES = {
    "softcap": "score softcap(cap = 2)",
    "alibi": "score alibi()",
    "slopes": "score alibi(slopes = [0.3, -0.2, 0, 2])",
    "both": "score alibi() score softcap(cap = 3)",
    "bias": "score bias(buckets = 8, max_distance = 30)",
    "scale": "scale 1 / (2 + n)",
}


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 12, 40])
def test_alibi_has_the_slopes_of_its_paper(heads: int) -> None:
    """For a spec that says the number of heads, and for one that takes that of the call."""
    q, k, v = (torch.randn(1, heads, 9, 4, dtype=torch.float64) for _ in range(3))
    low = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / low) for h in range(low)]
    slopes += [2 ** (-8 * (h + 1) / (2 * low)) for h in range(0, 2 * low, 2)][: heads - low]
    gap = (torch.arange(9)[:, None] - torch.arange(9)).abs()
    scores = q @ k.mT / 2 - torch.tensor(slopes, dtype=torch.float64)[:, None, None] * gap
    for said in ("", f"heads {heads}"):
        out = module_of(f"{said} attend full score alibi()", "auto")(q, k, v)
        torch.testing.assert_close(out, scores.softmax(-1) @ v)


def changed_scores(scores: torch.Tensor, name: str, table: torch.Tensor | None) -> torch.Tensor:
    """The changes of SCORES to scaled scores [B, H, n, n], in plain words."""
    n, heads = scores.shape[-1], scores.shape[1]
    gap = torch.arange(n)[:, None] - torch.arange(n)
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)])
    alibi = -slopes[:, None, None] * gap.abs()
    match name:
        case "softcap":
            return 2 * torch.tanh(scores / 2)
        case "alibi":
            return scores + alibi
        case "slopes":
            given = torch.tensor([0.3, -0.2, 0.0, 2.0], dtype=scores.dtype)
            return scores - given[:, None, None] * gap.abs()
        case "both":
            return 3 * torch.tanh((scores + alibi) / 3)
        case "bias" if table is not None:
            return scores + table[0][:, torch.from_numpy(bucket_of(gap.numpy(), 8, 30, True))]
        case _:
            return scores


def available(backend: str, body: str) -> bool:
    try:
        plan(spec_of(body).program, 130, backend=backend)
    except BackendError:
        return False
    return True


@every_backend
@pytest.mark.parametrize("normalize", ["softmax", "softmax1", "relu", "sigmoid"])
@pytest.mark.parametrize("name", SCORES)
def test_scores_and_normalisers(name: str, normalize: str, backend: str) -> None:
    body = f"heads 4 attend window(radius = 20) | global(first(2)) {SCORES[name]}"
    body += f" normalize {normalize}"
    if not available(backend, body):
        pytest.skip(f"{backend} refuses it, which test_refusals looks at")
    spec, module = spec_of(body), module_of(body, backend)
    n, table = 130, None
    if name == "bias":
        (table,) = module.parameters()
        torch.nn.init.normal_(table)
    given = tensors(2, 4, n, n, key_heads=2)
    q, k, v = given[0], *[x.repeat_interleave(2, 1) for x in given[1:]]
    scale = 1 / (2 + n) if name == "scale" else 1 / math.sqrt(8)
    scores = changed_scores(q @ k.transpose(2, 3) * scale, name, table)
    held = torch.from_numpy(spec.mask(n))
    exact = with_gradients(formula(normalize)(scores, held) @ v, given)
    found = with_gradients(module(*given), given)
    assert_agree(found, exact, exact)
    if table is not None:
        grads = [
            torch.autograd.grad(out.square().sum(), table)[0]
            for out in (module(*given), formula(normalize)(scores, held) @ v)
        ]
        # each number of a table is a sum over thousands of pairs, in float32
        torch.testing.assert_close(*grads, rtol=5e-6, atol=1e-4)


@every_backend
def test_large_numbers_stay_finite(backend: str) -> None:
    module = module_of(GRAPHS["window"], backend)
    q, k, v = (x.detach() * 1e10 for x in tensors(1, 1, 70, 70, dtype=torch.float32))
    assert torch.isfinite(module(q, k, v)).all()
    for normalize in ("softmax1", "relu", "sigmoid"):
        body = f"{GRAPHS['window']} normalize {normalize}"
        if available(backend, body):
            assert torch.isfinite(module_of(body, backend)(q, k, v)).all()


def test_buckets_are_those_of_the_source() -> None:
    def bucket(distance: int, buckets: int, most: int, two_sided: bool) -> int:
        found = 0
        if two_sided:
            buckets //= 2
            found = buckets if distance < 0 else 0
            distance = abs(distance)
        distance = max(distance, 0)
        exact = buckets // 2
        if distance < exact:
            return found + distance
        far = math.log(distance / exact) / math.log(most / exact) * (buckets - exact)
        # whole numbers are met exactly only by luck
        return found + min(buckets - 1, exact + math.floor(far + 1e-9))

    distances = np.arange(-300, 301)
    for buckets, most in ((32, 128), (8, 20), (4, 3), (33, 100), (16, 64)):
        for two_sided in (True, False):
            wanted = [bucket(int(x), buckets, most, two_sided) for x in distances]
            assert bucket_of(distances, buckets, most, two_sided).tolist() == wanted
    assert thresholds(16, 128)[7] == 8
    # log(16 / 8) / log(128 / 8) * 8 is 2 and must not be rounded below it
    assert bucket_of(np.array([15, 16]), 32, 128, True).tolist() == [9, 10]


@every_backend
def test_dropout_keeps_the_mean_and_follows_the_seed(backend: str) -> None:
    module = module_of("attend window(radius = 40)", backend)
    q, k, v = (x.detach() for x in tensors(8, 4, 130, 130, dtype=torch.float32))
    kept = module(q, k, torch.ones_like(v))
    torch.manual_seed(3)
    dropped = module(q, k, torch.ones_like(v), dropout_p=0.25)
    assert abs(dropped.mean() - kept.mean()) < 0.01
    assert 0.01 < (dropped - kept).std() < 0.5
    torch.manual_seed(3)
    assert torch.equal(module(q, k, torch.ones_like(v), dropout_p=0.25), dropped)
    assert not module(q, k, v, dropout_p=1.0).any()


@every_backend
def test_pieces_and_large_sizes_change_nothing(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attnspec.backends.common.pieces, "PIECE", 1 << 12)
    for name in ("blocks", "random", "causal"):
        spec, module = spec_of(GRAPHS[name]), module_of(GRAPHS[name], backend)
        given = tensors(1, 4, 300, 300, key_heads=2)
        exact = with_gradients(defined(spec, *given), given)
        assert_agree(with_gradients(module(*given), given), exact, exact)


@pytest.mark.parametrize("backend", ["torch", "bands"])
@pytest.mark.parametrize("body", ["strided", "blocks", "alibi"])
def test_a_default_device_reaches_no_kernel(body: str, backend: str) -> None:
    body = GRAPHS.get(body, "heads 4 attend window(radius = 9) score alibi()")
    given = tensors(2, 4, 130, 130)
    padding = torch.ones(2, 130, dtype=torch.bool)
    padding[1, 90:] = False
    plain = with_gradients(module_of(body, backend)(*given, key_padding_mask=padding), given)
    module = CompiledAttention(plan_data(spec_of(body).program, backend))
    with torch.device("meta"):
        out = module(*given, key_padding_mask=padding)
    for found, meant in zip(with_gradients(out, given), plain, strict=True):
        assert torch.equal(found, meant)


@every_backend
def test_a_length_without_a_value_says_nothing_of_a_backend(backend: str) -> None:
    # at n = 1 it divides by 0
    spec = spec_of("attend where(q != k // (n // 2))")
    assert spec.compile(backend=backend).backend == backend


def test_refusals() -> None:
    spec = spec_of("input t: tokens attend window(radius = 3) | global(t)")
    with pytest.raises(BackendError, match=r"tiles refuses: the graph reads .* `t`"):
        plan(spec.program, 64, backend="tiles")
    with pytest.raises(BackendError, match=r"one of auto, .*got 'quick'"):
        plan(spec.program, 64, backend="quick")
    step = plan(spec.program, 4096).steps[0]
    assert step.chosen.name != "tiles"
    refused = {c.backend.name: c.refusal for c in step.candidates if c.refusal is not None}
    assert "`t`" in refused["tiles"]
    assert "refused: the graph reads the run-time input `t`" in str(plan(spec.program, 4096))


@pytest.mark.parametrize(
    "body", ["where(q != k // (n // 2))", "where(q // (n // 2) < 3) + linear()"]
)
def test_a_length_without_a_value_refuses_nothing(body: str) -> None:
    spec = spec_of(f"attend {body}")
    for backend in ("auto", "scattered" if "linear" not in body else "factored"):
        module = spec.compile(backend=backend)
        given = tensors(1, 1, 6, 6)
        assert module(*given).shape == given[0].shape
        with pytest.raises(ValueError, match="division by zero"):
            module(*tensors(1, 1, 1, 1))


def test_what_several_groups_are_refused_for_is_said_once() -> None:
    spec = spec_of(
        "layers 2 heads 2 head 0 { attend window(radius = 3) } head 1 { attend self }"
        " layer 1 { head 1 { attend linear() } }"
    )
    found = plan(spec.program, 4096)
    said = [(c.backend.name, c.refusal) for step in found.steps for c in step.candidates]
    lines = str(found).splitlines()
    for refusal in {pair for pair in said if pair[1] is not None}:
        (line,) = [
            line for line in lines if f"{refusal[0]} " in line and f"refused: {refusal[1]}" in line
        ]
        groups = [
            " ".join(step.where)
            for step in found.steps
            if refusal in [(c.backend.name, c.refusal) for c in step.candidates]
        ]
        if len(groups) == len(found.steps):
            assert line.startswith("every group ")
        elif len(groups) > 1:
            assert line.startswith(f"{len(groups)} groups ")
            assert line.endswith(f"({'; '.join(groups)})")
    alike = str(plan(spec_of("heads 2 attend self head 1 { attend full }").program, 4096))
    assert alike.count("the last 16 queries at most") == 1
    assert "every group  " in alike


def test_the_cheapest_is_chosen_and_named_ones_are_kept() -> None:
    spec = spec_of("attend window(radius = 64)")
    assert plan(spec.program, 16384).steps[0].chosen.name != "dense"
    for n in (64, 16384):
        ranked = plan(spec.program, n).steps[0].candidates
        seconds = [c.seconds for c in ranked if c.seconds is not None]
        assert seconds == sorted(seconds)
    assert plan(spec.program, 16384, backend="dense").steps[0].chosen.name == "dense"
    assert plan(spec.program, 0).steps == ()


def test_a_plan_of_nothing_says_so() -> None:
    assert str(spec_of("attend full").plan(0)) == "sample, n = 0, cpu: nothing to run"
    with pytest.raises(ValueError, match="has 2 x 3 = 6 cells, got n = 0"):
        spec_of("sequence grid(2, 3) attend axial").plan(0)
    with pytest.raises(BackendError, match="one of auto"):
        spec_of("attend full").plan(0, backend="quick")


def test_estimates_are_shown_for_the_device_that_they_are_about() -> None:
    spec = spec_of("attend window(radius = 3)")
    head, *_ = str(spec.plan(512, device="cuda:1")).splitlines()
    published = "by default rates (NVIDIA H200)"
    assert head.endswith(f"cuda; estimates for one head of size 64, forward, {published}")
    head, *lines = str(spec.plan(512, device="mps")).splitlines()
    assert head.endswith(
        "no estimates for mps: plain tensor operations, ranked as on a GPU of another kind"
    )
    assert any(line.endswith("chosen") for line in lines)
    assert any("refused: its kernel runs on the CPU, not on mps" in line for line in lines)
    figure = re.compile(r"\d (s|ms|us)$")
    assert not any(figure.search(line) for line in lines)
    assert any(figure.search(line) for line in str(spec.plan(512)).splitlines())
    body = "layers 3 heads 3 attend window(radius = 4) layer 1 { head 0, 2 { attend full } }"
    text = str(plan(spec_of(body).program, 64))
    assert "layer 0, 2  head 0..2" in text
    assert "layer 1     head 0, 2" in text


def test_full_attention_is_torch_s() -> None:
    q, k, v = tensors(2, 3, 100, 100, dtype=torch.float32)
    wanted = functional.scaled_dot_product_attention(q, k, v)
    for backend in BACKEND_NAMES:
        torch.testing.assert_close(module_of("attend full", backend)(q, k, v), wanted)


def test_derivatives_of_derivatives() -> None:
    for name in ("window", "random"):
        for backend in BACKEND_NAMES:
            module = module_of(GRAPHS[name], backend)
            given = tensors(1, 1, 6, 6, size=2)
            assert torch.autograd.gradcheck(module, given, **ALONG)
            assert torch.autograd.gradgradcheck(module, given, **ALONG)


def test_a_wrong_backend_is_caught() -> None:
    class Forgetful(CompiledAttention):
        def forward(self, q, k, v, **rest):  # type: ignore[no-untyped-def]
            return super().forward(q, k, torch.cat([v[:, :, :-1], 0 * v[:, :, -1:]], 2), **rest)

    spec = spec_of("attend window(radius = 3)")
    wrong = Forgetful(plan_data(spec.program))
    given = tensors(1, 1, 20, 20)
    exact = with_gradients(defined(spec, *given), given)
    with pytest.raises(AssertionError, match="out errs"):
        assert_agree(with_gradients(wrong(*given), given), exact, exact)


def test_candidates_name_every_backend_once() -> None:
    work = Work(BY_NAME["full"](), 64, 64)
    assert sorted(c.backend.name for c in candidates(work, "cpu")) == sorted(
        backend.name for backend in BACKENDS
    )


@pytest.mark.parametrize(
    ("body", "backend"),
    [
        ("full", "scattered"),
        ("window(radius = 3)", "bands"),
        ("window(radius = 3)", "traced"),
        ("linear()", "factored"),
        ("window(radius = 3) + linear()", "factored"),
        ("lsh(rounds = 2, chunk = 8)", "lists"),
        ("sinkhorn(size = 8)", "lists"),
        ("sinkhorn(size = 8)", "traced"),
    ],
)
def test_gradients_that_are_differentiated_again_are_the_same(body: str, backend: str) -> None:
    """Of keys that are made of the queries, too: each has its own share."""
    name = "auto" if backend == "traced" else backend
    module = spec_of(f"attend {body}").compile(name, head_size=8)

    def attend(q: torch.Tensor) -> torch.Tensor:
        k = q if "lsh" in body else q.roll(1, 3) * 0.7
        out: torch.Tensor = module(q, k, k * 2)
        return out

    run = torch.compile(attend, backend="eager") if backend == "traced" else attend
    q = torch.randn(1, 2, 40, 8).requires_grad_()
    found = [
        torch.autograd.grad(run(q).square().sum(), q, create_graph=again)[0]
        for again in (False, True)
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_every_backend_has_a_row_on_their_page() -> None:
    page = (ROOT / "backends" / "README.md").read_text(encoding="utf-8")
    folders = [type(each).__module__.split(".")[2] for each in BACKENDS]
    assert [folder for folder in folders if f"\n| `{folder}/` | " not in page] == []
