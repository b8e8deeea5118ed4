"""Models of several stacks of attention: one is named, the others are left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import BY_STEM, specs_of
from tiny_models import (
    CAUSAL,
    FULL,
    IMAGES,
    TINY,
    TOLERANCE,
    WINDOW,
    difference,
    hidden,
    llama,
    tiny,
    tokens,
)
from tiny_models import transformers as hf
from torch import Tensor

import attnspec
from attnspec.integrations.transformers import SpecCache, convert, used_by


def llava() -> Any:
    torch.manual_seed(1)
    text = hf.LlamaConfig(**{**TINY, "eos_token_id": None})
    vision = hf.CLIPVisionConfig(**{**TINY, "image_size": 8, "patch_size": 4})
    config = hf.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=60, vision_feature_layer=-1
    )
    return hf.LlavaForConditionalGeneration(config).eval()


def images() -> dict[str, Tensor]:
    ids = tokens(2, 12)
    ids[:, 1:5] = 60
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "pixel_values": pixels}


def logits(model: Any, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits  # type: ignore[no-any-return]


def test_several_stacks_are_refused_by_their_names() -> None:
    model, spec = llava(), attnspec.parse(CAUSAL)
    stacks = "`model.vision_tower.encoder.layers` .* `model.language_model.layers`"
    with pytest.raises(attnspec.AttnSpecError, match=f"{stacks}.*`only=`"):
        convert(model, spec)
    with pytest.raises(attnspec.AttnSpecError, match=f"'language_model' is not.*{stacks}"):
        convert(model, spec, only="language_model")


@pytest.mark.parametrize(
    ("names", "given"),
    [
        ({"only": "model.language_model"}, [0, 1]),
        ({"skip": ("model.vision_tower",)}, [0, 1]),
        ({"only": "model.language_model.layers.1"}, [None, 0]),
        ({"only": "model.language_model", "skip": "model.language_model.layers.1"}, [0, None]),
    ],
)
def test_layers_that_are_not_chosen_keep_their_attention(
    names: dict[str, Any], given: list[int | None], tmp_path: Path
) -> None:
    model, inputs = llava(), images()
    before = logits(model, **inputs)
    with convert(model, attnspec.parse(CAUSAL), **names):
        assert difference(logits(model, **inputs), before) < TOLERANCE
    with convert(model, attnspec.parse(WINDOW), **names) as done:
        seen = [layer.what.rpartition(" ")[2] for layer in done.layers if "language" in layer.path]
        assert seen == ["spec" if number is None else str(number) for number in given]
        sparse = logits(model, **inputs)
        assert difference(sparse, before) > 0.01
        greedy = {**inputs, "max_new_tokens": 3, "do_sample": False}
        whole = model.generate(**greedy, use_cache=False)
        for cache in ({}, {"cache_implementation": "static"}):
            assert (model.generate(**greedy, **cache) == whole).all()
        model.save_pretrained(tmp_path)
    assert difference(logits(model, **inputs), before) == 0.0
    loaded = hf.AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    assert difference(logits(loaded, **inputs), sparse) < TOLERANCE
    # without its head the names begin elsewhere
    inner = used_by(hf.AutoModel.from_pretrained(tmp_path))
    assert sum(layer.kind == "spec" for layer in inner) == len([x for x in given if x is not None])


@pytest.mark.parametrize("stem", ["Bart", "Whisper"])
def test_a_decoder_alone_takes_a_spec(stem: str) -> None:
    model, ids = tiny(stem, "ForCausalLM"), tokens(2, 9)
    before = logits(model, input_ids=ids)
    with convert(model, attnspec.parse(CAUSAL)) as done:
        assert sorted(layer.kind for layer in done.layers) == ["dense"] * 2 + ["spec"] * 2
        assert difference(logits(model, input_ids=ids), before) < TOLERANCE


def test_a_decoder_that_is_causal_by_its_mask_alone_reads_itself() -> None:
    model = tiny("NllbMoe", num_experts=2)
    with convert(model, decoder=attnspec.parse(CAUSAL)) as done:
        assert [layer.kind for layer in done.layers][2:] == ["spec", "dense"] * 2
    convert(model, decoder=attnspec.parse(FULL))
    with pytest.raises(attnspec.AttnSpecError, match="must not read later positions"):
        model(input_ids=tokens(1, 5), decoder_input_ids=tokens(1, 5))


def test_windows_that_are_numbers_by_their_kind_are_replaced() -> None:
    own = {"sliding_window": 4, "num_codebooks": 2, "audio_vocab_size": 9}
    model, ids = tiny("Moshi", "ForCausalLM", **own), tokens(2, 9)
    # its own masks are causal alone
    before = logits(model, input_ids=ids)
    assert "`sliding_window = 4`" in str(convert(model, attnspec.parse(CAUSAL)))
    assert difference(logits(model, input_ids=ids), before) < TOLERANCE


def test_keys_that_are_made_of_others_are_named() -> None:
    model = tiny(
        "DeepseekV4",
        "ForCausalLM",
        **{"head_dim": 8, "q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2},
        **{"num_experts_per_tok": 2, "sliding_window": 6, "eos_token_id": None},
        layer_types=["sliding_attention", "heavily_compressed_attention"],
    )
    done = convert(model, attnspec.parse(WINDOW))
    assert "heavily_compressed_attention, sliding_attention in 2 layers" in str(done)
    model.generate(tokens(1, 9), past_key_values=SpecCache(model), max_new_tokens=3)


def test_a_cache_is_advised_that_has_places_for_all_layers() -> None:
    own = {"num_hidden_layers": 3, "lru_width": 48, "attention_window_size": 6}
    kinds = ["recurrent", "recurrent", "attention"]
    model, ids = tiny("RecurrentGemma", "ForCausalLM", block_types=kinds, **own), tokens(1, 12)
    sliding = hf.DynamicCache(config=model.config)
    convert(model, attnspec.parse("attention a { causal attend window(before = 9, after = 0) }"))
    model(input_ids=ids, past_key_values=sliding)
    words = r"`past_key_values = SpecCache\(model\)`"
    with pytest.raises(attnspec.AttnSpecError, match=words) as caught:
        model(input_ids=ids[:, :1], past_key_values=sliding)
    assert "DynamicCache" not in str(caught.value)


def test_a_part_that_asks_for_nothing_can_be_skipped() -> None:
    with pytest.raises(attnspec.AttnSpecError, match="in its own code"):
        convert(tiny("GPTNeoXJapanese", intermediate_multiple_size=2), attnspec.parse(CAUSAL))
    model = tiny("SiglipVision", **IMAGES)
    with pytest.raises(attnspec.AttnSpecError, match="in its own code; `skip="):
        convert(model, attnspec.parse(FULL))
    head = next(x.path for x in used_by(model) if x.kind == "cannot")
    kinds = {x.kind for x in convert(model, attnspec.parse(FULL), skip=head).layers}
    assert kinds == {"spec", "cannot"}


def test_a_layer_of_a_stack_keeps_its_attention_and_its_bias() -> None:
    spec = attnspec.parse("attention two { causal layers 2 attend full layer 1 { attend self } }")
    with convert(llama("eager"), spec, skip="model.layers.1") as done:
        what = [layer.what for layer in done.layers]
        assert what == ["`two`, layer 0", "the model's own, without a spec", "`two`, layer 1"]
    family = BY_STEM["T5"]
    before = family.hidden(model := family.build())
    score = "score bias(buckets = 32, max_distance = 128)"
    decoder = specs_of(family, "full", score)["decoder"]
    with convert(model, decoder=decoder, skip="decoder.block.1"):
        assert difference(family.hidden(model), before) < TOLERANCE


def test_layers_that_share_keys_have_states_of_their_own() -> None:
    model = tiny(
        "Gemma3nText",
        "ForCausalLM",
        **{"num_hidden_layers": 4, "head_dim": 8, "num_key_value_heads": 2, "laurel_rank": 4},
        **{"intermediate_size": [64] * 4, "vocab_size_per_layer_input": 61},
        **{"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "sliding_window": 8},
        **{"activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2},
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    layers = "layer 2 { attend window(before = 5, after = 0) }"
    text = f"attention g {{ causal layers 4 attend window(before = 2, after = 0) {layers} }}"
    convert(model, attnspec.parse(text))
    ids, cache = tokens(2, 12), SpecCache(model)
    with torch.no_grad():
        rows = [model(input_ids=x, past_key_values=cache).logits for x in torch.split(ids, 5, 1)]
    assert difference(torch.cat(rows, 1), hidden(model, ids)) < TOLERANCE
