"""Triton kernels of sums of features under the interpreter, in chunks of a few positions: values
and gradients against the definition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from attention_checks import ALONG, assert_agree, module_of, spec_of, tensors, with_gradients
from interpreted import compiled_for_a_gpu, interpreted, learner_of, small_chunks
from kernel_texts import CASES, FULL
from sweeps import in_turn

from attnspec.backends.factored.definitions import defined
from attnspec.backends.factored.features.kernel import FeatureKernel
from attnspec.backends.planner import plan
from attnspec.backends.triton.backend import INTERPRETED
from attnspec.lower.work import BackendError, Call
from attnspec.runtime import CompiledAttention
from attnspec.verification import verify

__all__ = ["interpreted", "small_chunks"]

pytestmark = pytest.mark.usefixtures("small_chunks")

SUMMED = [f"{'causal ' * causal}attend {text}" for text, causal in CASES if text not in FULL]

SIZES = SIZE, OUT_SIZE = 6, 5


def written_out(
    module: CompiledAttention,
    given: Sequence[torch.Tensor],
    learned: Sequence[torch.Tensor],
    padding: torch.Tensor | None = None,
) -> torch.Tensor:
    """The output by the definition, head by head and sample by sample; padding is left out, and of
    its queries nothing is said."""
    q, k, v = given
    names = dict(zip(dict(module.named_parameters()), learned, strict=True))
    repeat = q.shape[1] // k.shape[1]
    outs = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for b in range(len(q)):
        real = torch.arange(k.shape[2])
        queries = torch.arange(q.shape[2])
        if padding is not None:
            real = padding[b].nonzero()[:, 0]
            queries = (padding[b][k.shape[2] - q.shape[2] :]).nonzero()[:, 0]
        ((work, _),) = module.engine.binder.works(0, 1, len(queries), len(real))
        tables = {part: names[name][0, 0] for part, name in module.engine.tables_of(work)}
        for head in range(q.shape[1]):
            keys, values = k[b, head // repeat, real], v[b, head // repeat, real]
            out = defined(work, head, q[b, head, queries], keys, values, tables)
            outs = outs.index_put((torch.tensor(b), torch.tensor(head), queries), out)
    return outs


def wide(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.detach().double().requires_grad_() for x in given]


def check(
    body: str, shape: tuple[int, int, int, int], kind: torch.dtype, padded: bool = False
) -> None:
    """Values and gradients, those of what is learned too: in float64 as good as the same, in other
    types as near as the definition in that type is, or twice as far."""
    heads, key_heads, n_q, n = shape
    module = learner_of(body, kind, "triton", SIZES)
    torch.manual_seed(n)
    sizes = {"key_heads": key_heads, "size": SIZE, "out_size": OUT_SIZE}
    given = tensors(1 + padded, heads, n_q, n, dtype=kind, **sizes)
    padding, kept = None, torch.ones(1, 1, n_q, 1)
    if padded:
        padding = torch.rand(2, n) < 0.6
        padding[1, : n // 2], padding[:, -1] = False, True
        kept = padding[:, None, n - n_q :, None]
    learned = [*module.parameters()]
    leaves = [*given, *learned]
    found = with_gradients(module(*given, key_padding_mask=padding) * kept, leaves)
    exact = wide(leaves)
    right = with_gradients(written_out(module, exact[:3], exact[3:], padding), exact)
    if kind == torch.float64:
        for one, other in zip(found, right, strict=True):
            scale = max(1.0, other.abs().max().item())
            torch.testing.assert_close(one / scale, other / scale, rtol=1e-9, atol=1e-9)
        return
    base = with_gradients(written_out(module, given, learned, padding), leaves)
    assert_agree(found[:4], right[:4], base[:4])


SHAPES = (
    *(((1, 1, 1, 1), False), ((2, 1, 27, 27), False), ((1, 1, 9, 41), True)),
    *(((1, 1, 37, 37), False), ((2, 1, 18, 33), False)),
)
"""Heads, heads of keys, queries, keys, and whether some are padding."""


QUICK = (
    "causal attend linear(feature = identity)",
    "causal attend linear()",
    "causal attend linear(feature = squared_relu)",
    "causal attend linear(feature = relu)",
    "attend linear(feature = exp)",
    "causal attend linear(feature = exp, normalize = none)",
    "attend linear()",
    "causal attend linear(feature = exp)",
    "attend favor(features = 24, kind = trig)",
    "causal attend rfa(features = 12, gated = true)",
)
"""Those that go through different parts of the kernels."""

EVERY = [
    *in_turn(QUICK, SHAPES),
    *(
        pytest.param(body, shape, marks=pytest.mark.slow)
        for body in SUMMED
        if body not in QUICK
        for shape in SHAPES
    ),
]


@pytest.mark.parametrize(("body", "shape"), EVERY)
def test_values_and_gradients_are_those_of_the_formula(
    body: str, shape: tuple[tuple[int, int, int, int], bool]
) -> None:
    sizes, padded = shape
    check(body, sizes, torch.float64, padded)


TYPED = (
    "causal attend linear()",
    "causal attend linear(feature = exp)",
    "attend favor(features = 24)",
    "causal attend rfa(features = 12, gated = true, floor = 1)",
    "causal attend taylor(order = 2)",
)


@pytest.mark.parametrize(("body", "kind"), in_turn(TYPED, (torch.float32, torch.float16)))
def test_types(body: str, kind: torch.dtype) -> None:
    check(body, (2, 1, 21, 21), kind)


def few(n_q: int, n: int, **shape: int) -> list[torch.Tensor]:
    return [*tensors(1, 2, n_q, n, size=SIZE, out_size=OUT_SIZE, dtype=torch.float32, **shape)]


def test_blocks_of_features_and_values() -> None:
    # taylor of order 2 has 57 of rows of 9
    module = module_of("causal attend taylor(order = 2)", "triton")
    given = tensors(1, 1, 11, 11, size=9, out_size=33)
    meant = with_gradients(written_out(module, given, []), given)
    for mine, right in zip(with_gradients(module(*given), given), meant, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)


def test_what_is_launched_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnspec.backends.triton.sums import way

    launched: list[str] = []
    launch = way._launch

    def seen(kernel: Any, count: int) -> Any:
        launched.append(kernel.__name__)
        return launch(kernel, count)

    monkeypatch.setattr(way, "_launch", seen)
    given = few(27, 27)
    kept: list[int] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = module_of("causal attend linear()", "triton")(*given)
    assert launched == ["along", "carry", "outputs"]
    out.sum().backward()
    assert launched[3:] == [*("along", "carry") * 2, "of_queries", "of_keys", "of_values"]
    # neither features nor states: what is given, the output, and a number for each query
    assert sum(kept) <= sum(x.numel() for x in given) + out.numel() + 2 * 27


def test_every_run_gives_the_same_bits_however_many_heads_go_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from attnspec.backends.triton.sums import way

    module = module_of("causal attend linear()", "triton")
    given = few(27, 27)
    whole = with_gradients(module(*given), given)
    for mine, other in zip(with_gradients(module(*given), given), whole, strict=True):
        assert torch.equal(mine, other)
    monkeypatch.setattr(way, "ROOM", 1)
    for mine, other in zip(with_gradients(module(*given), given), whole, strict=True):
        assert torch.equal(mine, other)


def test_any_strides_and_rows_further_apart_than_32_bits_count() -> None:
    module = module_of("causal attend linear()", "triton")
    n, apart = 20, 1 << 27
    # memory that nobody writes to takes no room
    room = torch.empty(n * apart, dtype=torch.float16)
    k = room.as_strided((1, 1, n, 8), (0, 0, apart, 1))
    k.copy_(torch.randn(1, 1, n, 8))
    q = torch.randn(1, 1, n, 8).half()
    assert torch.equal(module(q, k, k), module(q, k.contiguous(), k.contiguous()))
    shared = torch.randn(2, n, 3, 2, 8)
    parts = [shared[:, :, i].transpose(1, 2).requires_grad_() for i in range(3)]
    own = [x.detach().contiguous().requires_grad_() for x in parts]
    # the gradient of a sum has no strides at all
    grads = [torch.autograd.grad(module(*x).sum(), x) for x in (parts, own)]
    for mine, other in zip(*grads, strict=True):
        assert torch.equal(mine, other)
    # nor have features rows in one piece where rows of queries and keys have none
    module = module_of("attend linear(feature = exp)", "triton")
    turned = torch.randn(1, 1, 8, 19).transpose(2, 3).requires_grad_()
    straight = turned.detach().contiguous().requires_grad_()
    found = [with_gradients(module(x, x, x), [x]) for x in (turned, straight)]
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)


def test_exponentials_that_are_large_stay_numbers() -> None:
    body, given = "causal attend linear(feature = exp)", few(27, 27)
    large = [(x.detach() * 60).requires_grad_() for x in given[:2]] + [given[2]]
    # of weights that float32 does not hold nothing is left, here and there
    found, meant = (
        with_gradients(module_of(body, backend)(*large), large)
        for backend in ("triton", "factored")
    )
    for mine, right in zip(found, meant, strict=True):
        assert torch.isfinite(mine).all()
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


def test_no_queries_and_no_keys() -> None:
    for body in ("causal attend linear()", "attend favor()"):
        module = module_of(body, "triton")
        given = [torch.zeros(1, 2, 0, 4, requires_grad=True) for _ in range(3)]
        assert [x.shape for x in with_gradients(module(*given), given)] == [(1, 2, 0, 4)] * 4


def test_where_kernels_do_not_go_it_is_computed_block_by_block() -> None:
    module = module_of("causal attend linear()", "triton")
    small = [x.requires_grad_() for x in tensors(1, 1, 2, 2, size=2)]
    assert torch.autograd.gradgradcheck(module, small, **ALONG)
    # the interpreter has no bfloat16
    ((group),) = module.engine.prepare(0, 2, 2, 20, 20, "cpu").groups
    kernel, call = cast(FeatureKernel, group.kernel), Call()
    q, k, v = few(20, 20)
    assert kernel.way.takes(kernel.given(q, k, v, call))
    q, k, v = (x.detach().bfloat16() for x in (q, k, v))
    assert not kernel.way.takes(kernel.given(q, k, v, call))
    meant = module_of("causal attend linear()", "factored")(q, k, v)
    assert torch.equal(module(q, k, v), meant)


def test_a_stream_goes_on_from_states() -> None:
    module = module_of("causal attend linear()", "triton")
    q, k, v = (x.detach() for x in few(20, 20))
    state, outs = None, []
    for at in (slice(0, 9), slice(9, 10), slice(10, 20)):
        out, state = module.step(q[:, :, at], k[:, :, at], v[:, :, at], state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), module(q, k, v), rtol=1e-5, atol=1e-5)


def test_operator_and_verification() -> None:
    module = module_of("heads 2 causal attend linear()", "triton")
    given = few(6, 6)
    padding = torch.ones(1, 6, dtype=torch.bool)
    torch.library.opcheck(
        torch.ops.attnspec.attention.default, (*given, module.engine.text, [], [], padding)
    )
    assert verify(spec_of("causal attend linear()").program, 9, backend="triton").ok


@pytest.mark.parametrize(
    "body",
    [
        "attend linformer(rank = 4, max_length = 64)",
        "attend nystrom(landmarks = 8)",
        "attend fourier()",
    ],
)
def test_products_of_whole_matrices_are_torchs_and_the_plan_says_so(body: str) -> None:
    program = spec_of(body).program
    (step,) = plan(program, 64, "cuda", "triton").steps
    assert step.lines[0].startswith("products of whole matrices by torch")
    (step,) = plan(program, 64, "cuda").steps
    assert step.chosen.name == "factored"
    told = {each.backend.name: each for each in step.candidates}
    assert told["triton"].refusal is None
    given = few(20, 20)
    found, meant = (
        learner_of(body, torch.float32, backend, SIZES)(*given)
        for backend in ("triton", "factored")
    )
    assert torch.equal(found, meant)


def test_a_plan_for_a_gpu_has_it_and_one_for_the_cpu_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for body in ("causal attend linear()", "attend favor()", "causal attend rfa(gated = true)"):
        program = spec_of(body).program
        (step,) = plan(program, 65_536, "cuda").steps
        assert step.chosen.name == "triton"
        assert "sums of features" in step.lines[0]
        assert plan(program, 65_536).steps[0].chosen.name == "factored"
    monkeypatch.delenv(INTERPRETED)
    with pytest.raises(BackendError, match="run on a GPU; with TRITON_INTERPRET=1"):
        plan(program, 64, backend="triton")


ROOMS = {90: 227 << 10, 86: 99 << 10}
"""The shared memory that a program may have, by compute capability."""


@pytest.mark.slow
@pytest.mark.parametrize("capability", ROOMS)
def test_kernels_compile_for_a_gpu(capability: int, tmp_path: Path) -> None:
    known = f"ROOM = {ROOMS[capability]}"
    kernels = compiled_for_a_gpu(known + COMPILED, tmp_path, capability)
    names = {"along", "carry", "outputs", "of_queries", "of_keys", "of_values"}
    assert {name for name, *_ in kernels} == names
    assert all(int(room) <= ROOMS[capability] for _, room, _ in kernels)
    # nothing that programs hold is put aside for want of registers
    assert all(int(put_aside) == 0 for *_, put_aside in kernels)


COMPILED = """
import attnspec
from attnspec.backends.triton.backend import TritonBackend
from attnspec.backends.triton.sums import way
from attnspec.lower.lower import works_of
from attnspec.lower.work import Call

def launch(kernel, count):
    def run(*given):
        options = {"num_warps": way.SUMMED.warps, "num_stages": way.SUMMED.stages}
        found = kernel.warmup(*given, grid=(count,), **options)
        print(kernel.__name__, found.metadata.shared, found.asm["ptx"].count(".local."))
    return run

way._launch, way.room_on = launch, lambda device: ROOM
way.is_taken = lambda q: True
for size, dtype, text in (
    (128, torch.bfloat16, "causal attend linear()"),
    (128, torch.float32, "causal attend linear()"),
    (64, torch.float32, "causal attend rfa(features = 64, gated = true)"),
    (64, torch.float16, "attend favor(features = 96)"),
):
    spec = attnspec.parse(f"attention a {{ {text} }}")
    ((work, heads),) = works_of(spec.program, 0, 2, 1000, 1000, {})
    kernel = TritonBackend().build(work, heads, torch.device("cpu"))
    q, k, v = (torch.zeros(1, h, 1000, size, dtype=dtype, requires_grad=True) for h in (2, 1, 1))
    module = spec.compile(head_size=size)
    tables = {x: module.get_parameter(y)[0] for x, y in module.engine.tables_of(work)}
    padding = torch.ones(1, 1000, dtype=torch.bool)
    kernel(q, k, v, Call(padding, tables=tables)).sum().backward()
"""
