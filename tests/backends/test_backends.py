"""Every backend against the definition: values, gradients, padding, lengths, types."""

from __future__ import annotations

import math
import re
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

from attnspec.backends import BACKENDS
from attnspec.backends.common.score_formula import bucket_of, thresholds
from attnspec.backends.planner import candidates, plan
from attnspec.graphs.patterns import BY_NAME
from attnspec.ir.serial import plan_data
from attnspec.lower.work import BackendError, Work
from attnspec.runtime import CompiledAttention

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
@pytest.mark.parametrize("name", ["causal", "causal window", "strided"])
def test_the_future_leaves_causal_rows_alone(name: str, backend: str) -> None:
    module = module_of(GRAPHS[name].replace(", after = 3", ", after = 0"), backend)
    with torch.no_grad():
        q, k, v = tensors(1, 2, 200, 200, dtype=torch.float32)
        out = module(q, k, v)
        for x in (k, v):
            x[:, :, 111:] = torch.randn_like(x[:, :, 111:]) * 100
        assert torch.equal(module(q, k, v)[:, :, :111], out[:, :, :111])


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


def available(backend: str, body: str) -> bool:
    try:
        plan(spec_of(body).program, 130, backend=backend)
    except BackendError:
        return False
    return True


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


def test_derivatives_of_derivatives() -> None:
    for name in ("window", "random"):
        for backend in BACKEND_NAMES:
            module = module_of(GRAPHS[name], backend)
            given = tensors(1, 1, 6, 6, size=2)
            assert torch.autograd.gradcheck(module, given, **ALONG)
            assert torch.autograd.gradgradcheck(module, given, **ALONG)


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
