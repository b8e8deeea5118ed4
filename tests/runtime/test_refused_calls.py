"""Calls that do not fit: the type of the error, the shapes, and the way out."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from attention_checks import tensors
from population import spec_of

from attnspec import SelfAttention, SpecError

EVENTS = (
    "causal input time: numbers"
    " attend where(time(k) <= time(q)) & window(radius = 20) | columns(first(2))"
)
INPUTS = (
    "input important: tokens(at_most = 9) input doc: ids input size: length"
    " attend (window(radius = 3) | global(important | first(1))) & same(doc) | prefix(size)"
)


def given(n: int, heads: int = 4, key_heads: int = 4) -> list[torch.Tensor]:
    return [x.detach() for x in tensors(2, heads, n, n, key_heads=key_heads)]


@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        ("attn_mask", "`forward` takes no `attn_mask`: which pairs there are stands in the spec"),
        ("is_causal", "stands in the spec, as the statement `causal`"),
        ("scale", "stands in the spec, as `scale 1 / 8`"),
        ("enable_gqa", "fewer heads than queries as they are"),
        ("doc", "it is an input of the spec, `inputs={'doc': tensor}`"),
        ("dropout", "did you mean `dropout_p`?"),
        ("zzz", "it takes layer, key_padding_mask, dropout_p, inputs, return_lse, query_start"),
    ],
)
def test_an_unknown_keyword_is_refused_with_the_way_out(keyword: str, message: str) -> None:
    spec = spec_of("input doc: ids causal scale 1 / 8 attend same(doc)")
    emitted: dict[str, Any] = {"__name__": "emitted"}
    exec(spec.emit(), emitted)
    for make in (spec.compile, emitted["Sample"]):
        with pytest.raises(TypeError, match=re.escape(message)):
            make()(*given(40), **{keyword: torch.ones(2, 40)})
    layer: Any = SelfAttention(spec_of("causal attend full"), 8, 2)
    x = torch.randn(1, 3, 8)
    cases: list[tuple[Any, list[torch.Tensor]]]
    cases = [(spec.compile().step, given(40)), (layer, [x]), (layer.step, [x])]
    for call, parts in cases:
        with pytest.raises(TypeError, match=f"takes no `{keyword}`: "):
            call(*parts, **{keyword: 1})


Q, K, V = (x.detach() for x in tensors(2, 4, 10, 10))


@pytest.mark.parametrize(
    ("parts", "kind", "words"),
    [
        ((Q, None, V), TypeError, "k must be a tensor, got NoneType"),
        ((Q[0], K, V), ValueError, r"the axes \[B, H, n, d\], got q \[4, 10, 8\]"),
        ((Q[:, :3], K, V), ValueError, "declares 4 heads, .*make it a parameter"),
        ([x.mT.mT.transpose(1, 2) for x in (Q, K, V)], ValueError, r"are these \[B, n, H, d\]\?"),
        ((Q, K[:, :3], V[:, :3]), ValueError, "heads of k and v must divide"),
        ((Q, K[:, :0], V[:, :0]), ValueError, "divide those of q"),
        ((Q, K[:1], V[:1]), ValueError, r"one batch size, got q \[2, 4, 10, 8\], k \[1"),
        ((Q, K, V[:, :2]), ValueError, "same heads and positions"),
        ((Q, K, V[:, :, :9]), ValueError, "same heads and positions"),
        ((Q, K[..., :7], V), ValueError, "one head size"),
        ((Q, K[:, :, :9], V[:, :, :9]), ValueError, "n_q is at most n_k"),
        ((Q, K.float(), V), TypeError, "got q torch.float64, k torch.float32, v torch.float64"),
        ([x.bool() for x in (Q, K, V)], TypeError, "floating type of 16 to 64 bits"),
        ((Q, K.to("meta"), V), ValueError, "one device, got q on cpu, k on meta"),
        ((Q.to_sparse(), K, V), TypeError, "q must be a dense tensor, got one of .* sparse_coo"),
        ((Q[..., :0], K[..., :0], V), ValueError, r"size of at least 1, got q \[2, 4, 10, 0\]"),
        ((Q, K, V[..., :0]), ValueError, r"size of at least 1, .*v \[2, 4, 10, 0\]"),
    ],
)
def test_tensors(parts: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        spec_of("heads 4 attend full").compile()(*parts)


BITS = torch.ones(2, 10, dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"layer": 2}, ValueError, "layer must be between 0 and 1, got 2"),
        ({"layer": -1}, ValueError, "layer must be between 0 and 1, got -1"),
        ({"layer": 1.0}, TypeError, "layer must be an integer, got float"),
        ({"layer": True}, TypeError, "layer must be an integer, got a boolean"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p must be between 0 and 1, got 1.5"),
        ({"dropout_p": float("nan")}, ValueError, "dropout_p must be"),
        ({"dropout_p": "0"}, TypeError, "dropout_p must be a number"),
        ({"key_padding_mask": BITS.float()}, TypeError, "must be bool, got torch.float32"),
        ({"key_padding_mask": BITS[:, 1:]}, ValueError, r"shape \[2, 10\], got \[2, 9\]"),
        ({"key_padding_mask": BITS.to("meta")}, ValueError, "must be on cpu as q, got meta"),
        ({"key_padding_mask": [True]}, TypeError, "must be a tensor, got list"),
        ({"key_padding_mask": BITS.to_sparse()}, TypeError, "key_padding_mask must be a dense"),
        ({"inputs": {"x": Q}}, ValueError, "has no input 'x'; its inputs: none"),
    ],
)
def test_options(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    module = spec_of("layers 2 heads 4 attend full").compile()
    with pytest.raises(kind, match=words):
        module(Q, K, V, **options)
    assert module(Q, K, V, layer=np.int64(1)).shape == Q.shape


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"important": None}, ValueError, "needs its input `important`"),
        ({"other": BITS}, ValueError, "no input 'other'; its inputs: important, doc, size"),
        ({"important": torch.ones(2, 60)}, TypeError, "`important` must be bool, got torch.float"),
        ({"important": torch.ones(2, 60).bool()}, ValueError, "at most 9 tokens, got 60"),
        ({"doc": torch.ones(2, 60)}, TypeError, "`doc` must be an integer type"),
        ({"doc": torch.ones(2, 61).long()}, ValueError, r"`doc` must have the shape \[2, 60\]"),
        ({"size": torch.ones(2, 1).long()}, ValueError, r"`size` must have the shape \[2\]"),
        ({"size": 3}, TypeError, "`size` must be a tensor, got int"),
    ],
)
def test_inputs(change: dict[str, object], kind: type[Exception], words: str) -> None:
    marks = torch.arange(60)[None] % 11 == torch.arange(2)[:, None]
    doc = torch.arange(60).expand(2, 60) // 20
    inputs = {"important": marks, "doc": doc, "size": torch.arange(2), **change}
    module = spec_of(INPUTS).compile()
    with pytest.raises(kind, match=words):
        module(*given(60), inputs={name: x for name, x in inputs.items() if x is not None})
    with pytest.raises(TypeError, match="mapping"):
        module(*given(60), inputs=[1])


@pytest.mark.parametrize(
    ("time", "error", "message"),
    [
        (torch.zeros(2, 5) > 0, TypeError, "floating type, got torch.bool"),
        (torch.zeros(2, 5, dtype=torch.complex64), TypeError, "got torch.complex64"),
        (torch.zeros(5), ValueError, r"got \[5\]"),
        (np.zeros((2, 5)), TypeError, "must be a tensor, got ndarray"),
        (None, ValueError, r"integer or floating type \[B, n_k\]"),
    ],
)
def test_inputs_of_numbers(time: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        spec_of(EVENTS).compile()(*given(5), inputs=None if time is None else {"time": time})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("t(k) // (n - 5) < 2", "of `n`, which may be 0 at n = 5"),
        ("t(k) % head < 2", "of `head`, which may be 0 at n = 5"),
        ("t(k) // 0 < 2", "divides by 0: keep"),
        ("t(k) * 2**61 < 5", r"may be above 2\*\*62"),
        ("4 / t(k) > 0", "divides by a whole number, of `t`, which may be 0"),
    ],
)
def test_numbers_that_may_be_0_or_too_large_are_named(body: str, reason: str) -> None:
    spec, t = spec_of(f"input t: numbers attend where({body})"), torch.arange(5)
    for ask in (
        lambda: spec.compile()(*given(5), inputs={"t": t.expand(2, 5)}),
        lambda: spec.mask(5, inputs={"t": t.numpy()}),
    ):
        # a mask is of one length and head
        with pytest.raises(ValueError, match=f"{reason}|divides by 0"):
            ask()


def test_a_step_knows_no_later_numbers() -> None:
    graph = "where(t(q) * t(k) <= 9) & window(before = 3, after = 0)"
    module, q = spec_of(f"causal input t: numbers attend {graph}").compile(), Q[:1, :1, :2]
    _, state = module.step(q, q, q, inputs={"t": torch.ones(1, 2, dtype=torch.long)})
    with pytest.raises(ValueError, match=r"2\*\*62"):
        module.step(q, q, q, state, inputs={"t": torch.full((1, 2), 2**40)})
    length = spec_of("causal input p: length attend where(k < p)").compile()
    with pytest.raises(ValueError, match="the length `p`, a number of the whole sequence"):
        length.step(q, q, q, inputs={"p": torch.tensor([1])})
    with pytest.raises(SpecError, match="`p` is a number"):
        spec_of("input p: length attend where(k < p(k))")


def test_extra_tokens_have_no_number() -> None:
    body = "extra_tokens 2 input t: numbers attend where(t(k) <= t(q)) | columns(first(2))"
    layer, x, time = SelfAttention(spec_of(body), 16, 2), torch.randn(2, 7, 16), torch.rand(2, 7)
    assert torch.isfinite(layer(x, inputs={"t": time})).all()
    with pytest.raises(TypeError, match="real beside extra tokens"):
        layer(x, inputs={"t": time.long()})


# --- before a call -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "kind", "words"),
    [
        ("foo", ValueError, "one that torch knows, for example 'cpu' or 'cuda', got 'foo'"),
        ("cuda:63", ValueError, r"one that is here, cpu.*, got 'cuda:63'"),
        (3, TypeError, "a torch.device or its name, .* got int"),
    ],
)
def test_devices_that_are_not_there(device: Any, kind: type[Exception], words: str) -> None:
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
def test_a_backend_that_takes_no_length_is_refused_at_once(
    body: str, backend: Any, device: str | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        spec_of(body).compile(backend=backend, device=device)
    if device is None:
        with pytest.raises(ValueError, match=words):
            spec_of(body).emit(backend=backend)


def test_a_length_that_a_size_does_not_have_is_refused_at_the_call() -> None:
    # every length that a grid has counts, and lengths that a size does not have do not
    spec_of("sequence grid(3, 4) attend axial").compile(backend="scattered")
    module = spec_of("attend window(radius = n - 100)").compile(backend="scattered")
    with pytest.raises(ValueError, match="`radius` must be at least 0, got -50 at n = 50"):
        module(*given(50))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"format": 1', '"format": 2', "plans of format 2"),
        ('"backend": "auto"', '"backend": "fast"', "backend must be one of"),
    ],
)
def test_plans_of_another_format_are_refused(old: str, new: str, why: str) -> None:
    text = spec_of("attend full").emit()
    assert old in text
    with pytest.raises((ImportError, ValueError), match=why):
        exec(text.replace(old, new) + "\nSample()", {})


@pytest.mark.parametrize(
    "body",
    [
        "attend linear(feature = identity)",
        "attend linear(normalize = none)",
        "attend window(radius = 3) + favor(features = 8, kind = trig)",
        "attend efficient()",
        "attend linformer(rank = 4)",
        "causal heads 4 attend full head 1 { attend rfa(features = 8) }",
        "causal attend window(radius = 2) normalize sigmoid",
        "input d: ids attend same(d) normalize relu",
    ],
)
def test_weights_without_a_positive_denominator_have_no_log_sum_exps(body: str) -> None:
    """Nor where nothing is computed."""
    module = spec_of(body).compile(head_size=8)
    for batch, queries, n in ((2, 30, 30), (2, 0, 30), (0, 30, 30), (2, 0, 0)):
        inputs = {"d": torch.zeros(batch, n, dtype=torch.int64)} if "input" in body else None
        parts = tensors(batch, 4, queries, n)
        with pytest.raises(ValueError, match="log-sum-exps, and what `sample` divides by has no"):
            module(*parts, inputs=inputs, return_lse=True)
        module(*parts, inputs=inputs)
    if body.startswith("causal"):
        with pytest.raises(ValueError, match="divides by has no logarithm"):
            module.step(*tensors(2, 4, 5, 5), keep_all=True, return_lse=True)
