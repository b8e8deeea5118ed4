"""Triton kernels under the interpreter against the definition, in tiles of a few rows: values,
log-sum-exps and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import triton
from attention_checks import (
    ALONG,
    GRAPHS,
    assert_agree,
    defined,
    module_of,
    spec_of,
    with_gradients,
)
from attention_checks import tensors as tensors_of
from interpreted import compiled_for_a_gpu, interpreted
from listed_calls import CPU
from random_specs import spec_text
from sweeps import in_turn
from zoo import ATTENTIONS, smaller

import attnspec
from attnspec.backends.planner import plan
from attnspec.backends.triton import backend as backend_module
from attnspec.backends.triton import tuning
from attnspec.backends.triton.backend import TritonBackend
from attnspec.backends.triton.tuning import ON_GPU
from attnspec.graphs.relation import Relation
from attnspec.lower.lower import works_of
from attnspec.lower.work import BackendError, Call
from attnspec.spec import Spec
from attnspec.verification import verify

__all__ = ["interpreted"]

pytestmark = pytest.mark.usefixtures("interpreted", "small_tiles")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16, so that short sequences have several."""
    monkeypatch.setattr(tuning, "ON_GPU", replace(ON_GPU, targets=(16,)))


def tensors(
    n_q: int, n: int, *, heads: int = 1, key_heads: int = 1, batch: int = 1, size: int = 4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tensors_of(
        batch, heads, n_q, n, key_heads=key_heads, size=size, out_size=3, dtype=torch.float32
    )


def exact(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.detach().double().requires_grad_() for x in given]


def check(spec: Spec, n_q: int, n: int, **shape: int) -> None:
    """Values and gradients of a module against the definition."""
    module = spec.compile(backend="triton")
    given = tensors(n_q, n, **shape)
    wide = exact(given)
    right = with_gradients(defined(spec, wide[0], wide[1], wide[2]), wide)
    base = with_gradients(defined(spec, *given), given)
    assert_agree(with_gradients(module(*given), given), right, base)


@pytest.mark.parametrize("name", GRAPHS)
def test_values_and_gradients(name: str) -> None:
    spec = spec_of(GRAPHS[name])
    check(spec, 1, 1)
    check(spec, 41, 41)


@pytest.mark.parametrize("name", ["causal", "strided", "blocks"])
def test_queries_are_the_last_positions_and_share_keys(name: str) -> None:
    check(spec_of(GRAPHS[name]), 18, 35, heads=4, key_heads=2)


SCORES = (
    "softcap(cap = 2)",
    "alibi(slopes = [0.5, -0.1]) score softcap(cap = 3)",
    "bias(buckets = 8, max_distance = 12)",
    "bias(buckets = 4, max_distance = 9) score softcap(cap = 1)",
)


@pytest.mark.parametrize(("score", "normalize"), in_turn(SCORES, ("softmax", "softmax1")))
def test_changed_scores_padding_and_sums(score: str, normalize: str) -> None:
    """The dense backend, which test_backends.py holds to plain words, is the definition here."""
    body = f"heads 2 attend window(radius = 9) | global(first(2)) score {score}"
    body += f" normalize {normalize}"
    n = 23
    padding = torch.rand(2, n) < 0.7
    padding[1] = False
    given = tensors(n, n, heads=2, batch=2)
    found = []
    for backend, parts in (("dense", exact(given)), ("dense", given), ("triton", given)):
        module = module_of(body, backend).to(parts[0].dtype)
        learned = [*module.parameters()]
        for table in learned:
            table.data = torch.linspace(-1, 1, table.numel()).to(table).view(table.shape)
        out, lse = module(*parts, key_padding_mask=padding, return_lse=True)
        weighed = (out * torch.cos(torch.arange(3.0))).sum() + lse[lse > -math.inf].sin().sum()
        grads = torch.autograd.grad(weighed, [*parts, *learned])
        sums = torch.where(lse > -math.inf, lse, -9.0)
        found.append([torch.cat([out.detach(), sums.detach()[..., None]], -1), *grads])
    right, base, ours = found
    assert_agree(ours[:4], right[:4], base[:4])
    for mine, meant in zip(ours[4:], right[4:], strict=True):
        torch.testing.assert_close(mine.double(), meant.double(), rtol=1e-5, atol=1e-5)


def test_half_numbers_and_any_strides() -> None:
    spec, n = spec_of(GRAPHS["blocks"]), 37
    module = spec.compile(backend="triton")
    shared = torch.randn(2, n, 3, 2, 8).half()
    parts = [shared[:, :, i].transpose(1, 2).requires_grad_() for i in range(3)]
    wide = exact(parts)
    right = with_gradients(defined(spec, wide[0], wide[1], wide[2]), wide)
    base = with_gradients(module_of(GRAPHS["blocks"], "dense")(*parts), parts)
    assert_agree(with_gradients(module(*parts), parts), right, base)
    # the gradient of a sum has no strides at all, rows of which every number is apart neither
    turned = torch.randn(1, 2, 8, n).transpose(2, 3).requires_grad_()
    (ours,) = torch.autograd.grad(module(turned, turned, turned).sum(), turned)
    (meant,) = torch.autograd.grad(defined(spec, turned, turned, turned).sum(), turned)
    torch.testing.assert_close(ours, meant, rtol=1e-4, atol=1e-4)


def far_apart(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, rows so far apart that 32 bits do not count to the last."""
    apart = 1 << 27
    # memory that nobody writes to takes no room
    room = torch.empty(x.shape[2] * apart, dtype=x.dtype)
    return room.as_strided(x.shape, (0, 0, apart, 1)).copy_(x)


@pytest.mark.parametrize("body", ["attend full", "causal attend linear()"])
def test_rows_further_apart_than_32_bits_count(body: str) -> None:
    near = [torch.randn(1, 1, 20, 8).half() for _ in range(3)]
    far = [far_apart(x) for x in near]
    module = module_of(body, "triton")
    assert torch.equal(module(*far), module(*near))
    work, heads = module.engine.binder.works(0, 1, 20, 20)[0]
    kernel = cast(Any, TritonBackend().build(work, heads, CPU))
    found = []
    for q, k, v in (far, near):
        if work.mechanism is None:
            # what autograd saves it hands on as it lies
            q = q[:, :, None]
            out, lse = kernel.forward(q, k, v, Call(), 0.3)
            found.append([out, *kernel.derivatives((q, k, v, out, lse), out, None, Call(), 0.3)])
        else:
            given = kernel.given(q, k, v, Call())
            kept = kernel.way.outputs(kernel.how, given)
            into = kernel.way.gradients(kernel.how, given, kept, kept[0])
            found.append([kept[0], into.q, into.k, into.v])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["blocks", "strided"])
def test_long_lists_are_cut_and_large_tiles_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnspec.backends.triton import attention, tables

    body = f"heads 2 {GRAPHS[name]} score bias(buckets = 4, max_distance = 9)"
    given = tensors(39, 39, heads=2)

    def results() -> list[torch.Tensor]:
        module = module_of(body, "triton")
        (table,) = module.parameters()
        torch.nn.init.uniform_(table, -1, 1)
        return with_gradients(module(*given), [*given, table])

    torch.manual_seed(1)
    whole = results()
    monkeypatch.setattr(tables, "SHORTEST", 1)
    monkeypatch.setattr(tables, "LONGEST", 1)
    monkeypatch.setattr(tuning, "ON_GPU", replace(ON_GPU, targets=(32,)))
    monkeypatch.setattr(
        attention, "blocks_for", lambda *given: attention.Blocks(16, 16, warps=4, stages=1)
    )
    torch.manual_seed(1)
    cut = results()
    for ours, meant in zip(cut, whole, strict=True):
        torch.testing.assert_close(ours, meant, rtol=1e-4, atol=1e-5)
    torch.manual_seed(1)
    for ours, meant in zip(results(), cut, strict=True):
        assert torch.equal(ours, meant)


INPUTS = {
    "ids": "causal input x: ids attend same(x)",
    "tokens": "input x: tokens attend window(radius = 2) | global(x)",
    "length": "input x: length attend causal | prefix(x)",
    "numbers": "input x: numbers attend where(abs(x(q) - x(k)) <= 0.3) | self",
}


@pytest.mark.parametrize("kind", INPUTS)
def test_run_time_inputs(kind: str) -> None:
    n = 21
    x = {
        "ids": torch.randint(0, 4, (2, n)).sort(-1).values,
        "tokens": torch.rand(2, n) < 0.2,
        "length": torch.randint(0, n + 1, (2,)),
        "numbers": torch.rand(2, n),
    }[kind]
    given = tensors(n, n, batch=2)
    results = [
        with_gradients(module_of(INPUTS[kind], backend)(*given, inputs={"x": x}), given)
        for backend in ("dense", "triton")
    ]
    for meant, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, meant, rtol=1e-4, atol=1e-5)


def outputs(relation: Relation, n: int) -> tuple[np.ndarray, np.ndarray]:
    """What one head of a relation gives for values that tell keys apart, and what it should."""
    from attnspec.graphs.relation import evaluate_pairs
    from attnspec.lower.work import Work

    kernel = TritonBackend().build(Work(relation, n, n), (0,), torch.device("cpu"))
    zeros, v = torch.zeros(1, 1, n, 2), torch.eye(n)[None, None]
    at = np.arange(n)
    held = np.broadcast_to(evaluate_pairs(relation, at[:, None], at[None], n), (n, n))
    weights = held / np.maximum(held.sum(1, keepdims=True), 1)
    with torch.no_grad():
        return kernel(zeros, zeros, v, Call())[0, 0].numpy(), weights


def test_random_compositions() -> None:
    for seed in range(20):
        n = (19, 33, 50)[seed % 3]
        for _, _, relation in attnspec.parse(spec_text(seed)).stack().relations(n):
            found, meant = outputs(relation, n)
            assert np.abs(found - meant).max() < 1e-6, f"seed {seed}, n = {n}: {spec_text(seed)}"


def static_graphs(part: int, parts: int) -> Iterator[tuple[str, Relation, int]]:
    """The distinct graphs of the zoo that no tensors decide, at a small length, in parts."""
    seen: set[tuple[Relation, int]] = set()
    for path, name in ATTENTIONS:
        program = smaller(path, name).program
        n = program.fixed_length or 45
        if program.inputs or any(attend.mechanism for attend in program.attends):
            continue
        for layer in range(program.layers or 1):
            for work, _ in works_of(program, layer, program.heads or 1, n, n, {}):
                if not work.decided and (work.relation, n) not in seen:
                    seen.add((work.relation, n))
                    if len(seen) % parts == part:
                        yield name, work.relation, n


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(x, marks=pytest.mark.slow) for x in range(1, 6))]
)
def test_static_graphs_of_the_zoo(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, relation, n in static_graphs(part, 6):
        monkeypatch.setattr(tuning, "ON_GPU", replace(ON_GPU, targets=(16,) if n < 50 else (64,)))
        found, meant = outputs(relation, n)
        assert np.abs(found - meant).max() < 1e-6, name


@pytest.mark.slow
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    kernels = compiled_for_a_gpu(PRINTED + COMPILED, tmp_path)
    assert {name for name, _ in kernels} == {"attend", "merge", "of_queries", "of_keys", "add_up"}
    # shared memory of a multiprocessor of that class
    assert all(int(room) <= 227 << 10 for _, room in kernels)


PRINTED = """
import attnspec
from attnspec.backends.triton import attention, tables
from attnspec.backends.triton.backend import TritonBackend
from attnspec.lower.lower import stand_ins, works_of
from attnspec.lower.work import Call

def launch(kernel, lists, batch, heads, blocks):
    def run(*given):
        found = kernel.warmup(*given, grid=(lists.count,), **blocks.options)
        print(kernel.__name__, found.metadata.shared)
    return run

attention._launch = launch
"""
"""Prints each kernel that would be launched, and the shared memory that it takes."""

COMPILED = """
tables.LONGEST = tables.SHORTEST = 1
for size, dtype, score, graph in (
    (64, torch.float16, "bias(buckets = 8)", "full"),
    (128, torch.bfloat16, "alibi() score softcap(cap = 9)", "same(x)"),
):
    reads = "input x: ids" if "x" in graph else ""
    body = f"heads 2 causal {reads} attend {graph} score {score}"
    spec = attnspec.parse(f"attention a {{ {body} }}")
    (work, heads), = works_of(spec.program, 0, 2, 1024, 1024, stand_ins(spec.program))
    kernel = TritonBackend().build(work, heads, torch.device("cpu"))
    q, k = (torch.zeros(1, 1, *each, 1024, size, dtype=dtype) for each in ((2,), ()))
    tables = {x: torch.zeros(2, 8, requires_grad=True) for x in spec.compile().state_dict()}
    for seed in (None, torch.zeros(1, dtype=torch.int64)):
        padding = torch.ones(1, 1024, dtype=torch.bool)
        data = {"x": torch.zeros(1, 1024, dtype=torch.int64)}
        call = Call(padding, 0.1, tables=tables, data=data, seed=seed)
        out, lse = kernel.forward(q, k, k, call, 0.1)
        kernel.derivatives((q, k, k, out, lse), out, None, call, 0.1)
"""


@pytest.mark.slow
def test_large_heads_fit_small_gpus(tmp_path: Path) -> None:
    found = compiled_for_a_gpu(PRINTED + LARGE_HEADS, tmp_path, 86)
    assert {name for name, _ in found} == {"attend", "of_queries", "of_keys"}
    # what a program may have on that class
    assert all(int(taken) <= 99 << 10 for _, taken in found)


LARGE_HEADS = """
attention.room_on = lambda device: 99 << 10
spec = attnspec.parse("attention a { causal attend window(before = 300, after = 0) }")
((work, heads),) = works_of(spec.program, 0, 1, 1024, 1024, {})
kernel = TritonBackend().build(work, heads, torch.device("cpu"))
for dtype in (torch.bfloat16, torch.float32):
    q, k = torch.zeros(1, 1, 1, 1024, 256, dtype=dtype), torch.zeros(1, 1, 1024, 256, dtype=dtype)
    out, lse = kernel.forward(q, k, k, Call(), 0.1)
    kernel.derivatives((q, k, k, out, lse), out, None, Call(), 0.1)
"""


@pytest.mark.parametrize("room", [99 << 10, 227 << 10])
def test_blocks_are_no_larger_where_there_is_less_room(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnspec.backends.triton import attention

    for size in (16, 64, 128, 256, 512):
        for dtype in (torch.bfloat16, torch.float32):
            for back in (False, True):
                whole = attention.blocks_for(size, dtype, back, False)
                found = attention.blocks_for(size, dtype, back, False, room)
                assert found == whole or room < 128 << 10
                assert tuning.LEAST <= found.q <= whole.q
                assert tuning.LEAST <= found.k <= whole.k
    # what triton knows of a device decides
    known = SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": room})
    driver = SimpleNamespace(active=SimpleNamespace(utils=known))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    attention.room_on.cache_clear()
    assert attention.room_on(torch.device("cuda", 0)) == room
    assert attention.room_on(CPU) == attention.LARGE
    attention.room_on.cache_clear()
    # compiled, forward in larger blocks these take 120 KB
    small = attention.blocks_for(256, torch.bfloat16, False, False, room)
    assert small.q * small.k == (64 * 64 if room > 99 << 10 else 64 * 32)


@pytest.mark.parametrize(
    ("triton_is", "numpy_is", "runs"),
    [("3.6.0", "2.4.1", False), ("3.6.0", "2.3.5", True), ("3.7.0", "2.4.1", True)],
)
def test_an_interpreter_that_is_older_than_numpy_is_refused(
    triton_is: str, numpy_is: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"triton": triton_is, "numpy": numpy_is}
    monkeypatch.setattr(backend_module, "version", known.__getitem__)
    monkeypatch.setenv(backend_module.INTERPRETED, "1")
    spec = spec_of("attend window(radius = 2)")
    ((work, _),) = works_of(spec.program, 0, 1, 9, 9, {})
    why = TritonBackend().refuses(work, "cpu")
    assert (why is None) is runs
    assert runs or why == "the interpreter of Triton before 3.7 needs a numpy before 2.4"


def test_heads_without_room_for_the_least_blocks_go_in_plain_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from attnspec.backends.triton import attention

    body = "causal attend window(before = 3, after = 0)"
    ((work, heads),) = works_of(spec_of(body).program, 0, 1, 20, 20, {})
    kernel = cast(Any, TritonBackend().build(work, heads, CPU))
    q, k, v = torch.randn(3, 1, 1, 20, 512)
    half = [x.half() for x in (q[:, :, None], k, v)]
    for room, goes in ((227 << 10, True), (99 << 10, False)):
        monkeypatch.setattr(attention, "room_on", lambda device, room=room: room)
        assert kernel.goes_fast(q[:, :, None], k, v, Call()) is goes
        assert kernel.goes_fast(*half, Call())

    def launched(*given: object) -> None:
        raise AssertionError("a kernel is launched")

    monkeypatch.setattr(attention, "_launch", launched)
    exact = module_of(body, "dense")(q, k, v)
    torch.testing.assert_close(kernel(q, k, v, Call()), exact, rtol=1e-5, atol=1e-5)


READ = (
    "causal input x: ids attend same(x)",
    "input x: ids attend same(x) & window(radius = 9) | self",
    "input x: tokens attend window(radius = 2) | global(x)",
    "input x: numbers attend where(x(k) <= x(q))",
)


@pytest.mark.parametrize("body", READ)
@pytest.mark.parametrize("back", [False, True])
def test_verification_reads_the_lists_of_a_call(
    body: str, back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = spec_of(body).program
    found = verify(program, 41, backend="triton", depth="pairs")
    assert found.ok
    assert any("its lists on the way back" in check.what for check in found.checks)
    from attnspec.backends.triton import labelled, reading

    def forgetful(of: Any) -> Any:
        """The last entry of a list is forgotten."""

        def run(*given: Any) -> Any:
            lists = of(*given)
            programs = lists.programs.clone()
            programs.view(-1, 5)[0, 3] -= 1
            return replace(lists, programs=programs)

        return run

    side = "columns" if back else "rows"
    for kind in (labelled.LabelledTables, reading.ReadTables):
        of = getattr(kind, side).func
        monkeypatch.setattr(kind, side, property(forgetful(of)))
    found = verify(program, 41, backend="triton", depth="pairs")
    assert [("way back" in fault.what) for fault in found.faults] == [back]


@pytest.mark.parametrize("back", [False, True])
def test_verification_reads_the_lists(back: bool) -> None:
    spec = spec_of("causal attend window(before = 6, after = 0) | residue(step = 4)")
    module = spec.compile(backend="triton")
    assert verify(spec.program, 41, backend="triton", depth="pairs").checks
    assert verify(spec.program, 41, module=module, depth="pairs").ok
    kernel: Any = module.engine.prepare(0, 2, 2, 41, 41, "cpu").groups[0].kernel
    step = kernel.steps[0]
    # the last entry of a list is forgotten
    (step.columns if back else step.rows).programs[0, 3] -= 1
    found = verify(spec.program, 41, module=module, depth="pairs")
    assert [("way back" in fault.what) for fault in found.faults] == [back]


def test_operator() -> None:
    module = module_of("heads 2 causal attend full score alibi()", "triton")
    given = tensors(18, 18, heads=2)
    padding = torch.ones(1, 18, dtype=torch.bool)
    torch.library.opcheck(
        torch.ops.attnspec.attention.default, (*given, module.engine.text, [], [], padding)
    )


@pytest.mark.parametrize("reuses", [("cpu",), ()])
def test_the_operator_hands_on_what_is_known_alone(
    monkeypatch: pytest.MonkeyPatch, reuses: tuple[str, ...]
) -> None:
    # a kernel that gives no log-sum-exps in passing is given none on the way back
    monkeypatch.setattr("attnspec.backends.triton.kernel.TritonKernel.reuses", reuses)
    module = module_of("heads 2 attend window(radius = 3)", "triton")
    given = [x.requires_grad_() for x in tensors(18, 18, heads=2)]
    call = torch.ops.attnspec.attention.default
    out = call(*given, module.engine.text, [], [])[0]
    found = torch.autograd.grad(out.square().sum(), given)
    right = torch.autograd.grad(module(*given).square().sum(), given)
    for mine, other in zip(found, right, strict=True):
        torch.testing.assert_close(mine, other)


def test_where_it_cannot_go_it_says_so_or_goes_by_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("attend window(radius = 3)")
    module = spec.compile(backend="triton")
    small = [x.detach().double().requires_grad_() for x in tensors_of(1, 1, 4, 4, size=2)]
    assert torch.autograd.gradgradcheck(module, small, **ALONG)
    q, k, v = (x.bfloat16() for x in tensors(20, 20))
    assert torch.isfinite(module(q, k, v)).all()
    assert plan(spec.program, 64).steps[0].chosen.name != "triton"
    bodies = ("normalize relu", "score bias(buckets = 6) score bias(buckets = 4)")
    for body, reason in zip(bodies, ("not merged by", "two learned tables"), strict=True):
        with pytest.raises(BackendError, match=reason):
            spec_of(f"heads 1 attend full {body}").compile(backend="triton")
    with pytest.raises(BackendError, match="type cuda, not on mps"):
        plan(spec.program, 64, "mps", "triton")
    monkeypatch.delenv(backend_module.INTERPRETED)
    with pytest.raises(BackendError, match="run on a GPU; with TRITON_INTERPRET=1"):
        plan(spec.program, 64, backend="triton")
    assert plan(spec.program, 4096, "cuda", "triton").steps[0].chosen.name == "triton"
    monkeypatch.setattr(backend_module, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="triton is not installed"):
        plan(spec.program, 64, "cuda", "triton")
