"""What the arguments of a model say of its sequences: padding, packed documents, a cache."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Setting:
    """The arguments of one call of a model, by name, and what they say.

    `own`, `decoder` and `other` are bool [B, positions], True = real, of the sequence, of a decoder
    beside an encoder, and of what cross-attention reads; None where nothing says so. `documents` is
    int64 [B, positions] or None, `past` how many positions a cache holds, None where none tells.
    `words` describes all that.
    """

    arguments: Mapping[str, object]
    own: torch.Tensor | None
    decoder: torch.Tensor | None
    other: torch.Tensor | None
    documents: torch.Tensor | None
    past: int | None
    words: tuple[str, ...]

    def real(self, path: str, crosses: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Which queries and which keys of a layer are real."""
        pair = "decoder_input_ids" in self.arguments or "tgt" in self.arguments
        if crosses:
            keys = self.own if self.other is None and pair else self.other
            return (self.decoder if pair else self.own), keys
        own = self.decoder if pair and "decoder" in path else self.own
        return own, own


def setting_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Setting:
    """What a call of the model is about; raises TypeError for arguments that it does not take."""
    signature = inspect.signature(model.forward)
    named: dict[str, object] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        many = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        named.update(value if many else {name: value})
    own, position_ids = _real(named, _OWN), named.get("position_ids")
    packed = documents(position_ids, own) if isinstance(position_ids, torch.Tensor) else None
    cache: Any = next(filter(_is_cache, named.values()), None)
    past = None if cache is None else int(cache.get_seq_length())
    words = tuple(_words(model, own, packed, cache))
    return Setting(named, own, _real(named, _DECODER), _real(named, _OTHER), packed, past, words)


def copied(value: Any) -> Any:
    """Arguments whose caches are copies, so that a run leaves what was handed in as it was."""
    if type(value) in (dict, tuple):
        entries = value.items() if type(value) is dict else enumerate(value)
        found = {name: copied(each) for name, each in entries}
        return found if type(value) is dict else tuple(found.values())
    if not _is_cache(value):
        return value
    # keys that were computed with gradients are copied, too
    with patch.object(torch.Tensor, "__deepcopy__", lambda x, memo: x.detach().clone()):
        return copy.deepcopy(value)


def _is_cache(value: object) -> bool:
    return callable(getattr(value, "get_seq_length", None))


def _real(named: Mapping[str, object], names: tuple[str, ...]) -> torch.Tensor | None:
    for name in names:
        mask = named.get(name)
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            if not name.endswith("key_padding_mask"):
                return mask.bool().cpu()
            return (mask == 0 if mask.is_floating_point() else ~mask.bool()).cpu()
    return None


def _words(
    model: nn.Module, real: torch.Tensor | None, packed: torch.Tensor | None, cache: Any
) -> Iterator[str]:
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if isinstance(implementation, str):
        yield f"attn_implementation = {implementation!r}"
    if packed is not None:
        yield f"up to {int(packed.max()) + 1} packed documents a sample, by `position_ids`"
    if real is not None:
        yield f"a 2-D mask, {'no padding' if bool(real.all()) else 'padding'}"
    if cache is not None:
        yield f"{type(cache).__name__} with {int(cache.get_seq_length()):,} positions"
