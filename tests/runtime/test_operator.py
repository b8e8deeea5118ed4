"""One operator for what traces and looks on: graphs of all lengths, exports, fakes, counts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_checks import ALONG, spec_of, tensors, with_gradients
from sweeps import sometimes
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from zoo import EXAMPLES, every_attention, smaller

from attnspec.ir.serial import plan_data
from attnspec.lower.mechanism_sizes import longest_of
from attnspec.runtime import CompiledAttention, composed
from attnspec.runtime.engine import engine_of
from attnspec.spec import load

LENGTHS = (70, 33, 64, 5, 2, 128, 300, 63, 65, 200)

BODIES = {
    "static": "causal attend window(before = isqrt(n), after = 0) | columns(first(2))",
    "bias": "heads 4 attend window(radius = 9) score bias(buckets = 8) normalize softmax1",
    "heads": "heads 4 attend window(radius = 3) head 1, 3 { attend random(keys = 2) }",
    "input": "input doc: ids causal attend same(doc)",
    "linear": "causal attend linear()",
    "rfa": "attend rfa(features = 8)",
    "hybrid": "causal attend window(before = 9, after = 0) + favor(features = 8)",
    "relu": "attend full normalize relu",
    "edges": "attend random(keys = 3) score softcap(cap = 2)",
}

every_body = pytest.mark.parametrize("name", BODIES)

SOME = ("static", "bias", "input", "hybrid")
"""One of nothing but a graph, one that learns, one that reads, and one with sums of features: what
traces sees one operator, whatever the body."""


def sample(name: str, backend: str = "auto") -> CompiledAttention:
    module = spec_of(BODIES.get(name, name)).compile(backend, head_size=8)
    source = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, generator=source)
    return module


def given(n: int, n_q: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tensors(2, 4, n if n_q is None else n_q, n, key_heads=2, dtype=torch.float32)


def others(name: str, n: int) -> dict[str, Any]:
    """A mask of padding, and what the spec reads."""
    found: dict[str, Any] = {
        "key_padding_mask": torch.arange(n) < torch.tensor([[n], [n - n // 5]])
    }
    if name == "input":
        found["inputs"] = {"doc": (torch.arange(n) // 20).repeat(2, 1)}
    return found


def check_same(found: torch.Tensor, meant: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
    for one, other in zip(
        with_gradients(found, leaves), with_gradients(meant, leaves), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


# --- traces --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sometimes(BODIES, SOME))
def test_one_graph_for_all_lengths(name: str) -> None:
    module = sample(name)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    for n in LENGTHS:
        parts, rest = given(n), others(name, n)
        leaves = [*parts, *module.parameters()]
        check_same(compiled(*parts, **rest), module(*parts, **rest), leaves)
    assert counter.frame_count == 1


@pytest.mark.parametrize("n_q", [1, 3])
def test_steps_of_generation_in_one_graph(n_q: int) -> None:
    module = sample("bias")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    with torch.inference_mode():
        for n in range(70, 80):
            parts = given(n, n_q)
            torch.testing.assert_close(compiled(*parts), module(*parts))
    assert counter.frame_count == 1


def test_one_graph_with_log_sum_exps_and_autocast() -> None:
    module = sample("bias")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def run(*parts: torch.Tensor) -> Any:
        return module(*parts, return_lse=True)

    for n in (70, 33, 90):
        parts = given(n)
        (out, lse), meant = run(*parts), module(*parts, return_lse=True)
        torch.testing.assert_close(lse, meant[1])
        leaves = [*parts, *module.parameters()]
        check_same(out * lse[..., None], meant[0] * meant[1][..., None], leaves)
    assert counter.frame_count == 1
    with torch.autocast("cpu", torch.bfloat16):
        found, meant = run(*parts)[0], module(*parts)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, meant)
        # a program that was saved calls the operator itself
        rest: Any = module.engine.text, [*module.parameters()], []
        assert torch.equal(torch.ops.attnspec.attention(*parts, *rest)[0], meant)
    check_same(found, meant, parts)


def test_emitted_modules_make_one_graph_too() -> None:
    space: dict[str, Any] = {"__name__": "emitted"}
    exec(spec_of(BODIES["heads"]).emit(), space)
    module: CompiledAttention = space["Sample"]()
    same = sample("heads")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    for n in (70, 33, 90):
        parts = given(n)
        check_same(compiled(*parts), same(*parts), parts)
    assert counter.frame_count == 1
    out, lse = module(*parts, return_lse=True)
    assert torch.equal(out, same(*parts))
    assert lse.shape == out.shape[:3]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_inductor() -> None:
    module = sample("static")
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    for n in (70, 33, 300):
        parts = given(n)
        check_same(compiled(*parts), module(*parts), parts)


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
    # the same weights are dropped on the way back: values are read linearly
    (grad,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(grad.sum() / out.sum(), torch.tensor(1.0))
    assert torch.equal(module(q, k, v), compiled(q, k, v, dropout_p=0.0))


LOADED = """
import importlib.util
import sys
import attnspec
# asking whether torch is there is not importing it
assert importlib.util.find_spec("torch") is not None
import torch
for folder in sys.argv[1:]:
    program = torch.export.load(f"{folder}/program.pt2").module()
    torch.save(program(**torch.load(f"{folder}/given.pt")), f"{folder}/found.pt")
"""


@pytest.mark.parametrize(
    "programs",
    [
        {"bias": False, "input": True},
        pytest.param({"hybrid": False, "heads": True}, marks=pytest.mark.slow),
    ],
    ids="+".join,
)
def test_exported_programs_in_another_process(programs: dict[str, bool], tmp_path: Path) -> None:
    meant = {
        (tmp_path / name): export(name, strict, tmp_path / name)
        for name, strict in programs.items()
    }
    subprocess.run([sys.executable, "-c", LOADED, *map(str, meant)], check=True)
    for folder, out in meant.items():
        assert torch.equal(torch.load(folder / "found.pt"), out), folder.name


def export(name: str, strict: bool, folder: Path) -> torch.Tensor:
    """Write an exported program of one length, and what is given at another; what is meant then."""
    module = sample(name)
    n = torch.export.Dim("n", max=1 << 20)
    shapes: dict[str, Any] = {"q": {2: n}, "k": {2: n}, "v": {2: n}, "key_padding_mask": {1: n}}
    rest = others(name, 70)
    if name == "input":
        shapes["inputs"] = {"doc": {1: n}}
    parts = [x.detach() for x in given(70)]
    names = {**dict(zip("qkv", parts, strict=True)), **rest}
    exported = torch.export.export(module, (), names, dynamic_shapes=shapes, strict=strict)
    folder.mkdir()
    torch.export.save(exported, folder / "program.pt2")
    parts = [x.detach() for x in given(133)]
    names = {**dict(zip("qkv", parts, strict=True)), **others(name, 133)}
    torch.save(names, folder / "given.pt")
    out: torch.Tensor = module(**names)
    return out


@every_body
def test_plain_operations_where_they_are_asked_for(name: str) -> None:
    module, rest = sample(name), others(name, 40)
    parts = tuple(x.detach() for x in given(40))
    with composed():
        program = torch.export.export(module, parts, rest, strict=False)
    assert "attnspec" not in str(program.graph)
    torch.testing.assert_close(program.module()(*parts, **rest), module(*parts, **rest))


# --- what looks on -------------------------------------------------------------------------------


@pytest.mark.parametrize("n_q", [40, 3])
@pytest.mark.parametrize("name", sometimes(BODIES, SOME))
def test_opcheck(name: str, n_q: int) -> None:
    module = sample(name)
    parts, rest = given(40, n_q), others(name, 40)
    read = [*rest.get("inputs", {}).values()]
    learned = [x.detach().requires_grad_() for x in module.parameters()]
    torch.library.opcheck(
        torch.ops.attnspec.attention.default,
        (*parts, module.engine.text, learned, read, rest["key_padding_mask"]),
    )


@every_body
def test_fakes_have_the_shapes_of_outputs(name: str) -> None:
    module = sample(name)
    parts, rest = given(40), others(name, 40)
    meant = module(*parts, **rest)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) for x in parts]
        found = module(*fakes, **rest)
        grads = torch.autograd.grad(found.sum(), fakes)
    assert (found.shape, found.dtype) == (meant.shape, meant.dtype)
    assert [x.shape for x in grads] == [x.shape for x in parts]


def test_selective_checkpoints_keep_the_output() -> None:
    module, calls = sample("static"), 0
    operator = torch.ops.attnspec.attention.default
    run = module.engine.run

    def counted(*given: Any, **rest: Any) -> Any:
        nonlocal calls
        calls += 1
        return run(*given, **rest)

    module.engine.run = counted  # type: ignore[method-assign]

    def policy(ctx: Any, each: Any, *given: Any, **rest: Any) -> checkpoint.CheckpointPolicy:
        kept = checkpoint.CheckpointPolicy.MUST_SAVE
        return kept if each == operator else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    parts = given(70)

    def block(*parts: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(module(*(x.sin() for x in parts))).cos()

    out = checkpoint.checkpoint(
        block,
        *parts,
        use_reentrant=False,
        context_fn=lambda: checkpoint.create_selective_checkpoint_contexts(policy),  # type: ignore[no-untyped-call]
    )
    assert calls == 1
    check_same(out, block(*parts), parts)


@pytest.mark.parametrize(
    "name", ["sparse_strided", "bigbird", "longformer", "alibi", "linear_transformer", "performer"]
)
def test_operations_are_those_of_the_analysis(name: str) -> None:
    spec = load(EXAMPLES / f"{name}.attn")
    heads, n, batch, size = spec.heads or 3, 256, 2, 16
    report = spec.analyse(n, batch=batch, heads=heads, head_dim=size)
    module = spec.compile(head_size=size)
    parts = [torch.randn(batch, heads, n, size, requires_grad=True) for _ in range(3)]
    with FlopCounterMode(display=False) as forward:
        out = module(*parts)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == report.flops
    assert backward.get_total_flops() == report.backward_flops


@pytest.mark.slow
@every_attention
def test_operations_of_the_zoo(path: Path, name: str) -> None:
    spec = smaller(path, name)
    n = spec.program.fixed_length or min(256, longest_of(spec.program) or 256)
    heads, found = spec.heads or 3, []
    report = spec.analyse(n, batch=2, heads=heads, head_dim=16)
    if report.flops is None:
        pytest.skip("not built yet")
    module = spec.compile(head_size=16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        parts = [torch.randn(2, heads, n, 16, requires_grad=True) for _ in range(3)]
        inputs = {
            each.name: torch.zeros(
                (2,) if each.kind == "length" else (2, n),
                dtype=torch.bool if each.kind == "tokens" else torch.int64,
            )
            for each in spec.inputs.values()
        }
        for layer in range(spec.layers):
            with FlopCounterMode(display=False) as forward:
                out = module(*parts, layer=layer, inputs=inputs)
            with FlopCounterMode(display=False) as backward:
                out.sum().backward()
            found.append((forward.get_total_flops(), backward.get_total_flops()))
    most = tuple(max(each) for each in zip(*found, strict=True))
    assert most == (report.flops, report.backward_flops)


@every_body
def test_vmap_of_the_operator(name: str) -> None:
    module = sample(name)
    parts, rest = given(30), others(name, 30)
    read = [x[:1] for x in rest.get("inputs", {}).values()]
    learned = [x.detach() for x in module.parameters()]
    others_given = module.engine.text, learned, read

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.attnspec.attention(q[None], k[None], v[None], *others_given)[
            0
        ]
        return out[0]

    one = {
        key: {k: x[:1] for k, x in value.items()} for key, value in rest.items() if key == "inputs"
    }
    meant = torch.cat([module(*(x[i : i + 1] for x in parts), **one) for i in range(2)])
    found = torch.func.vmap(run)(*parts)
    check_same(found, meant, parts)
    # keys of one sample for all, and gradients of each
    q, k, v = (x.detach() for x in parts)
    shared = torch.func.vmap(run, (0, None, None))(q, k[0], v[0])
    meant = torch.cat([run(q[i], k[0], v[0])[None] for i in range(2)])
    torch.testing.assert_close(shared, meant)
    loss = torch.func.grad(lambda *x: run(*x).square().sum(), (0, 1, 2))
    each = torch.func.vmap(loss, (0, None, None))(q, k[0], v[0])
    for index, some in enumerate(zip(*each, strict=True)):
        for x, y in zip(some, loss(q[index], k[0], v[0]), strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("asked", [(0,), (2,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, None), (2, 0, None)])
@pytest.mark.parametrize("more", ["", "score bias(buckets = 4)"])
def test_gradients_of_some_under_vmap_where_each_decides(
    asked: tuple[int, ...], mapped: tuple[int | None, ...], more: str
) -> None:
    module = sample(f"heads 4 causal attend topk(keys = 3) {more}")
    learned = [x.detach() for x in module.parameters()]

    def loss(*parts: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.attnspec.attention(*parts, module.engine.text, learned, [])[0]
        return out.square().sum()

    parts = [x.detach() for x in given(9)]
    every = [
        x if dim is None else torch.stack([x, x.flip(2), -x], dim)
        for x, dim in zip(parts, mapped, strict=True)
    ]
    slopes = torch.func.grad(loss, asked)
    found = torch.func.vmap(slopes, mapped)(*every)
    for at in range(3):
        own = (x if d is None else x.select(d, at) for x, d in zip(every, mapped, strict=True))
        for x, meant in zip(found, slopes(*own), strict=True):
            torch.testing.assert_close(x[at], meant)


def test_tables_that_are_mapped_over() -> None:
    module = sample("bias")
    q, k, v = (x.detach() for x in given(30))
    (table,) = module.parameters()
    tables = torch.stack([table.detach(), 2 * table.detach()])

    def loss(table: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.attnspec.attention(q, k, v, module.engine.text, [table], [])[
            0
        ]
        return out.square().sum()

    found = torch.func.vmap(torch.func.grad(loss))(tables)
    for x, table in zip(found, tables, strict=True):
        torch.testing.assert_close(x, torch.func.grad(loss)(table))


@pytest.mark.parametrize(
    "body",
    [
        *(BODIES[name] for name in ("static", "linear", "hybrid", "rfa")),
        # the pairs that the queries and keys of one sample decide are what they are nearby
        "causal attend topk(keys = 2)",
    ],
)
def test_derivatives_of_derivatives(body: str) -> None:
    module = spec_of(body).compile(head_size=8).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    parts = tensors(1, 1, 4, 4)
    others_given: Any = module.engine.text, [*module.parameters()], []

    def run(*parts: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.attnspec.attention(*parts, *others_given)[0]
        return out

    assert torch.autograd.gradcheck(run, parts, **ALONG)
    assert torch.autograd.gradgradcheck(run, parts, **ALONG)


@pytest.mark.parametrize("body", ["attend window(radius = 1)", "attend topk(keys = 2)"])
def test_every_level_of_torch_func_derives(body: str) -> None:
    module = sample(body).double()
    q, k, v = (x.detach() for x in tensors(2, 1, 4, 4))

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.attnspec.attention(q, k, v, module.engine.text, [], [])[0]
        return out.square().sum()

    def value(q: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.vjp(lambda q: loss(q, k, v), q)[0]
        return found

    def slopes(*parts: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.grad(loss)(*parts).square().sum()
        return found

    leaf = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf, k, v), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf)
    torch.testing.assert_close(torch.func.grad(value)(q), first.detach())
    (outside,) = torch.autograd.grad(value(leaf), leaf)
    torch.testing.assert_close(outside, first.detach())
    torch.testing.assert_close(torch.func.grad(slopes)(q, k, v), second)
    parts = [x[:, None] for x in (q, k, v)]
    if "topk" in body:
        with pytest.raises(RuntimeError, match="nor under `vmap` where queries and keys decide"):
            torch.func.vmap(torch.func.grad(slopes))(*parts)
        return
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(slopes))(*parts), second[:, None])


# --- a program by its text -----------------------------------------------------------------------


def test_a_text_alone_is_enough() -> None:
    plan = plan_data(spec_of("attend window(radius = 7) | global(first(1))").program)
    module = CompiledAttention(plan)
    parts = [x.detach() for x in given(90)]
    meant, text = module(*parts), module.engine.text
    assert engine_of(text) is module.engine
    del module
    found = torch.ops.attnspec.attention(*parts, text, [], [])
    assert torch.equal(found[0], meant)
    assert engine_of(text) is engine_of(text)
    with pytest.raises(ValueError, match="reads plans of format"):
        torch.ops.attnspec.attention(*parts, text.replace('"format":1', '"format":0'), [], [])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_what_has_no_rule_is_refused() -> None:
    module = sample("static")
    q, k, v = (x.detach() for x in given(30))

    def run(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.attnspec.attention(x, k, v, module.engine.text, [], [])[0]
        return out

    # a tangent is not lost without a word
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(run, (q,), (q,))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(q.requires_grad_())
        (grad,) = torch.autograd.grad(run(fake).sum(), fake, create_graph=True)
        with pytest.raises(RuntimeError, match="not computed in a traced program"):
            torch.autograd.grad(grad.sum(), fake)
