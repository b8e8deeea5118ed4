"""The attention function that a transformers model calls, for one compiled spec."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from attnspec.diagnostics import AttnSpecError
from attnspec.integrations.causality import require_past_only
from attnspec.integrations.model_mask import ModelMask
from attnspec.ir import Program, leaves
from attnspec.works import stand_ins, works_of

if TYPE_CHECKING:
    from attnspec.runtime import CompiledAttention

_HARMLESS = frozenset(
    {
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Keywords of models that change nothing of what is computed here."""

_ADVICE = {
    "encoder_hidden_states": "cross-attention has no pattern over one sequence",
    "output_attentions": "the weights are never formed; `eager` shows them",
    "sliding_window": "write the window in the spec and set `config.sliding_window = None`",
    "softcap": "write `score softcap(cap = …)` in the spec and clear it in the model's config",
}

_RELATIVE = frozenset(
    {"full", "self", "causal", "window", "dilated", "residue", "strided", "powers", "random"}
)
"""Patterns that say the same of a sequence wherever it begins in the tensor."""

_SAME_SCALE = 1e-6
"""Relative difference up to which two scales are one: float32 knows them no better."""


class ModelAttention:
    """Calls a compiled spec with what transformers passes, or says why that would be wrong."""

    def __init__(self, module: CompiledAttention) -> None:
        self.module = module
        self.program: Program = module.program
        if next(module.parameters(), None) is not None:
            raise AttnSpecError(
                f"an attention without learned parts is needed, `{self.program.name}` has some: "
                "a model would neither train nor save them"
            )
        if self.program.extra_tokens:
            raise AttnSpecError(
                f"an attention without extra tokens is needed, `{self.program.name}` has "
                f"{self.program.extra_tokens}: a model has no rows for them"
            )
        # the lengths of a long-running server come and go: only so many answers are kept
        self._past_only = lru_cache(maxsize=1024)(require_past_only)

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
        """The output, [B, q, H, d_v] and contiguous, and no weights.

        query [B, H, q, d]; key, value [B, H_kv, k, d], where k may reach beyond the positions
        written so far. Arguments are transformers' own, except `attnspec_inputs`: the run-time
        inputs of the spec, which models pass on. Raises AttnSpecError where the model asks for
        anything that the spec does not say.
        """
        self._refuse(others)
        mask = self._mask(attention_mask, module, query, key, is_causal)
        layer = self._layer(module)
        if mask.kind == "causal" or is_causal:
            self._past_only(self.program, layer, query.shape[1], mask.end, mask.q_length)
        if mask.left_padded and self._absolute:
            warnings.warn(
                f"`{self.program.name}` names positions, and they count from the padding: "
                "pad on the right, or the first tokens are not those of the text",
                stacklevel=2,
            )
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

    def _refuse(self, others: Mapping[str, object]) -> None:
        """Raise for a keyword that changes what is computed, and for one that is not known."""
        for name, value in others.items():
            if value is None or value is False or name in _HARMLESS:
                continue
            advice = f": {_ADVICE[name]}" if name in _ADVICE else ""
            raise AttnSpecError(
                f"`{self.program.name}` says all that the model may compute here, and the model "
                f"passes `{name}` too{advice}"
            )

    def _mask(
        self,
        given: ModelMask | torch.Tensor | None,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        is_causal: bool | None,
    ) -> ModelMask:
        """The facts that the mask function left, checked against the tensors."""
        q_length, kv_length = query.shape[2], key.shape[2]
        if isinstance(given, torch.Tensor):
            raise AttnSpecError(
                f"a padding mask [batch, length] is needed, got a mask {list(given.shape)}: which "
                f"query reads which key is said by `{self.program.name}`"
            )
        if given is None:
            # a model that asks for no mask has no padding and no cache
            if q_length != kv_length:
                raise AttnSpecError(
                    f"without a mask as many queries as keys are needed, got {q_length} and "
                    f"{kv_length}: nothing says where the queries stand"
                )
            past = getattr(module, "is_causal", True) if is_causal is None else is_causal
            kind = "causal" if past else "bidirectional"
            given = ModelMask(kind, q_length, 0, kv_length, 0, None)
        cross = (
            "CrossAttention" in type(module).__name__
            or (getattr(module, "is_decoder", False) and given.kind == "bidirectional")
            or (given.kind == "bidirectional" and given.end != given.kv_length)
        )
        if cross:
            raise AttnSpecError(
                f"self-attention is needed, this is cross-attention of {given.q_length} queries "
                f"and {given.kv_length} keys: `{self.program.name}` is a pattern over one sequence"
            )
        if given.kind not in ("causal", "bidirectional"):
            raise AttnSpecError(
                f"a causal or bidirectional model is needed, this one asks for a {given.kind} "
                f"mask, which `{self.program.name}` would replace: write it in the spec and switch "
                "it off in the model's config"
            )
        if given.kv_offset:
            raise AttnSpecError(
                f"a cache that keeps every key is needed, this one starts at position "
                f"{given.kv_offset}: use DynamicCache or StaticCache without a sliding window"
            )
        if given.q_length != q_length or kv_length < given.end:
            raise AttnSpecError(
                f"the mask was made for {given.q_length} queries and {given.end} keys, "
                f"got {q_length} and {kv_length}"
            )
        return given

    def _layer(self, module: torch.nn.Module) -> int:
        """The layer of the spec that a module of the model is."""
        layer = getattr(module, "layer_idx", None)
        layers = self.program.layers
        if layer is None:
            if layers is not None and layers > 1:
                raise AttnSpecError(
                    f"`{self.program.name}` tells {layers} layers apart, but "
                    f"{type(module).__name__} does not say which it is: it has no `layer_idx`"
                )
            return 0
        if layers is not None and layer >= layers:
            raise AttnSpecError(
                f"`{self.program.name}` has {layers} layers, the model asks for layer {layer}"
            )
        return int(layer)

    def _scaled(
        self, query: torch.Tensor, scaling: float | None, layer: int, n: int
    ) -> torch.Tensor:
        """The query such that the spec's own scale gives what the model's would.

        Where the spec declares a scale it must be the model's.
        """
        default = query.shape[-1] ** -0.5
        if scaling is None:
            return query
        if any(attend.scale is not None for attend in self.program.attends):
            works = works_of(
                self.program, layer, query.shape[1], query.shape[2], n, stand_ins(self.program)
            )
            for scale in {default if work.scale is None else work.scale for work, _ in works}:
                if not math.isclose(scale, scaling, rel_tol=_SAME_SCALE):
                    raise AttnSpecError(
                        f"the scale of `{self.program.name}` must be the model's, {scaling:.6g}, "
                        f"got {scale:.6g}: leave `scale` out of the spec"
                    )
            return query
        same = math.isclose(scaling, default, rel_tol=_SAME_SCALE)
        return query if same else query * (scaling / default)

    @property
    def _absolute(self) -> bool:
        """Whether the pairs depend on where a sequence begins."""
        return any(
            leaf.pattern not in _RELATIVE
            for attend in self.program.attends
            if attend.graph is not None
            for leaf in leaves(attend.graph)
        )
