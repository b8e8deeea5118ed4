"""A spec as the attention of tiny random models, held against transformers' own attention."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import (
    CAUSAL,
    FULL,
    LONGFORMER,
    SINKS,
    TOLERANCE,
    WINDOW,
    bert,
    difference,
    hidden,
    llama,
    named,
    names_restored,
    padded,
    reference,
    tokens,
    transformers,
)

import attnspec
from attnspec.integrations.transformers import register


@pytest.fixture(autouse=True)
def _no_names_left() -> Iterator[None]:
    with names_restored():
        yield


# --- encoders ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 6, 17])
def test_a_full_graph_is_the_model_itself(n: int) -> None:
    ids = tokens(3, n)
    wanted = hidden(bert("eager"), ids)
    assert difference(hidden(bert(named(FULL)), ids), wanted) < TOLERANCE


@pytest.mark.parametrize("left", [False, True])
def test_a_full_graph_keeps_padding(left: bool) -> None:
    ids, mask = tokens(3, 13), padded(13, left)
    wanted = hidden(bert("eager"), ids, mask)
    assert difference(hidden(bert(named(FULL)), ids, mask), wanted, mask) < TOLERANCE


def test_without_the_mask_function_padding_is_dropped() -> None:
    # what `register` prevents: the same attention function, registered alone
    ids, mask = tokens(3, 13), padded(13, left=False)
    attention = transformers.AttentionInterface()[named(FULL)]
    transformers.AttentionInterface.register("attnspec_alone", attention)
    wanted = hidden(bert("eager"), ids, mask)
    assert difference(hidden(bert("attnspec_alone"), ids, mask), wanted, mask) > 0.01


def test_window_and_global_are_the_dense_definition() -> None:
    spec = attnspec.parse(LONGFORMER)
    ids, mask = tokens(3, 19), padded(19, left=False)
    wanted = hidden(bert(reference(lambda n, layer: spec.mask(n))), ids, mask)
    got = hidden(bert(named(LONGFORMER)), ids, mask)
    assert difference(got, wanted, mask) < TOLERANCE
    # and the pattern is there: the model without it says something else
    assert difference(got, hidden(bert("eager"), ids, mask), mask) > 0.01


def test_padding_on_the_left_of_named_positions_warns() -> None:
    ids, mask = tokens(3, 13), padded(13, left=True)
    with pytest.warns(UserWarning, match="count from the padding"):
        hidden(bert(named(LONGFORMER)), ids, mask)


def test_layers_differ_by_layer_idx() -> None:
    text = """attention layered { layers 3 attend full
        layer 0 { attend self } layer 2 { attend window(radius = 2) } }"""
    spec = attnspec.parse(text)
    ids = tokens(2, 11)
    got = hidden(bert(named(text)), ids)
    wanted = hidden(bert(reference(lambda n, layer: spec.mask(n, layer))), ids)
    assert difference(got, wanted) < TOLERANCE
    reversed_layers = reference(lambda n, layer: spec.mask(n, 2 - layer))
    assert difference(got, hidden(bert(reversed_layers), ids)) > 0.01


def test_a_model_with_more_layers_than_the_spec_is_refused() -> None:
    text = "attention layered { layers 2 attend full layer 0 { attend self } }"
    with pytest.raises(attnspec.AttnSpecError, match="has 2 layers, the model asks for layer 2"):
        hidden(bert(named(text)), tokens(1, 4))


def test_heads_differ() -> None:
    text = "attention headed { heads 4 attend full head 1..2 { attend window(radius = 1) } }"
    spec = attnspec.parse(text)

    def masks(n: int, layer: int) -> np.ndarray:
        return np.stack([spec.mask(n, layer, head) for head in range(4)])

    ids, mask = tokens(3, 12), padded(12, left=False)
    wanted = hidden(bert(reference(masks)), ids, mask)
    assert difference(hidden(bert(named(text)), ids, mask), wanted, mask) < TOLERANCE


def test_run_time_inputs_pass_through_the_model() -> None:
    text = """attention marked { input important: tokens
        attend window(radius = 1) | global(important) }"""
    important = torch.zeros(2, 12, dtype=torch.bool)
    important[:, 4] = True
    spec = attnspec.parse(text)
    wanted = reference(lambda n, layer: spec.mask(n, inputs={"important": important[0].numpy()}))
    ids = tokens(2, 12)
    with torch.no_grad():
        got = bert(named(text))(ids, attnspec_inputs={"important": important}).last_hidden_state
    assert difference(got, hidden(bert(wanted), ids)) < TOLERANCE


def test_gradients_are_the_models_own() -> None:
    ids, mask = tokens(3, 9), padded(9, left=False)
    weight = torch.randn(3, 9, 24) * mask[..., None]
    gradients = []
    for attention in ("eager", named(FULL)):
        model = bert(attention)
        (model(ids, attention_mask=mask).last_hidden_state * weight).sum().backward()
        gradients.append(model.encoder.layer[0].attention.self.key.weight.grad)
    assert float(gradients[0].abs().max()) > 0.1
    assert difference(*gradients) < TOLERANCE * float(gradients[0].abs().max())


def test_dropout_acts_in_training_only() -> None:
    ids = tokens(2, 9)
    model = bert(named(FULL), attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0)
    assert difference(hidden(model, ids), hidden(model, ids)) == 0.0
    model.train()
    assert difference(hidden(model, ids), hidden(model, ids)) > 0.01


# --- decoders ---------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [False, True])
def test_a_causal_full_graph_is_the_model_itself(left: bool) -> None:
    ids, mask = tokens(3, 13), padded(13, left)
    wanted = hidden(llama("eager"), ids, mask)
    assert difference(hidden(llama(named(CAUSAL)), ids, mask), wanted, mask) < TOLERANCE


def step_by_step(model: Any, ids: torch.Tensor, cache: Any, first: int) -> torch.Tensor:
    """Logits [B, n, vocabulary]: `first` tokens in one go, the others one at a time."""
    parts = []
    with torch.no_grad():
        for start, stop in itertools.pairwise((0, *range(first, ids.shape[1] + 1))):
            out = model(ids[:, start:stop], past_key_values=cache, use_cache=True)
            parts.append(out.logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("text", [WINDOW, SINKS])
@pytest.mark.parametrize("static", [False, True])
def test_decoding_with_a_cache_is_prefill(text: str, static: bool) -> None:
    ids = tokens(2, 15)
    model = llama(named(text))
    wanted = hidden(model, ids)
    cache = (
        transformers.StaticCache(config=model.config, max_cache_len=23)
        if static
        else transformers.DynamicCache(config=model.config)
    )
    assert difference(step_by_step(model, ids, cache, first=6), wanted) < TOLERANCE
    spec = attnspec.parse(text)
    dense_model = llama(reference(lambda n, layer: spec.mask(n)))
    assert difference(wanted, hidden(dense_model, ids)) < TOLERANCE


def test_a_prompt_in_chunks_is_prefill() -> None:
    ids = tokens(2, 14)
    model = llama(named(SINKS))
    cache = transformers.DynamicCache(config=model.config)
    parts = []
    with torch.no_grad():
        for start, stop in ((0, 3), (3, 10), (10, 14)):
            parts.append(model(ids[:, start:stop], past_key_values=cache).logits)
    assert difference(torch.cat(parts, 1), hidden(model, ids)) < TOLERANCE


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(cache: str) -> None:
    # a batch padded on the left goes on as each of its samples does alone
    model = llama(named(WINDOW))
    ids, mask = tokens(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    if cache == "static":
        settings |= {"cache_implementation": "static", "disable_compile": True}
    got = model.generate(ids, attention_mask=mask, **settings)
    assert got.shape == (2, 15)
    for row, start in enumerate((0, 3)):
        alone = ids[row : row + 1, start:]
        for _ in range(8):
            following = hidden(model, alone)[:, -1].argmax(-1, keepdim=True)
            alone = torch.cat([alone, following], 1)
        assert got[row, start:].tolist() == alone[0].tolist()


def test_a_decoder_refuses_to_read_the_future() -> None:
    text = LONGFORMER.replace("longformer", "leaky")
    message = "position 0 reads position 1; write `causal` in the spec"
    with pytest.raises(attnspec.AttnSpecError, match=message):
        hidden(llama(named(text)), tokens(1, 9))


@pytest.mark.parametrize(
    "graph", ["window(before = 3, after = 0)", "full & causal", "causal - self | self"]
)
def test_a_decoder_takes_what_stays_in_the_past_without_saying_causal(graph: str) -> None:
    text = f"attention past_only {{ attend {graph} }}"
    spec = attnspec.parse(text)
    ids = tokens(2, 9)
    wanted = hidden(llama(reference(lambda n, layer: spec.mask(n))), ids)
    assert difference(hidden(llama(named(text)), ids), wanted) < TOLERANCE


def test_a_decoder_refuses_pairs_that_only_run_time_knows() -> None:
    text = "attention documents { input document: ids attend same(document) }"
    with pytest.raises(attnspec.AttnSpecError, match="depend on the input `document`"):
        llama(named(text))(
            tokens(1, 4), attnspec_inputs={"document": torch.zeros(1, 4, dtype=torch.long)}
        )


@pytest.mark.parametrize("name", [3, b"near", ["near"]])
def test_a_name_that_is_no_text_is_refused(name: Any) -> None:
    with pytest.raises(TypeError, match="a name must be a text, got"):
        register(attnspec.parse("attention a { attend full }"), name)
