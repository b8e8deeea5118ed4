"""The attention function that a transformers model calls, for one compiled spec."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from attnspec.bind import Situation, bind_attended
from attnspec.diagnostics import AttnSpecError
from attnspec.integrations.model_mask import ModelMask
from attnspec.ir import Attend, Compound, Leaf, Program, Term, inputs_of, leaves
from attnspec.patterns import BY_NAME
from attnspec.scalars import evaluate

if TYPE_CHECKING:
    from attnspec.runtime import CompiledAttention

_HARMLESS = frozenset(
    {
        "deterministic",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Keywords of models that do not change what is computed here."""

_ADVICE = {
    "sliding_window": "write the window in the spec and set `config.sliding_window = None`",
    "output_attentions": "the weights are never formed; use `eager` to look at them",
    "encoder_hidden_states": "cross-attention has no pattern over one sequence",
    "softcap": "write `score softcap(cap = …)` in the spec and clear it in the model's config",
    "is_causal": "",
}

_RELATIVE = frozenset(
    {"full", "self", "causal", "window", "dilated", "residue", "strided", "powers", "random"}
)
"""Patterns that say the same of a sequence wherever it stands in the tensor."""

_SCALE_TOLERANCE = 1e-6


class ModelAttention:
    """Calls a compiled spec with what transformers passes, or says why it would be wrong to."""

    def __init__(self, name: str, module: CompiledAttention) -> None:
        self.name = name
        self.module = module
        self.program: Program = module.program
        if next(module.parameters(), None) is not None:
            raise AttnSpecError(
                f"`{self.program.name}` has learned parts, which a model would neither train nor "
                "save: an attention without any is needed"
            )
        if self.program.extra_tokens:
            raise AttnSpecError(
                f"`{self.program.name}` has extra tokens, for which a model has no rows"
            )
        # lengths come and go in a server: only so many answers are kept
        self._checked = lru_cache(maxsize=1024)(self._check_past)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: ModelMask | torch.Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        attnspec_inputs: Mapping[str, torch.Tensor] | None = None,
        **others: object,
    ) -> tuple[torch.Tensor, None]:
        """[B, q, H, d_v] contiguous, and no weights; shapes and keywords are transformers' own.

        query [B, H, q, d]; key, value [B, H_kv, k, d], where k may go beyond the positions that are
        known so far. Raises AttnSpecError for all that the spec does not say.
        """
        self._refuse(others)
        mask = self._mask(attention_mask, query, key)
        self._refuse_cross_attention(module, mask)
        layer = self._layer(module)
        if mask.padding is not None:
            self._warn_of_left_padding(mask.padding)
        past_only = getattr(module, "is_causal", True) if mask.kind == "unknown" else False
        if mask.kind == "causal" or is_causal or (is_causal is None and past_only):
            self._checked(layer, query.shape[1], mask.end, mask.q_length)
        if key.shape[2] > mask.end:
            key, value = key[:, :, : mask.end], value[:, :, : mask.end]
        out = self.module(
            self._scaled(query, scaling, layer, mask.end),
            key,
            value,
            layer=layer,
            key_padding_mask=mask.padding,
            dropout_p=dropout if module.training else 0.0,
            inputs=attnspec_inputs,
        )
        return out.transpose(1, 2).contiguous(), None
