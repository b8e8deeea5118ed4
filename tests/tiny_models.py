"""Tiny random models of transformers, by the stems of their classes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnspec
from attnspec.integrations.transformers import register

transformers = pytest.importorskip(
    "transformers", reason="needs transformers: pip install 'attnspec[hf]'"
)
TOLERANCE = 1e-5

FULL = "attention full_attention { attend full }"
CAUSAL = "attention past { causal attend full }"
LONGFORMER = "attention longformer { attend window(radius = 3) | global(first(1)) }"
WINDOW = "attention recent { causal attend window(before = 4, after = 0) }"
SINKS = "attention sinks { causal attend window(before = 2, after = 0) | columns(first(2)) }"

WIDTH, HEADS, LAYERS = 48, 4, 2
TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "encoder_attention_heads"), HEADS),
    "decoder_attention_heads": HEADS,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "hidden_dim", "d_ff", "d_kv"), 16),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "intermediate_size_mlp"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    **{"initializer_range": 0.2, "init_std": 0.2, "vocab_size": 61, "word_embed_proj_dim": WIDTH},
    **{"num_mel_bins": 8, "max_source_positions": 13, "num_experts_per_tok": 1, "rotary_dim": 4},
    **{"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "attn_temperature_tuning": False,
}
"""Sizes under every name that a config has for them: strong enough for attention to matter."""

IMAGES = {"image_size": 8, "patch_size": 2}

_numbers = itertools.count()


def tiny(stem: str, head: str = "Model", attention: str = "eager", /, **settings: Any) -> Any:
    """A tiny random model, in evaluation; a setting of `...` is left to the config."""
    given = {name: value for name, value in {**TINY, **settings}.items() if value is not ...}
    config = getattr(transformers, f"{stem}Config")(**given)
    config._attn_implementation = attention
    torch.manual_seed(1)
    name = stem if head == "Model" else stem.removesuffix("Text")
    return getattr(transformers, f"{name}{head}")(config).eval()


def bert(attention: str, **settings: Any) -> Any:
    return tiny("Bert", "Model", attention, num_hidden_layers=3, **settings)


def llama(attention: str, **settings: Any) -> Any:
    own = {"num_hidden_layers": 3, "num_key_value_heads": 2, "eos_token_id": None, **settings}
    return tiny("Llama", "ForCausalLM", attention, **own)


def named(text: str, **settings: Any) -> str:
    """Registers the spec of a text under a name of its own."""
    return register(attnspec.parse(text), f"attnspec_test_{next(_numbers)}", **settings)


def tokens(batch: int, n: int) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(3, 60, (batch, n), generator=generator)


def padded(n: int, left: bool) -> Tensor:
    """int [3, n]: samples of n, n - 5 and 1 tokens."""
    mask = torch.zeros(3, n, dtype=torch.long)
    for row, length in enumerate((n, n - 5, 1)):
        mask[row, n - length if left else 0 : n if left else length] = 1
    return mask


def hidden(model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        out = model(ids, attention_mask=mask)
    return out.logits if "logits" in out else out.last_hidden_state  # type: ignore[no-any-return]


def difference(a: Tensor, b: Tensor, real: Tensor | None = None) -> float:
    """The largest absolute difference at real tokens."""
    assert a.shape == b.shape
    apart = (a - b).abs()
    apart = apart if real is None else apart[real.bool()]
    assert not apart.isnan().any()
    return float(apart.max())


def called(name: str, **terms: Any) -> Any:
    """The output of the attention function of a name for four queries and keys of a layer."""
    q, k, v = torch.randn(3, 1, 2, 4, 8, generator=torch.Generator().manual_seed(3))
    settings: dict[str, Any] = {"is_causal": False, "training": False, "index_block_size": 4}
    layer = SimpleNamespace(**settings | terms.pop("layer", {}))
    terms = {"k": k, "scaling": 8**-0.5, "dropout": 0.9} | terms
    return transformers.AttentionInterface()[name](layer, q, terms.pop("k"), v, None, **terms)


@contextmanager
def names_restored() -> Iterator[None]:
    """Takes back what was registered within."""
    mappings = (
        transformers.AttentionInterface._global_mapping,
        transformers.AttentionMaskInterface._global_mapping,
    )
    before = [dict(mapping) for mapping in mappings]
    try:
        yield
    finally:
        for mapping, kept in zip(mappings, before, strict=True):
            mapping.clear()
            mapping.update(kept)
