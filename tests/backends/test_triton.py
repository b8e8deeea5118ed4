"""Triton kernels under the interpreter, beside other backends where the oracle has no formula; what
they refuse, and what is compiled for a GPU."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_checks import ALONG, check_transforms, module_of, tensors
from interpreted import compiled_for_a_gpu, interpreted
from local_ranks import Shards
from population import spec_of
from sweeps import few
from torch import Tensor
from views import errors

from attnspec.verification.verify import verify

__all__ = ["interpreted"]

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]


SLOW = pytest.mark.slow


def differing(call: Shards, other: str) -> list[str]:
    """In what `triton` errs by more than another backend does in the same type."""
    kinds = (torch.float64, other), (call.dtype, other), (call.dtype, "triton")
    sums = call.has_sums
    meant, rough, said = (call.found(call.module(*x), x[0], sums) for x in kinds)
    return errors(said, meant, rough)


@pytest.mark.parametrize(
    ("body", "n", "shape", "other"),
    [
        ("causal attend topk(blocks = 2, size = 8, queries = 1)", 29, "left", "dense"),
        ("causal attend lsh(buckets = 6, rounds = 3, chunk = 8)", 29, "left", "dense"),
        (
            "input c: choices(size = 4) attend chosen(c) | global(first(1)) normalize softmax1",
            17,
            "last queries",
            "dense",
        ),
        ("causal attend topk(blocks = 2, size = 4, queries = 1) | self", 0, "plain", "dense"),
        ("causal attend rfa(features = 12, gated = true, floor = 1)", 33, "grouped", "factored"),
        ("causal attend (self | columns(first(1))) + linear()", 33, "holes", "factored"),
        (
            "heads 2 causal attend window(before = 9, after = 0)"
            " score s + [0.5, -1, 2, 1][(q - k) // 3] * (1 + head) score 4 * tanh(s / 4)",
            70,
            "left",
            "tables",
        ),
        # chunks of several segments
        *(
            pytest.param(body, n, shape, "dense" if "topk" in body else "factored", marks=SLOW)
            for body, n, shape in (
                ("input i: ids heads 4 attend topk(keys = 5) | same(i) & self", 29, "grouped"),
                ("causal attend topk(blocks=1,size=16,queries=1) | cluster(count=9)", 29, "right"),
                ("causal attend window(before = 9, after = 0) + rfa(features = 12)", 33, "left"),
                ("causal attend linear(feature = exp)", 1100, "plain"),
                ("causal attend window(before = 70, after = 0) + linear()", 1100, "plain"),
                ("attend window(radius = 3) + rfa(features = 12)", 75, "left"),
                ("attend linear(feature = identity)", 33, "plain"),
                ("attend favor(features = 24, kind = trig)", 33, "plain"),
            )
        ),
    ],
)
def test_lists_of_the_data_and_sums_are_as_elsewhere(
    body: str, n: int, shape: str, other: str
) -> None:
    assert differing(Shards(body, n, 1, "", shape, torch.float32), other) == []


# many keys of few rows, and many rows of few keys: lists are cut, and partial results merged
LONG = "attend self | global(first(1))"


@SLOW
def test_long_lists_are_cut_and_each_run_gives_the_same_bits() -> None:
    for body in (LONG, f"input d: ids {LONG} & same(d)", "causal attend linear()"):
        call = Shards(body, 1200, 1, "", "plain", torch.float32)
        module = call.module(call.dtype)
        assert differing(call, "auto") == []
        both = [call.found(module, call.dtype, True) for _ in range(2)]
        assert all(torch.equal(*pair) for pair in zip(*both, strict=True))


@pytest.mark.parametrize("body", ["attend full", "causal attend linear()"])
def test_rows_further_apart_than_32_bits_count(body: str) -> None:
    near = [torch.randn(1, 1, 20, 8).half().requires_grad_() for _ in range(3)]
    far = []
    for x in near:
        # memory that nobody writes to takes no room
        room = torch.empty(20 << 27, dtype=x.dtype).as_strided(x.shape, (0, 0, 1 << 27, 1))
        far.append(room.copy_(x.detach()).requires_grad_())
    module, found = module_of(body, "triton"), []
    for parts in (far, near):
        out = module(*parts)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), parts)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("body", ["attend window(radius = 5)", "attend linear(feature = exp)"])
def test_any_strides(body: str) -> None:
    module = module_of(body, "triton")
    # the gradient of a sum has no strides at all, rows of which every number is apart neither
    turned = torch.randn(1, 1, 8, 19).transpose(2, 3).requires_grad_()
    straight = turned.detach().contiguous().requires_grad_()
    grads = [torch.autograd.grad(module(x, x, x).sum(), x)[0] for x in (turned, straight)]
    torch.testing.assert_close(*grads)


def test_exponentials_that_are_large_stay_numbers() -> None:
    # of weights that float32 does not hold nothing is left, here and there
    q, k, v = (x.detach() for x in tensors(1, 2, 27, 27, size=6, dtype=torch.float32))
    parts = [(60 * q).requires_grad_(), (60 * k).requires_grad_(), v]
    both = []
    for backend in ("triton", "factored"):
        out = module_of("causal attend linear(feature = exp)", backend)(*parts)
        both.append([out.detach(), *torch.autograd.grad(out.sin().sum(), parts[:2])])
    for mine, right in zip(*both, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)
    # features in frames whose unit float32 does not hold
    wide = tensors(1, 1, 5, 5, size=64, dtype=torch.float32)
    body = "attend rbf(sigma = 1.0, features = 64, seed = 0)"
    ours, right = (module_of(body, x)(*wide) for x in ("triton", "factored"))
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-4)
    # sums that float16 does not hold
    q = torch.full((1, 1, 40, 16), 60.0, dtype=torch.float16)
    v = torch.randn(1, 1, 40, 4).half()
    means = v.float().cumsum(2) / torch.arange(1, 41)[:, None]
    ours = module_of("causal attend linear(feature = squared_relu)", "triton")(q, q, v)
    torch.testing.assert_close(ours.float(), means, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("body", ["causal attend linear()", "causal attend self + linear()"])
def test_a_stream_goes_on_from_states(body: str) -> None:
    module = module_of(body, "triton")
    q, k, v = (x.detach() for x in tensors(1, 2, 20, 20, size=6, dtype=torch.float32))
    state, outs = None, []
    for at in (slice(0, 9), slice(9, 10), slice(10, 20)):
        out, state = module.step(q[:, :, at], k[:, :, at], v[:, :, at], state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), module(q, k, v), rtol=1e-5, atol=1e-5)


BODIES = {
    "static": "attend window(radius = 1) | columns(first(1))",
    "inputs": "input x: ids attend where(x(k) <= x(q)) & window(radius = 2)",
    "decided": "causal attend topk(blocks = 1, size = 2, queries = 1) | self",
    "sums": "causal attend linear()",
    "beside": "causal attend self + linear()",
}
MEANS = "attend lsh(buckets = 2, rounds = 2, chunk = 2, combine = mean, share_qk = false)"


@pytest.mark.parametrize("body", [*BODIES.values(), MEANS, f"{MEANS} normalize softmax1"])
def test_every_kind_of_work_is_launched(body: str) -> None:
    entered: set[str] = set()
    inputs = {"x": torch.tensor([[0, 0, 1, 1]])} if body.startswith("input") else None
    module = module_of(body, "triton")
    sys.setprofile(lambda frame, event, argument: entered.add(frame.f_code.co_name))
    try:
        module(*tensors(1, 1, 4, 4, size=2), inputs=inputs)
    finally:
        sys.setprofile(None)
    assert "launch" in entered


@pytest.mark.parametrize("body", few(BODIES, ("inputs", "decided")))
def test_other_derivatives_are_found_by_other_ways(body: str) -> None:
    module = module_of(BODIES[body], "triton")
    inputs = {"x": torch.tensor([[0, 0, 1, 1]])} if body == "inputs" else None
    given = tensors(1, 1, 4, 4, size=2)

    def run(*parts: Tensor, lse: bool = False) -> Any:
        return module(*parts, inputs=inputs, return_lse=lse)

    assert torch.autograd.gradgradcheck(partial(run, lse=True), given, **ALONG)
    check_transforms(run, *(x.detach() for x in given))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("graph", "other"),
    [
        pytest.param(
            "causal attend window(before = 6, after = 0) | residue(step = 4)",
            "causal attend window(before = 5, after = 0) | residue(step = 4)",
            marks=SLOW,
        ),
        (
            "causal input x: ids attend same(x)",
            "causal input x: ids attend same(x) & window(radius = 2)",
        ),
        (
            "input x: numbers attend where(x(k) <= x(q))",
            "input x: numbers attend where(x(k) < x(q))",
        ),
        pytest.param(
            "causal attend window(before = 6, after = 0) + linear()",
            "causal attend window(before = 5, after = 0) + linear()",
            marks=SLOW,
        ),
    ],
)
def test_verification_runs_the_lists_both_ways(graph: str, other: str) -> None:
    program = spec_of(graph).program
    found = verify(program, 41, ["triton"], depth="pairs")
    assert found.ok
    assert found.checks
    wrong = verify(program, 41, module=module_of(other, "triton"), depth="pairs")
    assert not wrong.ok


def test_on_the_cpu_it_runs_by_name_where_it_is_interpreted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    window = spec_of("attend window(radius = 3)")
    assert window.plan(64, backend="triton").steps[0].chosen.name == "triton"
    assert window.plan(64).steps[0].chosen.name != "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    for body in ("attend window(radius = 3)", "causal attend linear()"):
        with pytest.raises(ValueError, match="run on a GPU; with TRITON_INTERPRET=1"):
            spec_of(body).plan(64, backend="triton")


def test_plans_for_a_gpu_say_what_runs() -> None:
    for body, n, chosen, lines in (
        ("causal attend linear()", 65_536, "triton", ["sums of features in chunks of"]),
        ("attend favor()", 65_536, "triton", ["sums of features"]),
        ("attend nystrom(landmarks = 8)", 64, "factored", []),
        (
            "causal attend window(before = 2, after = 0) + linear()",
            65_536,
            "triton",
            ["sums of features in chunks of", "the graph instead in natural order"],
        ),
        ("input x: ids attend same(x) + favor(features = 12)", 65_536, "factored", []),
    ):
        (step,) = spec_of(body).plan(n, "cuda").steps
        assert step.chosen.name == chosen
        assert all(x.startswith(y) for x, y in zip(step.lines, lines, strict=False))
    (step,) = spec_of("attend nystrom(landmarks = 8)").plan(64, "cuda", backend="triton").steps
    assert step.lines[0].startswith("products of whole matrices by torch")


@pytest.mark.parametrize(
    ("triton", "numpy", "runs"),
    [("3.6.0", "2.4.1", False), ("3.6.0", "2.3.5", True), ("3.7.0", "2.4.1", True)],
)
def test_an_interpreter_that_is_older_than_numpy_is_refused(
    triton: str, numpy: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"triton": triton, "numpy": numpy}
    monkeypatch.setattr("attnspec.version.version", known.__getitem__)
    remembered = sys.modules["attnspec.version"].is_installed
    remembered.cache_clear()
    spec = spec_of("attend window(radius = 2)")
    try:
        if runs:
            assert spec.plan(9, backend="triton").steps
        else:
            with pytest.raises(ValueError, match=r"Triton before 3\.7 needs a numpy before 2\.4"):
                spec.plan(9, backend="triton")
    finally:
        remembered.cache_clear()


def test_types_that_kernels_do_not_take_go_the_composed_way() -> None:
    # the interpreter has no bfloat16
    for body in ("attend window(radius = 3)", "causal attend linear()"):
        q = torch.randn(1, 2, 20, 6).bfloat16()
        found, meant = (module_of(body, x)(q, q, q) for x in ("triton", "auto"))
        torch.testing.assert_close(found, meant, rtol=2e-2, atol=2e-2)


@SLOW
@pytest.mark.parametrize("capability", [90, 86])
def test_kernels_compile_for_a_gpu(capability: int, tmp_path: Path) -> None:
    # the shared memory that a program may have
    room = {90: 227 << 10, 86: 99 << 10}[capability]
    found = compiled_for_a_gpu(f"ROOM = {room}" + COMPILED, tmp_path, capability)
    assert {name for name, _ in found} == {
        *("attend", "merge", "of_queries", "of_keys", "add_up"),
        *("along", "carry", "outputs", "of_features", "of_values"),
    }
    assert [each for each in found if int(each[1]) > room] == []


COMPILED = """
import attnspec
from attnspec.backends.triton import attention, tables
from attnspec.backends.triton.backend import TritonBackend
from attnspec.backends.triton.sums import way
from attnspec.lower.lower import Binder
from attnspec.lower.work import Call

def printed(kernel, count, given, warps, stages):
    found = kernel.warmup(*given, grid=(count,), num_warps=warps, num_stages=stages)
    print(kernel.__name__, found.metadata.shared)

attention.launch = printed
attention.room_on = lambda device: ROOM
way.is_taken = lambda q: True
tables.LONGEST = tables.SHORTEST = 1
for size, dtype, body in (
    (64, torch.float16, "attend full score bias(buckets = 8)"),
    (128, torch.bfloat16, "input x: ids attend same(x) score alibi() score softcap(cap = 9)"),
    (256, torch.float32, "attend window(before = 300, after = 0)"),
    (128, torch.bfloat16, "attend linear()"),
    (64, torch.float32, "attend rfa(features = 64, gated = true)"),
    (64, torch.float16, "attend window(before = 63, after = 0) + favor(features = 96)"),
):
    spec = attnspec.parse(f"attention a {{ heads 2 causal {body} }}")
    ((work, heads),) = Binder(spec.program).works(0, 2, 1024, 1024)
    kernel = TritonBackend().build(work, heads, torch.device("cpu"))
    q, k, v = (torch.zeros(1, h, 1024, size, dtype=dtype, requires_grad=True) for h in (2, 1, 1))
    data = {"x": torch.zeros(1, 1024, dtype=torch.int64)} if work.reads else {}
    module = spec.compile(head_size=size)
    learned = {x: module.get_parameter(y)[0] for x, y in module.engine.tables_of(work)}
    padding = torch.ones(1, 1024, dtype=torch.bool)
    seeds = (None,) if work.mechanism else (None, torch.zeros(1, dtype=torch.int64))
    for seed in seeds:
        call = Call(padding, 0.1 if seed is not None else 0.0, tables=learned, data=data, seed=seed)
        if work.mechanism:
            kernel(q, k, v, call).sum().backward()
        else:
            parts = q.detach()[:, :, None].view(1, 1, 2, 1024, size), k.detach(), v.detach()
            out, lse = kernel.forward(*parts, call, 0.1)
            kernel.derivatives((*parts, out, lse), out, None, call, 0.1)
"""


def test_any_call_is_a_call_of_the_module() -> None:
    given: Any = [torch.zeros(1, 2, 0, 4, requires_grad=True) for _ in range(3)]
    for body in ("causal attend linear()", "attend favor()", "attend full"):
        out = module_of(body, "triton")(*given)
        assert [x.shape for x in torch.autograd.grad(out.sum(), given)] == [(1, 2, 0, 4)] * 3
