"""`GRAPH + MECHANISM` with Triton kernels under the interpreter, against `factored` in float64,
which test_hybrid.py holds to the formula."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from attention_checks import (
    ALONG,
    assert_agree,
    check_transforms,
    module_of,
    spec_of,
    tensors,
    with_gradients,
)
from interpreted import compiled_for_a_gpu, interpreted, learner_of, small_chunks

from attnspec.backends.factored.hybrid.formula import HybridFormula
from attnspec.backends.planner import plan
from attnspec.lower.work import BackendError
from attnspec.runtime import CompiledAttention
from attnspec.verification import verify

__all__ = ["interpreted", "small_chunks"]

pytestmark = pytest.mark.usefixtures("small_chunks")

SIZES = SIZE, OUT_SIZE = 6, 5


def results(
    module: CompiledAttention, given: Sequence[torch.Tensor], padding: torch.Tensor | None
) -> list[torch.Tensor]:
    return with_gradients(module(*given, key_padding_mask=padding), [*given, *module.parameters()])


WINDOW = "causal attend window(before = 9, after = 0) + "

BODIES = {
    "behind a window": "causal attend window(before = 2, after = 0) + linear()",
    "signed": WINDOW + "linear(feature = identity)",
    "in frames": WINDOW + "favor(features = 12)",
    "learned": WINDOW + "rfa(features = 12) score bias(buckets = 4, max_distance = 5)",
    "taylor": WINDOW + "taylor(order = 2)",
    "around": "attend window(radius = 3) + linear()",
    "some rows": "causal attend strided(stride = 8) + favor(features = 12)",
    "everything": "attend full + linear()",
    "nothing": "attend (window(radius = 3) - full) + rbf(features = 12)",
}

QUICK = (
    ("behind a window", torch.float32),
    ("learned", torch.float16),
    ("around", torch.float32),
)

EVERY = [
    pytest.param(body, kind, marks=() if (body, kind) in QUICK else pytest.mark.slow)
    for body in BODIES
    for kind in (torch.float32, torch.float16)
]


@pytest.mark.parametrize(("body", "kind"), EVERY)
def test_values_and_gradients(body: str, kind: torch.dtype) -> None:
    text = "heads 2 " + BODIES[body]
    for n_q, n in ((1, 1), (19, 33)):
        torch.manual_seed(n)
        given = tensors(2, 2, n_q, n, key_heads=1, size=SIZE, out_size=OUT_SIZE, dtype=kind)
        wide = [x.detach().double().requires_grad_() for x in given]
        # the keys of the first queries of one sample are all padding
        padding = torch.arange(n) >= torch.tensor([0, n // 2])[:, None]
        right = results(learner_of(text, torch.float64, "factored", SIZES), wide, padding)
        base = results(learner_of(text, kind, "factored", SIZES), given, padding)
        found = results(learner_of(text, kind, "triton", SIZES), given, padding)
        assert_agree(found[:4], right[:4], base[:4])
        for ours, meant, near in zip(found[4:], right[4:], base[4:], strict=True):
            scale = max(1.0, meant.abs().max().item())
            allowed = 2 * (near.double() - meant).abs().max().item() + 1e-5 * scale
            assert (ours.double() - meant).abs().max().item() <= allowed


def test_a_window_goes_on_from_what_was_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs block by block in plain operations, forward or backward."""
    from attnspec.backends.factored.hybrid.formula import HybridFormula

    def composed(*given: object) -> None:
        raise AssertionError("the formula is asked for")

    monkeypatch.setattr(HybridFormula, "__init__", composed)
    given = tensors(1, 1, 20, 20, size=SIZE, dtype=torch.float32)
    module = learner_of(BODIES["behind a window"], torch.float32, "triton", SIZES)
    assert all(torch.isfinite(x).all() for x in results(module, given, None))
    with pytest.raises(AssertionError, match="the formula is asked for"):
        learner_of(BODIES["around"], torch.float32, "triton", SIZES)(*given)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("causal", ["causal ", ""])
def test_derivatives_of_derivatives_and_transforms(causal: str) -> None:
    module = module_of(f"{causal}attend self + linear()", "triton")
    small = tensors(1, 1, 3, 3, size=1)
    assert torch.autograd.gradgradcheck(module, small, **ALONG)
    check_transforms(module, *tensors(2, 1, 3, 3, size=1))


def test_streams_go_on() -> None:
    module = learner_of(BODIES["behind a window"], torch.float32, "triton", SIZES)
    q, k, v = (x.detach() for x in tensors(1, 1, 17, 17, size=SIZE, dtype=torch.float32))
    state, outs = None, []
    for at in (slice(0, 5), slice(5, 6), slice(6, 17)):
        out, state = module.step(q[:, :, at], k[:, :, at], v[:, :, at], state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), module(q, k, v), rtol=1e-5, atol=1e-5)


def test_the_plan_says_which_part_runs_where() -> None:
    for body, line in (
        ("behind a window", "sums of features in chunks of 64"),
        ("around", "sums of features in tiles beside the graph, in tensor products"),
    ):
        (step,) = plan(spec_of(BODIES[body]).program, 65_536, "cuda").steps
        assert step.chosen.name == "triton"
        assert step.lines[0].startswith(line)
        assert step.lines[1].startswith("the graph instead in natural order")


@pytest.mark.parametrize("body", ["behind a window", "around"])
def test_verification_reads_the_lists_of_the_graph(body: str) -> None:
    found = verify(spec_of(BODIES[body]).program, 21, backend="triton", depth="pairs")
    assert found.ok
    assert any("its lists on the way back" in check.what for check in found.checks)


# --- graphs that a call decides ------------------------------------------------------------------

DECIDED = {
    "labels": "causal input x: ids attend (window(before = 9, after = 0) & same(x)) + linear()",
    "documents": "input x: ids attend same(x) + favor(features = 12)",
    "lengths": "causal input m: length attend (prefix(m) | window(before = 2, after = 0))"
    " + linear() score bias(buckets = 4, max_distance = 5)",
    "marks": "input x: tokens attend (global(x) & window(radius = 6)) + linear(feature = relu)",
    "topk": "causal attend (window(before = 2, after = 0) | topk(keys = 3)) + linear()",
    "chosen": "input c: choices(size = 4) attend chosen(c) + rfa(features = 12)",
    "lsh": "causal attend lsh(rounds = 2, buckets = 4, chunk = 8) + linear()",
}


def data_of(body: str, heads: int, n: int) -> dict[str, torch.Tensor]:
    """Run-time inputs of two samples."""
    torch.manual_seed(n)
    if "x: ids" in body:
        return {"x": torch.randint(0, 2, (2, n)).cumsum(1) // 4}
    if "x: tokens" in body:
        return {"x": torch.rand(2, n) < 0.3}
    if "m: length" in body:
        return {"m": torch.tensor([n // 3, n])}
    if "c: choices" in body:
        return {"c": torch.randint(-1, -(-n // 4), (2, heads, n, 2))}
    return {}


@pytest.mark.parametrize("body", DECIDED)
@pytest.mark.parametrize(("n_q", "n"), [(1, 1), (75, 75)])
def test_what_a_call_decides_beside_a_mechanism(
    body: str, n_q: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, kind = f"heads 2 {DECIDED[body]}", torch.float32
    data = data_of(text, 2, n)
    keys = 2 if body == "lsh" else 1
    given = [*tensors(2, 2, n_q, n, key_heads=keys, size=SIZE, out_size=OUT_SIZE, dtype=kind)]
    if body == "lsh":
        # keys that are the queries
        given[1] = given[0].detach().clone().requires_grad_()
    wide = [x.detach().double().requires_grad_() for x in given]
    padding = torch.arange(n) >= torch.tensor([0, n // 2])[:, None]

    def run(backend: str, kind: torch.dtype, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        module = learner_of(text, kind, backend, SIZES)
        out = module(*parts, key_padding_mask=padding, inputs=data)
        return with_gradients(out, [*parts, *module.parameters()])

    right, base = run("factored", torch.float64, wide), run("factored", kind, given)
    with monkeypatch.context() as patch:
        patch.setattr(HybridFormula, "_of_all_pairs", _never)
        found = run("triton", kind, given)
    assert_agree(found[:4], right[:4], base[:4])
    for ours, meant in zip(found[4:], right[4:], strict=True):
        torch.testing.assert_close(ours.double(), meant, rtol=1e-4, atol=1e-4)


def _never(*given: object) -> None:
    raise AssertionError("all pairs are looked at together")


def test_what_kernels_do_not_decide_is_refused() -> None:
    for graph, reason in (
        ("input x: ids attend (same(x) & random(keys = 3, seed = 0))", "parts that are looked up"),
        ("attend topk(keys = 3)", "scores are changed"),
    ):
        scores = " score softcap(cap = 5)" if "topk" in graph else ""
        with pytest.raises(BackendError, match=rf"{reason}.*: `factored` computes both"):
            spec_of(f"{graph} + linear(){scores}").compile(backend="triton")


def test_the_plan_says_what_a_call_decides() -> None:
    (step,) = plan(spec_of(DECIDED["labels"]).program, 65_536, "cuda").steps
    assert step.chosen.name == "triton"
    assert step.lines[0].startswith("sums of features in tiles beside the graph")
    assert step.lines[1].startswith("the graph instead in natural order")


@pytest.mark.slow
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    kernels = compiled_for_a_gpu(COMPILED, tmp_path)
    names = {"attend", "of_queries", "of_keys", "along", "carry", "outputs", "of_values"}
    assert {name for name, _ in kernels} == names
    # shared memory of a multiprocessor of that class
    assert all(int(room) <= 227 << 10 for _, room in kernels)


COMPILED = """
import attnspec
from attnspec.backends.triton import attention
from attnspec.backends.triton.backend import TritonBackend
from attnspec.backends.triton.sums import hybrid, way
from attnspec.lower.lower import works_of
from attnspec.lower.work import Call

def compiled(kernel, given, count, **options):
    found = kernel.warmup(*given, grid=(count,), **options)
    print(kernel.__name__, found.metadata.shared)

def launch_tiles(kernel, lists, batch, heads, blocks):
    return lambda *given: compiled(kernel, given, lists.count, **blocks.options)

def launch_sums(kernel, count):
    options = {"num_warps": way.SUMMED.warps, "num_stages": way.SUMMED.stages}
    return lambda *given: compiled(kernel, given, count, **options)

attention._launch, way._launch = launch_tiles, launch_sums
way.is_taken = hybrid.is_taken = lambda q: True
for size, dtype, text in (
    (128, torch.bfloat16, "window(before = 63, after = 0) + linear()"),
    (64, torch.float16, "window(before = 63, after = 0) + favor(features = 96)"),
):
    spec = attnspec.parse(f"attention a {{ causal attend {text} }}")
    ((work, heads),) = works_of(spec.program, 0, 2, 1000, 1000, {})
    kernel = TritonBackend().build(work, heads, torch.device("cpu"))
    q, k, v = (torch.zeros(1, h, 1000, size, dtype=dtype, requires_grad=True) for h in (2, 1, 1))
    padding = torch.ones(1, 1000, dtype=torch.bool)
    kernel(q, k, v, Call(padding)).sum().backward()
"""
