"""Compiled attentions as users meet them: arguments, errors, copies, transforms, threads."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from attention_checks import (
    BACKEND_NAMES,
    GRAPHS,
    check_transforms,
    defined,
    module_of,
    spec_of,
    tensors,
    with_gradients,
)
from torch.utils.checkpoint import checkpoint

from attnspec.ir.serial import from_data, plan_data, to_data
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache
from attnspec.lower.work import BackendError
from attnspec.runtime import CompiledAttention

BODIES = {
    "tiles": ("attend window(radius = 20) | global(first(3))", "tiles"),
    "dense": ("attend window(radius = 20) | global(first(3))", "dense"),
    "heads": ("heads 2 attend window(radius = 20) head 1 { attend residue(step = 7) }", "auto"),
    "bias": ("heads 2 causal attend window(radius = 9) score bias(buckets = 8)", "auto"),
    "hybrid": ("causal attend window(before = 9, after = 0) + linear()", "auto"),
}

every_body = pytest.mark.parametrize("name", BODIES)


def sample(name: str) -> CompiledAttention:
    body, backend = BODIES[name]
    module = module_of(body, backend)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


# --- shapes of nothing and of one ----------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_nothing_to_attend_gives_zeros_or_nothing(backend: str) -> None:
    module = module_of(GRAPHS["strided"], backend)
    for batch, n_q, n_k in ((2, 0, 0), (0, 5, 5), (2, 0, 5), (0, 0, 0)):
        given = tensors(batch, 2, n_q, n_k, out_size=3)
        out, *grads = with_gradients(module(*given), given)
        assert out.shape == (batch, 2, n_q, 3)
        assert [grad.shape for grad in grads] == [x.shape for x in given]
        assert not any(grad.any() for grad in grads)


def test_one_position_returns_its_value() -> None:
    q, k, v = tensors(1, 2, 1, 1, size=1)
    for name in ("full", "causal", "window", "random"):
        torch.testing.assert_close(module_of(GRAPHS[name])(q, k, v), v)


# --- what stands in scalars ----------------------------------------------------------------------


def test_layers_and_heads_are_known_to_the_graph() -> None:
    body = "layers 3 heads 4 attend window(radius = head + 10 * layer)"
    spec, module = spec_of(body), module_of(body)
    for layer in range(3):
        given = tensors(1, 4, 40, 40)
        torch.testing.assert_close(module(*given, layer=layer), defined(spec, *given, layer=layer))


def test_undeclared_layers_and_heads_take_any_number() -> None:
    body = "attend random(keys = 3, seed = 1) | where(k == head)"
    spec, module = spec_of(body), module_of(body)
    for heads, layer in ((1, 0), (5, 0), (3, 40)):
        given = tensors(1, heads, 30, 30)
        torch.testing.assert_close(module(*given, layer=layer), defined(spec, *given, layer=layer))
    given = tensors(1, 2, 30, 30)
    assert not torch.equal(module(*given, layer=0), module(*given, layer=1))


def test_tables_of_layers_and_heads_are_their_own() -> None:
    module = module_of(
        "layers 2 heads 3 attend full score bias(buckets = 4) layer 1 { attend self }"
    )
    (table,) = module.parameters()
    assert table.shape == (2, 3, 4)
    assert not table.any()
    given = tensors(1, 3, 9, 9)
    plain = module(*given)
    with torch.no_grad():
        table[0, 1] = torch.tensor([3.0, -1.0, 0.5, 2.0])
    changed = module(*given)
    assert torch.equal(changed[:, [0, 2]], plain[:, [0, 2]])
    assert not torch.equal(changed[:, 1], plain[:, 1])
    module.reset_parameters()
    assert torch.equal(module(*given), plain)


def test_grids_have_one_length() -> None:
    body = "sequence grid(4, 5) extra_tokens 2 attend full"
    module = module_of(body)
    given = tensors(1, 1, 22, 22)
    assert module(*given).shape == (1, 1, 22, 8)
    for n in (20, 21, 0):
        with pytest.raises(ValueError, match=rf"4 x 5 = 20 cells and 2 extra tokens, got n = {n}"):
            module(*tensors(1, 1, n, n))


def test_a_size_without_a_value_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"`radius` must be at least 0, got -7 at n = 3"):
        module_of("attend window(radius = n - 10)")(*tensors(1, 1, 3, 3))


# --- inputs --------------------------------------------------------------------------------------

INPUTS = (
    "input important: tokens(at_most = 9) input doc: ids input size: length"
    " attend (window(radius = 3) | global(important | first(1))) & same(doc) | prefix(size)"
)


def drawn_inputs(batch: int, n: int) -> dict[str, torch.Tensor]:
    return {
        "important": torch.arange(n)[None] % 11 == torch.arange(batch)[:, None],
        "doc": torch.arange(n).expand(batch, n) // 20,
        "size": torch.arange(batch) * 2,
    }


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"important": None}, ValueError, "needs its input `important`"),
        (
            {"other": torch.ones(1)},
            ValueError,
            "no input 'other'; its inputs: important, doc, size",
        ),
        (
            {"important": torch.ones(2, 60)},
            TypeError,
            "`important` must be bool, got torch.float32",
        ),
        ({"important": torch.ones(2, 60).bool()}, ValueError, "at most 9 tokens, got 60"),
        ({"doc": torch.ones(2, 60)}, TypeError, "`doc` must be an integer type"),
        ({"doc": torch.ones(2, 61).long()}, ValueError, r"`doc` must have the shape \[2, 60\]"),
        ({"size": torch.ones(2, 1).long()}, ValueError, r"`size` must have the shape \[2\]"),
        ({"size": 3}, TypeError, "`size` must be a tensor, got int"),
    ],
)
def test_wrong_inputs(change: dict[str, object], kind: type[Exception], words: str) -> None:
    module, inputs = module_of(INPUTS), {**drawn_inputs(2, 60), **change}
    given = {name: x for name, x in inputs.items() if x is not None}
    with pytest.raises(kind, match=words):
        module(*tensors(2, 1, 60, 60), inputs=given)
    with pytest.raises(TypeError, match="mapping"):
        module(*tensors(2, 1, 60, 60), inputs=[1])


# --- what is refused -----------------------------------------------------------------------------


def refused(kind: type[Exception], words: str, *given: object, **rest: object) -> None:
    module = module_of("layers 2 heads 4 attend full")
    with pytest.raises(kind, match=words):
        module(*given, **rest)


def test_wrong_tensors() -> None:
    q, k, v = (x.detach() for x in tensors(2, 4, 10, 10))
    refused(TypeError, "k must be a tensor, got NoneType", q, None, v)
    refused(TypeError, "q must be a tensor, got list", [1], k, v)
    refused(ValueError, r"q must have the axes \[B, H, n, d\], got q \[4, 10, 8\]", q[0], k, v)
    refused(ValueError, r"declares 4 heads, .*make it a parameter", q[:, :3], k, v)
    flipped = [x.transpose(1, 2) for x in (q, k, v)]
    refused(ValueError, r"are these \[B, n, H, d\]\?", *flipped)
    refused(ValueError, r"heads of k and v must divide", q, k[:, :3], v[:, :3])
    refused(ValueError, r"divide those of q", q, k[:, :0], v[:, :0])
    refused(ValueError, r"one batch size, got q \[2, 4, 10, 8\], k \[1", q, k[:1], v[:1])
    refused(ValueError, r"same heads and positions", q, k, v[:, :2])
    refused(ValueError, r"same heads and positions", q, k, v[:, :, :9])
    refused(ValueError, r"one head size", q, k[..., :7], v)
    refused(ValueError, r"n_q is at most n_k", q, k[:, :, :9], v[:, :, :9])
    refused(TypeError, r"got q torch.float64, k torch.float32, v torch.float64", q, k.float(), v)
    refused(TypeError, r"floating type", q.long(), k.long(), v.long())
    refused(TypeError, r"floating type", q + 0j, k + 0j, v + 0j)
    refused(ValueError, r"one device, got q on cpu, k on meta", q, k.to("meta"), v)
    refused(TypeError, r"q must be a dense tensor, got one of .* sparse_coo", q.to_sparse(), k, v)
    nested = torch.nested.nested_tensor(list(q), layout=torch.jagged)
    refused(TypeError, r"v must be a dense tensor, got one of .* nested", q, k, nested)
    refused(ValueError, r"size of at least 1, got q \[2, 4, 10, 0\]", q[..., :0], k[..., :0], v)
    refused(ValueError, r"size of at least 1, .*v \[2, 4, 10, 0\]", q, k, v[..., :0])


def test_wrong_options() -> None:
    q, k, v = (x.detach() for x in tensors(2, 4, 10, 10))
    refused(ValueError, r"layer must be between 0 and 1, got 2", q, k, v, layer=2)
    refused(ValueError, r"layer must be between 0 and 1, got -1", q, k, v, layer=-1)
    refused(TypeError, r"layer must be an integer, got float", q, k, v, layer=1.0)
    refused(TypeError, r"layer must be an integer, got a boolean", q, k, v, layer=True)
    refused(ValueError, r"dropout_p must be between 0 and 1, got 1.5", q, k, v, dropout_p=1.5)
    refused(ValueError, r"dropout_p must be", q, k, v, dropout_p=float("nan"))
    refused(TypeError, r"dropout_p must be a number", q, k, v, dropout_p="0")
    for mask, kind, words in (
        (torch.ones(2, 10), TypeError, "key_padding_mask must be bool, got torch.float32"),
        (torch.ones(2, 9).bool(), ValueError, r"shape \[2, 10\], got \[2, 9\]"),
        (torch.ones(2, 10).bool().to("meta"), ValueError, "must be on cpu as q, got meta"),
        ([True], TypeError, "must be a tensor, got list"),
        (torch.ones(2, 10).bool().to_sparse(), TypeError, "key_padding_mask must be a dense"),
    ):
        refused(kind, words, q, k, v, key_padding_mask=mask)
    refused(ValueError, "has no input 'x'; its inputs: none", q, k, v, inputs={"x": q})
    assert module_of("layers 2 heads 4 attend full")(q, k, v, layer=np.int64(1)).shape == q.shape


def test_tensors_without_numbers_have_shapes() -> None:
    given = [x.detach().to("meta").requires_grad_() for x in tensors(2, 2, 40, 40, out_size=5)]
    for body in ("attend window(radius = 3)", "heads 2 attend full score bias()", INPUTS):
        module = module_of(body).to("meta")
        inputs = {name: x.to("meta") for name, x in drawn_inputs(2, 40).items()}
        out = module(*given, inputs=inputs if body == INPUTS else None)
        assert (out.shape, out.device.type) == ((2, 2, 40, 5), "meta")
        out.sum().backward()
        assert given[0].grad is not None
    with pytest.raises(ValueError, match="bands refuses: its kernel runs on the CPU, not on meta"):
        module_of("attend full", "bands")(*given)


def test_learned_tables_are_where_q_is() -> None:
    given = [x.detach().to("meta") for x in tensors(2, 2, 40, 40)]
    with pytest.raises(ValueError, match=r"`bias_0` must be on meta as q, got cpu: move the mod"):
        module_of("heads 2 attend full score bias()")(*given)


@pytest.mark.parametrize(
    ("device", "kind", "words"),
    [
        ("foo", ValueError, "one that torch knows, for example 'cpu' or 'cuda', got 'foo'"),
        ("", ValueError, "one that torch knows"),
        ("cuda:x", ValueError, "one that torch knows"),
        ("cuda:63", ValueError, r"one that is here, cpu.*, got 'cuda:63'"),
        (3, TypeError, "a torch.device or its name, .* got int"),
        (b"cpu", TypeError, "got bytes"),
    ],
)
def test_devices_that_are_not_there(device: str, kind: type[Exception], words: str) -> None:
    spec = spec_of("attend full")
    with pytest.raises(kind, match=words):
        spec.compile(device=device)
    if device != "cuda:63":
        with pytest.raises(kind, match=words):
            spec.plan(64, device=device)


def test_devices_that_are_there() -> None:
    spec = spec_of("heads 2 attend full score bias()")
    for device in ("cpu", "cpu:0", torch.device("cpu"), "meta"):
        kinds = {x.device.type for x in spec.compile(device=device).parameters()}
        assert kinds == {torch.device(device).type}
    assert spec.plan(64, device=torch.device("cuda", 1)).device == "cuda"


@pytest.mark.parametrize(
    ("body", "backend", "device", "words"),
    [
        (INPUTS, "tiles", None, "tiles refuses: the graph reads the run-time input"),
        (INPUTS, "scattered", "cpu", "scattered refuses: the graph reads the run-time input"),
        ("attend full normalize relu", "bands", None, "on cpu, results that `relu`.*on cuda, i"),
        ("heads 2 attend self head 1 { attend full normalize relu }", "bands", "cpu", "refuses"),
        ("attend full", "bands", "meta", "its kernel runs on the CPU, not on meta"),
        ("attend full", "dence", None, "one of auto, .*got 'dence'"),
        ("attend full", None, None, "one of auto, .*got None"),
    ],
)
def test_what_no_length_can_change_is_refused_at_once(
    body: str, backend: str, device: str | None, words: str
) -> None:
    with pytest.raises(BackendError, match=words):
        spec_of(body).compile(backend=backend, device=device)
    if device is None:
        with pytest.raises(BackendError, match=words):
            spec_of(body).emit(backend=backend)


def test_what_depends_on_the_length_is_refused_at_the_call() -> None:
    # every length that a grid has counts, and lengths that a size does not have do not
    spec_of("sequence grid(3, 4) attend axial").compile(backend="scattered")
    module = spec_of("attend window(radius = n - 100)").compile(backend="scattered")
    with pytest.raises(ValueError, match="`radius` must be at least 0, got -50 at n = 50"):
        module(*tensors(1, 1, 50, 50))


def test_plans_of_another_format_are_refused() -> None:
    plan = plan_data(spec_of("attend full").program)
    with pytest.raises(ValueError, match="reads plans of format 1, got 2"):
        CompiledAttention({**plan, "format": 2})
    with pytest.raises(ValueError, match="backend must be one of"):
        CompiledAttention({**plan, "backend": "fast"})


# --- copies, types, threads ----------------------------------------------------------------------


@every_body
def test_copies_compute_the_same(name: str) -> None:
    module = sample(name)
    given = tensors(1, 2, 70, 70, dtype=torch.float32)
    out = module(*given)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(*given), out)
    fresh = module_of(*BODIES[name])
    fresh.load_state_dict(module.state_dict(), strict=True)
    assert torch.equal(fresh(*given), out)
    assert set(module.state_dict()) == {name for name, _ in module.named_parameters()}


def test_autocast_narrows_as_torch_does() -> None:
    for backend in BACKEND_NAMES:
        module = module_of(GRAPHS["window"], backend)
        q, k, v = tensors(1, 2, 70, 70, dtype=torch.float32)
        wanted = module(q.bfloat16(), k.bfloat16(), v.bfloat16())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(q, k.bfloat16(), v)
            assert module(q.double(), k.double(), v.double()).dtype == torch.float64
        assert torch.equal(out, wanted)
        grads = torch.autograd.grad(out.float().sum(), (q, k, v))
        assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads)


def test_autocast_leaves_what_is_wrong_to_the_checks() -> None:
    module = module_of("attend full")
    q, k, v = (x.detach().float() for x in tensors(1, 2, 9, 9))
    with torch.autocast("cpu"):
        with pytest.raises(TypeError, match="k must be a tensor, got ndarray"):
            module(q, k.numpy(), v)
        with pytest.raises(TypeError, match=r"got q torch\.int64"):
            module(q.long(), k.long(), v.long())
        assert module(q, k, v).dtype == torch.bfloat16


@every_body
def test_checkpoints_recompute_the_same(name: str) -> None:
    module = sample(name)
    given = tensors(1, 2, 70, 70, dtype=torch.float32)
    # sums of features have no weights to drop
    for options in ({},) if name == "hybrid" else ({}, {"dropout_p": 0.5}):
        torch.manual_seed(1)
        wanted = with_gradients(module(*given, **options), given)
        torch.manual_seed(1)
        out = checkpoint(lambda *x: module(*x, **options), *given, use_reentrant=False)  # noqa: B023
        for found, right in zip(with_gradients(out, given), wanted, strict=True):
            assert torch.equal(found, right)


def test_threads_share_a_module() -> None:
    module = module_of(GRAPHS["strided"])
    cases = [(n, tensors(1, 2, n, n, dtype=torch.float32)) for n in (5, 64, 100, 130) * 6]
    alone = module_of(GRAPHS["strided"])
    with ThreadPoolExecutor(8) as pool:
        outs = list(pool.map(lambda case: module(*case[1]).detach(), cases))
    for (_, given), out in zip(cases, outs, strict=True):
        assert torch.equal(alone(*given), out)


def test_the_cache_is_bounded() -> None:
    cache: Cache[int, int] = Cache(3)
    built: list[int] = []

    def square(key: int) -> int:
        built.append(key)
        return key * key

    def get(key: int) -> int:
        return cache.get(key, lambda: square(key))

    assert [get(key) for key in (1, 2, 3, 1, 4, 1, 2)] == [1, 4, 9, 1, 16, 1, 4]
    assert built == [1, 2, 3, 4, 2]
    assert len(cache) == 3
    assert len(copy.deepcopy(cache)) == 0
    module = module_of("attend self")
    for n in range(LIMITS.rows_looked_up + 1, LIMITS.rows_looked_up + LIMITS.layouts + 10):
        module(*tensors(1, 1, n, n, dtype=torch.float32))
    assert len(module.engine.prepared) == LIMITS.layouts


def test_errors_while_building_reach_the_caller() -> None:
    cache: Cache[int, int] = Cache(3)

    def fail() -> int:
        raise KeyError("what happened")

    with pytest.raises(KeyError, match="what happened"):
        cache.get(1, fail)
    assert len(cache) == 0


def test_modes_of_the_caller_do_not_reach_what_is_kept() -> None:
    given = tensors(1, 2, 70, 70, dtype=torch.float32)
    wanted = module_of(GRAPHS["strided"])(*given)
    for name in BACKEND_NAMES:
        for enter in (torch.inference_mode(), torch.device("meta"), torch.no_grad()):
            module = module_of(GRAPHS["strided"], name)
            with enter:
                module(*given)
            grads = torch.autograd.grad(module(*given).sum(), given)
            assert all(grad.device.type == "cpu" for grad in grads)
        module = module_of(GRAPHS["strided"], name)
        torch.func.grad(lambda x, run=module: run(x, given[1], given[2]).sum())(given[0])
        torch.testing.assert_close(module(*given), wanted)
        default = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float64)
            assert module_of(GRAPHS["strided"], name)(*given).dtype == torch.float32
        finally:
            torch.set_default_dtype(default)


# --- transforms ----------------------------------------------------------------------------------


# torch scripts the derivatives of its own operators when jvp is first used
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@every_body
def test_transforms_of_torch_func(name: str) -> None:
    module = sample(name)
    q, k, v = (x.detach() for x in tensors(3, 2, 40, 40))
    check_transforms(module, q, k, v)


def test_torch_compile_with_inputs() -> None:
    module = module_of(INPUTS)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    given, inputs = tensors(3, 2, 60, 60), drawn_inputs(3, 60)
    torch.testing.assert_close(compiled(*given, inputs=inputs), module(*given, inputs=inputs))
    inputs["important"][:] = True
    with pytest.raises(ValueError, match="at most 9 tokens"):
        compiled(*given, inputs=inputs)


# --- plain data ----------------------------------------------------------------------------------


def test_programs_survive_as_plain_data() -> None:
    bodies = [*GRAPHS.values(), INPUTS, *[body for body, _ in BODIES.values()]]
    bodies += [
        "sequence grid(n // 4, 4) attend neighborhood(3, 3) scale 1 / sqrt(n)",
        "layers 4 heads 2 layer even { attend full } layer odd { attend self normalize relu }",
        "attend global(positions(1, 4..n // 2) | every(5, offset = 2) - last(3))",
        "attend random(keys = 2, per_head = false) score softcap(cap = 30)",
    ]
    for body in bodies:
        program = spec_of(body).program
        data = to_data(program)
        assert from_data(data) == program
        assert eval(repr(data), {"__builtins__": {}}) == data
