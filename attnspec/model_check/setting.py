"""What the arguments of a model say of its sequences: padding, packed documents, a cache."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from attnspec.model_check.packing import documents

_OWN = ("attention_mask", "padding_mask", "src_key_padding_mask", "key_padding_mask")
_DECODER = ("decoder_attention_mask", "tgt_key_padding_mask")
_OTHER = ("encoder_attention_mask", "memory_key_padding_mask")
"""Arguments [B, n] that say which tokens are real; those of torch, `…key_padding_mask`, say which
are padding."""


class Setting:
    """The `arguments` of one call of a model, by name, and what they say.

    `own`, `decoder` and `other` are bool [B, positions], True = real, of the sequence, of a decoder
    beside an encoder, and of what cross-attention reads; None where nothing says so. `documents` is
    int64 [B, positions] or None, `past` how many positions a cache holds, None where none tells.
    `words` describes all that. Raises TypeError for arguments that the model does not take.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        signature = inspect.signature(model.forward)
        self.arguments: dict[str, Any] = {}
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            many = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            self.arguments.update(value if many else {name: value})
        self.own, self.decoder, self.other = map(self._real, (_OWN, _DECODER, _OTHER))
        self.documents = documents(self.arguments.get("position_ids"), self.own)
        cache = next(filter(_is_cache, self.arguments.values()), None)
        self.past = None if cache is None else int(cache.get_seq_length())
        implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
        self.words: list[str] = [f"attn_implementation = {implementation!r}"] * bool(implementation)
        if self.documents is not None:
            count = int(self.documents.max()) + 1
            self.words.append(f"up to {count} packed documents a sample, by `position_ids`")
        if self.own is not None:
            self.words.append(f"a 2-D mask, {'no ' * bool(self.own.all())}padding")
        if cache is not None:
            self.words.append(f"{type(cache).__name__} with {self.past:,} positions")

    def real(self, path: str, crosses: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Which queries and which keys of a layer are real."""
        pair = "decoder_input_ids" in self.arguments or "tgt" in self.arguments
        if crosses:
            keys = self.own if self.other is None and pair else self.other
            return (self.decoder if pair else self.own), keys
        own = self.decoder if pair and "decoder" in path else self.own
        return own, own

    def _real(self, names: tuple[str, ...]) -> torch.Tensor | None:
        for name in names:
            mask = self.arguments.get(name)
            if isinstance(mask, torch.Tensor) and mask.ndim == 2:
                if not name.endswith("key_padding_mask"):
                    return mask.bool().cpu()
                return (mask == 0 if mask.is_floating_point() else ~mask.bool()).cpu()
        return None


def copied(value: Any) -> Any:
    """An argument, a cache as a copy, so that a run leaves what was handed in as it was."""
    if not _is_cache(value):
        return value
    # keys that were computed with gradients are copied, too
    with patch.object(torch.Tensor, "__deepcopy__", lambda x, memo: x.detach().clone()):
        return copy.deepcopy(value)


def _is_cache(value: object) -> bool:
    return callable(getattr(value, "get_seq_length", None))
