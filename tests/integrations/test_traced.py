"""Converted models under torch.compile and torch.export: as many graphs as with their own
attention, and the numbers of a call that is not traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_families import BY_STEM
from tiny_models import CAUSAL, LONGFORMER, SINKS, WINDOW, bert, llama, named, tokens
from torch._dynamo.utils import counters

import attnspec
from attnspec.integrations.transformers import convert

SLOW = pytest.mark.slow
COMPILED = pytest.mark.skipif(
    torch.__version__ < "2.11", reason="torch.compile takes a converted model from torch 2.11 on"
)
BOTH_WAYS = "attention near { attend window(radius = 3) | global(first(1)) score alibi() }"


def given(n: int, masked: bool, pad: int = 0) -> dict[str, Any]:
    ids = tokens(2, n)
    mask = torch.ones_like(ids)
    mask[1, n - pad :] = 0
    return {"input_ids": ids, "attention_mask": mask} if masked else {"input_ids": ids}


def compiled(model: Any, **settings: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend="eager", **settings)


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def converted(model: Any, text: str = WINDOW, positions: Any = "absolute") -> Any:
    model.config.use_cache = False
    convert(model, attnspec.parse(text), positions=positions)
    return model


@COMPILED
@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        pytest.param(lambda: llama("sdpa", num_hidden_layers=1), WINDOW, id="llama", marks=SLOW),
        pytest.param(lambda: llama("sdpa"), WINDOW, id="llama of several layers", marks=SLOW),
        pytest.param(lambda: bert("sdpa"), BOTH_WAYS, id="bert", marks=SLOW),
        pytest.param(
            lambda: BY_STEM["GptOss"].build("eager", "ForCausalLM"),
            f"{CAUSAL[:-1]} normalize softmax1 }}",
            id="gpt_oss",
            marks=SLOW,
        ),
    ],
)
def test_one_graph_serves_every_length(make: Callable[[], Any], text: str, masked: bool) -> None:
    model = converted(make(), text)
    traced, before = compiled(model, dynamic=True), graphs()
    for n in (20, 33):
        call = given(n, masked, pad=4)
        real = call["attention_mask"].bool() if masked else ...
        torch.testing.assert_close(traced(**call)[0][real], model(**call)[0][real])
    assert graphs() == before + 1


# transformers keeps hidden states beside its forward
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        pytest.param(lambda: llama("sdpa", num_hidden_layers=1), SINKS, id="llama"),
        pytest.param(lambda: bert("sdpa"), LONGFORMER, id="bert", marks=SLOW),
    ],
)
def test_a_dynamic_length_is_exported(make: Callable[[], Any], text: str, strict: bool) -> None:
    model = converted(make(), text, "real" if text == SINKS else "absolute")
    call, n = given(20, True), torch.export.Dim("n", min=2, max=40)
    shapes = {name: {1: n} for name in call}
    program = torch.export.export(model, (), call, dynamic_shapes=shapes, strict=strict)
    other = given(37, True, pad=4)
    real = other["attention_mask"].bool()
    found = program.module()(**other)[0][real]
    torch.testing.assert_close(found, model(**other)[0][real], rtol=1e-4, atol=1e-4)


@SLOW
@COMPILED
def test_generating_with_a_compiled_step_is_generating() -> None:
    model, ids = converted(llama("sdpa")), tokens(2, 6)
    settings = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    model.config.use_cache = True
    meant, before = model.generate(ids, **settings), graphs()
    model.forward = compiled(model.forward)
    assert torch.equal(model.generate(ids, **settings), meant)
    # the prompt, and the steps
    assert graphs() <= before + 2


@SLOW
@COMPILED
def test_packed_documents_are_refused_by_what_was_traced() -> None:
    traced, call = compiled(converted(llama("sdpa"))), given(8, False)
    traced(**call, position_ids=torch.arange(8)[None])
    with pytest.raises(RuntimeError, match="the model asks for a packed mask"):
        traced(**call, position_ids=(torch.arange(8) % 5)[None])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("attention s { attend where(q - k < 4 and (k <= q or k > n * 2)) }", "statement `causal`"),
        ("attention s { causal attend full scale 1 / sqrt(n) }", "it reads n"),
    ],
)
def test_a_trace_refuses_causality_that_only_pairs_show(text: str, words: str) -> None:
    model = llama(named(text))
    with pytest.raises(attnspec.AttnSpecError, match=words):
        torch.export.export(model, (), given(8, False), strict=False)


@COMPILED
@pytest.mark.parametrize("real", [False, True])
def test_layers_of_a_converted_model_compile_to_one_graph(real: bool) -> None:
    model, call = llama("sdpa"), given(8, True, pad=3)
    convert(model, attnspec.parse(SINKS), positions="real" if real else "absolute")
    with torch.no_grad():
        meant = model(**call, use_cache=False)[0]
        torch._dynamo.reset()
        before = graphs()
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend="eager")
        torch.testing.assert_close(model(**call, use_cache=False)[0], meant)
    assert graphs() == before + 1
