"""Configs of transformers as specs: tiny random models of every known type with their fields
varied read and weigh what the spec says, or the config is refused by the name of a field."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import LAYERS, TINY, WIDTH, transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attnspec import AttnSpecError, Spec, from_hf_config
from attnspec.integrations.transformers import convert, used_by
from attnspec.interchange import hf_configs
from attnspec.testing import assert_attends

N = 13

_OWN_KERNELS = {"big_bird", "fnet", "nystromformer", "reformer", "longformer", "longt5"}
KINDS = sorted(hf_configs._KNOWN - _OWN_KERNELS)
NAMED = (
    "moshi granite_swa granitemoe_swa ministral3 diffllama laguna mimo_v2_flash glm4 lfm2 ernie4_5"
    " seed_oss"
).split()
"""Types that once had to be told which way they read."""

FOLDED = ("opt", "esm", "xglm", "whisper")
"""Types whose queries are scaled before they meet keys."""

LATER = ("granite_swa", "granitemoe_swa")
"""Types that multiply outputs, and not weights, by what a sink leaves of them."""

SINGLE = ("xglm",)
"""Types whose masks are numbers of float32."""

FIELDS: dict[str, Any] = {
    **TINY,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "kv_channels"), 8),
    **{"qk_rope_head_dim": 4, "v_head_dim": 12, "image_size": 12, "patch_size": 4},
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61, "laurel_rank": 4},
    **{"global_head_dim": 8, "num_kv_shared_layers": 0, "altup_num_inputs": 2},
    **{"audio_vocab_size": 9, "num_codebooks": 2, "decoder_start_token_id": 0},
}

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_SIDES = ("encoder_attention_heads", "decoder_attention_heads")

_TYPES = [["sliding_attention", "full_attention"], ["full_attention", "sliding_attention"]]
_GEMMAS = ("gemma", "gemma2", "gemma3_text", "gemma3n_text")

_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 16}
_SCALED = _YARN | {"factor": 4.0, "mscale_all_dim": 0.7, "mscale": 1.0}

_QWENS = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")

VARIED: dict[str, tuple[Collection[str], Sequence[Any]]] = {
    "is_causal": (KINDS, (None, False, False, True)),
    "is_decoder": (hf_configs._BOTH_WAYS, (False, True, True)),
    "sliding_window": (hf_configs._BY_TYPES | hf_configs._BY_WINDOW, (1, 2, 3, 5, 8)),
    "use_sliding_window": (_QWENS, (True, True, False)),
    "layer_types": (hf_configs._BY_TYPES - {"llama4_text", "lfm2"}, _TYPES),
    "attention_chunk_size": (("llama4_text",), (2, 5)),
    "no_rope_layers": (("llama4_text",), ([1, 0], [0, 1])),
    "attn_logit_softcapping": (("gemma2", "gemma3_text", "vaultgemma"), (None, None, 0.5, 3.0)),
    "query_pre_attn_scalar": (("gemma2", "gemma3_text", "vaultgemma"), (12, 48)),
    "attention_multiplier": (
        "granite granite_swa granitemoe granitemoe_swa granitemoeshared hyperclovax".split(),
        (0.1, 1.0),
    ),
    "rope_parameters": (hf_configs._LATENT, (_YARN | {"factor": 4.0}, _SCALED)),
    "scale_attn_weights": (("gpt2", "gpt_bigcode"), (True, False)),
    "scale_attn_by_inverse_layer_idx": (("gpt2",), (True, False)),
    "use_bidirectional_attention": (_GEMMAS, (False, True, True)),
    "attention_k_eq_v": (("gemma4_text",), (False, True)),
    "attn_config": (
        ("mpt",),
        ({}, {"softmax_scale": 0.4}, {"alibi": False}, {"alibi_bias_max": 4}, {"prefix_lm": True}),
    ),
    "alibi": (("falcon",), (False, False, True)),
    "use_relative_position_bias": (("beit",), (False, True)),
    "local_attention": (("modernbert",), (2, 4, 9)),
    "relative_attention_num_buckets": (("t5", "mt5", "mpnet"), (32, 32, 8)),
    "relative_attention_max_distance": (("t5", "mt5"), (9, 128)),
}
"""Fields that change what is read or scored, with the types that have them, and what they say."""

STRAY = {
    "sliding_window": 3,
    "use_sliding_window": True,
    "attn_logit_softcapping": 0.5,
    "query_pre_attn_scalar": 3,
    "attention_multiplier": 0.1,
}
"""Such fields in the configs of types that do not read them."""

_WITH_FIELDS = sorted(
    {x for name, (kinds, _) in VARIED.items() if not name.startswith("is_") for x in kinds}
)


def config_of(seed: int, kind: str = "") -> tuple[Any, dict[str, Any]]:
    """A random config of each type, more often with fields of its own, and these fields."""
    source = random.Random(seed)
    kinds = _WITH_FIELDS if seed % 2 else KINDS
    kind = kind or kinds[seed // 2 * 7 % len(kinds)]
    varied = {
        name: source.choice(values)
        for name, (kinds, values) in VARIED.items()
        if kind in kinds and source.random() < 0.6
    }
    varied = {name: value for name, value in varied.items() if value is not None}
    for name, value in STRAY.items():
        if kind not in VARIED[name][0] and source.random() < 0.2:
            varied[name] = value
    if kind == "modernbert":
        # another name of half its `local_attention`
        varied.pop("sliding_window", None)
    heads = {"codegen": 4, "stablelm": 6, "mimo_v2_flash": 4}.get(kind) or source.choice(
        (2, 3, 4, 6)
    )
    shape: dict[str, Any] = {**dict.fromkeys(_HEADS + _SIDES, heads), "num_key_value_heads": 1}
    if kind in (*hf_configs._LATENT, "jetmoe", "diffllama"):
        shape["num_key_value_heads"] = heads
    elif kind == "dbrx":
        shape["attn_config"] = {"rope_theta": 1e4, "kv_n_heads": 1, "clip_qkv": 8}
    elif kind != "falcon":
        shape["head_dim"] = WIDTH // heads
    if kind == "ministral3":
        rotary = {"rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": 64}
        shape["rope_parameters"] = {**rotary, "llama_4_scaling_beta": 0.1 * (seed % 2 == 0)}
    config = transformers.AutoConfig.for_model(kind, **{**FIELDS, **shape, **varied})
    return config, varied


def inputs_of(model: Any, n: int = N) -> dict[str, Tensor]:
    """One random sample."""
    kind, size = next(model.parameters()).dtype, getattr(model.config, "image_size", None)
    ids = torch.randint(3, 40, (1, n))
    sample = {
        "input_ids": ids,
        "pixel_values": torch.randn(1, 3, size or 1, size or 1, dtype=kind),
        "input_features": torch.randn(1, 8, 2 * n, dtype=kind),
    }
    decoded = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return {model.main_input_name: sample[model.main_input_name], **decoded}


class _Watching(TorchFunctionMode):
    """Keeps the last product of queries and keys and the last softmax."""

    operands: tuple[Tensor, Tensor] | None = None
    weights: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("matmul", "__matmul__", "bmm", "baddbmm"):
            every = (*args, *(kwargs or {}).values())
            left, right = [x for x in every if isinstance(x, Tensor)][-2:]
            if self.weights is None and left.shape[-2] == right.shape[-1]:
                self.operands = left, right.mT
        # that of a router comes before queries meet keys
        if name == "softmax" and self.weights is None and self.operands is not None:
            self.weights = result
        return result


def weighed(model: Any, layer: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """The queries and keys [1, H, n, d] of a layer as they meet, and its weights [1, H, n, n]."""
    watch, entered = _Watching(), ExitStack()
    hooks = [
        layer.register_forward_pre_hook(lambda *_: entered.enter_context(watch) and None),
        layer.register_forward_hook(lambda *_: entered.close()),
    ]
    model(**inputs_of(model))
    for hook in hooks:
        hook.remove()
    assert watch.operands is not None
    assert watch.weights is not None
    q, k = watch.operands
    n = q.shape[-2]
    weights = watch.weights[..., :n].reshape(1, -1, n, n)
    k = k.expand(*q.shape[:-2], *k.shape[-2:])
    return q.reshape(1, -1, n, q.shape[-1]), k.reshape(1, -1, n, k.shape[-1]), weights


def layers_of(model: Any, part: str | None) -> dict[str, nn.Module]:
    """The self-attention layers of a part, by their names."""
    modules = dict(model.named_modules())
    found = {x.path: modules[x.path] for x in used_by(model) if x.path.startswith(part or "")}
    return {
        path: layer
        for path, layer in found.items()
        # a pooling head, as cross-attention, has queries of its own
        if not ("encoder_attn" in path or "EncDec" in path)
        and not isinstance(layer, nn.MultiheadAttention)
    }


def answer(config: Any, part: str | None) -> tuple[str, Spec | None]:
    """The text of a config's spec, or why there is none."""
    try:
        spec = from_hf_config(config, part=part)
    except AttnSpecError as error:
        return str(error), None
    return spec.source, spec


def specs(config: Any, varied: dict[str, Any]) -> dict[str | None, Spec]:
    """The spec of each part that is not refused; dictionary and saved file give the same."""
    parts = ("encoder", "decoder") if config.is_encoder_decoder else (None,)
    known = {}
    for part in parts:
        text, spec = answer(config, part)
        for form in (config.to_dict(), json.loads(config.to_json_string())):
            assert answer(form, part)[0] == text
        if spec is not None:
            known[part] = spec
        else:
            # sliding layers need a window
            assert any(
                f"`{name}" in text for name in (*varied, "sliding_window", "rope_parameters")
            ), text
    return known


def prepared(config: Any, attention: str = "eager") -> Any:
    """A model with random numbers where there are zeros, in float64."""
    model = transformers.AutoModel.from_config(
        config, attn_implementation=attention, experts_implementation="eager"
    )
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.zeros_(parameter)
        elif parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.1)
        else:
            nn.init.normal_(parameter, 0.0, 0.1)
    return model.eval() if config.model_type in SINGLE else model.eval().double()


@torch.no_grad()
def require_weights(model: Any, spec: Spec, part: str | None) -> None:
    """Each layer weighs its queries and keys as the spec does."""
    module = spec.compile("dense").to(next(model.parameters()).dtype)
    for parameter in module.parameters():
        (table,) = (
            x
            for name, x in model.named_parameters()
            if "relative_attention_bias" in name and name.startswith(part or "")
        )
        parameter.copy_(table.T)
    for number, layer in enumerate(layers_of(model, part).values()):
        q, k, weights = weighed(model, layer)
        if model.config.model_type in FOLDED:
            q = q * q.shape[-1] ** 0.5
        n = q.shape[2]
        eye = torch.eye(n, dtype=q.dtype).expand(1, k.shape[1], n, n)
        found = module(q, k, eye, layer=number)
        if model.config.model_type in LATER:
            found = found / found.sum(-1, keepdim=True)
        torch.testing.assert_close(weights.to(q.dtype), found, atol=2e-6, rtol=1e-4)


SLOW = [pytest.param(seed, "", marks=pytest.mark.slow) for seed in range(5, 300)]
QUICK = [(seed, "") for seed in range(5)] + list(enumerate(NAMED))


@pytest.mark.parametrize(("seed", "kind"), [*QUICK, *SLOW])
def test_a_model_reads_and_weighs_what_the_spec_of_its_config_says(seed: int, kind: str) -> None:
    torch.manual_seed(seed)
    config, varied = config_of(seed, kind)
    known = specs(config, varied)
    for attention in ("eager", "sdpa") if known else ():
        torch.manual_seed(seed)
        model = prepared(config, attention)
        for part, spec in known.items():
            names = list(layers_of(model, part))
            # which calls its attention twice
            if config.model_type != "diffllama":
                assert_attends(model, spec, layers=names, call=inputs_of(model))
            if attention == "eager":
                require_weights(model, spec, part)
        if not model._supports_sdpa:
            break


@pytest.mark.parametrize("kind", NAMED)
def test_a_model_with_the_spec_of_its_config_gives_what_it_gave(kind: str) -> None:
    config, _ = config_of(3, kind)
    spec, model = from_hf_config(config), prepared(config)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(parameter)
    call = {**inputs_of(model), "use_cache": False}
    with torch.no_grad():
        before = model(**call)[0]
        with convert(model, spec):
            torch.testing.assert_close(model(**call)[0], before, atol=1e-5, rtol=1e-4)


_CHUNKS = {"attn_layers": ["local"] * LAYERS, "local_attn_chunk_length": 4}
OF_THEIR_OWN: list[tuple[str, dict[str, Any]]] = [
    ("longformer", {"attention_window": [4, 8]}),
    ("big_bird", {"attention_type": "original_full"}),
    ("longt5", {"encoder_attention_type": "local", "local_radius": 3}),
    ("reformer", {**_CHUNKS, "local_num_chunks_before": 2, "local_num_chunks_after": 1}),
    ("reformer", {**_CHUNKS, "is_decoder": True}),
]


@pytest.mark.parametrize(("kind", "fields"), OF_THEIR_OWN, ids=str)
def test_kernels_of_their_own_read_what_the_spec_of_their_config_says(
    kind: str, fields: dict[str, Any]
) -> None:
    own = {"axial_pos_embds": False, "num_attention_heads": 4, "num_heads": 4}
    config = transformers.AutoConfig.for_model(kind, **{**FIELDS, **own, **fields})
    model, n = prepared(config), 16
    call, inputs = {**inputs_of(model, n), "use_cache": False}, {}
    if kind == "longformer":
        del call["use_cache"]
        inputs["important"] = torch.arange(n)[None] == 5
        call["global_attention_mask"] = inputs["important"].long()
    for part, spec in specs(config, fields).items():
        names = list(layers_of(model, part)) if part else None
        assert_attends(model, spec, layers=names, inputs=inputs, call=call)


def around(kind: str, text: str, **fields: Any) -> Any:
    """A tiny config with a text model and a vision model inside."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    inner = {**FIELDS, "model_type": text, **heads, **fields}
    vision = {**FIELDS, "model_type": "siglip_vision_model", "num_attention_heads": 2}
    more = {"image_token_id": 39, "projection_dim": WIDTH, "mm_tokens_per_image": 4}
    return transformers.AutoConfig.for_model(kind, text_config=inner, vision_config=vision, **more)


_SLIDING = {"sliding_window": 3, "layer_types": _TYPES[0]}

_IMAGES = [0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0]
"""Which tokens are of images, one to a run."""


@pytest.mark.parametrize(
    ("config", "given", "read"),
    [
        (around("paligemma", "gemma"), [0] * 7 + [1] * 6, {"prompt": 7}),
        (around("paligemma", "gemma2", **_SLIDING), [0] * 7 + [1] * 6, {"prompt": 7}),
        (
            around("gemma3", "gemma3_text", **_SLIDING),
            _IMAGES,
            {"image": [-1, 0, 0, 0, 0, 0, -1, -1, 1, 1, -1, -1, -1]},
        ),
        (around("llava", "mistral", sliding_window=4), None, None),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_prompts_and_images_that_are_read_both_ways_are_inputs(
    config: Any, given: list[int] | None, read: dict[str, Any] | None
) -> None:
    spec = from_hf_config(config)
    assert from_hf_config(json.loads(config.to_json_string())) == spec
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    kinds = {} if given is None else {"token_type_ids": torch.tensor([given])}
    out = model(torch.randint(3, 30, (1, N)), output_attentions=True, **kinds)
    inputs = None if read is None else {name: np.array(value) for name, value in read.items()}
    for layer, weights in enumerate(out.attentions):
        assert ((weights[0, 0] > 0).numpy() == spec.mask(N, layer=layer, inputs=inputs)).all(), (
            layer
        )
