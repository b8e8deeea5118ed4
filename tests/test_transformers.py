"""A spec as the attention of tiny random models, held against transformers' own attention."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import attnspec
from attnspec.integrations.model_mask import ModelMask, kind_of, model_mask
from attnspec.integrations.transformers import register

transformers = pytest.importorskip(
    "transformers", reason="needs transformers: pip install 'attnspec[hf]'"
)
masking = pytest.importorskip("transformers.masking_utils")

TOLERANCE = 1e-5

FULL = "attention full_attention { attend full }"
CAUSAL = "attention past { causal attend full }"
LONGFORMER = "attention longformer { attend window(radius = 3) | global(first(1)) }"
WINDOW = "attention recent { causal attend window(before = 4, after = 0) }"
SINKS = "attention sinks { causal attend window(before = 2, after = 0) | columns(first(2)) }"

_numbers = itertools.count()


def named(text: str, **settings: Any) -> str:
    """Registers the spec of a text under a name of its own."""
    return register(attnspec.parse(text), f"attnspec_test_{next(_numbers)}", **settings)


def bert(attention: str, **settings: Any) -> Any:
    config = transformers.BertConfig(
        vocab_size=61,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=40,
        # strong enough for attention to matter in random layers
        initializer_range=0.2,
        **settings,
    )
    torch.manual_seed(1)
    model = transformers.BertModel(config).eval()
    model.set_attn_implementation(attention)
    return model


def llama(attention: str, **settings: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.2,
        **settings,
    )
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config).eval()
    model.set_attn_implementation(attention)
    return model


def tokens(batch: int, n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(1, 61, (batch, n), generator=generator)


def padded(n: int, left: bool) -> torch.Tensor:
    """int [3, n]: samples of n, n - 5 and 1 tokens."""
    mask = torch.zeros(3, n, dtype=torch.long)
    for row, length in enumerate((n, n - 5, 1)):
        mask[row, n - length if left else 0 : n if left else length] = 1
    return mask


def hidden(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        out = model(ids, attention_mask=mask)
    return out.logits if "logits" in out else out.last_hidden_state  # type: ignore[no-any-return]


def dense(
    masks: Callable[[int, int], np.ndarray],
) -> Callable[..., tuple[torch.Tensor, None]]:
    """transformers' attention function for a dense mask per layer: the definition, by softmax."""

    def attend(
        module: Any, q: Any, k: Any, v: Any, mask: ModelMask, *, scaling: float, **_: object
    ) -> tuple[torch.Tensor, None]:
        n = k.shape[2]
        allowed = torch.from_numpy(masks(n, module.layer_idx))[n - q.shape[2] :]
        if mask.padding is not None:
            allowed = allowed & mask.padding[:, None, None, :]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2) * scaling).masked_fill(~allowed, -torch.inf)
        weights = scores.softmax(-1).masked_fill(~allowed, 0.0)
        return (weights @ v).transpose(1, 2).contiguous(), None

    return attend


def reference(masks: Callable[[int, int], np.ndarray], mask_function: Any = model_mask) -> str:
    name = f"reference_{next(_numbers)}"
    transformers.AttentionInterface.register(name, dense(masks))
    transformers.AttentionMaskInterface.register(name, mask_function)
    return name


def difference(a: torch.Tensor, b: torch.Tensor, real: torch.Tensor | None = None) -> float:
    """The largest absolute difference at real tokens."""
    assert a.shape == b.shape
    apart = (a - b).abs()
    apart = apart if real is None else apart[real.bool()]
    assert not apart.isnan().any()
    return float(apart.max())


@pytest.fixture(autouse=True)
def _no_names_left() -> Iterator[None]:
    attention = transformers.AttentionInterface._global_mapping
    masks = transformers.AttentionMaskInterface._global_mapping
    before = dict(attention), dict(masks)
    yield
    for mapping, kept in zip((attention, masks), before, strict=True):
        mapping.clear()
        mapping.update(kept)


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


# --- refusals ---------------------------------------------------------------------------------


def test_a_mask_of_the_users_own_is_refused() -> None:
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    with pytest.raises(attnspec.AttnSpecError, match=r"got a mask \[1, 1, 5, 5\]"):
        hidden(bert(named(FULL)), tokens(1, 5), mask)


def test_packed_sequences_are_refused() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(attnspec.AttnSpecError, match="asks for a packed mask"):
        llama(named(CAUSAL))(tokens(1, 6), position_ids=positions, use_cache=False)


def test_sliding_windows_of_the_model_are_refused() -> None:
    config = transformers.MistralConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        sliding_window=4,
    )
    model = transformers.MistralForCausalLM(config).eval()
    model.set_attn_implementation(named(CAUSAL))
    with pytest.raises(attnspec.AttnSpecError, match=r"`sliding_window`.*config.sliding_window"):
        model(tokens(1, 9))


def test_cross_attention_is_refused() -> None:
    model = bert(named(CAUSAL), is_decoder=True, add_cross_attention=True)
    with pytest.raises(attnspec.AttnSpecError, match="cross-attention"):
        model(tokens(1, 5), encoder_hidden_states=torch.zeros(1, 5, 24))


@pytest.fixture
def call() -> Callable[..., Any]:
    """The attention function of a full graph, on four queries and keys of an encoder."""
    attention = transformers.AttentionInterface()[named(FULL)]

    def call(mask: ModelMask | None = None, **settings: Any) -> Any:
        q, k, v = torch.randn(3, 1, 2, 4, 8)
        module = SimpleNamespace(is_causal=False, layer_idx=0, training=False)
        return attention(module, q, k, v, mask, **{"scaling": 8**-0.5, "dropout": 0.0} | settings)

    return call


@pytest.mark.parametrize(
    "keyword",
    ["softcap", "s_aux", "position_bias", "sliding_window", "cache", "cu_seq_lens_q", "novelty"],
)
def test_what_changes_the_mathematics_is_refused(call: Callable[..., Any], keyword: str) -> None:
    with pytest.raises(attnspec.AttnSpecError, match=f"passes `{keyword}`"):
        call(**{keyword: torch.ones(2)})
    assert call(**{keyword: None})[0].shape == (1, 4, 2, 8)


def test_weights_cannot_be_had(call: Callable[..., Any]) -> None:
    with pytest.raises(attnspec.AttnSpecError, match="`output_attentions`"):
        call(output_attentions=True)


def test_the_output_is_contiguous_and_without_weights(call: Callable[..., Any]) -> None:
    out, weights = call(position_ids=torch.arange(4), use_cache=True)
    assert out.shape == (1, 4, 2, 8)
    assert out.is_contiguous()
    assert weights is None


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (ModelMask("causal", 4, 8, 12, 3, None), "starts at position 3"),
        (ModelMask("causal", 3, 0, 4, 0, None), "made for 3 queries"),
        (ModelMask("causal", 4, 2, 6, 0, None), "4 queries and 6 keys, got 4 and 4"),
        (ModelMask("bidirectional", 4, 0, 9, 0, None), "cross-attention of 4 queries and 9 keys"),
        (ModelMask("custom", 4, 0, 4, 0, None), "asks for a custom mask"),
    ],
)
def test_masks_that_do_not_fit(call: Callable[..., Any], mask: ModelMask, message: str) -> None:
    with pytest.raises(attnspec.AttnSpecError, match=message):
        call(mask)


def test_without_a_mask_the_queries_are_all_positions(call: Callable[..., Any]) -> None:
    module = SimpleNamespace(is_causal=True, layer_idx=0, training=False)
    attention = transformers.AttentionInterface()[named(CAUSAL)]
    q, k = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 6, 8)
    with pytest.raises(attnspec.AttnSpecError, match="got 4 and 6"):
        attention(module, q, k, k, None)
    # and a decoder is a decoder without a mask, too
    with pytest.raises(attnspec.AttnSpecError, match="must not read the future"):
        call(is_causal=True)


# --- scale ------------------------------------------------------------------------------------


def test_the_models_scale_is_used(call: Callable[..., Any]) -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    torch.manual_seed(3)
    out, _ = call(scaling=0.7)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.7)
    assert difference(out, wanted.transpose(1, 2)) < TOLERANCE


def test_a_declared_scale_must_be_the_models() -> None:
    text = "attention scaled { attend full scale 0.5 }"
    with pytest.raises(attnspec.AttnSpecError, match="must be the model's"):
        hidden(bert(named(text)), tokens(1, 5))
    same = "attention scaled { attend full scale 1 / sqrt(6) }"
    ids = tokens(1, 5)
    assert difference(hidden(bert(named(same)), ids), hidden(bert("eager"), ids)) < TOLERANCE


# --- names ------------------------------------------------------------------------------------


def test_the_default_name() -> None:
    assert register(attnspec.parse(FULL)) == "attnspec_full_attention"


def test_a_name_stands_for_one_spec() -> None:
    spec = attnspec.parse(CAUSAL)
    name = register(spec, "attnspec_once")
    assert register(attnspec.parse(CAUSAL), name) == name
    with pytest.raises(attnspec.AttnSpecError, match="registered for another"):
        register(attnspec.parse(WINDOW), name)
    with pytest.raises(attnspec.AttnSpecError, match="registered for another"):
        register(spec, name, backend="dense")
    ids = tokens(1, 9)
    before = hidden(llama(name), ids)
    assert register(attnspec.parse(WINDOW), name, override=True) == name
    assert difference(hidden(llama(name), ids), before) > 0.001


@pytest.mark.parametrize("name", ["owner/name", "a-b", "1a", "", "my_sdpa", "flashy", "eager"])
def test_names_that_mean_something_to_transformers(name: str) -> None:
    with pytest.raises(attnspec.AttnSpecError, match="a name must"):
        register(attnspec.parse(FULL), name)


def test_a_compiled_module_is_taken_as_it_is() -> None:
    module = attnspec.parse(LONGFORMER).compile()
    name = register(module, "attnspec_module")
    assert register(module, name) == name
    ids = tokens(2, 11)
    assert difference(hidden(bert(name), ids), hidden(bert(named(LONGFORMER)), ids)) == 0.0
    with pytest.raises(attnspec.AttnSpecError, match="`backend` must be left out"):
        register(module, "attnspec_other", backend="dense")


@pytest.mark.parametrize("wrong", [None, "longformer", torch.nn.Linear(2, 2)])
def test_only_attentions_are_registered(wrong: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(type(wrong).__name__)):
        register(wrong)


# --- what the mask function says ----------------------------------------------------------------


def test_kinds_of_masks() -> None:
    ids = torch.zeros(1, 3, dtype=torch.long)
    causal = masking.causal_mask_function
    packed = masking.packed_sequence_compatibility_function(causal, ids, ids)
    overlay = masking.or_masks(causal, masking.blockwise_overlay(ids))
    chunked = masking.chunked_causal_mask_function(4, torch.zeros(1))
    assert kind_of(causal) == "causal"
    assert kind_of(masking.bidirectional_mask_function) == "bidirectional"
    assert kind_of(masking.sliding_window_causal_mask_function(4)) == "sliding"
    assert kind_of(masking.sliding_window_bidirectional_mask_function(4)) == "sliding"
    assert kind_of(chunked) == "chunked"
    assert kind_of(packed) == "packed"
    assert kind_of(overlay) == "blockwise"
    assert kind_of(lambda b, h, q, k: k <= q) == "custom"


def test_the_query_offset_is_read_at_once() -> None:
    counter = torch.tensor(4)
    facts = model_mask(
        q_length=2, kv_length=9, q_offset=counter, mask_function=masking.causal_mask_function
    )
    counter += 1
    assert (facts.q_offset, facts.end) == (4, 6)
    with pytest.raises(FrozenInstanceError):
        facts.q_offset = 5  # type: ignore[misc]


@pytest.mark.parametrize("width", [3, 6, 8])
def test_padding_is_cut_or_filled_to_the_positions_so_far(width: int) -> None:
    mask = torch.ones(2, width, dtype=torch.long)
    mask[1, 0] = 0
    facts = model_mask(
        q_length=2,
        kv_length=9,
        q_offset=4,
        mask_function=masking.causal_mask_function,
        attention_mask=mask,
    )
    assert facts.padding is not None
    wanted = [
        [column < width and (row == 0 or column > 0) for column in range(6)] for row in (0, 1)
    ]
    assert facts.padding.tolist() == wanted
    assert facts.left_padded
