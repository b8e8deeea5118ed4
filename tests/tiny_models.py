"""Tiny random models of transformers, and attentions registered for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import attnspec
from attnspec.integrations.model_layers import crosses
from attnspec.integrations.model_mask import ModelMask, model_mask
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
    cap: float | None = None,
    across: Callable[[int, int], np.ndarray] | None = None,
) -> Callable[..., tuple[torch.Tensor, None]]:
    """transformers' attention function for a dense mask per layer: the definition, by softmax.

    Scores are first capped, cap · tanh(score / cap), if a cap is given. Layers that read another
    sequence have the mask [m, n] that `across` says of both lengths, or read every key.
    """

    def attend(
        module: Any,
        q: Any,
        k: Any,
        v: Any,
        mask: ModelMask | None,
        *,
        scaling: float,
        s_aux: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        n = k.shape[2]
        # one that is written out knows its facts
        mask = getattr(mask, "facts", mask)
        layer = getattr(module, "layer_idx", None) or 0
        allowed = torch.ones(q.shape[2], n, dtype=torch.bool)
        if crosses(module) and across is not None:
            allowed = torch.from_numpy(across(q.shape[2], n))
        elif not crosses(module):
            allowed = torch.from_numpy(masks(n, layer))[..., n - q.shape[2] :, :]
        if mask is not None and mask.padding is not None:
            allowed = allowed & mask.padding[:, None, None, :]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * scaling
        scores = scores if position_bias is None else scores + position_bias
        scores = scores if cap is None else cap * (scores / cap).tanh()
        scores = scores.masked_fill(~allowed, -torch.inf)
        if s_aux is not None:
            # a key of value 0 with this score
            sink = s_aux[None, :, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., : k.shape[2]].masked_fill(~allowed, 0.0)
        return (weights @ v).transpose(1, 2).contiguous(), None

    return attend


def reference(
    masks: Callable[[int, int], np.ndarray],
    cap: float | None = None,
    across: Callable[[int, int], np.ndarray] | None = None,
) -> str:
    """Registers dense attention under the masks of (n, layer), [n, n] or one for each head; for
    layers that read another sequence, of (m, n)."""
    name = f"reference_{next(_numbers)}"
    transformers.AttentionInterface.register(name, dense(masks, cap, across))
    transformers.AttentionMaskInterface.register(name, model_mask)
    return name


def difference(a: torch.Tensor, b: torch.Tensor, real: torch.Tensor | None = None) -> float:
    """The largest absolute difference at real tokens."""
    assert a.shape == b.shape
    apart = (a - b).abs()
    apart = apart if real is None else apart[real.bool()]
    assert not apart.isnan().any()
    return float(apart.max())


@contextmanager
def names_restored() -> Iterator[None]:
    """Takes back what was registered within."""
    attention = transformers.AttentionInterface._global_mapping
    masks = transformers.AttentionMaskInterface._global_mapping
    before = dict(attention), dict(masks)
    try:
        yield
    finally:
        for mapping, kept in zip((attention, masks), before, strict=True):
            mapping.clear()
            mapping.update(kept)
