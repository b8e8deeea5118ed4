"""One operator for what traces and looks on: graphs of all lengths, exports, fakes, counts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_checks import learner_of, tensors, with_gradients
from population import spec_of
from sweeps import few
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from attnspec import SelfAttention
from attnspec.runtime import CompiledAttention

LENGTHS = (70, 33, 64, 2, 130)

BODIES = {
    "static": "causal attend window(before = isqrt(n), after = 0) | columns(first(2))",
    "bias": "heads 4 attend window(radius = 9) score bias(buckets = 8) normalize softmax1",
    "input": "input doc: ids causal attend same(doc)",
    "hybrid": "causal attend window(before = 9, after = 0) + favor(features = 8)",
}

SOME = tuple(BODIES)


def sample(name: str) -> CompiledAttention:
    module: CompiledAttention = learner_of(BODIES.get(name, name)).float()
    return module


def given(n: int, n_q: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return tensors(2, 4, n if n_q is None else n_q, n, key_heads=2, dtype=torch.float32)


def others(name: str, n: int) -> dict[str, Any]:
    """A mask of padding, and what the spec reads."""
    found: dict[str, Any] = {
        "key_padding_mask": torch.arange(n) < torch.tensor([[n], [n - n // 5]])
    }
    if name == "input":
        found["inputs"] = {"doc": (torch.arange(n) // 20).repeat(2, 1)}
    return found


def check_same(found: Tensor, meant: Tensor, leaves: Sequence[Tensor]) -> None:
    for one, other in zip(
        with_gradients(found, leaves), with_gradients(meant, leaves), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "n_q"), few([("input", None), ("static", None), ("bias", 3), ("hybrid", None)], 4)
)
def test_one_graph_for_all_lengths(name: str, n_q: int | None) -> None:
    """Of whole sequences, or of the last queries in steps of generation."""
    module = sample(name)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    # one of several results, too
    for n in LENGTHS if n_q is None else range(70, 76):
        parts, rest = given(n, n_q), others(name, n)
        leaves = [*parts, *module.parameters()]
        (found, lse), (meant, sums) = (
            each(*parts, **rest, return_lse=True) for each in (compiled, module)
        )
        torch.testing.assert_close(lse, sums)
        found, meant = (
            out * torch.where(sums.isfinite(), x, 0)[..., None]
            for out, x in ((found, lse), (meant, sums))
        )
        check_same(found, meant, leaves)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_dropout_in_a_graph() -> None:
    module = sample("static")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    q, k, v = given(50)
    v = torch.ones_like(v).requires_grad_()
    out = compiled(q, k, v, dropout_p=0.5)
    assert not torch.equal(out, compiled(q, k, v, dropout_p=0.5))
    assert abs(out.mean().item() - 1) < 0.1
    # the same weights are dropped in the backward pass: values are read linearly
    (grad,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(grad.sum() / out.sum(), torch.tensor(1.0))
    assert torch.equal(module(q, k, v), compiled(q, k, v, dropout_p=0.0))


LOADED = """
import importlib.util, sys, attnspec
# asking whether torch is there is not importing it
assert importlib.util.find_spec("torch") is not None
import torch
program = torch.export.load(f"{sys.argv[1]}/program.pt2").module()
torch.save(program(*torch.load(f"{sys.argv[1]}/given.pt")), f"{sys.argv[1]}/found.pt")
"""


@pytest.mark.parametrize("elsewhere", few([False, True]))
def test_an_exported_program_runs_in_another_process(elsewhere: bool, tmp_path: Path) -> None:
    module, n = sample("bias"), torch.export.Dim("n", max=1 << 20)
    shapes = {name: {2: n} for name in "qkv"}
    exported = torch.export.export(module, given(70), dynamic_shapes=shapes, strict=False)
    torch.export.save(exported, tmp_path / "program.pt2")
    parts = [x.detach() for x in given(133)]
    torch.save(parts, tmp_path / "given.pt")
    if elsewhere:
        subprocess.run([sys.executable, "-c", LOADED, str(tmp_path)], check=True)
        found = torch.load(tmp_path / "found.pt")
    else:
        found = torch.export.load(tmp_path / "program.pt2").module()(*parts)
    assert torch.equal(found, module(*parts))


@pytest.mark.parametrize(
    ("body", "n_q"),
    [
        ("cross heads 2 attend full", 20),
        ("heads 2 input x: pairs attend full score s + x(q, k)", 12),
        ("heads 2 input x: choices attend chosen(x)", 12),
    ],
)
def test_lengths_and_inputs_of_heads_stay_free(body: str, n_q: int) -> None:
    """One program for more and fewer queries than keys, and for inputs with an axis of heads."""
    module, size = spec_of(body).compile(), {"q": torch.export.Dim("q"), "k": torch.export.Dim("k")}
    lengths = {"q": size["q"] if module.program.cross else size["k"], "k": size["k"]}

    def call(n_q: int, n_k: int) -> dict[str, Any]:
        made = {"pairs": torch.randn(2, 2, n_k, n_k), "choices": torch.zeros(2, 2, n_k, 3).long()}
        q, k = torch.randn(2, 2, n_q, 8), torch.randn(2, 2, n_k, 8)
        inputs = {entry.name: made[entry.kind] for entry in module.program.inputs}
        return {"q": q, "k": k, "v": k.clone()} | ({"inputs": inputs} if inputs else {})

    shapes: dict[str, Any] = {name: {2: lengths[name[0]]} for name in ("q", "k")}
    shapes["v"] = shapes["k"]
    for entry in module.program.inputs:
        axes = (2, 3) if entry.kind == "pairs" else (2,)
        shapes["inputs"] = {entry.name: dict.fromkeys(axes, size["k"])}
    given = call(n_q, 12)
    traced = torch.export.export(module, (), given, dynamic_shapes=shapes, strict=False).module()
    for sizes in ((n_q, 12), (17, 31) if module.program.cross else (31, 31)):
        given = call(*sizes)
        torch.testing.assert_close(traced(**given), module(**given))


def operator(module: CompiledAttention, **inputs: Tensor) -> Callable[..., Tensor]:
    """The operator of a traced program: of q, k, v and of what is learned elsewhere."""

    def run(q: Any, k: Any, v: Any, *tables: Tensor) -> Tensor:
        learned = list(tables or module.parameters())
        rest: Any = module.engine.text, learned, [*inputs.values()]
        out: Tensor = torch.ops.attnspec.attention(q, k, v, *rest)[0]
        return out

    return run


@pytest.mark.parametrize(("name", "n_q"), [("bias", 40), ("input", 3)])
def test_opcheck(name: str, n_q: int) -> None:
    module = sample(name)
    parts, rest = given(40, n_q), others(name, 40)
    read = [*rest.get("inputs", {}).values()]
    learned = [x.detach().requires_grad_() for x in module.parameters()]
    torch.library.opcheck(
        torch.ops.attnspec.attention.default,
        (*parts, module.engine.text, learned, read, rest["key_padding_mask"]),
    )


@pytest.mark.parametrize("written", ["key_padding_mask", "input"])
def test_tensors_written_over_before_derivatives_are_refused(written: str) -> None:
    module = sample("input")
    parts, rest = given(40), others("input", 40)
    padding, read = torch.arange(40).expand(2, 40) < 30, [*rest["inputs"].values()]
    before = [x.clone() for x in (padding, *read)]
    out, _ = torch.ops.attnspec.attention(*parts, module.engine.text, [], read, padding)
    torch.autograd.grad(out.sum(), parts, retain_graph=True)
    assert all(map(torch.equal, (padding, *read), before))
    (padding if written == "key_padding_mask" else read[0]).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), parts)


def test_selective_checkpoints_keep_the_output() -> None:
    module, parts = sample("static"), given(70)
    kept = torch.ops.attnspec.attention.default

    def policy(ctx: Any, each: Any, *args: Any, **rest: Any) -> checkpoint.CheckpointPolicy:
        which = checkpoint.CheckpointPolicy
        return which.MUST_SAVE if each == kept else which.PREFER_RECOMPUTE

    def block(*parts: Tensor) -> Tensor:
        return torch.as_tensor(module(*(x.sin() for x in parts))).cos()

    def contexts() -> Any:
        return checkpoint.create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]

    def kept_back(*parts: Tensor) -> Any:
        return checkpoint.checkpoint(block, *parts, use_reentrant=False, context_fn=contexts)

    counts = []
    for run in (kept_back, block):
        with FlopCounterMode(display=False) as counted:
            run(*parts).sum().backward()
        counts.append(counted.get_total_flops())
    # it is not computed once more
    assert counts[0] == counts[1] > 0
    check_same(kept_back(*parts), block(*parts), parts)


@pytest.mark.parametrize("name", SOME)
def test_vmap_of_the_operator(name: str) -> None:
    module, parts = sample(name), given(30)
    read = {x: y[:1] for x, y in others(name, 30).get("inputs", {}).items()}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return operator(module, **read)(q[None], k[None], v[None])[0]

    meant = torch.cat([module(*(x[i : i + 1] for x in parts), inputs=read) for i in range(2)])
    check_same(torch.func.vmap(run)(*parts), meant, parts)
    # keys of one sample for all, and gradients of each
    q, k, v = (x.detach() for x in parts)
    shared = torch.func.vmap(run, (0, None, None))(q, k[0], v[0])
    torch.testing.assert_close(shared, torch.stack([run(q[i], k[0], v[0]) for i in range(2)]))
    loss = torch.func.grad(lambda *x: run(*x).square().sum(), (0, 1, 2))
    each = torch.func.vmap(loss, (0, None, None))(q, k[0], v[0])
    for index, some in enumerate(zip(*each, strict=True)):
        for x, y in zip(some, loss(q[index], k[0], v[0]), strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("body", ["causal attend topk(keys = 4)", "attend full"])
def test_vmap_with_numbers_of_pairs_for_all(body: str) -> None:
    module = spec_of(f"input near: pairs {body} score s + near(q, k)").compile()
    q, k, v = torch.randn(3, 4, 2, 1, 9, 8)
    read = {"near": torch.randn(2, 1, 9, 9)}
    found = torch.func.vmap(lambda *parts: module(*parts, inputs=read))(q, k, v)
    meant = [module(*parts, inputs=read) for parts in zip(q, k, v, strict=True)]
    torch.testing.assert_close(found, torch.stack(meant))


@pytest.mark.parametrize("body", ["attend window(radius = 1)", "attend topk(keys = 2)"])
def test_every_level_of_torch_func_derives(body: str) -> None:
    run = operator(sample(body).double())
    q, k, v = (x.detach() for x in tensors(2, 1, 4, 4))

    def loss(*parts: Tensor) -> Tensor:
        return run(*parts).square().sum()

    def value(q: Tensor) -> Tensor:
        found: Tensor = torch.func.vjp(lambda q: loss(q, k, v), q)[0]
        return found

    def slopes(*parts: Tensor) -> Tensor:
        found: Tensor = torch.func.grad(loss)(*parts).square().sum()
        return found

    leaf = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf, k, v), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf)
    torch.testing.assert_close(torch.func.grad(value)(q), first.detach())
    torch.testing.assert_close(torch.autograd.grad(value(leaf), leaf)[0], first.detach())
    torch.testing.assert_close(torch.func.grad(slopes)(q, k, v), second)
    parts = [x[:, None] for x in (q, k, v)]
    if "topk" in body:
        with pytest.raises(RuntimeError, match="nor under `vmap` where queries and keys decide"):
            torch.func.vmap(torch.func.grad(slopes))(*parts)
        return
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(slopes))(*parts), second[:, None])


LAYERS = (
    ("layers 5 attend full layer 3 { attend block(size = 4) }", 2),
    ("layers 5 causal attend window(before = 7, after = 0)", 1),
    ("layers 3 attend random_blocks(size = 4, blocks = 2, seed = 1)", 3),
)


@pytest.mark.parametrize(("body", "different"), few(LAYERS, 3))
def test_layers_that_compute_the_same_are_one_graph(body: str, different: int) -> None:
    spec = spec_of(body)
    x, total = torch.randn(2, 33, 32), spec.program.layers or 1
    layers = [SelfAttention(spec, 32, 4, layer=i) for i in range(total)]
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    for layer in layers:
        meant = layer(x)
        layer.compile(fullgraph=True, backend="eager")
        torch.testing.assert_close(layer(x), meant)
    assert counters["stats"]["unique_graphs"] == before + different


@pytest.mark.parametrize(
    "body",
    [
        "causal attend window(before = 7, after = 0)",
        "input doc: ids causal attend same(doc)",
        "input near: pairs causal attend full score s + near(q, k)",
    ],
)
def test_a_call_says_how_many_slots_of_a_cache_are_keys(body: str) -> None:
    module = spec_of(body).compile()
    given = [x.requires_grad_() for x in tensors(2, 4, 3, 20)]
    real = torch.rand(2, 20, generator=torch.Generator().manual_seed(0)) > 0.2
    inputs = {"doc": torch.arange(20).repeat(2, 1) // 5} if "doc" in body else {}
    if "near" in body:
        inputs["near"] = torch.randn(2, 1, 3, 20, dtype=torch.float64, requires_grad=True)
    leaves = [*given, *(x for x in inputs.values() if x.requires_grad)]
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    traced = torch.compile(module, fullgraph=True, backend="aot_eager")
    for count in (4, 19, 20):
        short = [given[0], *(x[:, :, :count] for x in given[1:])]
        cut = {name: x[..., :count] for name, x in inputs.items()}
        meant = module(*short, key_padding_mask=real[:, :count], inputs=cut)
        grads = torch.autograd.grad(meant.square().sum(), leaves)
        for run in (module, traced):
            keys = torch.tensor(count)
            out = run(*given, keys=keys, key_padding_mask=real, inputs=inputs)
            torch.testing.assert_close(out, meant)
            torch.testing.assert_close(torch.autograd.grad(out.square().sum(), leaves), grads)
    assert counters["stats"]["unique_graphs"] == before + 1
