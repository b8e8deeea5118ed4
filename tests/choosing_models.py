"""Settings of tiny models that choose keys for each query by themselves, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STACK = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    **STACK,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "index_topk": 5,
    "index_head_dim": 16,
    "index_n_heads": 2,
}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "DeepSeek V3.2": ("DeepseekV32", {**LATENT, "head_dim": 8, "first_k_dense_replace": 1}),
    "HY 4": ("HYV4", {**LATENT, "head_dim": 16, "n_shared_experts": 1}),
    "GLM 5.3": (
        "Glm5NextText",
        {
            **LATENT,
            "qk_rope_head_dim": 0,
            "qk_nope_head_dim": 16,
            "index_kpool": 2,
            "index_topk": 6,
            "layer_types": ["indexed_attention"] * 2,
            "n_shared_experts": 1,
        },
    ),
    "MiniMax M3": (
        "MiniMaxM3VLText",
        {
            **STACK,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rotary_dim": 8,
            "intermediate_size": 48,
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_block_size": 4,
            "index_topk_blocks": 2,
            "layer_types": ["minimax_m3_sparse"] * 2,
        },
    ),
    "Qwen 4": (
        "Qwen4ExpText",
        {
            **STACK,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 6,
            "indexer_compress_ratio": 2,
            "layer_types": ["indexed_attention"] * 2,
        },
    ),
}
