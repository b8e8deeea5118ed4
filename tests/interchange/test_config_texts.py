"""What specs of configs of transformers say: their texts, what a dictionary leaves out, and what is
refused. Whether models do so: test_configs.py."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from goldens import Golden
from tiny_models import TINY, transformers

from attnspec import AttnSpecError, from_hf_config

_KINDS = ["sliding_attention", "full_attention"]
_LOCAL = {"encoder_attention_type": "local"}


def test_what_configs_say(golden: Golden) -> None:
    """The text of each config in the file, or why there is none."""

    def answer(line: str) -> tuple[str, list[str]]:
        call = line.partition(": ")[2]
        try:
            return f"written: {call}", eval(f"from_hf_config({call})").source.splitlines()
        except AttnSpecError as error:
            return f"refused: {call}", str(error).splitlines()

    golden.entries(answer)


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


def test_what_is_no_config_is_refused() -> None:
    with pytest.raises(TypeError, match="config"):
        from_hf_config(3)
