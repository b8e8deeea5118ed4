"""What the arguments of a model say of its sequences: padding, packed documents, what a cache has."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attnspec.model_check.packing import documents

_REAL = ("attention_mask", "padding_mask")
"""Arguments [B, n] that say which tokens are real: of transformers, True or 1 = real."""

_PADDED = ("src_key_padding_mask", "key_padding_mask", "tgt_key_padding_mask")
"""Arguments [B, n] of torch, which say which are padding: True, or -inf, = padding."""


@dataclass(frozen=True)
class Setting:
    """The arguments of one call of a model, by name, and what they say.

    `real` is bool [B, positions], `documents` int64 [B, positions], both None where nothing says
    so. `past` is how many positions a cache holds already, None where no cache tells; `batch` the
    number of samples, None where no tensor shows it. `words` describes all that.
    """

    arguments: Mapping[str, object]
    real: torch.Tensor | None
    documents: torch.Tensor | None
    past: int | None
    batch: int | None
    words: tuple[str, ...]


def setting_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Setting:
    """What a call of the model is about; raises TypeError for arguments that it does not take."""
    signature = inspect.signature(model.forward)
    named: dict[str, object] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            named.update({f"{name}[{at}]": each for at, each in enumerate(value)})
        else:
            named[name] = value
    real = _real(named)
    position_ids = named.get("position_ids")
    packed = documents(position_ids, real) if isinstance(position_ids, torch.Tensor) else None
    caches = list(_caches(named.values()))
    past = max((int(cache.get_seq_length()) for cache in caches), default=None)
    return Setting(
        arguments=named,
        real=real,
        documents=packed,
        past=past,
        batch=_batch(named),
        words=tuple(_words(model, named, real, packed, caches, past)),
    )


def copied(value: Any) -> Any:
    """Arguments whose caches are copies, so that a run leaves what was handed in as it was."""
    if isinstance(value, dict):
        return {name: copied(each) for name, each in value.items()}
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(copied(each) for each in value)
    return copy.deepcopy(value) if _is_cache(value) else value


def _is_cache(value: object) -> bool:
    return callable(getattr(value, "get_seq_length", None))


def _caches(values: Any) -> Iterator[Any]:
    return (value for value in values if _is_cache(value))


def _real(named: Mapping[str, object]) -> torch.Tensor | None:
    for name in (*_REAL, *_PADDED):
        mask = named.get(name)
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            if name in _REAL:
                return mask.bool()
            return mask == 0 if mask.is_floating_point() else ~mask.bool()
    return None


def _batch(named: Mapping[str, object]) -> int | None:
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and value.ndim > 1 and name != "position_ids":
            return int(value.shape[0])
    return None


def _words(
    model: nn.Module,
    named: Mapping[str, object],
    real: torch.Tensor | None,
    packed: torch.Tensor | None,
    caches: list[Any],
    past: int | None,
) -> Iterator[str]:
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if isinstance(implementation, str):
        yield f"attn_implementation = {implementation!r}"
    if packed is not None:
        yield f"up to {int(packed.max()) + 1} packed documents a sample, by `position_ids`"
    if real is not None:
        sides = [("left", real[:, 0]), ("right", real[:, -1])]
        padded = [side for side, column in sides if not bool(column.all())]
        kind = f"padding on the {' and '.join(padded)}" if padded else "no padding"
        yield f"a 2-D mask, {kind if padded or bool(real.all()) else 'padding in between'}"
    for cache in caches:
        yield f"{type(cache).__name__} with {past:,} positions"
