"""The attention layers of a model, and what each would call: found by looking at their code.

A layer that takes part in transformers' attention interface looks its function up by the name in
its config, with `get_interface`, and hands over the terms of its score by keyword. Both stand in
the compiled code of the layer's class, so they are known before anything runs and where no source
is at hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from attnspec.runtime.module import CompiledAttention

_LOOK_UP = "get_interface"
"""The method of transformers' registry by which a layer finds its function."""

PLACE = "attnspec_place"
"""Where a module keeps its place in a model that was given a spec."""

HELD = "attnspec"
"""The name of what a spec learns, as a part of a model."""

PLAIN = {"full_attention", "sliding_attention", "chunked_attention"}
"""Types of layers that differ by the pairs they read alone."""

_JOINS = re.compile("cross|encoder_?att|enc_?dec|x_attn", re.IGNORECASE)
"""What a layer that reads another sequence is called in the layers of a decoder."""

_OWN_TOKENS = ("class_embedding", "cls_token", "distillation_token", "register_tokens")
"""Parameters of models of images that stand before the patches, [..., hidden]."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where an attention module stands in a model that was given a spec.

    `layer` is its number among the `layers` like it, None where one module serves several; `extra`
    tokens of the model's own stand before its sequence; `table` is the module that holds the
    learned bias by distance that the model adds to its scores, an Embedding [buckets, heads];
    `attention` holds what the spec learns, a part of the model. `crosses` says that it reads the
    keys of another sequence, `own` names the attention that it keeps beside layers with a spec, by
    transformers' names. `causal` is what `convert` was asked for, and `real` that positions are
    counted over real tokens.
    """

    layer: int | None
    layers: int | None
    extra: int = 0
    table: nn.Module | None = None
    attention: CompiledAttention | None = None
    crosses: bool = False
    own: str | None = None
    causal: bool | None = None
    real: bool = False


def place_of(module: nn.Module) -> Place | None:
    """The place of a module; None where no model was given a spec by `convert`."""
    return vars(module).get(PLACE)


def places_in(model: nn.Module) -> Iterator[tuple[str, nn.Module, Place]]:
    """The attention modules of a model with their paths and places: modules at the same path but
    for its numbers are layers alike, numbered as they come unless they know their index."""
    rows: dict[str, list[tuple[str, nn.Module]]] = {}
    for path, module in attention_layers(model):
        rows.setdefault(re.sub(r"\b\d+\b", "*", path), []).append((path, module))
    for row in rows.values():
        tables = (module for _, module in row if hasattr(module, "relative_attention_bias"))
        first = next(tables, None)
        for number, (path, module) in enumerate(row):
            table = module if hasattr(module, "relative_attention_bias") else first
            layer, layers = _number(module, number, len(row))
            extra, joins = _own_tokens(model, path), _crosses_at(path, module)
            yield path, module, Place(layer, layers, extra, table, crosses=joins)


def _number(module: nn.Module, number: int, found: int) -> tuple[int | None, int | None]:
    """The layer of a module, one of so many in its stack, and how many layers there are."""
    index, layers = getattr(module, "layer_idx", None), layers_in(module)
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return number, found
    if index is not None:
        return index, layers
    # where there are fewer modules than layers, some run more than once
    return (None, None) if found < (layers or 0) else (number, found)


def _own_tokens(model: nn.Module, path: str) -> int:
    """How many tokens of its own the part of a model that a path leads into puts first."""
    count = 0
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        prefix = owner.rpartition(".")[0]
        if last in _OWN_TOKENS and (not prefix or path.startswith(f"{prefix}.")):
            count += parameter.numel() // parameter.shape[-1]
    return count


def attention_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The innermost attention modules with their paths: `("encoder.layer.0.attention.self", …)`.

    A module is an attention if it is a compiled spec, if its class looks attention functions up, or
    says so by its name and has weights.
    """
    for path, module in model.named_modules():
        below = (inner for inner in module.modules() if inner is not module)
        if not _is_attention(type(module)) or any(_is_attention(type(x)) for x in below):
            continue
        if path.rpartition(".")[2] == HELD:
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
    classes = [
        entry
        for name in sorted(modules - {root.__module__})
        for entry in vars(sys.modules.get(name, object)).values()
        if isinstance(entry, type)
        and entry.__module__ == name
        and issubclass(entry, nn.Module)
        and _is_attention(entry)
    ]
    return [] if any(looks_up(entry) for entry in classes) else [e.__name__ for e in classes]


def _crosses_at(path: str, module: nn.Module) -> bool:
    """Whether the module at a path of a model reads the keys of another sequence: by what its layer
    calls it, or else by the module alone."""
    name = re.split(r"\b\d+\b", path)[-1]
    if _JOINS.search(name):
        return True
    # a decoder's layer that is causal by its mask alone
    return _crosses(module) and not ("self" in name and not _is_cross(module))


def crosses(module: nn.Module) -> bool:
    """Whether an attention module reads the keys of another sequence."""
    place = place_of(module)
    return _crosses(module) if place is None else place.crosses


def _crosses(module: nn.Module) -> bool:
    turned = getattr(module, "is_decoder", False) and not getattr(module, "is_causal", True)
    return turned or _is_cross(module)


def _is_cross(module: nn.Module) -> bool:
    return "CrossAttention" in type(module).__name__ or getattr(module, "is_cross_attention", False)


def decodes(module: nn.Module) -> bool:
    """Whether an attention module stands in a decoder whose layers read the encoder, too."""
    both = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    return bool(both and getattr(module, "is_decoder", False))


def layers_in(module: nn.Module) -> int | None:
    """How many layers the model has that an attention module is of; None where nothing says so."""
    count = setting_of(getattr(module, "config", None), "num_hidden_layers")
    return count if isinstance(count, int) else None


def attribute_of(module: nn.Module, name: str) -> Any:
    """What an attention module, or else its config, holds under a name."""
    if hasattr(module, name):
        return getattr(module, name)
    return setting_of(getattr(module, "config", None), name, getattr(module, "layer_idx", None))


def setting_of(config: Any, name: str, layer: object = None) -> Any:
    """What a config holds under a name; None where it holds nothing, or where its layers differ and
    none is meant."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        # transformers raises where the layers of one model differ in a setting
        return getattr(config.per_layer_config[layer], name) if isinstance(layer, int) else None


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
