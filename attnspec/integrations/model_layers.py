"""The attention layers of a model, and what each would call: found by looking at their code.

A layer that takes part in transformers' attention interface looks its function up by the name in
its config, with `get_interface`, and hands over the terms of its score by keyword. Both stand in
the compiled code of the layer's class, so they are known before anything runs and where no source
is at hand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from attnspec.runtime.module import CompiledAttention

_LOOK_UP = "get_interface"
"""The method of transformers' registry by which a layer finds its function."""


def attention_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The innermost attention modules with their paths: `("encoder.layer.0.attention.self", …)`.

    A module is an attention if it is a compiled spec, if its class looks attention functions up, or
    says so by its name and has weights.
    """
    for path, module in model.named_modules():
        below = (inner for inner in module.modules() if inner is not module)
        if not _is_attention(type(module)) or any(_is_attention(type(x)) for x in below):
            continue
        calls = isinstance(module, CompiledAttention) or looks_up(type(module))
        if calls or next(module.parameters(), None) is not None:
            yield path, module


def looks_up(kind: type) -> bool:
    """Whether the methods of a module's class look an attention function up by name."""
    return any(_LOOK_UP in code.co_names for code in _codes(kind))


def passes(kind: type, keyword: str) -> bool:
    """Whether the methods of a module's class pass something by this keyword."""
    return any(
        isinstance(constant, tuple) and keyword in constant
        for code in _codes(kind)
        for constant in code.co_consts
    )


def keeps_its_own(kind: type, root: type) -> list[str]:
    """The attention classes beside a model's class, if none of them looks a function up.

    Beside it are those of its own module and of its bases', up to `root`, transformers' own base.
    """
    modules = {base.__module__ for base in kind.__mro__ if issubclass(base, root)}
    found = [
        entry
        for name in sorted(modules - {root.__module__})
        for entry in vars(sys.modules.get(name, object)).values()
        if isinstance(entry, type)
        and entry.__module__ == name
        and issubclass(entry, nn.Module)
        and _is_attention(entry)
    ]
    return [] if any(looks_up(entry) for entry in found) else [e.__name__ for e in found]


def crosses(module: nn.Module) -> bool:
    """Whether an attention module reads the keys of another sequence."""
    return (
        "CrossAttention" in type(module).__name__
        or getattr(module, "is_cross_attention", False)
        or (getattr(module, "is_decoder", False) and not getattr(module, "is_causal", True))
    )


def decodes(module: nn.Module) -> bool:
    """Whether an attention module stands in a decoder whose layers read the encoder, too."""
    config = getattr(module, "config", None)
    return bool(
        getattr(module, "is_decoder", False) and getattr(config, "is_encoder_decoder", False)
    )


def layers_in(module: nn.Module) -> int | None:
    """How many layers the model has that an attention module is of; None where nothing says so."""
    config = getattr(module, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    return count if isinstance(count, int) else None


def attribute_of(module: nn.Module, name: str) -> Any:
    """What an attention module, or else its config, holds under a name."""
    missing = object()
    own = getattr(module, name, missing)
    return getattr(getattr(module, "config", None), name, None) if own is missing else own


def _is_attention(kind: type) -> bool:
    named = "Attention" in kind.__name__
    return named or issubclass(kind, CompiledAttention) or looks_up(kind)


def _codes(kind: type) -> Iterator[CodeType]:
    """The code of a class's own and inherited methods, below decorators."""
    for base in kind.__mro__:
        if base in (nn.Module, object):
            continue
        for entry in vars(base).values():
            while hasattr(entry, "__wrapped__"):
                entry = entry.__wrapped__
            if isinstance(entry, FunctionType):
                yield from _within(entry.__code__)


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _within(constant)
