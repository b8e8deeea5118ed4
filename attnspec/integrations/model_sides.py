"""The attention function of a decoder beside an encoder, whose layers read two sequences."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from attnspec.integrations.model_attention import ModelAttention
from attnspec.integrations.model_layers import crosses
from attnspec.integrations.model_mask import ModelMask, written_out
from attnspec.ir.program import Program
from attnspec.text.diagnostics import AttnSpecError

_KEPT = "sdpa"
"""The attention of transformers that stands for a model's own."""


class SidesAttention:
    """Calls one spec for the decoder's own sequence and one for the encoder's; where there is none,
    the model's own attention, which reads every key that its mask allows."""

    def __init__(self, own: ModelAttention | None, cross: ModelAttention | None) -> None:
        self.own, self.cross = own, cross

    def of(self, module: torch.nn.Module) -> ModelAttention | None:
        """The spec of a module, None where it keeps its own attention."""
        return self.cross if crosses(module) else self.own

    @property
    def entries(self) -> tuple[ModelAttention, ...]:
        """The specs."""
        return tuple(each for each in (self.own, self.cross) if each is not None)

    @property
    def program(self) -> Program:
        """The program of the first spec."""
        return self.entries[0].program

    @property
    def standing(self) -> Mapping[str, torch.Tensor] | None:
        """The run-time inputs that stand for every call."""
        return self.entries[0].standing

    @standing.setter
    def standing(self, inputs: Mapping[str, torch.Tensor] | None) -> None:
        for each in self.entries:
            each.standing = inputs

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: ModelMask | torch.Tensor | None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """As `ModelAttention` for the module's own spec; without one as transformers' own."""
        chosen = self.of(module)
        if chosen is not None:
            return chosen(module, query, key, value, attention_mask, **others)
        if isinstance(attention_mask, ModelMask):
            attention_mask = _dense(attention_mask, query)
        others.pop("attnspec_inputs", None)
        attend = import_module("transformers").AttentionInterface()[_KEPT]
        found: tuple[torch.Tensor, None] = attend(
            module, query, key, value, attention_mask, **others
        )
        return found


def _dense(mask: ModelMask, query: torch.Tensor) -> torch.Tensor | None:
    """What a layer that keeps its own attention may read, bool [B or 1, 1, q, k]; None for all."""
    if mask.kind == "causal" and not mask.kv_offset:
        place = {"device": query.device, "batch_size": query.shape[0]}
        return written_out(mask, place).as_subclass(torch.Tensor)
    if mask.kind == "bidirectional":
        return None if mask.padding is None else mask.padding[:, None, None].to(query.device)
    raise AttnSpecError(
        f"a causal or bidirectional mask is needed beside layers with a spec, got a {mask.kind} one"
    )
