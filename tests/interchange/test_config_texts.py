"""What specs of configs of transformers say: their texts, what a dictionary leaves out, and what is
refused. Whether models do so: test_configs.py."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from tiny_models import TINY, transformers

import attnspec
from attnspec import AttnSpecError, Spec, from_hf_config


def only(text: str) -> Spec:
    return attnspec.parse(f"attention a {{ {text} }}")


_KINDS = ["sliding_attention", "full_attention"]
_LOCAL = {"encoder_attention_type": "local"}
TEXTS: list[tuple[dict[str, Any], Any, str]] = [
    ({"model_type": "fnet", "num_hidden_layers": 2}, None, "attend fourier()"),
    (
        {"model_type": "longt5", "num_layers": 2, "local_radius": 5, "num_heads": 2, **_LOCAL},
        "encoder",
        "heads 2 attend window(radius = 5) scale 1 score bias(buckets = 32, max_distance = 128)",
    ),
    ({"model_type": "bart", "encoder_layers": 3}, "encoder", "attend full"),
    (
        {"model_type": "nystromformer", "num_landmarks": 8, "conv_kernel_size": 5},
        None,
        "attend nystrom(landmarks = 8, iterations = 6, conv = 5)",
    ),
    (
        {"model_type": "gpt_neo", "attention_types": [[["local"], 2]], "num_layers": 2},
        None,
        "causal attend window(before = 255, after = 0) scale 1",
    ),
    (
        {"model_type": "reformer", "attn_layers": ["lsh"], "num_buckets": [8, 8], "num_hashes": 2},
        None,
        # as in the file `reformer_hf` of the zoo
        "attend lsh(buckets = 64, rounds = 2, chunk = 64, seed = 0, scale = unit,"
        " bucket_mask = false, multiplicity = true)",
    ),
    (
        {"model_type": "mine", "num_hidden_layers": 1, "sliding_window": 3},
        True,
        "causal attend window(before = 2, after = 0)",
    ),
    (
        {"model_type": "mine", "num_hidden_layers": 1, "attn_logit_softcapping": 3.0},
        True,
        "causal attend full score softcap(cap = 3.0)",
    ),
    (
        {"model_type": "big_bird", "block_size": 4, "num_random_blocks": 1},
        None,
        "attend block(size = 4, before = 1, after = 1) | global(first(4) | last(4))"
        " | random_blocks(size = 4, blocks = 1, seed = 0)",
    ),
    (
        {"model_type": "longformer", "num_hidden_layers": 1, "attention_window": 4},
        None,
        "input important: tokens attend window(radius = 2) | global(important)",
    ),
    ({"model_type": "granite", "attention_multiplier": 0.1}, None, "causal attend full scale 0.1"),
    (
        {"model_type": "mimo_v2_flash", "layer_types": _KINDS[1:], "num_hidden_layers": 1},
        None,
        "causal attend full normalize softmax",
    ),
    (
        {"model_type": "mimo_v2_flash", "layer_types": _KINDS[:1], "num_hidden_layers": 1},
        None,
        "causal attend window(before = 128, after = 0) normalize softmax1",
    ),
    (
        {"model_type": "gemma4_text", "sliding_window": 8, "layer_types": _KINDS,
         "num_hidden_layers": 2, "use_bidirectional_attention": "all"},
        None,
        "layers 2 attend window(radius = 5) scale 1 layer 1 { attend full }",
    ),
    # computed fields may be null
    (
        {"model_type": "modernbert", "local_attention": 6, "sliding_window": None,
         "layer_types": _KINDS[:1], "num_hidden_layers": 1},
        None,
        "attend window(radius = 3)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "said", "text"), TEXTS, ids=lambda x: str(x)[:40])
def test_what_a_config_says(config: dict[str, Any], said: Any, text: str) -> None:
    given = {"causal": said} if isinstance(said, bool) else {"part": said}
    found, meant = from_hf_config(config, **given), only(text)
    assert found.program.attends == meant.program.attends, found.source
    assert found.program.causal == meant.program.causal
    assert {*found.inputs} == {*meant.inputs}


def test_most_layers_stand_first_and_the_others_by_their_numbers() -> None:
    kinds = [_KINDS[x] for x in (0, 1, 1, 0, 0)]
    config = {"model_type": "my-model", "num_hidden_layers": 5, "sliding_window": 3}
    found = from_hf_config({**config, "layer_types": kinds}, causal=True)
    text = "causal layers 5 attend window(before = 2, after = 0) layer 1..2 { attend full }"
    assert " ".join(found.source.split()) == f"attention my_model {{ {text} }}"


_BIRD, _FORMER = {"model_type": "big_bird"}, {"model_type": "reformer"}
_SIX = {**TINY, "num_hidden_layers": 6, "cls_token_id": 1, "sep_token_id": 2}
LEFT_OUT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, {"n_layer": 2}),
    ({"model_type": "gpt2", "scale_attn_weights": False}, {"n_layer": 1}),
    ({"model_type": "granite"}, {"num_hidden_layers": 2}),
    ({"model_type": "mistral"}, {"num_hidden_layers": 2}),
    ({"model_type": "longformer"}, {"num_hidden_layers": 2}),
    ({**_BIRD, "block_size": 64, "num_random_blocks": 3}, {"num_hidden_layers": 2}),
    (_BIRD, {"num_hidden_layers": 1, "attention_type": "original_full"}),
    (
        {"model_type": "gpt_neo", "window_size": 256},
        {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    ),
    ({**_FORMER, "local_attn_chunk_length": 64}, {"attn_layers": ["local", "lsh", "local"]}),
    ({"model_type": "nystromformer", "num_landmarks": 64}, {"num_hidden_layers": 2}),
    ({"model_type": "t5", "num_heads": 8}, {"num_layers": 2, "num_decoder_layers": 3}),
    ({"model_type": "longt5", "num_heads": 8, "local_radius": 127}, {"num_layers": 2, **_LOCAL}),
    ({"model_type": "bart"}, {"encoder_layers": 2, "decoder_layers": 3}),
    ({"model_type": "bart", "num_hidden_layers": 12}, {}),
    ({"model_type": "bert", "is_decoder": True}, {}),
    ({"model_type": "gemma2", "sliding_window": 5}, _SIX),
    ({"model_type": "gemma3_text", "sliding_window": 5, "sliding_window_pattern": 3}, _SIX),
    ({"model_type": "cohere2", "sliding_window": 2, "sliding_window_pattern": 2}, _SIX),
    ({"model_type": "exaone4", "sliding_window": 4, "sliding_window_pattern": 4}, _SIX),
    ({"model_type": "olmo3", "sliding_window": 3}, _SIX),
    ({"model_type": "gpt_oss", "sliding_window": 5}, _SIX),
    (
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3},
        {**_SIX, "sliding_window": 4},
    ),
    (
        {"model_type": "modernbert", "global_attn_every_n_layers": 2},
        {**_SIX, "local_attention": 8},
    ),
    (
        {"model_type": "llama4_text", "no_rope_layers": [1, 0, 1, 1, 0, 1]},
        {**_SIX, "attention_chunk_size": 7},
    ),
]
"""What a dictionary says where it leaves out what its class has by itself, and the settings."""


@pytest.mark.parametrize(("given", "settings"), LEFT_OUT, ids=lambda x: str(x)[:60])
def test_what_is_left_out_is_as_the_class_has_it(
    given: dict[str, Any], settings: dict[str, Any]
) -> None:
    config = transformers.AutoConfig.for_model(**{**given, **settings})
    for part in ("encoder", "decoder") if config.is_encoder_decoder else (None,):
        wanted = from_hf_config(config, part=part)
        for form in ({**given, **settings}, config.to_dict(), json.loads(config.to_json_string())):
            assert from_hf_config(form, part=part).source == wanted.source
        if settings.get("cls_token_id"):
            assert len({wanted.mask(23, layer=layer).tobytes() for layer in range(6)}) == 2


def test_a_dictionary_of_a_known_type_needs_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(AttnSpecError, match="needs transformers"):
        from_hf_config({"model_type": "gemma2", "num_hidden_layers": 4, "sliding_window": 5})
    own = {"model_type": "mine", "num_hidden_layers": 1, "sliding_window": 5}
    assert from_hf_config(own, causal=True).layers == 1


_CAUSAL, _ENCODER = {"causal": True}, {"part": "encoder"}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("lama", {}, {}, "did you mean `llama`"),
    ("mamba", {}, {}, "`linear_attention` cannot be a spec"),
    ("brand_new", {}, {}, "`causal = True`"),
    # no guess at a type that transformers knows
    ("xmod", {}, {}, "`sliding_window` say$"),
    ("t5", {}, {}, "part = 'encoder'"),
    ("llama", {}, _ENCODER, "one stack"),
    ("mistral", {"sliding_window": 0}, {}, "from 1 on"),
    ("qwen3", {"layer_types": ["linear_attention"]}, {}, "`linear_attention`"),
    ("mine", {"num_hidden_layers": None}, _CAUSAL, "num_hidden_layers"),
    ("led", {}, _ENCODER, "not known here"),
    ("deepseek_v32", {"index_topk": 8}, {}, "by an indexer of their own"),
    ("minimax_m3_vl_text", {"index_topk_blocks": 2}, _CAUSAL, "`index_topk_blocks = 2` has the"),
    ("llama", {"num_hidden_layers": -1}, {}, "from 1 on, got -1"),
    ("bart", {"encoder_layers": -1}, _ENCODER, "no layers"),
    ("mine", {"layer_types": ["full_attention"] * 2}, _CAUSAL, "2 entries, and the config 1 lay"),
    ("longformer", {"attention_window": 5}, {}, "even"),
    ("longformer", {"attention_window": 0}, {}, "even"),
    ("longformer", {"attention_window": [4, 4, 4]}, {}, "one for each layer"),
    ("longt5", {"encoder_attention_type": "transient-global"}, _ENCODER, "transient"),
    ("reformer", {"attn_layers": ["lsh"], "lsh_num_chunks_after": 1}, {}, "previous chunk"),
    ("reformer", {"attn_layers": ["lsh"], "lsh_attn_chunk_length": 0}, {}, "`lsh_attn_chunk_len"),
    ("reformer", {"attn_layers": ["full"]}, {}, "local or lsh, got 'full'"),
    ("gpt_neo", {"attention_types": [[["full"], 1]], "num_layers": 1}, {}, "got 'full'"),
    ("big_bird", {"is_decoder": True}, {}, "decoder"),
    *(
        ("a", {"layer_types": [f"{x}_attention"]}, _CAUSAL, "their own parts choose")
        for x in ("compressed_sparse", "heavily_compressed", "deepseek_sparse")
    ),
    # fields that no spec says
    ("llama4_text", {}, {}, "attn_temperature_tuning"),
    ("ministral3", {}, {}, "llama_4_scaling_beta"),
    ("falcon", {"alibi": True}, {}, "alibi"),
    ("mpt", {"attn_config": {"prefix_lm": True}}, {}, "attn_config.prefix_lm"),
    ("llama", {"per_layer_config": {"0": {"num_key_value_heads": 2}}}, {}, "per_layer"),
    ("gemma4_text", {"per_layer_config": {"0": {"sliding_window": 3}}}, {}, "per_layer"),
    ("bloom", {"is_causal": False}, {}, "is_causal"),
    ("t5", {"is_causal": True}, _ENCODER, "is_causal"),
    ("gemma", {"use_bidirectional_attention": True}, {}, "use_bidirectional_attention"),
    ("gemma3n_text", {"use_bidirectional_attention": True}, {}, "use_bidirectional_attention"),
    ("qwen2_vl", {}, {}, "qwen2_vl_text"),
    *(
        ("mine", more, _CAUSAL, next(iter(more)))
        for more in ({"alibi": True}, {"is_causal": False}, {"per_layer_config": {"0": {"x": 1}}})
    ),
]


@pytest.mark.parametrize(("kind", "fields", "said", "words"), REFUSED)
def test_what_is_open_or_no_spec_is_refused(
    kind: str, fields: dict[str, Any], said: dict[str, Any], words: str
) -> None:
    count = (
        {}
        if kind in ("bart", "mamba", "qwen2_vl", "reformer", "gpt_neo")
        else {"num_hidden_layers": 1}
    )
    with pytest.raises(AttnSpecError, match=words):
        from_hf_config({"model_type": kind, **count, **fields}, **said)


def test_what_is_no_config_is_refused() -> None:
    with pytest.raises(TypeError, match="config"):
        from_hf_config(3)
