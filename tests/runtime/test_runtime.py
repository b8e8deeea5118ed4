"""Compiled attentions as users meet them: arguments, errors, copies, transforms, threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_checks import BACKEND_NAMES, GRAPHS, tensors, with_gradients
from population import spec_of

from attnspec.runtime import CompiledAttention


def module_of(body: str, backend: str = "auto") -> CompiledAttention:
    return spec_of(body).compile(backend=backend)


# --- shapes of nothing ----------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_nothing_to_attend_gives_zeros_or_nothing(backend: str) -> None:
    module = module_of(GRAPHS["strided"], backend)
    for batch, n_q, n_k in ((2, 0, 0), (0, 5, 5), (2, 0, 5), (0, 0, 0)):
        given = tensors(batch, 2, n_q, n_k, out_size=3)
        out, *grads = with_gradients(module(*given), given)
        assert out.shape == (batch, 2, n_q, 3)
        assert [grad.shape for grad in grads] == [x.shape for x in given]
        assert not any(grad.any() for grad in grads)


# --- what stands in scalars ----------------------------------------------------------------------


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
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        refused(TypeError, "floating type of 16 to 64 bits", *(x.to(dtype) for x in (q, k, v)))
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
    with pytest.raises(ValueError, match="tables refuses: its kernel runs on the CPU, not on meta"):
        module_of("attend topk(keys = 2)", "tables")(*given)


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


@pytest.mark.parametrize(
    ("body", "backend", "device", "words"),
    [
        (INPUTS, "scattered", "cpu", "scattered refuses: the graph reads the run-time input"),
        ("attend full normalize relu", "torch", None, "torch knows no `relu`"),
        ("heads 2 attend self head 1 { attend full normalize relu }", "torch", "cpu", "refuses"),
        ("attend topk(keys = 2)", "tables", "meta", "its kernel runs on the CPU, not on meta"),
        ("attend full", "bands", None, "the backend `bands` is called `tables` now"),
        ("attend full", "dence", None, "one of auto, .*got 'dence'"),
        ("attend full", None, None, "one of auto, .*got None"),
    ],
)
def test_what_no_length_can_change_is_refused_at_once(
    body: str, backend: str, device: str | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        spec_of(body).compile(backend=backend, device=device)
    if device is None:
        with pytest.raises(ValueError, match=words):
            spec_of(body).emit(backend=backend)


def test_what_depends_on_the_length_is_refused_at_the_call() -> None:
    # every length that a grid has counts, and lengths that a size does not have do not
    spec_of("sequence grid(3, 4) attend axial").compile(backend="scattered")
    module = spec_of("attend window(radius = n - 100)").compile(backend="scattered")
    with pytest.raises(ValueError, match="`radius` must be at least 0, got -50 at n = 50"):
        module(*tensors(1, 1, 50, 50))


def test_plans_of_another_format_are_refused() -> None:
    """As a module has that an older release wrote."""
    text = spec_of("attend full").emit()

    def make(text: str) -> object:
        names: dict[str, Any] = {}
        exec(compile(text, "emitted", "exec"), names)
        return names["Sample"]()

    for change, why in (
        (('"format": 1', '"format": 2'), "plans of format 2"),
        (('"backend": "auto"', '"backend": "fast"'), "backend must be one of"),
    ):
        assert change[0] in text
        with pytest.raises((ImportError, ValueError), match=why):
            make(text.replace(*change))


# --- copies, types, threads ----------------------------------------------------------------------


def test_autocast_leaves_what_is_wrong_to_the_checks() -> None:
    module = module_of("attend full")
    q, k, v = (x.detach().float() for x in tensors(1, 2, 9, 9))
    with torch.autocast("cpu"):
        with pytest.raises(TypeError, match="k must be a tensor, got ndarray"):
            module(q, k.numpy(), v)
        with pytest.raises(TypeError, match=r"got q torch\.int64"):
            module(q.long(), k.long(), v.long())
        assert module(q, k, v).dtype == torch.bfloat16


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


# --- second calls --------------------------------------------------------------------------------

LABELLED = "heads 4 input documents: ids input marks: tokens(at_most = 9)"


def read(body: str, seed: int) -> dict[str, torch.Tensor] | None:
    if LABELLED not in body:
        return None
    generator = torch.Generator().manual_seed(seed)
    marks = torch.arange(40).roll(seed) % 6 == torch.tensor([[0], [1]])
    return {"marks": marks, "documents": torch.randint(4, (2, 40), generator=generator)}


@pytest.mark.parametrize("with_padding", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        f"{LABELLED} attend window(radius = 9) & same(documents) | global(marks)",
        f"{LABELLED} causal attend same(documents) & ~global(marks) score alibi()",
        "heads 4 attend window(radius = 9) score bias(buckets = 8, max_distance = 16)",
    ],
)
def test_inputs_and_tables_of_a_second_call_are_its_own(body: str, with_padding: bool) -> None:
    module, definition = module_of(body), module_of(body, "dense")
    for table in module.parameters():
        torch.nn.init.normal_(table)
    definition.load_state_dict(module.state_dict())
    parts, padding = tensors(2, 4, 40, 40), torch.arange(40) < torch.tensor([[40], [37]])

    def called(module: CompiledAttention, seed: int) -> list[torch.Tensor]:
        inputs = read(body, seed)
        out = module(*parts, key_padding_mask=padding if with_padding else None, inputs=inputs)
        if inputs is not None:
            # what a call was given is its own
            inputs.clear()
        return with_gradients(out, [*parts, *module.parameters()])

    for seed in (0, 1):
        for one, meant in zip(called(module, seed), called(definition, seed), strict=True):
            torch.testing.assert_close(one, meant)
    if LABELLED in body:
        with pytest.raises(ValueError, match="promises at most 9"):
            module(*parts, inputs={**(read(body, 0) or {}), "marks": torch.ones(2, 40) > 0})


def test_padding_that_changes_in_place_is_seen() -> None:
    module, parts = module_of("attend window(radius = 9)"), tensors(2, 4, 40, 40)
    padding = torch.arange(40) < torch.tensor([[40], [37]])
    first, version = module(*parts, key_padding_mask=padding), padding._version
    # torch does not count what is written behind its back
    padding.numpy()[:, 10:] = False
    assert padding._version == version
    found = module(*parts, key_padding_mask=padding)
    assert not torch.equal(found, first)
    fresh = module_of("attend window(radius = 9)")(*parts, key_padding_mask=padding.clone())
    assert torch.equal(found, fresh)
