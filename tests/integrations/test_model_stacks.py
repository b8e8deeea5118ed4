"""Models of several stacks of attention: one is named, the others are left alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import FAMILIES
from tiny_models import CAUSAL, FULL, TOLERANCE, WINDOW, difference, llama, names_restored, tokens
from tiny_models import transformers as hf

import attnspec
from attnspec.integrations.transformers import SpecCache, convert, used_by

_TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
}
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    "vocab_size": 61,
    "d_model": 32,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "eos_token_id": None,
}


@pytest.fixture(autouse=True)
def _no_names_left() -> Iterator[None]:
    with names_restored():
        yield


def llava() -> Any:
    torch.manual_seed(1)
    text = hf.LlamaConfig(vocab_size=61, eos_token_id=None, initializer_range=0.2, **_TINY)
    vision = hf.CLIPVisionConfig(image_size=8, patch_size=4, **_TINY)
    config = hf.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=60, vision_feature_layer=-1
    )
    return hf.LlavaForConditionalGeneration(config).eval()


def images() -> dict[str, torch.Tensor]:
    ids = tokens(2, 12).clamp(max=59)
    ids[:, 1:5] = 60
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "pixel_values": pixels}


def logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits  # type: ignore[no-any-return]


def test_several_stacks_are_refused_by_their_names() -> None:
    model = llava()
    stacks = "`model.vision_tower.encoder.layers` .* `model.language_model.layers`"
    with pytest.raises(attnspec.AttnSpecError, match=f"{stacks}.*`only=`"):
        convert(model, attnspec.parse(CAUSAL))
    with pytest.raises(attnspec.AttnSpecError, match=f"got 'language_model'.*{stacks}"):
        convert(model, attnspec.parse(CAUSAL), only="language_model")


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
        assert seen == ["attention" if number is None else str(number) for number in given]
        sparse = logits(model, **inputs)
        assert difference(sparse, before) > 0.01
        for cache in ({}, {"cache_implementation": "static"}):
            written = model.generate(**inputs, max_new_tokens=3, do_sample=False, **cache)
            whole = inputs["input_ids"]
            for _ in range(3):
                rows = logits(model, **{**inputs, "input_ids": whole})
                whole = torch.cat([whole, rows[:, -1:].argmax(-1)], 1)
            assert (written == whole).all()
        model.save_pretrained(tmp_path)
    assert difference(logits(model, **inputs), before) == 0.0
    loaded = hf.AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    assert difference(logits(loaded, **inputs), sparse) < TOLERANCE
    # without its head the names begin elsewhere
    inner = used_by(hf.AutoModel.from_pretrained(tmp_path))
    assert sum(layer.kind == "spec" for layer in inner) == len([x for x in given if x is not None])


@pytest.mark.parametrize("stem", ["Bart", "Whisper"])
def test_a_decoder_alone_takes_a_spec(stem: str) -> None:
    config = getattr(hf, f"{stem}Config")(**_SMALL)
    model = getattr(hf, f"{stem}ForCausalLM")(config).eval()
    ids = tokens(2, 9)
    before = logits(model, input_ids=ids)
    with convert(model, attnspec.parse(CAUSAL)) as done:
        assert sorted(layer.kind for layer in done.layers) == ["dense"] * 2 + ["spec"] * 2
        assert difference(logits(model, input_ids=ids), before) < TOLERANCE


def test_a_decoder_that_is_causal_by_its_mask_alone_reads_itself() -> None:
    model = hf.NllbMoeModel(hf.NllbMoeConfig(**_SMALL, num_experts=2)).eval()
    with convert(model, decoder=attnspec.parse(CAUSAL)) as done:
        assert [layer.kind for layer in done.layers][2:] == ["spec", "dense"] * 2
    convert(model, decoder=attnspec.parse(FULL))
    with pytest.raises(attnspec.AttnSpecError, match="must not read the future"):
        model(input_ids=tokens(1, 5), decoder_input_ids=tokens(1, 5))


def test_windows_that_are_numbers_by_their_kind_are_replaced() -> None:
    config = hf.MoshiConfig(
        **_TINY, vocab_size=61, sliding_window=4, ffn_dim=48, num_codebooks=2, audio_vocab_size=9
    )
    model, ids = hf.MoshiForCausalLM(config).eval(), tokens(2, 9)
    # its own masks are causal alone
    before = logits(model, input_ids=ids)
    assert "`sliding_window = 4`" in str(convert(model, attnspec.parse(CAUSAL)))
    assert difference(logits(model, input_ids=ids), before) < TOLERANCE


def test_keys_that_are_made_of_others_are_named() -> None:
    config = hf.DeepseekV4Config(
        **{**_TINY, "vocab_size": 61, "head_dim": 8, "q_lora_rank": 16, "o_lora_rank": 8},
        o_groups=2,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        eos_token_id=None,
        layer_types=["sliding_attention", "heavily_compressed_attention"],
    )
    model = hf.DeepseekV4ForCausalLM(config).eval()
    done = convert(model, attnspec.parse(WINDOW))
    assert "in place of heavily_compressed_attention, sliding_attention in 2 layers" in str(done)
    model.generate(tokens(1, 9), past_key_values=SpecCache(model), max_new_tokens=3)


def test_a_method_of_another_kind_is_refused() -> None:
    config = hf.GPTNeoXJapaneseConfig(
        **{**_TINY, "vocab_size": 61, "intermediate_multiple_size": 2}
    )
    with pytest.raises(attnspec.AttnSpecError, match="in its own code"):
        convert(hf.GPTNeoXJapaneseModel(config), attnspec.parse(CAUSAL))


def test_a_cache_is_advised_that_has_places_for_all_layers() -> None:
    config = hf.RecurrentGemmaConfig(
        **{**_TINY, "num_hidden_layers": 3, "vocab_size": 61, "lru_width": 32},
        attention_window_size=6,
        eos_token_id=None,
        block_types=["recurrent", "recurrent", "attention"],
    )
    model, ids = hf.RecurrentGemmaForCausalLM(config).eval(), tokens(1, 12)
    sliding = hf.DynamicCache(config=model.config)
    far = attnspec.parse("attention far { causal attend window(before = 9, after = 0) }")
    convert(model, far)
    model(input_ids=ids, past_key_values=sliding)
    with pytest.raises(
        attnspec.AttnSpecError, match=r"`past_key_values = SpecCache\(model\)`"
    ) as e:
        model(input_ids=ids[:, :1], past_key_values=sliding)
    assert "DynamicCache" not in str(e.value)


def test_a_part_that_asks_for_nothing_can_be_skipped() -> None:
    config = hf.SiglipVisionConfig(**_TINY, image_size=8, patch_size=4)
    model = hf.SiglipVisionModel(config).eval()
    with pytest.raises(attnspec.AttnSpecError, match="in its own code; `skip="):
        convert(model, attnspec.parse(FULL))
    head = next(x.path for x in used_by(model) if x.kind == "cannot")
    assert {x.kind for x in convert(model, attnspec.parse(FULL), skip=head).layers} == {
        "spec",
        "cannot",
    }


def test_choices_of_layers_of_one_stack() -> None:
    model = llama("eager")
    spec = attnspec.parse("attention two { causal layers 2 attend full layer 1 { attend self } }")
    with convert(model, spec, skip="model.layers.1") as done:
        assert [layer.what for layer in done.layers] == [
            "`two`, layer 0",
            "its own attention",
            "`two`, layer 1",
        ]


def test_a_layer_that_keeps_its_attention_keeps_its_bias() -> None:
    family = next(x for x in FAMILIES if x.stem == "T5")
    model = family.build()
    before = family.hidden(model)
    text = "attention b { causal heads 4 attend full score bias(buckets = 32, max_distance = 128) }"
    with convert(model, decoder=attnspec.parse(text), skip="decoder.block.1"):
        assert difference(family.hidden(model), before) < TOLERANCE
