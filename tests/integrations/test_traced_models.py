"""Converted models under torch.compile and torch.export: as many graphs as with their own
attention, and the numbers of a call that is not traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import CAUSAL, LONGFORMER, SINKS, WINDOW, bert, llama, named, transformers
from torch._dynamo.utils import counters

import attnspec
from attnspec.integrations.transformers import convert

SLOW = pytest.mark.slow
COMPILED = pytest.mark.skipif(
    torch.__version__ < "2.11",  # type: ignore[operator]
    reason="torch.compile takes a converted model from torch 2.11 on",
)
BOTH_WAYS = "attention near { attend window(radius = 3) | global(first(1)) score alibi() }"


def gemma() -> Any:
    config = transformers.Gemma3TextConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=32,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=16,
        initializer_range=0.2,
    )
    torch.manual_seed(1)
    return transformers.Gemma3ForCausalLM(config).eval()


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=32,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    torch.manual_seed(1)
    return transformers.GptOssForCausalLM(config).eval()


def called(n: int, masked: bool, pad: int = 0) -> dict[str, Any]:
    ids = torch.randint(3, 61, (2, n), generator=torch.Generator().manual_seed(n))
    mask = torch.ones_like(ids)
    mask[1, n - pad :] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    return given if masked else {"input_ids": ids}


def compiled(model: Any, **settings: Any) -> Any:
    return torch.compile(model, fullgraph=True, backend="eager", **settings)


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@COMPILED
@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        pytest.param(lambda: llama("sdpa"), WINDOW, id="llama"),
        pytest.param(lambda: bert("sdpa"), BOTH_WAYS, id="bert", marks=SLOW),
        pytest.param(gemma, SINKS, id="gemma", marks=SLOW),
        pytest.param(gpt_oss, f"{CAUSAL[:-1]} normalize softmax1 }}", id="gpt_oss", marks=SLOW),
    ],
)
def test_one_graph_serves_every_length(make: Callable[[], Any], text: str, masked: bool) -> None:
    model = make()
    model.config.use_cache = False
    convert(model, attnspec.parse(text))
    torch._dynamo.reset()
    traced, before = compiled(model, dynamic=True), graphs()
    for n in (20, 33):
        given = called(n, masked, pad=4)
        real = given["attention_mask"].bool() if masked else ...
        torch.testing.assert_close(traced(**given)[0][real], model(**given)[0][real])
    assert graphs() == before + 1


@pytest.mark.slow
# transformers keeps hidden states beside its forward
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        pytest.param(lambda: llama("sdpa"), SINKS, id="llama"),
        pytest.param(lambda: bert("sdpa"), LONGFORMER, id="bert"),
    ],
)
def test_a_dynamic_length_is_exported(make: Callable[[], Any], text: str, strict: bool) -> None:
    model = make()
    model.config.use_cache = False
    convert(model, attnspec.parse(text))
    given, n = called(20, True), torch.export.Dim("n", min=2, max=40)
    shapes = {name: {1: n} for name in given}
    program = torch.export.export(model, (), given, dynamic_shapes=shapes, strict=strict)
    other = called(37, True, pad=4)
    real = other["attention_mask"].bool()
    found = program.module()(**other)[0][real]
    torch.testing.assert_close(found, model(**other)[0][real], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 3])
def test_a_step_with_a_static_cache_is_one_graph(left: int) -> None:
    model = llama("sdpa")
    convert(model, attnspec.parse(WINDOW))
    ids, mask = called(16, False)["input_ids"], torch.ones(2, 24, dtype=torch.long)
    mask[1, :left] = 0
    cache = transformers.StaticCache(config=model.config, max_cache_len=24)
    own = transformers.DynamicCache()
    torch._dynamo.reset()
    traced, before = compiled(model), graphs()
    with torch.no_grad():
        for each in (cache, own):
            model(input_ids=ids[:, :10], attention_mask=mask[:, :10], past_key_values=each)
        for i in range(10, 16):
            rest = {"input_ids": ids[:, i : i + 1], "position_ids": torch.tensor([[i]])}
            found = traced(**rest, attention_mask=mask, past_key_values=cache).logits
            meant = model(**rest, attention_mask=mask[:, : i + 1], past_key_values=own).logits
            torch.testing.assert_close(found, meant)
    assert graphs() == before + 1


@pytest.mark.slow
def test_generating_with_a_compiled_step_is_generating() -> None:
    model = llama("sdpa")
    convert(model, attnspec.parse(WINDOW))
    ids = called(6, False)["input_ids"]
    settings = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    meant, whole = model.generate(ids, **settings), model.forward
    torch._dynamo.reset()
    before = graphs()
    model.forward = torch.compile(whole, backend="eager", fullgraph=True)
    assert torch.equal(model.generate(ids, **settings), meant)
    # the prompt, and the steps
    assert graphs() <= before + 2


@pytest.mark.slow
def test_packed_documents_are_refused_by_what_was_traced() -> None:
    model = llama("sdpa")
    model.config.use_cache = False
    convert(model, attnspec.parse(WINDOW))
    torch._dynamo.reset()
    traced, given = compiled(model), called(8, False)
    traced(**given, position_ids=torch.arange(8)[None])
    with pytest.raises(RuntimeError, match="this one asks for a packed mask"):
        traced(**given, position_ids=(torch.arange(8) % 5)[None])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("attention s { attend where(q - k < 4 and (k <= q or k > n * 2)) }", "write `causal`"),
        ("attention s { causal attend full scale 1 / sqrt(n) }", "it reads n"),
    ],
)
def test_a_trace_refuses_causality_that_only_pairs_show(text: str, words: str) -> None:
    model, given = llama("sdpa"), called(8, False)
    model.set_attn_implementation(named(text))
    torch._dynamo.reset()
    with pytest.raises(attnspec.AttnSpecError, match=words):
        torch.export.export(model, (), given, strict=False)


@COMPILED
def test_layers_of_a_converted_model_compile_to_one_graph() -> None:
    model = llama("sdpa")
    convert(model, attnspec.parse(WINDOW))
    given = called(8, False)
    with torch.no_grad():
        meant = model(**given, use_cache=False)[0]
        torch._dynamo.reset()
        before = graphs()
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend="eager")
        torch.testing.assert_close(model(**given, use_cache=False)[0], meant)
    assert graphs() == before + 1
