"""Configs of transformers as specs: the pairs are those of transformers' own masks."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

import attnspec
from attnspec.interchange.hf_configs import from_hf_config
from attnspec.spec import Spec
from attnspec.text.diagnostics import AttnSpecError

transformers = pytest.importorskip("transformers")

N = 23

SMALL: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 8,
    "vocab_size": 7,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}

MASKED: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "MistralConfig": {"sliding_window": 5},
    "Gemma2Config": {"sliding_window": 5},
    "Gemma3TextConfig": {"sliding_window": 5},
    "GptOssConfig": {"sliding_window": 5},
    "Llama4TextConfig": {"attention_chunk_size": 7, "attn_temperature_tuning": False},
    "Qwen2Config": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3},
    "Qwen3Config": {},
    "Olmo3Config": {"sliding_window": 3},
    "Cohere2Config": {"sliding_window": 2},
    "ModernBertConfig": {"local_attention": 8},
}


def config_of(name: str, **settings: Any) -> Any:
    config = getattr(transformers, name)(**{**SMALL, **settings})
    config._attn_implementation = "sdpa"
    return config


def masks_of(config: Any) -> dict[str, Any] | Any:
    """transformers' own masks by the type of a layer, None where all keys before are read."""
    from transformers import masking_utils as hf

    given = {"config": config, "inputs_embeds": torch.zeros(1, N, 16), "attention_mask": None}
    if config.model_type == "modernbert":
        sliding = hf.create_bidirectional_sliding_window_mask(**given)
        return {"sliding_attention": sliding, "full_attention": None}
    return hf.create_masks_for_generate(**given, past_key_values=None)


@pytest.mark.parametrize("name", MASKED)
def test_the_pairs_are_those_of_the_model(name: str) -> None:
    config = config_of(name, **MASKED[name])
    spec, masks = from_hf_config(config), masks_of(config)
    every = np.tri(N, dtype=bool) if spec.program.causal else np.ones((N, N), bool)
    assert spec.layers == 6
    for layer in range(6):
        found = masks[config.layer_types[layer]] if isinstance(masks, dict) else masks
        meant = every if found is None else found[0, 0].numpy()
        assert (spec.mask(N, layer=layer) == meant).all(), layer


@pytest.mark.parametrize("name", ["Gemma2Config", "Qwen2Config"])
def test_a_dictionary_is_as_good_as_a_config(name: str) -> None:
    config = config_of(name, **MASKED[name])
    assert from_hf_config(config.to_dict()) == from_hf_config(config)


HUB: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2Config", {"sliding_window": 5}),
    "gemma3_text": ("Gemma3TextConfig", {"sliding_window": 5, "sliding_window_pattern": 3}),
    "cohere2": ("Cohere2Config", {"sliding_window": 2, "sliding_window_pattern": 2}),
    "exaone4": ("Exaone4Config", {"sliding_window": 4, "sliding_window_pattern": 4}),
    "olmo3": ("Olmo3Config", {"sliding_window": 3}),
    "gpt_oss": ("GptOssConfig", {"sliding_window": 5}),
    "qwen2": ("Qwen2Config", MASKED["Qwen2Config"]),
    "modernbert": ("ModernBertConfig", {"local_attention": 8, "global_attn_every_n_layers": 2}),
    "llama4_text": (
        "Llama4TextConfig",
        {
            "attention_chunk_size": 7,
            "no_rope_layers": [1, 0, 1, 1, 0, 1],
            "attn_temperature_tuning": False,
        },
    ),
}


@pytest.mark.parametrize("kind", HUB)
def test_a_config_of_the_hub_has_the_layers_of_its_class(kind: str) -> None:
    name, settings = HUB[kind]
    config = config_of(name, **settings)
    found = from_hf_config({"model_type": kind, **SMALL, **settings})
    assert len(set(config.layer_types)) == 2
    assert len({found.mask(N, layer=layer).tobytes() for layer in range(6)}) == 2
    assert found == from_hf_config(config)


def test_a_dictionary_of_a_known_type_needs_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(AttnSpecError, match="needs transformers"):
        from_hf_config({"model_type": "gemma2", "num_hidden_layers": 4, "sliding_window": 5})
    own = {"model_type": "mine", "num_hidden_layers": 1, "sliding_window": 5}
    assert from_hf_config(own, causal=True).layers == 1


def test_an_encoder_that_decodes_is_causal() -> None:
    decoder = transformers.BertConfig(is_decoder=True, num_hidden_layers=2)
    assert from_hf_config(decoder).program.causal
    assert from_hf_config(decoder.to_dict()).program.causal
    assert not from_hf_config(transformers.BertConfig(num_hidden_layers=2)).program.causal


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (transformers.GraniteConfig(attention_multiplier=0.1), "scale 0.1"),
        ({"model_type": "granite", "num_hidden_layers": 2}, "scale 1.0"),
        (
            transformers.GPT2Config(scale_attn_by_inverse_layer_idx=True, n_embd=32, n_head=2),
            "scale 1 / sqrt(16) / (layer + 1)",
        ),
        ({"model_type": "gpt2", "n_layer": 2, "scale_attn_weights": False}, "scale 1"),
        (transformers.GPT2Config(), None),
    ],
)
def test_scales_of_the_config_are_kept(config: Any, text: str | None) -> None:
    spec = from_hf_config(config)
    meant = only(f"causal layers {spec.layers} attend full {text or ''}")
    scales = [spec.program.attend(layer).scale for layer in range(spec.layers or 1)]
    assert scales == [meant.program.attend(layer).scale for layer in range(spec.layers or 1)]


def only(text: str) -> Spec:
    return attnspec.parse(f"attention a {{ {text} }}")


def same_attends(found: Spec, text: str) -> bool:
    return found.program.attends == only(text).program.attends


def test_scores_are_changed_as_the_model_does() -> None:
    gemma = from_hf_config(config_of("Gemma2Config", query_pre_attn_scalar=64))
    assert (
        gemma.program.attends[0].scores
        == only("attend full score softcap(cap = 50.0)").program.attends[0].scores
    )
    assert "scale 1 / sqrt(64)" in gemma.source
    assert "normalize softmax1" in from_hf_config(config_of("GptOssConfig")).source


def test_longformer_halves_its_window() -> None:
    config = transformers.LongformerConfig(attention_window=[4, 4, 8], num_hidden_layers=3)
    spec, marked = from_hf_config(config), np.arange(N) == 6
    q, k = np.arange(N)[:, None], np.arange(N)[None]
    for layer, window in enumerate([4, 4, 8]):
        meant = (abs(q - k) <= window // 2) | marked[:, None] | marked[None]
        assert (spec.mask(N, layer=layer, inputs={"important": marked}) == meant).all()


def test_bigbird_has_its_blocks() -> None:
    spec = from_hf_config(transformers.BigBirdConfig(block_size=4, num_random_blocks=1))
    n, mask = 40, spec.mask(40)
    i, j = np.arange(n)[:, None] // 4, np.arange(n)[None] // 4
    ends = (i == 0) | (i == 9) | (j == 0) | (j == 9)
    fixed = (abs(i - j) <= 1) | ends
    assert mask[fixed].all()
    drawn = (mask & ~fixed)[::4, ::4].sum(1)
    assert drawn.max() == 1
    assert same_attends(
        from_hf_config(transformers.BigBirdConfig(attention_type="original_full")), "attend full"
    )


@pytest.mark.parametrize(
    ("config", "part", "text"),
    [
        ({"model_type": "fnet", "num_hidden_layers": 2}, None, "attend fourier()"),
        (
            {"model_type": "longt5", "num_layers": 2, "local_radius": 5,
             "num_heads": 2,
             "encoder_attention_type": "local"},
            "encoder",
            "heads 2 attend window(radius = 5) scale 1 "
            "score bias(buckets = 32, max_distance = 128)",
        ),
        ({"model_type": "bart", "encoder_layers": 3}, "encoder", "attend full"),
        (
            {"model_type": "nystromformer", "num_hidden_layers": 3, "num_landmarks": 8,
             "conv_kernel_size": 5},
            None,
            "attend nystrom(landmarks = 8, iterations = 6, conv = 5)",
        ),
        (
            {"model_type": "gpt_neo", "attention_types": [[["local"], 2]], "window_size": 4,
             "num_layers": 2},
            None,
            "attend window(before = 3, after = 0) scale 1",
        ),
        (
            {"model_type": "reformer", "attn_layers": ["local"], "local_attn_chunk_length": 8,
             "is_decoder": True},
            None,
            "attend block(size = 8, before = 1)",
        ),
        ({"model_type": "mine", "num_hidden_layers": 1, "sliding_window": 3}, True,
         "attend window(before = 2, after = 0)"),
    ],
)  # fmt: skip
def test_models_of_their_own_kind(config: dict[str, Any], part: Any, text: str) -> None:
    said = {"causal": part} if isinstance(part, bool) else {"part": part}
    found = from_hf_config(config, **said)
    assert same_attends(found, text), found.source
    assert found.program.layers == config.get("num_hidden_layers", found.program.layers)


LEFT_OUT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, {"n_layer": 2}),
    ({"model_type": "gpt2"}, {"n_layer": 1}),
    ({"model_type": "granite"}, {"num_hidden_layers": 2}),
    ({"model_type": "mistral", "sliding_window": 5}, {"num_hidden_layers": 2}),
    ({"model_type": "longformer"}, {"num_hidden_layers": 2}),
    (
        {"model_type": "big_bird", "block_size": 64, "num_random_blocks": 3},
        {"num_hidden_layers": 2},
    ),
    ({"model_type": "big_bird"}, {"num_hidden_layers": 1, "attention_type": "original_full"}),
    (
        {"model_type": "gpt_neo", "window_size": 256},
        {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    ),
    (
        {"model_type": "reformer", "lsh_attn_chunk_length": 64, "local_attn_chunk_length": 64},
        {"attn_layers": ["local", "lsh", "local"]},
    ),
    (
        {"model_type": "nystromformer", "num_landmarks": 64, "conv_kernel_size": 65},
        {"num_hidden_layers": 2},
    ),
    ({"model_type": "t5", "num_heads": 8}, {"num_layers": 2}),
    ({"model_type": "t5", "num_heads": 8}, {"num_layers": 2, "num_decoder_layers": 3}),
    (
        {"model_type": "longt5", "num_heads": 8, "local_radius": 127},
        {"num_layers": 2, "encoder_attention_type": "local"},
    ),
    ({"model_type": "bart"}, {"encoder_layers": 2, "decoder_layers": 3}),
    ({"model_type": "bart", "num_hidden_layers": 12}, {}),
    ({"model_type": "xlm-roberta"}, {"num_hidden_layers": 2}),
]
"""What a dictionary says where it leaves out what its class has by itself, and the settings."""


@pytest.mark.parametrize(("given", "settings"), LEFT_OUT, ids=str)
def test_what_is_left_out_is_as_the_class_has_it(
    given: dict[str, Any], settings: dict[str, Any]
) -> None:
    config = transformers.AutoConfig.for_model(**{**given, **settings})
    parts = ("encoder", "decoder") if config.is_encoder_decoder else (None,)
    for part in parts:
        found = from_hf_config({**given, **settings}, part=part)
        assert found.source == from_hf_config(config, part=part).source


def test_most_layers_stand_first_and_the_others_by_their_numbers() -> None:
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    config = {"model_type": "my-model", "num_hidden_layers": 5, "sliding_window": 3}
    found = from_hf_config({**config, "layer_types": [*types, "sliding_attention"]}, causal=True)
    assert found.source.splitlines() == [
        "attention my_model {",
        "    causal",
        "    layers 5",
        "    attend window(before = 2, after = 0)",
        "    layer 1..2 {",
        "        attend full",
        "    }",
        "}",
    ]
    assert (
        "\n    attend full"
        in from_hf_config(
            {**config, "layer_types": [types[0], *["full_attention"] * 4]}, causal=True
        ).source
    )


def test_reformer_has_the_conventions_of_its_model() -> None:
    config = transformers.ReformerConfig(num_buckets=[8, 8], num_hashes=2, is_decoder=True)
    spec, shipped = from_hf_config(config), attnspec.zoo("reformer_hf", rounds=2)
    assert spec.program.attend(1).graph == shipped.program.attend(0).graph


@pytest.mark.parametrize(
    ("config", "said", "words"),
    [
        ({"model_type": "lama", "num_hidden_layers": 1}, {}, "did you mean `llama`"),
        ({"model_type": "diffllama", "num_hidden_layers": 1}, {}, "`sliding_window` say$"),
        ({"model_type": "mamba", "num_hidden_layers": 1}, {}, "`linear_attention` are no spec"),
        ({"model_type": "brand_new", "num_hidden_layers": 1}, {}, "`causal = True`"),
        ({"model_type": "t5", "num_layers": 2}, {}, "part = 'encoder'"),
        ({"model_type": "llama", "num_hidden_layers": 1}, {"part": "encoder"}, "one stack"),
        ({"model_type": "mistral", "num_hidden_layers": 1, "sliding_window": 0}, {}, "from 1 on"),
        (
            {"model_type": "qwen3", "layer_types": ["linear_attention"], "num_hidden_layers": 1},
            {},
            "`linear_attention`",
        ),
        ({"model_type": "mine"}, {"causal": True}, "num_hidden_layers"),
        ({"model_type": "led"}, {"part": "encoder"}, "not known here"),
        ({"model_type": "deepseek_v32", "index_topk": 8}, {}, "by an indexer of their own"),
        (
            {"model_type": "minimax_m3_vl_text", "num_hidden_layers": 1, "index_topk_blocks": 2},
            {"causal": True},
            "`index_topk_blocks = 2` has the layers choose keys by an indexer",
        ),
        ({"model_type": "llama", "num_hidden_layers": -1}, {}, "from 1 on, got -1"),
        ({"model_type": "bart", "encoder_layers": -1}, {"part": "encoder"}, "no layers"),
        (
            {"model_type": "mine", "num_hidden_layers": 3, "layer_types": ["full_attention"] * 2},
            {"causal": True},
            "2 entries, and the config 3 layers",
        ),
        ({"model_type": "longformer", "num_hidden_layers": 1, "attention_window": 5}, {}, "even"),
        (
            {"model_type": "longt5", "num_layers": 1, "encoder_attention_type": "transient-global"},
            {"part": "encoder"},
            "transient",
        ),
        (
            {
                "model_type": "reformer",
                "attn_layers": ["lsh"],
                "lsh_attn_chunk_length": 8,
                "lsh_num_chunks_after": 1,
            },
            {},
            "previous chunk",
        ),
        (
            {"model_type": "reformer", "attn_layers": ["lsh"], "lsh_attn_chunk_length": 0},
            {},
            "`lsh_attn_chunk_length` must be",
        ),
        ({"model_type": "reformer", "attn_layers": ["full"]}, {}, "local or lsh, got 'full'"),
        (
            {"model_type": "gpt_neo", "attention_types": [[["full"], 1]], "num_layers": 1},
            {},
            "got 'full'",
        ),
        ({"model_type": "big_bird", "num_hidden_layers": 1, "is_decoder": True}, {}, "decoder"),
        (
            {"model_type": "longformer", "num_hidden_layers": 2, "attention_window": [4, 4, 4]},
            {},
            "one for each layer",
        ),
        ({"model_type": "longformer", "num_hidden_layers": 1, "attention_window": 0}, {}, "even"),
    ],
)
def test_what_is_open_is_refused(config: dict[str, Any], said: dict[str, Any], words: str) -> None:
    with pytest.raises(AttnSpecError, match=words):
        from_hf_config(config, **said)


def test_what_is_no_config_is_refused() -> None:
    with pytest.raises(TypeError, match="config"):
        from_hf_config(3)
