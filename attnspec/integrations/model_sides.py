"""The attention function of a decoder beside an encoder, whose layers read two sequences."""

from __future__ import annotations

from collections.abc import Mapping
from threading import local
from typing import Any, cast

import torch
from torch import Tensor

from attnspec.analysis.growth.stable import changed_by_padding
from attnspec.graphs.forms.stability import must_be_steady
from attnspec.integrations.model_attention import ModelAttention, own_attention
from attnspec.integrations.model_layers import Place, attribute_of, crosses, place_of
from attnspec.integrations.model_mask import ModelMask
from attnspec.ir.crossing import evened
from attnspec.ir.program import Program
from attnspec.text.diagnostics import AttnSpecError


class CrossAttention(ModelAttention):
    """Calls a compiled spec for the layers of a decoder that read an encoder."""

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: ModelMask | Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        attnspec_inputs: Mapping[str, Tensor] | None = None,
        **others: object,
    ) -> tuple[Tensor, None]:
        """The output [B, m, H, d_v] of queries [B, H, m, d], by keyword from `query_start` on, and
        no weights; keys [B, H_kv, n, d] are the encoder's, and so are padding and inputs."""
        start, place = cast(int, others.pop("query_start", 0)), place_of(module)
        layer = self.layer_of(module)
        self.refuse(module, others, layer)
        self.require_held(place)
        self.require_heads(query.shape[1])
        padding = self._padding(attention_mask, key.shape[2])
        if padding is not None:
            fault = changed_by_padding(evened(self.program), layer, query.shape[1])
            if fault is not None:
                self.warn_once("padding", must_be_steady(self.program.name, fault))
        every = ModelMask("bidirectional", key.shape[2], 0, key.shape[2], 0, padding)
        out = self.module_of(place)(
            self.scaled(query, scaling, layer, key.shape[2]),
            key,
            value,
            layer=layer,
            key_padding_mask=padding,
            dropout_p=dropout if module.training else 0.0,
            inputs=self.inputs_of(attnspec_inputs, every),
            query_start=start,
        )
        return out.transpose(1, 2).contiguous(), None

    def require_fit(self, module: torch.nn.Module) -> None:
        """Raise for what is known of a layer before it is called: the spec cannot stand for it."""
        if not self.program.cross:
            raise AttnSpecError(
                f"this layer is cross-attention, and `{self.program.name}` is a spec of one"
                " sequence: write `cross` in it"
            )
        self.layer_of(module)
        self.require_held(place_of(module))
        heads = attribute_of(module, "num_attention_heads")
        self.require_heads(heads if isinstance(heads, int) else self.program.head_count)

    def _padding(self, mask: ModelMask | Tensor | None, keys: int) -> Tensor | None:
        """Which keys are real, bool [B, n], None where all are."""
        if isinstance(mask, Tensor) or (mask is not None and mask.kind != "bidirectional"):
            shape = list(mask.shape) if isinstance(mask, Tensor) else f"a {mask.kind} one"
            raise AttnSpecError(
                f"the encoder's mask must be a padding mask [batch, length], since"
                f" `{self.program.name}` says which keys are read, got {shape}"
            )
        if mask is None or mask.padding is None:
            return None
        if mask.padding.shape[1] != keys:
            raise AttnSpecError(
                f"the padding mask must have the {keys} keys, got {list(mask.padding.shape)}"
            )
        return mask.padding


class SidesAttention:
    """Calls one spec for a model's own sequence and one for the encoder's; where there is none, the
    model's own attention, which reads every key that its mask allows."""

    def __init__(self, own: ModelAttention | None, cross: CrossAttention | None = None) -> None:
        self.own, self.cross = own, cross
        for each in self.entries:
            each.shares = cross is not None
        # a layer reads its own sequence first, and only then is said where its queries stand
        self._position = local()

    def of(self, module: torch.nn.Module) -> ModelAttention | None:
        """The spec of a module, None where it keeps its own attention."""
        place = place_of(module)
        if place is not None:
            return self.for_place(place) if place.own is None else None
        # with one spec alone a layer that reads two sequences is refused by it
        return self.cross if self.cross is not None and crosses(module) else self.own

    def for_place(self, place: Place) -> ModelAttention | None:
        """The spec for a place of a model."""
        return self.cross if place.crosses else self.own

    @property
    def entries(self) -> tuple[ModelAttention, ...]:
        """The specs."""
        return tuple(each for each in (self.own, self.cross) if each is not None)

    @property
    def program(self) -> Program:
        """The program of the first spec."""
        return self.entries[0].program

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: ModelMask | Tensor | None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As `ModelAttention` for the module's own spec; without one as transformers' own."""
        chosen = self.of(module)
        if self.cross is not None:
            if not crosses(module):
                self._position.start = _start(attention_mask, query, key)
            elif chosen is not None:
                others["query_start"] = self._started()
        if chosen is not None:
            return chosen(module, query, key, value, attention_mask, **others)
        others.pop("attnspec_inputs", None)
        return own_attention(module, (query, key, value), attention_mask, others)

    def _started(self) -> int:
        """Where the queries stand, as the layer's own sequence has said."""
        start: int | None = getattr(self._position, "start", 0)
        if start is None:
            raise AttnSpecError(
                "the decoder's mask must be a padding mask [batch, length], got one of pairs, which"
                f" does not say where the queries of `{self.program.name}` are"
            )
        return start


def _start(mask: ModelMask | Tensor | None, q: Tensor, k: Tensor) -> int | None:
    """The position of the first query of a sequence; None where its mask does not say."""
    if isinstance(mask, ModelMask):
        return mask.q_offset
    before = k.shape[2] - q.shape[2]
    # a mask of pairs may be one of a cache with places that nothing was written to yet
    return None if before and isinstance(mask, Tensor) else before
