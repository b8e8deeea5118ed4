"""What `register` and its two functions promise: refusals, scale, names, what masks tell."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import (
    CAUSAL,
    FULL,
    LONGFORMER,
    TOLERANCE,
    WINDOW,
    bert,
    difference,
    hidden,
    llama,
    named,
    names_restored,
    tokens,
    transformers,
)

import attnspec
from attnspec.integrations.causality import require_past_only
from attnspec.integrations.model_mask import ModelMask, kind_of, model_mask
from attnspec.integrations.transformers import register

masking = pytest.importorskip("transformers.masking_utils")


@pytest.fixture(autouse=True)
def _no_names_left() -> Iterator[None]:
    with names_restored():
        yield


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
    with pytest.raises(
        attnspec.AttnSpecError, match="build the model with `sliding_window = None`"
    ):
        model(tokens(1, 9))


def test_cross_attention_is_refused() -> None:
    model = bert(named(CAUSAL), is_decoder=True, add_cross_attention=True)
    with pytest.raises(attnspec.AttnSpecError, match="cross-attention"):
        model(tokens(1, 5), encoder_hidden_states=torch.zeros(1, 5, 24))


def test_an_encoder_and_decoder_is_refused() -> None:
    config = transformers.BartConfig(
        vocab_size=61,
        d_model=24,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
    )
    model = transformers.BartModel(config).eval()
    model.set_attn_implementation(named(CAUSAL))
    # as many queries as keys: only the module tells
    with pytest.raises(attnspec.AttnSpecError, match="layers of this decoder read the encoder's"):
        model(tokens(1, 5), attention_mask=torch.ones(1, 5), decoder_input_ids=tokens(1, 5))


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
    ["softcap", "position_bias", "sliding_window", "cache", "cu_seq_lens_q", "novelty"],
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
        (ModelMask("causal", 4, 8, 12, 3, None), "4 queries and 12 keys"),
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


@pytest.mark.parametrize("mask", [None, ModelMask("bidirectional", 4, 0, 4, 0, None)])
def test_a_decoder_is_one_by_its_word(call: Callable[..., Any], mask: ModelMask | None) -> None:
    with pytest.raises(attnspec.AttnSpecError, match="must not read the future"):
        call(mask, is_causal=True)


def test_dropout_is_for_training_whatever_is_passed(call: Callable[..., Any]) -> None:
    outs = []
    for dropout in (0.0, 0.9):
        torch.manual_seed(3)
        outs.append(call(dropout=dropout)[0])
    assert difference(*outs) == 0.0


def test_layers_that_differ_need_to_be_told_apart() -> None:
    text = "attention layered { layers 2 attend full layer 0 { attend self } }"
    attention = transformers.AttentionInterface()[named(text)]
    module = SimpleNamespace(is_causal=False, training=False)
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(attnspec.AttnSpecError, match="it has no `layer_idx`"):
        attention(module, q, q, q, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("attention e { extra_tokens 2 attend full }", "`e` has 2: .*counts them"),
        (
            "attention e { heads 4 attend full score bias(buckets = 8, max_distance = 16) }",
            "learned parts",
        ),
    ],
)
def test_specs_that_a_model_cannot_hold(text: str, message: str) -> None:
    with pytest.raises(attnspec.AttnSpecError, match=message):
        named(text)


# --- causality --------------------------------------------------------------------------------


def test_only_the_queries_at_hand_are_looked_at() -> None:
    program = attnspec.parse("attention e { attend window(radius = 1) }").program
    require_past_only(program, 0, heads=2, n=6, n_q=1)
    with pytest.raises(attnspec.AttnSpecError, match="position 4 reads position 5"):
        require_past_only(program, 0, heads=2, n=6, n_q=2)


@pytest.mark.parametrize("body", ["linear()", "window(before = 3, after = 0) + linear()"])
def test_a_mechanism_reads_later_positions_beside_a_graph_as_well(body: str) -> None:
    program = attnspec.parse(f"attention e {{ attend {body} }}").program
    with pytest.raises(attnspec.AttnSpecError, match="a mechanism reads every position"):
        require_past_only(program, 0, heads=1, n=6, n_q=6)


def test_every_head_is_looked_at() -> None:
    text = "attention e { heads 3 attend causal head 2 { attend full } }"
    program = attnspec.parse(text).program
    with pytest.raises(attnspec.AttnSpecError, match="position 0 reads position 1"):
        require_past_only(program, 0, heads=3, n=6, n_q=6)


def test_a_mechanism_reads_everything_unless_the_spec_is_causal() -> None:
    program = attnspec.parse("attention e { attend linear() }").program
    with pytest.raises(attnspec.AttnSpecError, match="a mechanism reads every position"):
        require_past_only(program, 0, heads=1, n=6, n_q=6)
    causal = attnspec.parse("attention e { causal attend linear() }").program
    require_past_only(causal, 0, heads=1, n=6, n_q=6)


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


def test_the_class_of_an_emitted_module_is_taken() -> None:
    # a name of its own: what other tests register stays registered
    spec = attnspec.parse(LONGFORMER.replace("attention longformer", "attention as_a_class"))
    emitted: dict[str, Any] = {"__name__": "as_a_class_attn"}
    exec(compile(spec.emit(), "as_a_class_attn.py", "exec"), emitted)
    name = register(emitted["AsAClass"])
    assert name == "attnspec_as_a_class"
    assert register(emitted["AsAClass"]) == name
    ids = tokens(2, 11)
    assert difference(hidden(bert(name), ids), hidden(bert(named(LONGFORMER)), ids)) == 0.0


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
    assert isinstance(facts, ModelMask)
    counter += 1
    assert (facts.q_offset, facts.end) == (4, 6)
    with pytest.raises(FrozenInstanceError):
        facts.q_offset = 5  # type: ignore[misc]


@pytest.mark.parametrize(("q_length", "kv_length"), [(2, 9), (9, 5)])
def test_padding_of_two_sequences_has_the_longer_one(q_length: int, kv_length: int) -> None:
    facts = model_mask(
        q_length=q_length,
        kv_length=kv_length,
        mask_function=masking.bidirectional_mask_function,
        attention_mask=torch.tensor([[1, 0]]),
    )
    assert isinstance(facts, ModelMask)
    assert facts.padding is not None
    assert facts.padding.tolist() == [[True] + [False] * 8]


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
    assert isinstance(facts, ModelMask)
    assert facts.padding is not None
    wanted = [
        [column < width and (row == 0 or column > 0) for column in range(6)] for row in (0, 1)
    ]
    assert facts.padding.tolist() == wanted
    assert facts.left_padded
